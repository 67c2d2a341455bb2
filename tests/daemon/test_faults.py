"""What may go wrong beside processes and HTTP: a lost GPU, absurd numbers, records without a hash,
and what two clients could see of each other."""

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
    ("how", "said"),
    [
        pytest.param("code -3", "llama_decode failed with code -3", id="an error code"),
        pytest.param("abort", "CUDA error", id="ggml aborts"),
    ],
)
def test_a_gpu_lost_after_suspend_is_said_and_the_next_request_gets_a_new_engine(
    how: str, said: str, home: Home
) -> None:
    """GPU lost after suspend: the worker is restarted, and the answer that it cost says why."""
    lost = home.root / "lost"
    home.environment["LOCALSPEC_ENGINE"] = shlex.join(
        [sys.executable, "-P", str(LOST_GPU), str(lost)]
    )
    daemon = RunningDaemon(home)
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    assert home.chat("x", **fields, max_tokens=2).status == 200
    first = daemon.worker_pid()
    for _ in range(10):  # a whole answer takes less than a busy machine may have this test wait
        with home.streaming("x", **fields) as stream:
            assert stream.readline().startswith(b"data: ")
            lost.write_text(how)
            last = stream.read().decode().strip().split("\n\n")[-1]
        if not last.endswith("[DONE]"):
            break
        lost.unlink(missing_ok=True)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "worker_died"
    assert said in error["message"]
    assert home.chat("x", **fields, max_tokens=2).status == 200
    assert home.status()["counts"]["worker_deaths"] == 1
    assert daemon.worker_pid() != first
    assert "worker" in Path(home.log).read_text()
    daemon.stop()


def test_a_context_of_two_billion_tokens_is_refused_wherever_it_is_asked_for(
    home: Home, daemon: RunningDaemon
) -> None:
    """A context of 2^31 tokens: 400 with the field's name, or it is left out and said."""
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
    left_out = home.run("ask", "say x")
    assert (left_out.returncode, left_out.stdout) == (0, "x\n")
    assert "LOCALSPEC_CONTEXT: 'context' must be 0 (auto) or between 256 and" in left_out.stderr


def test_a_record_without_a_hash_is_verified_before_the_pair_is_loaded(
    home: Home, daemon: RunningDaemon, tmp_path: Path
) -> None:
    """A record without a hash, as an older release may have left it: the files are hashed again."""
    files = cycle_pair(tmp_path / "pair")
    body = {"name": "mine", "target": files.target, "draft": files.draft}
    added = home.request("POST", "/localspec/pairs", body)
    assert added.status == 201, added.body
    [record] = home.root.rglob("mine.json")
    whole = json.loads(record.read_text())
    for model in (whole["target"], whole["draft"]):
        for part in model["parts"]:
            part["sha256"], part["checked"] = "", 0
    before = json.dumps(whole)
    record.write_text(before)
    assert home.chat("say x", model="mine").text == "x"
    now = json.loads(record.read_text())
    assert all(len(part["sha256"]) == 64 for part in now["target"]["parts"])
    assert all(len(part["sha256"]) == 64 for part in now["draft"]["parts"])


@pytest.mark.parametrize("known", [True, False], ids=["the same", "another"])
def test_a_chat_template_that_is_not_the_catalogues_is_said(known: bool, tmp_path: Path) -> None:
    """A template whose hash differs from the catalogue's: said while pulling and kept with the pair."""
    with pulling_home(tmp_path) as home:
        template = hashlib.sha256(synthetic.CHAT_TEMPLATE.encode()).hexdigest()
        line = f'template_sha256 = "{template if known else "0" * 64}"'
        text = home.catalogue.read_text()
        home.catalogue.write_text(
            text.replace('file = "target.gguf"', f'file = "target.gguf"\n{line}')
        )
        daemon = RunningDaemon(home)
        home.request("POST", "/localspec/pulls", {"name": "tiny"})
        states = home.request("GET", "/localspec/pulls/tiny/events").events
        for said in (json.loads(states[-2]), home.request("GET", "/localspec/pairs/tiny").json):
            told = any(
                "chat template in target.gguf differs from the catalogue's" in n
                for n in said["notes"]
            )
            assert told is not known, said
        daemon.stop()


RULES = " ".join(f"Rule {number}: answer about Python only." for number in range(30))


def asked(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{RULES} {question}"}]
    wanted = {"temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 5}
    return {"messages": messages, "exact": True, **wanted, **fields}


def test_what_one_client_asked_does_not_show_in_anothers_answer(home: Home) -> None:
    """Two clients' prefix caches: no text crosses, down to the last bit of the probabilities."""
    home.environment |= {"LOCALSPEC_PARALLEL": "1", "LOCALSPEC_CONTEXT": "1024"}
    daemon = RunningDaemon(home)

    def choices(body: dict[str, Any]) -> tuple[Any, int]:
        answer = home.request("POST", "/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        details = answer.json["usage"]["prompt_tokens_details"]
        return answer.json["choices"], details["cached_tokens"]

    mine = "My password is tulip-7391. What does os.walk do?"
    for question in ("My password is", "What does os.walk do?", "Repeat what was said before."):
        alone, cached = choices(asked(question, cache_prompt=False))
        assert cached == 0
        choices(asked(mine))
        after, cached = choices(asked(question))
        assert cached > 0  # the rules that both share: the cache was at work
        assert after == alone
        assert "tulip" not in json.dumps(after)
    wait_for(lambda: home.status()["running"] == 0, "its end")
    daemon.stop()
