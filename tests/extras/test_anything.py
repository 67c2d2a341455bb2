"""Random requests may fail themselves, but they never affect another client.

Each run takes a few seconds. LOCALSPEC_TEST_REQUESTS=5000 sends so many requests from each client, and
LOCALSPEC_TEST_SEED draws other requests.
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
from benchmarks.api.hostile import to_url
from benchmarks.api.isolation import embedding_length, send_hostile
from benchmarks.synthetic_projector import png, write_projector
from localspec.engine.llama import Model
from tests.support.any_request import RequestGenerator
from tests.support.daemons import Answer, Home, RunningDaemon, temporary_home
from tests.support.error_shapes import has_error, read_error
from tests.support.exploration import FACTOR, SEED
from tests.support.gguf_files import relabelled
from tests.support.rescoring import SHIPPED_NEAR_TIE, worst_gap

pytestmark = pytest.mark.explore

FOLDER = Path(localspec.__file__).parent / "builtin"
REQUESTS = int(os.environ.get("LOCALSPEC_TEST_REQUESTS", "0"))
SECONDS = 3.0 * FACTOR  # duration without LOCALSPEC_TEST_REQUESTS
CLIENTS = 2  # besides the bystander, and one that is hostile
HOSTILE = 12 * FACTOR  # requests of that one, without LOCALSPEC_TEST_REQUESTS
# Codes of errors that a request itself may cause. Any other code counts as harm to others.
OWN_ERROR_CODES = {
    "bad_request", "cancelled", "chat_template_error", "conflict", "context_length_exceeded",
    "invalid_grammar", "invalid_request", "load_failed", "model_not_found", "not_found",
    "registry_error", "request_too_large", "unsafe_path", "unsupported_encoding",
}  # fmt: skip
QUESTIONS = ("def f(x):\n    ", "import os\n\n\ndef walk(path):\n", "What does os.walk do?\n")


class Trouble(AssertionError):
    """A request did harm, or its answer did not have the published shape."""


def check_answer(path: str, body: bytes, answer: Answer) -> str:
    """Check that an answer is JSON with an error of its own at most; return its code or "ok"."""

    def trouble(what: str) -> Trouble:
        return Trouble(f"{what}: {answer.status} {answer.body[:600]!r}\nfor {path} {body[:1500]!r}")

    content_type = answer.headers.get("content-type", "")
    if content_type.startswith("text/event-stream"):
        values = [json.loads(event) for event in answer.events if event != "[DONE]"]
        errors = [value for value in values if has_error(path, value)]
    elif content_type.startswith("application/x-ndjson"):
        values = [json.loads(line) for line in answer.body.splitlines()]
        errors = [value for value in values if has_error(path, value)]
    elif content_type.startswith("application/json"):
        errors = [answer.json] if answer.status >= 400 else []
    else:
        raise trouble("not JSON")
    if not errors:
        return "ok" if answer.status < 400 else "no error"
    [error] = errors
    try:
        _, code = read_error(path, error)
    except (AssertionError, KeyError):
        raise trouble("no error of its protocol's shape") from None
    if code is None:
        if answer.status >= 500:
            raise trouble("not its own error")
        return str(answer.status)
    if code not in OWN_ERROR_CODES or (answer.status >= 500 and code != "load_failed"):
        raise trouble("not its own error")
    return code


class Company:
    """Clients that send random requests, and a bystander whose answers must not change."""

    def __init__(self, home: Home, until: float) -> None:
        self.home = home
        self.until = until
        self.codes: Counter[str] = Counter()
        self.troubles: list[BaseException] = []
        self.answered = 0
        self._busy = CLIENTS + 1

    def over(self, count: int) -> bool:
        enough = count >= REQUESTS if REQUESTS else time.monotonic() > self.until
        return enough or bool(self.troubles)

    def anything(self, drawn: RequestGenerator) -> None:
        count = 0
        try:
            while not self.over(count):
                path, body = drawn.request()
                try:
                    answer = self.home.request("POST", path, body)
                except OSError as error:
                    raise Trouble(f"{error!r} for {path} {body[:1500]!r}") from error
                self.codes[f"{path} {check_answer(path, body, answer)}"] += 1
                count += 1
        except BaseException as error:
            self.troubles.append(error)
        self._busy -= 1

    def hostile(self, seed: int) -> None:
        """Send pictures, documents, streams that are read twice, and long texts, and often leave early."""
        try:
            for number in range(REQUESTS or HOSTILE):
                status = send_hostile(str(self.home.socket), seed * 100_000 + number).status
                self.codes[f"hostile {status}"] += 1
                if self.troubles or status not in ("200", "400", "404", "409", "413", "left"):
                    raise Trouble(f"{status} for hostile request {number} of seed {seed}")
        except BaseException as error:
            self.troubles.append(error)
        self._busy -= 1

    def bystander(self, alone: dict[tuple[int, bool], Any]) -> None:
        """Repeat requests; in exact mode answers are identical, otherwise equal up to near-ties."""
        try:
            while self._busy:
                for (number, exact), expected in alone.items():
                    answer = ask(self.home, number, exact)
                    if answer != expected and (exact or not is_near_tie(number, answer)):
                        raise Trouble(f"{answer} instead of {expected} for a bystander")
                    self.answered += 1
        except BaseException as error:
            self.troubles.append(error)


def ask(home: Home, number: int, exact: bool) -> Any:
    """Return the text and the tokens of a bystander's answer."""
    body = {"prompt": QUESTIONS[number], "temperature": 0, "n_predict": 24, "ignore_eos": True}
    answer = home.request("POST", "/completion", {**body, "return_tokens": True, "exact": exact})
    assert answer.status == 200, f"a bystander was refused: {answer.body!r}"
    return answer.json["content"], answer.json["tokens"]


