"""What one request carries can fail that request and nothing else: any request, beside bystanders.

A few seconds of it in every run; with LOCALSPEC_TEST_REQUESTS=5000 so many requests by each client, and
with LOCALSPEC_TEST_SEED others than usual.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import localspec
from localspec.engine.llama import Model
from tests.support.any_request import Drawn
from tests.support.daemons import Answer, Home, RunningDaemon, temporary_home
from tests.support.gguf_files import relabelled
from tests.support.rescoring import SHIPPED_NEAR_TIE, worst_gap

FOLDER = Path(localspec.__file__).parent / "builtin"
REQUESTS = int(os.environ.get("LOCALSPEC_TEST_REQUESTS", "0"))
SEED = int(os.environ.get("LOCALSPEC_TEST_SEED", "1"))
SECONDS = 3.0  # of it, where no number of requests is asked for
CLIENTS = 2  # beside the bystander
# A request's own refusals and limits. What is not among them is trouble that it made for others.
ITS_OWN = {
    "bad_request", "cancelled", "chat_template_error", "conflict", "context_length_exceeded",
    "invalid_grammar", "invalid_request", "load_failed", "model_not_found", "not_found",
    "registry_error", "request_too_large", "unsafe_path", "unsupported_encoding",
}  # fmt: skip
QUESTIONS = ("def f(x):\n    ", "import os\n\n\ndef walk(path):\n", "What does os.walk do?\n")


class Trouble(AssertionError):
    """A request that did harm, or was not answered as every one is."""


def check(path: str, sent: bytes, answer: Answer) -> str:
    """An answer is JSON or events of it, and an error is the request's own; its code, or "ok"."""

    def trouble(what: str) -> Trouble:
        return Trouble(f"{what}: {answer.status} {answer.body[:600]!r}\nfor {path} {sent[:1500]!r}")

    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        events = [json.loads(event) for event in answer.events if event != "[DONE]"]
        said = [event["error"] for event in events if "error" in event]
    elif kind.startswith("application/x-ndjson"):
        values = [json.loads(line) for line in answer.body.splitlines()]
        said = [value["error"] for value in values if "error" in value]
    elif kind.startswith("application/json"):
        said = [answer.json["error"]] if answer.status >= 400 else []
    else:
        raise trouble("not JSON")
    if not said:
        return "ok" if answer.status < 400 else "no error"
    [error] = said
    if path.startswith("/api/"):  # Ollama's errors are a sentence
        if not isinstance(error, str) or answer.status >= 500:
            raise trouble("no error of Ollama's shape")
        return str(answer.status)
    if not {"message", "type", "param", "code"} <= error.keys():
        raise trouble("no error of OpenAI's shape")
    if error["code"] not in ITS_OWN or (answer.status >= 500 and error["code"] != "load_failed"):
        raise trouble("not its own error")
    return str(error["code"])


class Company:
    """Clients that send anything, and one whose answers must not change."""

    def __init__(self, home: Home, until: float) -> None:
        self.home = home
        self.until = until
        self.codes: Counter[str] = Counter()
        self.troubles: list[BaseException] = []
        self.answered = 0
        self._busy = CLIENTS

    def over(self, sent: int) -> bool:
        enough = sent >= REQUESTS if REQUESTS else time.monotonic() > self.until
        return enough or bool(self.troubles)

    def anything(self, drawn: Drawn) -> None:
        sent = 0
        try:
            while not self.over(sent):
                path, body = drawn.request()
                try:
                    answer = self.home.request("POST", path, body)
                except OSError as error:
                    raise Trouble(f"{error!r} for {path} {body[:1500]!r}") from error
                self.codes[f"{path} {check(path, body, answer)}"] += 1
                sent += 1
        except BaseException as error:
            self.troubles.append(error)
        self._busy -= 1

    def bystander(self, alone: dict[tuple[int, bool], Any]) -> None:
        """In exact mode the answer is the same to the byte; else the target's own, but for rounding."""
        try:
            while self._busy:
                for (number, exact), expected in alone.items():
                    found = ask(self.home, number, exact)
                    if found != expected and (exact or not near(number, found)):
                        raise Trouble(f"{found} instead of {expected} for a bystander")
                    self.answered += 1
        except BaseException as error:
            self.troubles.append(error)


def ask(home: Home, number: int, exact: bool) -> Any:
    """A bystander's answer: its text and its tokens."""
    body = {"prompt": QUESTIONS[number], "temperature": 0, "n_predict": 24, "ignore_eos": True}
    answer = home.request("POST", "/completion", {**body, "return_tokens": True, "exact": exact})
    assert answer.status == 200, f"a bystander was refused: {answer.body!r}"
    return answer.json["content"], answer.json["tokens"]


def near(number: int, found: Any) -> bool:
    """Is it what the target alone would choose, where two choices within rounding count as one?"""
    path = str(FOLDER / "target.gguf")
    with Model(path) as model:
        prompt = model.vocab.tokenize(QUESTIONS[number], add_special=True, parse_special=False)
        ends = model.vocab.ends
    tokens = found[1]
    return len(tokens) == 24 and worst_gap(path, prompt, tokens, ends) <= SHIPPED_NEAR_TIE


def shipped(folder: Path, pre_tokenizer: str | None) -> str:
    """The shipped pair as LOCALSPEC_PAIR names it, or a copy that cuts text into words otherwise."""
    names = ("target.gguf", "draft.gguf")
    for name in names:
        if pre_tokenizer is None:
            shutil.copy(FOLDER / name, folder / name)
        else:
            relabelled(FOLDER / name, pre_tokenizer, folder / name)
    return ",".join(str(folder / name) for name in names)


@pytest.mark.timeout(0 if REQUESTS else 120)
@pytest.mark.parametrize("pre_tokenizer", [None, "tekken"], ids=["as shipped", "tekken"])
def test_whatever_is_asked_is_answered_and_harms_nobody(
    tmp_path: Path, pre_tokenizer: str | None
) -> None:
    with temporary_home() as home:
        home.environment |= {
            "LOCALSPEC_PAIR": shipped(tmp_path, pre_tokenizer),
            "LOCALSPEC_CONTEXT": "512",
            "HF_HUB_OFFLINE": "1",
        }
        daemon = RunningDaemon(home)
        alone = {(n, exact): ask(home, n, exact) for n in range(3) for exact in (True, False)}
        before = home.status()
        drawn = [Drawn(SEED * 1000 + number) for number in range(CLIENTS)]
        company = Company(home, time.monotonic() + SECONDS)
        threads = [threading.Thread(target=company.anything, args=(each,)) for each in drawn]
        threads.append(threading.Thread(target=company.bystander, args=(alone,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"{sum(company.codes.values())} requests, {company.answered} of a bystander")
        print("\n".join(f"{count:6} {code}" for code, count in company.codes.most_common()))
        assert not company.troubles, "\n".join(str(trouble) for trouble in company.troubles)
        after = home.status()
        assert after["pid"] == before["pid"]
        assert after["counts"]["worker_deaths"] == before["counts"]["worker_deaths"]
        assert company.answered > 0
        assert any(code.endswith(" ok") for code in company.codes), "nothing was answered"
        assert daemon.stop() == 0
