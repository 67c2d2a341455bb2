"""Limit how long a model thinks before it answers, through its template and in the engine."""

from __future__ import annotations

from typing import Any

from localspec.daemon.completion.reply.parser import THOUGHTS
from localspec.protocol.frames import ThinkingLimit
from localspec.protocol.requests import ChatRequest, TemplateRequest

# Thinking tokens for each effort if the request has no budget, as in other servers.
_EFFORT_TOKENS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}


def limit(request: ChatRequest, max_tokens: int | None) -> ThinkingLimit | None:
    """Return where the engine ends the reasoning; None if there is no budget or the answer ends before it.

    `max_tokens` is the maximum number of tokens in the answer, including reasoning.
    """
    budget = _budget(request)
    if budget is None or budget < 0 or (max_tokens is not None and budget >= max_tokens > 0):
        return None
    return ThinkingLimit(budget, list(THOUGHTS))


def told(request: ChatRequest | TemplateRequest) -> dict[str, Any]:
    """Return the template's own switches; families have different names for them and ignore unknown ones."""
    budget, effort = _budget(request), request.reasoning_effort
    if budget is None and effort is None:
        return {}
    enabled = budget != 0
    effort_switch = {"reasoning_effort": effort} if effort and enabled else {}
    return {"enable_thinking": enabled, "thinking": enabled, **effort_switch}


def _budget(request: ChatRequest | TemplateRequest) -> int | None:
    for tokens in (
        request.reasoning_budget_tokens,
        request.thinking_budget_tokens,
        request.thinking_token_budget,
    ):
        if tokens is not None:
            return tokens
    return _EFFORT_TOKENS.get(request.reasoning_effort or "")
