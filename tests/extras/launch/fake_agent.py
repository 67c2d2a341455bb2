"""A program that stands for each agent, whichever name it is started by.

It reads what the real agent reads, in the real agent's precedence, sends one streamed request in its protocol
to the address that it was given, and prints what came as one line of JSON. The last argument is the question.
If it is "wait", the program then waits for a signal. Its exit status is 7.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

WORDS = sys.argv[1:]


def value_of(option: str) -> str:
    return WORDS[WORDS.index(option) + 1]


def claude() -> tuple[str, str, str, dict[str, Any]]:
    user = Path.home() / ".claude" / "settings.json"
    layers = [json.loads(user.read_text())["env"]] if user.exists() else []
    settings = json.loads(value_of("--settings"))
    for layer in (*layers, settings["env"]):
        os.environ |= layer
    token = os.environ["ANTHROPIC_AUTH_TOKEN"]
    if not token:
        helper = subprocess.run(settings["apiKeyHelper"], shell=True, stdout=-1, text=True)
        token = helper.stdout.strip()
    body = {"max_tokens": int(os.environ["CLAUDE_CODE_MAX_OUTPUT_TOKENS"])}
    url = f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages"
    return url, token, os.environ["ANTHROPIC_MODEL"], body


def codex() -> tuple[str, str, str, dict[str, Any]]:
    settings = [WORDS[index + 1] for index, word in enumerate(WORDS) if word == "-c"]
    config = tomllib.loads("\n".join(settings))
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses"
    url = f"{provider['base_url']}/responses"
    return url, os.environ[provider["env_key"]], config["model"], {}


def opencode() -> tuple[str, str, str, dict[str, Any]]:
    text = os.environ["OPENCODE_CONFIG_CONTENT"]
    config = json.loads(re.sub(r"{env:(\w+)}", lambda name: os.environ[name[1]], text))
    name, _, model = config["model"].partition("/")
    provider = config["provider"][name]
    url = f"{provider['options']['baseURL']}/chat/completions"
    body = {"max_tokens": provider["models"][model]["limit"]["output"]}
    return url, provider["options"]["apiKey"], model, body


def pi() -> tuple[str, str, str, dict[str, Any]]:
    assert "registerProvider" in Path(value_of("-e")).read_text()
    provider = json.loads(os.environ["LOCALSPEC_PROVIDER"])
    (model,) = provider["models"]
    assert (value_of("--provider"), value_of("--model")) == ("localspec", model["id"])
    body = {"max_tokens": model["maxTokens"]}
    return f"{provider['baseUrl']}/v1/messages", os.environ["LOCALSPEC_TOKEN"], model["id"], body


def main() -> int:
    agent = {"claude": claude, "codex": codex, "opencode": opencode, "pi": pi}[
        Path(sys.argv[0]).name
    ]
    url, token, model, body = agent()
    message = {"role": "user", "content": f"say {WORDS[-1]}"}
    body |= {
        "model": model,
        "stream": True,
        "input" if "responses" in url else "messages": [message],
    }
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer = response.read().decode()
    shown = {"url": url, "token": token, "answer": answer, "words": WORDS, "pid": os.getpid()}
    print(json.dumps(shown), flush=True)
    if WORDS[-1] == "wait":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pause()
    return 7


sys.exit(main())
