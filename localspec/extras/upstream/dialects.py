"""One class for each kind of server.

`ServerDialect` is what all servers in OpenAI's shape have in common, and says what a kind may add. A new kind
needs its class, its line in KINDS, and its name in `UpstreamKind` of protocol/settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localspec.protocol import frames
from localspec.protocol.requests import sampling_parameters

# ------------------------------------------------------------------------ base
# What all servers in OpenAI's shape have in common, and what a kind of server may override.


Body = dict[str, Any]

# OpenAI's sampling parameters: our name of each, and the server's.
SAMPLING = {
    name: name for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
}


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


class ServerDialect:
    """A server in OpenAI's shape about which no more is known.

    sampling: our names of sampling parameters, and the server's.
    constraints: the kinds of constraints that the server supports.
    known_fields: further fields of a request that the server has under our names.
    has_native_api: whether it has llama-server's own paths.
    can_require_named_tool: whether a request can require one tool by name.
    returns_token_ids: whether it has `return_token_ids`.
    """

    kind = "openai"
    name = "server"
    owners: tuple[str, ...] = ()  # values of `owned_by` in its list of models
    sampling: Mapping[str, str] = SAMPLING
    constraints: frozenset[str] = frozenset({"json_object", "json_schema"})
    text_constraints: frozenset[str] = frozenset()  # for a text that is not a chat
    known_fields: frozenset[str] = frozenset()
    has_native_api = False
    accepts_text_bias = False
    template_kwargs = False
    can_require_named_tool = True
    returns_token_ids = False
    metrics_path = (
        ""  # the path of the metrics that `parse_counters` parses, from the server's root
    )

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        """Add a constraint to the body. `schema` is the object of a JSON schema."""
        if constraint.kind == "json_object":
            body["response_format"] = {"type": "json_object"}
        else:
            response_schema = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": response_schema}

    def continue_message(self, body: Body, part: str) -> bool:
        """Make the answer continue the last message. Return whether the server supports that."""
        return False

    def add_fields(self, body: Body, request: frames.Generate) -> None:
        """Add the fields that only this kind of server knows."""

    def parse_draft_counts(self, chunk: Mapping[str, Any]) -> DraftCounts | None:
        """Return the draft tokens that a chunk at the end of an answer reports."""
        return None

    def parse_counters(self, text: str) -> ServerCounters | None:
        """Parse the server's metrics."""
        return None


def sum_counter(text: str, name: str) -> int | None:
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


# ------------------------------------------------------------------------ llama server
# The dialect of llama-server, which has the same names for the fields of a request as we do.


class LlamaServer(ServerDialect):
    kind = "llama-server"
    name = "llama-server"
    owners = ("llamacpp",)
    sampling: Mapping[str, str] = {
        parameter.name: parameter.name for parameter in sampling_parameters()
    }
    constraints = frozenset({"json_object", "json_schema", "grammar"})
    text_constraints = constraints
    known_fields = frozenset(
        {
            *("ignore_eos", "cache_prompt", "n_cache_reuse", "mixed_prompts", "reasoning_format"),
            *("t_max_predict_ms", "n_indent", "samplers", "thinking"),
        }
    )
    has_native_api = True
    accepts_text_bias = True
    template_kwargs = True
    can_require_named_tool = False  # it treats an object as "auto"

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        match constraint.kind:
            case "grammar":
                body["grammar"] = constraint.source
            case _ if "messages" not in body:
                body["json_schema"] = schema or {"type": "object"}
            case _:
                super().constrain(body, constraint, schema)

    def continue_message(self, body: Body, part: str) -> bool:
        # It always continues the last message of an assistant, but repeats the message without these fields.
        body |= {"continue_final_message": part, "add_generation_prompt": False}
        return True

    def add_fields(self, body: Body, request: frames.Generate) -> None:
        if request.thinking is not None:
            body["thinking_budget_tokens"] = request.thinking.tokens

    def parse_draft_counts(self, chunk: Mapping[str, Any]) -> DraftCounts | None:
        """Return the draft tokens of an answer. Without drafts the server reports none."""
        timings = chunk.get("timings")
        if not isinstance(timings, dict):
            return None
        drafted, accepted = (parse_count(timings.get(f"draft_n{end}")) for end in ("", "_accepted"))
        return DraftCounts(drafted, accepted) if drafted and accepted is not None else None


# ------------------------------------------------------------------------ localspec
# The dialect of another localspec, which reports the same figures as we do.


class Localspec(LlamaServer):
    kind = "localspec"
    name = "localspec"
    owners = ("localspec",)
    can_require_named_tool = True
    constraints = frozenset({"json_object", "json_schema", "grammar", "regex"})
    text_constraints = constraints
    known_fields = LlamaServer.known_fields | {
        *("exact", "loop_guard", "reveal_draft", "speculative", "prediction"),
        *("min_tokens", "stop_token_ids"),
    }

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        if constraint.kind == "regex":
            body["regex"] = constraint.source
        elif constraint.kind == "json_object":
            body["response_format"] = {"type": "json_object"}
        else:
            super().constrain(body, constraint, schema)

    def add_fields(self, body: Body, request: frames.Generate) -> None:
        super().add_fields(body, request)
        speculative, default = request.speculative, frames.SpeculationSettings()
        body["speculative"] = {
            "enabled": speculative.enabled,
            "depth": "auto" if speculative.depth is None else speculative.depth,
            "kind": speculative.kind,
            "verification": speculative.verification,
        }
        if speculative == default:
            del body["speculative"]
        if request.exact is not None:
            body["exact"] = request.exact
        if request.reveal_draft:
            body["reveal_draft"] = True
        if request.private:
            body["localspec"] = {"private": True}


