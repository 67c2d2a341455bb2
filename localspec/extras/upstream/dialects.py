"""What each kind of server in OpenAI's shape understands and reports: one entry of KINDS for each.

A new kind needs its entry, and its name in `UpstreamKind` of protocol/settings.py. The figures of SGLang and
TensorRT-LLM follow their source code; none were recorded from a running server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from localspec.protocol import frames
from localspec.protocol.requests import sampling_parameters

Body = dict[str, Any]

# OpenAI's sampling parameters: our name of each, and the server's.
SAMPLING = {
    name: name for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
}
_MORE_SAMPLING = {
    **SAMPLING, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty",
}  # fmt: skip
_JSON = {"json_object": "", "json_schema": ""}  # constraints that OpenAI's `response_format` has


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """The counts of a server since its start, over the requests of all clients."""

    tokens: int  # generated
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The draft tokens of one answer.

    The number of passes follows from them: each pass adds one token to those that it accepts, also if nothing
    was drafted. `accepts[n]` is the number of passes that accepted n draft tokens.
    """

    drafted: int
    accepted: int
    accepts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDialect:
    """A kind of server. The defaults are those of one about which no more is known.

    owners: values of `owned_by` in its list of models.
    sampling: our names of sampling parameters, and the server's.
    constraints: the kinds of constraints that it supports, each with the field for it; "" is OpenAI's
        `response_format`, and "a.b" the field b of an object a.
    text_constraints: the same for a text that is not a chat.
    known_fields: further fields of a request that the server has under our names.
    continuing: the fields that make an answer continue the last message; None: it does not.
    continues_thoughts: whether an answer can continue thoughts too, whose name is then the field's value.
    has_native_api: whether it has llama-server's own paths.
    can_require_named_tool: whether a request can require one tool by name.
    returns_token_ids: whether it has `return_token_ids`.
    extra_fields: fields of every request.
    drafts: the path in a chunk to the figures of drafts, then the names of those drafted and accepted.
    metrics_path: the path of its metrics from the server's root, and `metrics` the names of the counters.
    """

    kind: str = "openai"
    name: str = "server"
    owners: tuple[str, ...] = ()
    sampling: Mapping[str, str] = field(default_factory=lambda: SAMPLING)
    constraints: Mapping[str, str] = field(default_factory=lambda: _JSON)
    text_constraints: Mapping[str, str] = field(default_factory=dict)
    known_fields: frozenset[str] = frozenset()
    continuing: Mapping[str, Any] | None = None
    continues_thoughts: bool = False
    has_native_api: bool = False
    accepts_text_bias: bool = False
    template_kwargs: bool = False
    can_require_named_tool: bool = True
    returns_token_ids: bool = False
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    drafts: tuple[tuple[str, ...], str, str] = ((), "", "")
    metrics_path: str = ""
    metrics: tuple[str, str, str] = ("", "", "")

    def constrain(self, body: Body, constraint: frames.Constraint) -> None:
        kind, source = constraint.kind, constraint.source
        name = (self.constraints if "messages" in body else self.text_constraints)[kind]
        outer, _, inner = name.partition(".")
        schema = msgspec.json.decode(source) if kind == "json_schema" else {"type": "object"}
        if inner:
            body[outer] = {inner: source}
        elif name:
            is_object = kind in _JSON and self.has_native_api
            body[name] = (schema or {"type": "object"}) if is_object else source
        elif kind == "json_object":
            body["response_format"] = {"type": kind}
        else:
            response_schema = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": kind, kind: response_schema}

    def continue_message(self, body: Body, part: str) -> bool:
        """Make the answer continue the last message. Return whether the server supports that."""
        if self.continuing is None:
            return False
        body |= self.continuing
        if self.continues_thoughts:
            body["continue_final_message"] = part
        return self.continues_thoughts or part == "content"

    def add_fields(self, body: Body, request: frames.Generate) -> None:
        """Add the fields that only this kind of server knows."""
        body |= self.extra_fields
        if request.thinking is not None and "thinking" in self.known_fields:
            body["thinking_budget_tokens"] = request.thinking.tokens
        if self.kind != "localspec":
            return
        speculative = request.speculative
        if speculative != frames.SpeculationSettings():
            body["speculative"] = {
                "enabled": speculative.enabled,
                "depth": "auto" if speculative.depth is None else speculative.depth,
                "kind": speculative.kind,
                "verification": speculative.verification,
            }
        if request.exact is not None:
            body["exact"] = request.exact
        if request.reveal_draft:
            body["reveal_draft"] = True
        if request.private:
            body["localspec"] = {"private": True}

    def parse_draft_counts(self, chunk: Mapping[str, Any]) -> DraftCounts | None:
        """Return the draft tokens that a chunk at the end of an answer reports."""
        path, *names = self.drafts
        figures: Any = chunk if path else None
        for key in path:
            figures = figures.get(key) if isinstance(figures, dict) else None
        if not isinstance(figures, dict):
            return None
        drafted, accepted = (parse_count(figures.get(name)) for name in names)
        if drafted is None or accepted is None or (self.has_native_api and not drafted):
            return None  # llama-server has these figures for an answer without drafts, too
        histogram = figures.get("acceptance_histogram")  # vLLM's
        accepts = [parse_count(count) for count in histogram] if isinstance(histogram, list) else []
        valid = [count for count in accepts[:256] if count is not None]
        return DraftCounts(drafted, accepted, valid if len(valid) == len(accepts) else [])

    def parse_counters(self, text: str) -> ServerCounters | None:
        """Parse the server's metrics."""
        tokens, drafted, accepted = (_sum_counter(text, name) for name in self.metrics)
        if tokens is None or drafted is None or accepted is None:
            return None
        return ServerCounters(tokens, drafted, accepted)


