"""How long a model may think before it answers: what its template is told, and where the engine ends it."""

from __future__ import annotations

from typing import Any

from localspec.daemon.completion.reply.parser import THOUGHTS
from localspec.protocol.frames import ThinkingLimit
from localspec.protocol.requests import ChatRequest, TemplateRequest

# Tokens of thoughts that an effort comes to where no budget is given, as other servers have it.
_BUDGETS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}


def limit(request: ChatRequest, most: int | None) -> ThinkingLimit | None:
    """Where the engine ends the thoughts; None where nobody asks for that, or the answer ends before.

    most: tokens of the answer, thoughts among them.
    """
    budget = _budget(request)
    if budget is None or budget < 0 or (most is not None and budget >= most > 0):
        return None
    return ThinkingLimit(budget, list(THOUGHTS))


def told(request: ChatRequest | TemplateRequest) -> dict[str, Any]:
    """A template's own switches. Families have different names for them, and pass over the others'."""
    budget, effort = _budget(request), request.reasoning_effort
    if budget is None and effort is None:
        return {}
    on = budget != 0
    effort_told = {"reasoning_effort": effort} if effort and on else {}
    return {"enable_thinking": on, "thinking": on, **effort_told}


def _budget(request: ChatRequest | TemplateRequest) -> int | None:
    for asked in (
        request.reasoning_budget_tokens,
        request.thinking_budget_tokens,
        request.thinking_token_budget,
    ):
        if asked is not None:
            return asked
    return _BUDGETS.get(request.reasoning_effort or "")
