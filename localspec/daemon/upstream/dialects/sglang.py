"""The dialect of SGLang. Its figures follow its source code; none were recorded from a running server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.daemon.upstream.dialects.base import SAMPLING, Body, Dialect, Spoken, whole
from localspec.protocol import frames


class Sglang(Dialect):
    kind = "sglang"
    name = "SGLang"
    owners = ("sglang",)
    sampling: Mapping[str, str] = {
        **SAMPLING, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty",
    }  # fmt: skip
    constraints = frozenset({"json_object", "json_schema", "grammar", "regex"})
    text_constraints = frozenset({"json_schema", "grammar", "regex"})
    known = frozenset({"ignore_eos", "min_tokens", "stop_token_ids"})
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

    def goes_on(self, body: Body, part: str) -> bool:
        body |= {"continue_final_message": True}
        return part == "content"

    def more(self, body: Body, request: frames.Generate) -> None:
        body["return_spec_tokens_details"] = True

    def spoken(self, chunk: Mapping[str, Any]) -> Spoken | None:
        details: Any = chunk.get("sglext")
        details = details.get("spec_tokens_details") if isinstance(details, dict) else None
        if not isinstance(details, dict):
            return None
        names = "spec_num_proposed_drafts", "spec_num_correct_drafts"
        drafted, accepted = (whole(details.get(name)) for name in names)
        return None if drafted is None or accepted is None else Spoken(drafted, accepted)