# ------------------------------------------------------------------------ sglang
# The dialect of SGLang. Its figures follow its source code; none were recorded from a running server.


class Sglang(ServerDialect):
    kind = "sglang"
    name = "SGLang"
    owners = ("sglang",)
    sampling: Mapping[str, str] = {
        **SAMPLING, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty",
    }  # fmt: skip
    constraints = frozenset({"json_object", "json_schema", "grammar", "regex"})
    text_constraints = frozenset({"json_schema", "grammar", "regex"})
    known_fields = frozenset({"ignore_eos", "min_tokens", "stop_token_ids"})
    template_kwargs = True

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        match constraint.kind:
            case "grammar":
                body["ebnf"] = constraint.source
            case "regex":
                body["regex"] = constraint.source
            case "json_schema" if "messages" not in body:
                body["json_schema"] = constraint.source
            case _:
                super().constrain(body, constraint, schema)

    def continue_message(self, body: Body, part: str) -> bool:
        body |= {"continue_final_message": True}
        return part == "content"

    def add_fields(self, body: Body, request: frames.Generate) -> None:
        body["return_spec_tokens_details"] = True

    def parse_draft_counts(self, chunk: Mapping[str, Any]) -> DraftCounts | None:
        details: Any = chunk.get("sglext")
        details = details.get("spec_tokens_details") if isinstance(details, dict) else None
        if not isinstance(details, dict):
            return None
        names = "spec_num_proposed_drafts", "spec_num_correct_drafts"
        drafted, accepted = (parse_count(details.get(name)) for name in names)
        return None if drafted is None or accepted is None else DraftCounts(drafted, accepted)


# ------------------------------------------------------------------------ tensorrt llm
# The dialect of TensorRT-LLM (trtllm-serve), from its source code. It does not report drafts per answer.


class TensorRtLlm(ServerDialect):
    kind = "tensorrt-llm"
    name = "TensorRT-LLM"
    owners = ("tensorrt_llm", "tensorrt-llm")
    sampling: Mapping[str, str] = {
        **SAMPLING, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty",
    }  # fmt: skip
    known_fields = frozenset({"ignore_eos"})
    template_kwargs = True


# ------------------------------------------------------------------------ vllm
# The dialect of vLLM.


class Vllm(ServerDialect):
    kind = "vllm"
    name = "vLLM"
    owners = ("vllm",)
    sampling: Mapping[str, str] = {
        **SAMPLING, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty",
    }  # fmt: skip
    constraints = frozenset({"json_object", "json_schema", "grammar", "regex"})
    text_constraints = constraints
    known_fields = frozenset({"ignore_eos", "min_tokens", "stop_token_ids"})
    template_kwargs = True
    returns_token_ids = True
    metrics_path = "/metrics"

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        if constraint.kind in ("grammar", "regex"):
            body["structured_outputs"] = {constraint.kind: constraint.source}
        else:
            super().constrain(body, constraint, schema)

    def continue_message(self, body: Body, part: str) -> bool:
        body |= {"add_generation_prompt": False, "continue_final_message": True}
        return part == "content"

    def parse_draft_counts(self, chunk: Mapping[str, Any]) -> DraftCounts | None:
        """Return the draft tokens reported with `--per-request-spec-decode-metrics summary`."""
        metrics = chunk.get("metrics")
        figures = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if not isinstance(figures, dict):
            return None
        names = "num_draft_tokens", "num_accepted_draft_tokens"
        drafted, accepted = (parse_count(figures.get(name)) for name in names)
        if drafted is None or accepted is None:
            return None
        histogram = figures.get("acceptance_histogram")
        accepts = [parse_count(count) for count in histogram] if isinstance(histogram, list) else []
        valid = [count for count in accepts[:256] if count is not None]
        return DraftCounts(drafted, accepted, valid if len(valid) == len(accepts) else [])

    def parse_counters(self, text: str) -> ServerCounters | None:
        prefix = "vllm:spec_decode_num"
        tokens = sum_counter(text, "vllm:generation_tokens_total")
        drafted = sum_counter(text, f"{prefix}_draft_tokens_total")
        accepted = sum_counter(text, f"{prefix}_accepted_tokens_total")
        if tokens is None or drafted is None or accepted is None:
            return None
        return ServerCounters(tokens, drafted, accepted)


# ------------------------------------------------------------------------ dialects


KINDS: dict[str, ServerDialect] = {
    dialect.kind: dialect
    for dialect in (ServerDialect(), LlamaServer(), Localspec(), Vllm(), Sglang(), TensorRtLlm())
}


def dialect_of_owner(owner: object) -> ServerDialect:
    """Return the kind of server whose models name this owner, or the general one."""
    key = str(owner).lower()
    return next((dialect for dialect in KINDS.values() if key in dialect.owners), KINDS["openai"])
