"""One file for each kind of server.

base: what all servers in OpenAI's shape have in common, and what a kind may add
llama_server, localspec, vllm, sglang, tensorrt_llm: the kinds

A new kind needs its file, its line in KINDS, and its name in `UpstreamKind` of protocol/settings.py.
"""

from __future__ import annotations

from localspec.daemon.upstream.dialects.base import Dialect
from localspec.daemon.upstream.dialects.llama_server import LlamaServer
from localspec.daemon.upstream.dialects.localspec import Localspec
from localspec.daemon.upstream.dialects.sglang import Sglang
from localspec.daemon.upstream.dialects.tensorrt_llm import TensorRtLlm
from localspec.daemon.upstream.dialects.vllm import Vllm

KINDS: dict[str, Dialect] = {
    dialect.kind: dialect
    for dialect in (Dialect(), LlamaServer(), Localspec(), Vllm(), Sglang(), TensorRtLlm())
}


def of_owner(owner: object) -> Dialect:
    """Return the kind of server whose models name this owner, or the general one."""
    key = str(owner).lower()
    return next((dialect for dialect in KINDS.values() if key in dialect.owners), KINDS["openai"])
