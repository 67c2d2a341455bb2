"""The dialect of another localspec, which reports the same figures as we do."""

from __future__ import annotations

from typing import Any

from localspec.daemon.upstream.dialects.base import Body
from localspec.daemon.upstream.dialects.llama_server import LlamaServer
from localspec.protocol import frames


class Localspec(LlamaServer):
    kind = "localspec"
    name = "localspec"
    owners = ("localspec",)
    names_tools = True
    constraints = frozenset({"json_object", "json_schema", "grammar", "regex"})
    text_constraints = constraints
    known = LlamaServer.known | {
        *("exact", "reveal_draft", "speculative", "prediction"),
        *("min_tokens", "stop_token_ids"),
    }

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        if constraint.kind == "regex":
            body["regex"] = constraint.source
        elif constraint.kind == "json_object":
            body["response_format"] = {"type": "json_object"}
        else:
            super().constrain(body, constraint, schema)

    def more(self, body: Body, request: frames.Generate) -> None:
        super().more(body, request)
        speculative, default = request.speculative, frames.Speculative()
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
