"""The agents that `localspec launch` starts: what leads each to this daemon, and what it needs of a pair.

No agent has a file written for it. It gets variables of the environment and arguments, which take precedence
over its own files. The token is in variables only, because other users can read a process's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from localspec import literals

TOKEN_VARIABLE = "LOCALSPEC_TOKEN"
_TIMEOUT_MS = 3_600_000  # of an answer: a CPU reads a long prompt for minutes
_MAX_ANSWER_TOKENS = 20_000  # what Claude Code reserves at most
# The smallest window that Claude Code accepts, in tokens, and how much of it is used without the answer.
_CLAUDE_MIN_WINDOW, _USED_PERCENT = 100_000, 90
_CLAUDE_MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"),
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
)
# They would lead it to another provider, or have it ask which login to use.
_CLAUDE_LOGINS = (
    *("ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK"),
    *("CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
)


class Endpoint(NamedTuple):
    """The daemon and the pair, as an agent is told of them."""

    url: str  # without a path
    token: str
    pair: str
    context: int  # tokens; 0: unknown, as that of a pair on another server

    @property
    def answer_tokens(self) -> int:
        return min(self.context // 4, _MAX_ANSWER_TOKENS)


class Agent(NamedTuple):
    """One agent, whose key in `AGENTS` is the name of its program."""

    title: str
    package: str  # of npm
    min_context: int  # tokens of its instructions, its tools and some turns
    # Returns variables of the environment, and arguments.
    launch: Callable[[Endpoint], tuple[dict[str, str], list[str]]]


def _claude(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    variables = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.token,
        **dict.fromkeys(_CLAUDE_MODELS, endpoint.pair),
        **dict.fromkeys(_CLAUDE_LOGINS, ""),
        **dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), str(_TIMEOUT_MS)),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line of the prompt that changes
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if context := endpoint.context:
        answer, window = endpoint.answer_tokens, max(context, _CLAUDE_MIN_WINDOW)
        percent = _USED_PERCENT * (context - answer) // (window - answer)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(answer)
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(max(1, percent))
    # `env` in the user's settings.json replaces variables, and that of --settings replaces both.
    settings = {
        "env": {**variables, "ANTHROPIC_AUTH_TOKEN": ""},
        "apiKeyHelper": f"printenv {TOKEN_VARIABLE}",
    }
    return variables, ["--settings", json.dumps(settings)]


def _codex(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    provider = "model_providers.localspec"
    values = {
        "model": endpoint.pair,
        "model_provider": "localspec",
        f"{provider}.name": "localspec",
        f"{provider}.base_url": f"{endpoint.url}/v1",
        f"{provider}.env_key": TOKEN_VARIABLE,
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": _TIMEOUT_MS,
        "check_for_update_on_startup": False,
        **({"model_context_window": endpoint.context} if endpoint.context else {}),
    }
    settings = [f"{key}={literals.toml(value)}" for key, value in values.items()]
    return {}, [word for setting in settings for word in ("-c", setting)]


def _opencode(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    key = f"{{env:{TOKEN_VARIABLE}}}"
    limit = {"context": endpoint.context, "output": endpoint.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": key, "timeout": False},
        "models": {endpoint.pair: {"limit": limit} if endpoint.context else {}},
    }
    models = dict.fromkeys(("model", "small_model"), f"localspec/{endpoint.pair}")
    flags = dict.fromkeys(("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH"), "1")
    config = json.dumps({**models, "provider": {"localspec": provider}})
    return {"OPENCODE_CONFIG_CONTENT": config, **flags}, []


def _pi(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    model = {
        **dict.fromkeys(("id", "name"), endpoint.pair),
        "reasoning": True,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": endpoint.context or _CLAUDE_MIN_WINDOW,
        "maxTokens": endpoint.answer_tokens or _MAX_ANSWER_TOKENS,
    }
    api = {"baseUrl": endpoint.url, "api": "anthropic-messages", "authHeader": True}
    provider = json.dumps({**api, "models": [model]})
    extension = str(Path(__file__).with_name("pi.mjs"))
    arguments = ["-e", extension, "--provider", "localspec", "--model", endpoint.pair]
    return {"LOCALSPEC_PROVIDER": provider, "PI_SKIP_VERSION_CHECK": "1"}, arguments


AGENTS = {
    "claude": Agent("Claude Code", "@anthropic-ai/claude-code", 32_768, _claude),
    "codex": Agent("Codex", "@openai/codex", 16_384, _codex),
    "opencode": Agent("opencode", "opencode-ai", 16_384, _opencode),
    "pi": Agent("pi", "@earendil-works/pi-coding-agent", 8_192, _pi),
}
