"""The dialect of TensorRT-LLM (trtllm-serve), from its source code. It does not report drafts per answer."""

from __future__ import annotations

from collections.abc import Mapping

from localspec.daemon.upstream.dialects.base import SAMPLING, Dialect


class TensorRtLlm(Dialect):
    kind = "tensorrt-llm"
    name = "TensorRT-LLM"
    owners = ("tensorrt_llm", "tensorrt-llm")
    sampling: Mapping[str, str] = {
        **SAMPLING, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty",
    }  # fmt: skip
    known = frozenset({"ignore_eos"})
    template_kwargs = True
