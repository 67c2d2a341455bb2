"""The dialect of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.daemon.upstream.dialects.base import (
    SAMPLING,
    Body,
    Counters,
    Dialect,
    Spoken,
    counted,
    whole,
)
from localspec.protocol import frames


class Vllm(Dialect):
    kind = "vllm"
    name = "vLLM"
    owners = ("vllm",)
    sampling: Mapping[str, str] = {
        **SAMPLING, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty",
    }  # fmt: skip
    constraints = frozenset({"json_object", "json_schema", "grammar", "regex"})
    text_constraints = constraints
    known = frozenset({"ignore_eos", "min_tokens", "stop_token_ids"})
    template_kwargs = True
    names_tokens = True
    metrics = "/metrics"

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        if constraint.kind in ("grammar", "regex"):
            body["structured_outputs"] = {constraint.kind: constraint.source}
        else:
            super().constrain(body, constraint, schema)

    def goes_on(self, body: Body, part: str) -> bool:
        body |= {"add_generation_prompt": False, "continue_final_message": True}
        return part == "content"

    def spoken(self, chunk: Mapping[str, Any]) -> Spoken | None:
        """Return the draft tokens reported with `--per-request-spec-decode-metrics summary`."""
        metrics = chunk.get("metrics")
        figures = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if not isinstance(figures, dict):
            return None
        names = "num_draft_tokens", "num_accepted_draft_tokens"
        drafted, accepted = (whole(figures.get(name)) for name in names)
        if drafted is None or accepted is None:
            return None
        histogram = figures.get("acceptance_histogram")
        accepts = [whole(count) for count in histogram] if isinstance(histogram, list) else []
        valid = [count for count in accepts[:256] if count is not None]
        return Spoken(drafted, accepted, valid if len(valid) == len(accepts) else [])

    def counters(self, text: str) -> Counters | None:
        prefix = "vllm:spec_decode_num"
        tokens = counted(text, "vllm:generation_tokens_total")
        drafted = counted(text, f"{prefix}_draft_tokens_total")
        accepted = counted(text, f"{prefix}_accepted_tokens_total")
        if tokens is None or drafted is None or accepted is None:
            return None
        return Counters(tokens, drafted, accepted)
