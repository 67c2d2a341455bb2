"""Editors on the real engine: priority over chats, cancellation, warm prefixes and time limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localspec
from localspec.engine.llama import Model
from localspec.engine.prompt.infill import infill_tokens
from localspec.protocol.frames import InfillPrompt
from tests.support.daemons import (
    Answer,
    Home,
    UnixConnection,
    real_home,
)
from tests.support.daemons import wait_for as until
from tests.support.rescoring import SHIPPED_NEAR_TIE, worst_gap

ABOVE = "import os\n\n\n" + "".join(f"def f{n}(x):\n    return x + {n}\n\n\n" for n in range(8))
HOLE: dict[str, Any] = {
    "input_prefix": ABOVE,
    "input_suffix": "\n\nprint(size('x'))\n",
    "input_extra": [{"text": "def area(r):\n    return 3 * r * r\n", "filename": "shapes.py"}],
    "prompt": "def size(path):\n    return ",
    "n_predict": 12,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 5000,
}
# The sampler that lets a text end early is off: the builtin pair nearly fills this hole with nothing,
# and a prompt from the cache or in another batch could decide that.
BEST: dict[str, Any] = {"samplers": ["top_k"], "top_k": 1, "return_tokens": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    """Run a daemon with one slot for chats."""
    with real_home(parallel="1") as home:
        yield home


def infill(home: Home, **fields: Any) -> Any:
    answer = home.request("POST", "/infill", {**HOLE, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def assert_same_text(one: Any, other: Any, **place: Any) -> None:
    """Check that two completions are equal, or differ only at a near-tie of the target."""
    if one["content"] == other["content"]:
        return
    hole = {**HOLE, **place}
    extra = [(extra_file["filename"], extra_file["text"]) for extra_file in hole["input_extra"]]
    asked = InfillPrompt(
        hole["input_prefix"], hole["input_suffix"], extra, hole["prompt"], hole["n_predict"]
    )
    target = str(Path(localspec.__file__).parent / "builtin" / "target.gguf")
    with Model(target) as model:
        prompt = infill_tokens(model.vocab, asked, 1024, 1 << 20)
    for answer in (one, other):
        assert worst_gap(target, prompt, answer["tokens"]) <= SHIPPED_NEAR_TIE


def running(home: Home) -> int:
    count: int = home.status()["running"]
    return count


def test_deleting_a_line_shifts_the_cache_below(served: Home) -> None:
    """The shift is reported in the answer, in status and in the metrics."""
    lines = [f"def f{n}(x):\n    return x + {n}\n\n\n" for n in range(60)]
    first = infill(served, input_prefix="".join(lines), input_extra=[])
    assert first["timings"]["cache_shift_n"] == 0
    second = infill(served, input_prefix="".join(lines[:-24] + lines[-23:]), input_extra=[])
    assert second["timings"]["cache_shift_n"] >= 32
    assert first["timings"]["cache_exact_n"] == first["timings"]["cache_n"]
    key = infill(
        served, input_prefix="".join(lines[:-24] + lines[-23:]), prompt="d", input_extra=[]
    )
    for timings in (second["timings"], key["timings"]):  # the next key reuses the shifted cache
        assert timings["cache_exact_n"] < timings["cache_n"]
    assert key["timings"]["cache_shift_n"] == 0
    assert served.status()["figures"]["cache_hits"]["shift"] == 1


def test_an_editor_is_answered_while_chats_use_every_slot(served: Home) -> None:
    """Completions for editors have priority, even over a chat that is being written."""
    truth = infill(served, **BEST)
    assert truth["content"]
    # Without drafts, which repeat its text so fast that it could end before the completion.
    slow = {"ignore_eos": True, "max_tokens": 600, "speculative": {"enabled": False}}
    with served.streaming("What does os.walk do?", **slow) as chat:
        chat.readline()
        answer = infill(served, **BEST)
        assert running(served) == 1
        assert b"data: " in chat.readline() + chat.readline()  # events and blank lines take turns
        chat.leave()
    until(lambda: running(served) == 0, "the place of the chat that was left")
    assert_same_text(answer, truth)


def test_a_newer_completion_cancels_the_older_one(served: Home) -> None:
    """The rest of the older one in the cache does not change the newer one's answer."""
    truth = infill(served, **BEST)
    assert truth["content"]
    older = UnixConnection(served.socket)
    endless = {**HOLE, **BEST, "n_predict": -1, "ignore_eos": True}
    endless["speculative"] = {"enabled": False}  # drafts could end it before it is cancelled
    older.request("POST", "/infill", json.dumps(endless))
    until(lambda: running(served) == 1, "the older completion")
    assert_same_text(infill(served, **BEST), truth)
    ended = Answer(older.getresponse())
    older.close()
    assert (ended.status, ended.error["code"]) == (499, "cancelled")
    assert running(served) == 0


def test_a_dropped_connection_frees_its_slot(served: Home) -> None:
    endless = {**HOLE, **BEST, "n_predict": -1, "ignore_eos": True}
    for place in ({"input_prefix": ABOVE * 3, "cache_prompt": False}, {}):
        leaving = UnixConnection(served.socket)
        leaving.request("POST", "/infill", json.dumps({**endless, **place}))
        until(lambda: running(served) == 1, "its place")
        leaving.close()
        until(lambda: running(served) == 0, "the place of a client that left")
    assert infill(served, **BEST)["content"]


def test_a_warm_up_fills_the_cache(served: Home) -> None:
    """llama.vim sends `n_predict: 0` before the cursor rests, which gives no text but a warm cache."""
    place = {"input_prefix": ABOVE + "# warm\n", "input_suffix": "\n", **BEST}
    silent = {"n_predict": 0, "prompt": "", "response_fields": [""]}
    assert infill(served, **place, **silent) == {}
    answer = infill(served, **place, id_slot=3)
    timings = answer["timings"]
    assert answer["content"]
    assert timings["cache_n"] > 0.8 * answer["tokens_evaluated"]
    assert timings["prompt_n"] == answer["tokens_evaluated"] - timings["cache_n"]
    cold = infill(served, **place, cache_prompt=False)
    assert cold["timings"]["cache_n"] == 0
    assert_same_text(cold, answer, **place)


def test_an_announced_text_is_read_while_nobody_waits(served: Home) -> None:
    place = {"input_prefix": ABOVE + "# announced\n", "input_suffix": "\n", **BEST}
    announcement = {**HOLE, **place, "localspec": {"ahead": True}}
    assert infill(served, **announcement)["content"] == ""
    timings = infill(served, **place)["timings"]
    assert timings["cache_ahead_n"] > 8
    assert timings["prompt_n"] <= 2
    with served.streaming("go on", max_tokens=400, ignore_eos=True):
        until(lambda: running(served) == 1, "a chat")
        assert served.request("POST", "/infill", announcement).status == 409


def test_an_answer_ends_soon_after_its_time_limit(served: Home) -> None:
    """With `t_max_predict_ms` an answer ends at the end of the line after that time."""
    endless = 'root ::= ("some code\\n"){250}'  # lines without an end of their own
    answer = infill(served, n_predict=-1, grammar=endless, **BEST, t_max_predict_ms=1)
    assert answer["tokens_predicted"] < 200
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"]
