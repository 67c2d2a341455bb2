"""One file for each kind of server.

base: what all of OpenAI's shapes have in common, and how a kind says what it has beyond
llama_server, localspec, vllm, sglang, tensorrt_llm: the kinds

To add one: its file, its line in KINDS, its name in `UpstreamKind` of protocol/settings.py.
"""

from __future__ import annotations

from localspec.daemon.upstream.dialects.base import Dialect
from localspec.daemon.upstream.dialects.llama_server import LlamaServer
from localspec.daemon.upstream.dialects.localspec import Localspec
from localspec.daemon.upstream.dialects.sglang import Sglang
from localspec.daemon.upstream.dialects.tensorrt_llm import TensorRtLlm
from localspec.daemon.upstream.dialects.vllm import Vllm

KINDS: dict[str, Dialect] = {
    each.kind: each
    for each in (Dialect(), LlamaServer(), Localspec(), Vllm(), Sglang(), TensorRtLlm())
}


def of_owner(owner: object) -> Dialect:
    """The kind whose models name this owner; where none does, no more is known than OpenAI's shapes."""
    named = str(owner).lower()
    return next((each for each in KINDS.values() if named in each.owners), KINDS["openai"])
