"""The dialect of llama-server, which has the same names for the fields of a request as we do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.daemon.upstream.dialects.base import Body, Dialect, Spoken, whole
from localspec.protocol import frames
from localspec.protocol.sampling import parameters


class LlamaServer(Dialect):
    kind = "llama-server"
    name = "llama-server"
    owners = ("llamacpp",)
    sampling: Mapping[str, str] = {parameter.name: parameter.name for parameter in parameters()}
    constraints = frozenset({"json_object", "json_schema", "grammar"})
    text_constraints = constraints
    known = frozenset(
        {
            *("ignore_eos", "cache_prompt", "n_cache_reuse", "mixed_prompts", "reasoning_format"),
            *("t_max_predict_ms", "n_indent", "samplers", "thinking"),
        }
    )
    native = True
    bias_of_texts = True
    template_kwargs = True
    names_tools = False  # it treats an object as "auto"

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        match constraint.kind:
            case "grammar":
                body["grammar"] = constraint.source
            case _ if "messages" not in body:
                body["json_schema"] = schema or {"type": "object"}
            case _:
                super().constrain(body, constraint, schema)

    def goes_on(self, body: Body, part: str) -> bool:
        # It always continues the last message of an assistant, but repeats the message without these fields.
        body |= {"continue_final_message": part, "add_generation_prompt": False}
        return True

    def more(self, body: Body, request: frames.Generate) -> None:
        if request.thinking is not None:
            body["thinking_budget_tokens"] = request.thinking.tokens

    def spoken(self, chunk: Mapping[str, Any]) -> Spoken | None:
        """Return the draft tokens of an answer. Without drafts the server reports none."""
        timings = chunk.get("timings")
        if not isinstance(timings, dict):
            return None
        drafted, accepted = (whole(timings.get(f"draft_n{end}")) for end in ("", "_accepted"))
        return Spoken(drafted, accepted) if drafted and accepted is not None else None
