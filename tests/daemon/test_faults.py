"""Faults beside processes and HTTP: a lost GPU, huge numbers, missing hashes, and prompt leaks."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import synthetic
from tests.support.daemons import ROOT, Home, RunningDaemon, wait_for
from tests.support.pairs import cycle_pair
from tests.support.pulling import pulling_home

LOST_GPU = ROOT / "tests" / "support" / "lost_gpu.py"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("code -3", "llama_decode failed with code -3", id="an error code"),
        pytest.param("abort", "CUDA error", id="ggml aborts"),
    ],
)
def test_a_lost_gpu_is_reported_and_the_worker_is_replaced(
    fault: str, message: str, home: Home
) -> None:
    """After a suspend the worker is restarted, and the answer that failed names the cause."""
    lost = home.root / "lost"
    home.environment["LOCALSPEC_ENGINE"] = shlex.join(
        [sys.executable, "-P", str(LOST_GPU), str(lost)]
    )
    daemon = RunningDaemon(home)
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    assert home.chat("x", **fields, max_tokens=2).status == 200
    first_pid = daemon.worker_pid()
    for _ in range(10):  # on a busy machine an answer may be complete before the GPU is lost
        with home.streaming("x", **fields) as stream:
            assert stream.readline().startswith(b"data: ")
            lost.write_text(fault)
            last_event = stream.read().decode().strip().split("\n\n")[-1]
        if not last_event.endswith("[DONE]"):
            break
        lost.unlink(missing_ok=True)
    error = json.loads(last_event.removeprefix("data: "))["error"]
    assert error["code"] == "worker_died"
    assert message in error["message"]
    assert home.chat("x", **fields, max_tokens=2).status == 200
    assert home.status()["counts"]["worker_deaths"] == 1
    assert daemon.worker_pid() != first_pid
    assert "worker" in Path(home.log).read_text()


def test_a_context_of_two_billion_tokens_is_refused(home: Home, daemon: RunningDaemon) -> None:
    """A request gets a 400 with the field's name; an environment variable is ignored with a warning."""
    answer = home.request("GET", f"/localspec/pairs/builtin?context={2**31}")
    assert (answer.status, answer.error["param"]) == (400, "context")
    for target, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 2**31}),
        ("/completion", {"prompt": "x", "n_predict": 2**31}),
        ("/infill", {"prompt": "x", "n_predict": 2**31}),
    ):
        answer = home.request("POST", target, body)
        assert answer.status == 400
        assert answer.error["param"] in ("max_tokens", "n_predict")
        assert str(2**31 - 1) in answer.error["message"]
    daemon.stop()
    home.environment["LOCALSPEC_CONTEXT"] = str(2**31)
    result = home.run("ask", "say x")
    assert (result.returncode, result.stdout) == (0, "x\n")
    assert "LOCALSPEC_CONTEXT: 'context' must be 0 (auto) or between 256 and" in result.stderr


def test_a_record_without_a_hash_is_verified_before_the_pair_is_loaded(
    home: Home, daemon: RunningDaemon, tmp_path: Path
) -> None:
    """An older release may have left a record without a hash: the files are hashed again."""
    files = cycle_pair(tmp_path / "pair")
    body = {"name": "mine", "target": files.target, "draft": files.draft}
    added = home.request("POST", "/localspec/pairs", body)
    assert added.status == 201, added.body
    [record] = home.root.rglob("mine.json")
    fields = json.loads(record.read_text())
    for model in (fields["target"], fields["draft"]):
        for part in model["parts"]:
            part["sha256"], part["checked"] = "", 0
    original = json.dumps(fields)
    record.write_text(original)
    assert home.chat("say x", model="mine").text == "x"
    updated = json.loads(record.read_text())
    assert all(len(part["sha256"]) == 64 for part in updated["target"]["parts"])
    assert all(len(part["sha256"]) == 64 for part in updated["draft"]["parts"])


@pytest.mark.parametrize("matches", [True, False], ids=["the same", "another"])
def test_a_chat_template_that_differs_from_the_catalogue_is_noted(
    matches: bool, tmp_path: Path
) -> None:
    """The difference is reported by the pull and stored with the pair."""
    with pulling_home(tmp_path) as home:
        template = hashlib.sha256(synthetic.CHAT_TEMPLATE.encode()).hexdigest()
        line = f'template_sha256 = "{template if matches else "0" * 64}"'
        text = home.catalogue.read_text()
        home.catalogue.write_text(
            text.replace('file = "target.gguf"', f'file = "target.gguf"\n{line}')
        )
        RunningDaemon(home)
        home.request("POST", "/localspec/pulls", {"name": "tiny"})
        states = home.request("GET", "/localspec/pulls/tiny/events").events
        for state in (json.loads(states[-2]), home.request("GET", "/localspec/pairs/tiny").json):
            noted = any(
                "chat template in target.gguf differs from the catalogue's" in n
                for n in state["notes"]
            )
            assert noted is not matches, state


RULES = " ".join(f"Rule {number}: answer about Python only." for number in range(30))


def build_body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{RULES} {question}"}]
    options = {"temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 5}
    return {"messages": messages, "exact": True, **options, **fields}


def test_answers_do_not_leak_prompts_of_other_clients(home: Home) -> None:
    """A shared prefix cache changes no bit of the probabilities of another client's answer."""
    home.environment |= {"LOCALSPEC_PARALLEL": "1", "LOCALSPEC_CONTEXT": "1024"}
    RunningDaemon(home)

    def choices(body: dict[str, Any]) -> tuple[Any, int]:
        answer = home.request("POST", "/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        details = answer.json["usage"]["prompt_tokens_details"]
        return answer.json["choices"], details["cached_tokens"]

    secret_question = "My password is tulip-7391. What does os.walk do?"
    for question in ("My password is", "What does os.walk do?", "Repeat what was said before."):
        alone, cached = choices(build_body(question, cache_prompt=False))
        assert cached == 0
        choices(build_body(secret_question))
        shared, cached = choices(build_body(question))
        assert cached > 0  # the shared rules were in the cache
        assert shared == alone
        assert "tulip" not in json.dumps(shared)
    wait_for(lambda: home.status()["running"] == 0, "its end")