def _sum_counter(text: str, name: str) -> int | None:
    """Return the sum of a counter over all labels, in Prometheus' text format."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    ]
    return int(sum(values)) if values else None


def parse_count(value: object) -> int | None:
    """Return a non-negative count as an int, or None if `value` is not one."""
    is_count = (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53
    )
    return int(value) if is_count else None  # type: ignore[call-overload]


_VLLM_CONSTRAINTS = {
    **_JSON, "grammar": "structured_outputs.grammar", "regex": "structured_outputs.regex",
}  # fmt: skip
_LLAMA_SERVER = ServerDialect(
    kind="llama-server",
    name="llama-server",
    owners=("llamacpp",),
    sampling={parameter.name: parameter.name for parameter in sampling_parameters()},
    constraints={**_JSON, "grammar": "grammar"},
    text_constraints={**dict.fromkeys(_JSON, "json_schema"), "grammar": "grammar"},
    known_fields=frozenset(
        {
            *("ignore_eos", "cache_prompt", "n_cache_reuse", "mixed_prompts", "reasoning_format"),
            *("t_max_predict_ms", "n_indent", "samplers", "thinking"),
        }
    ),
    # It always continues the last message of an assistant, but repeats the message without these fields.
    continuing={"continue_final_message": "", "add_generation_prompt": False},
    continues_thoughts=True,
    has_native_api=True,
    accepts_text_bias=True,
    template_kwargs=True,
    can_require_named_tool=False,  # it treats an object as "auto"
    drafts=(("timings",), "draft_n", "draft_n_accepted"),
)
KINDS: dict[str, ServerDialect] = {
    dialect.kind: dialect
    for dialect in (
        ServerDialect(),
        _LLAMA_SERVER,
        replace(
            _LLAMA_SERVER,
            kind="localspec",
            name="localspec",
            owners=("localspec",),
            can_require_named_tool=True,
            constraints={**_LLAMA_SERVER.constraints, "regex": "regex"},
            text_constraints={
                **_LLAMA_SERVER.text_constraints,
                "json_object": "",
                "regex": "regex",
            },
            known_fields=_LLAMA_SERVER.known_fields
            | {
                *("exact", "loop_guard", "reveal_draft", "speculative", "prediction"),
                *("min_tokens", "stop_token_ids"),
            },
        ),
        ServerDialect(
            kind="vllm",
            name="vLLM",
            owners=("vllm",),
            sampling=_MORE_SAMPLING,
            constraints=_VLLM_CONSTRAINTS,
            text_constraints=_VLLM_CONSTRAINTS,
            known_fields=frozenset({"ignore_eos", "min_tokens", "stop_token_ids"}),
            continuing={"add_generation_prompt": False, "continue_final_message": True},
            template_kwargs=True,
            returns_token_ids=True,
            # Reported with `--per-request-spec-decode-metrics summary`.
            drafts=(
                ("metrics", "speculative_decoding"),
                "num_draft_tokens",
                "num_accepted_draft_tokens",
            ),
            metrics_path="/metrics",
            metrics=(
                "vllm:generation_tokens_total",
                "vllm:spec_decode_num_draft_tokens_total",
                "vllm:spec_decode_num_accepted_tokens_total",
            ),
        ),
        ServerDialect(
            kind="sglang",
            name="SGLang",
            owners=("sglang",),
            sampling=_MORE_SAMPLING,
            constraints={**_JSON, "grammar": "ebnf", "regex": "regex"},
            text_constraints={"json_schema": "json_schema", "grammar": "ebnf", "regex": "regex"},
            known_fields=frozenset({"ignore_eos", "min_tokens", "stop_token_ids"}),
            continuing={"continue_final_message": True},
            template_kwargs=True,
            extra_fields={"return_spec_tokens_details": True},
            drafts=(
                ("sglext", "spec_tokens_details"),
                "spec_num_proposed_drafts",
                "spec_num_correct_drafts",
            ),
        ),
        ServerDialect(
            kind="tensorrt-llm",
            name="TensorRT-LLM",
            owners=("tensorrt_llm", "tensorrt-llm"),
            sampling=_MORE_SAMPLING,
            known_fields=frozenset({"ignore_eos"}),
            template_kwargs=True,
        ),
    )
}


def dialect_of_owner(owner: object) -> ServerDialect:
    """Return the kind of server whose models name this owner, or the general one."""
    key = str(owner).lower()
    return next((dialect for dialect in KINDS.values() if key in dialect.owners), KINDS["openai"])