def is_near_tie(number: int, answer: Any) -> bool:
    """Return whether the target alone would choose these tokens, near-ties aside."""
    path = str(FOLDER / "target.gguf")
    with Model(path) as model:
        prompt = model.vocab.tokenize(QUESTIONS[number], add_special=True, parse_special=False)
        ends = model.vocab.ends
    tokens = answer[1]
    return len(tokens) == 24 and worst_gap(path, prompt, tokens, ends) <= SHIPPED_NEAR_TIE


def copy_builtin(folder: Path, pre_tokenizer: str | None) -> str:
    """Copy the builtin pair, with another pre-tokenizer on request; return it for LOCALSPEC_PAIR.

    It reads pictures, because a projector lies beside it.
    """
    names = ("target.gguf", "draft.gguf")
    for name in names:
        if pre_tokenizer is None:
            shutil.copy(FOLDER / name, folder / name)
        else:
            relabelled(FOLDER / name, pre_tokenizer, folder / name)
    write_projector(folder / "mmproj-F16.gguf", embedding_length(folder / names[0]))
    return ",".join(str(folder / name) for name in names)


@pytest.mark.timeout(0 if REQUESTS else 1800)
@pytest.mark.parametrize("pre_tokenizer", [None, "tekken"], ids=["as shipped", "tekken"])
def test_random_requests_do_not_harm_a_bystander(tmp_path: Path, pre_tokenizer: str | None) -> None:
    with temporary_home() as home:
        home.environment |= {
            "LOCALSPEC_PAIR": copy_builtin(tmp_path, pre_tokenizer),
            "LOCALSPEC_CONTEXT": "512",
            "HF_HUB_OFFLINE": "1",
        }
        daemon = RunningDaemon(home)
        alone = {(n, exact): ask(home, n, exact) for n in range(3) for exact in (True, False)}
        picture = {"type": "image_url", "image_url": {"url": to_url(png(1))}}
        content = [picture, {"type": "text", "text": "What is that?"}]
        messages = [{"role": "user", "content": content}]
        seen = home.request("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert seen.status == 200, seen.body
        before = home.status()
        drawn = [RequestGenerator(SEED * 1000 + number) for number in range(CLIENTS)]
        company = Company(home, time.monotonic() + SECONDS)
        threads = [
            threading.Thread(target=company.anything, args=(requests,)) for requests in drawn
        ]
        threads.append(threading.Thread(target=company.hostile, args=(SEED,)))
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
