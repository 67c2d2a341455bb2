"""The endpoint for the next edit, with the pair that comes with localspec and with the scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.daemons import Home, UnixConnection, real_home, scripted_home, wait_for

PATH = "/localspec/next-edit"
WINDOW = "def copy(a, b):\n    return shutil.copytree(a, b)\n\n\n" + "".join(
    f"def f{n}(x):\n    return x + {n}\n" for n in range(8)
)
ASKED: dict[str, Any] = {
    "path": "copy.py",
    "above": "import shutil\n\n\n",
    "before": WINDOW[:20],
    "after": WINDOW[20:],
    "below": "\n\nprint(copy('a', 'b'))\n",
    "edits": [{"path": "copy.py", "old": "def copy(a):\n", "new": "def copy(a, b):\n"}],
}


@pytest.fixture(scope="module")
def real() -> Iterator[Home]:
    with real_home() as home:
        yield home


def ask(home: Home, **fields: Any) -> Any:
    answer = home.request("POST", PATH, {**ASKED, **fields})
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("form", ["zeta1", "zeta2", "sweep", "chat", "text"])
def test_the_shipped_pair_answers_in_every_form(real: Home, form: str) -> None:
    """The edits are what makes the old window the new one, and the answer says how it was drafted."""
    answer = ask(real, form=form)
    assert (answer["object"], answer["form"]) == ("next_edit", form)
    lines, moved = WINDOW.split("\n")[:-1], 0
    for edit in answer["edits"]:
        assert lines[edit["start"] + moved : edit["end"] + moved] == edit["old"]
        lines[edit["start"] + moved : edit["end"] + moved] = edit["new"]
        moved += len(edit["new"]) - len(edit["old"])
    assert "".join(f"{line}\n" for line in lines) == answer["window"]
    assert answer["timings"]["predicted_n"] == answer["usage"]["completion_tokens"]
    assert "accepted_prediction_tokens" in answer["usage"]["completion_tokens_details"]
    assert answer["localspec"]["speculation"]


def test_an_answer_without_room_proposes_nothing(real: Home) -> None:
    answer = ask(real, max_tokens=3, form="sweep")
    assert (answer["finish_reason"], answer["edits"], answer["window"]) == ("length", [], WINDOW)


def test_bad_requests_are_refused_by_name(real: Home) -> None:
    for fields, name in (
        ({"before": " ", "after": "\n"}, "before"),
        ({"form": "zeta2", "above": "<<<<<<< CURRENT\n"}, "form"),
        ({"stream": True}, "stream"),
        ({"edits": [{"path": "x", "line": 0}]}, "edits[0].line"),
        ({"form": "zeta3"}, "form"),
    ):
        answer = real.request("POST", PATH, {**ASKED, **fields})
        assert (answer.status, answer.error["param"]) == (400, name), answer.body


@pytest.fixture(scope="module")
def fake() -> Iterator[Home]:
    with scripted_home() as home:
        yield home


def read_frame(home: Home, **fields: Any) -> Any:
    """Return the frame that the engine gets, which it writes as its answer."""
    answer = ask(home, before="!echo ", after="", form="text", **fields)
    return json.loads(answer["window"])


def test_the_old_window_is_the_draft(fake: Home) -> None:
    frame = read_frame(fake, max_tokens=70, max_ms=500)
    assert frame["rewrite"] == {"old": "!echo \n"}
    assert frame["speculative"]["prediction"].startswith("!echo \n")
    assert (frame["priority"], frame["sampling"]["temperature"]) == ("editor", 0.0)
    assert (frame["max_tokens"], frame["max_predict_ms"]) == (70, 500)


def test_a_newer_request_for_the_same_file_ends_an_older_one(fake: Home) -> None:
    """Another file's request is a bystander. One whose client has gone ends as well."""
    body = {"before": "!forever ", "after": "x", "form": "sweep"}

    def send(path: str) -> UnixConnection:
        connection = UnixConnection(fake.socket)
        connection.request("POST", PATH, json.dumps({**body, "path": path}))
        return connection

    def running() -> int:
        count: int = fake.status()["running"]
        return count

    bystander, older = send("other.py"), send("same.py")
    wait_for(lambda: running() == 2, "two requests")
    newer = send("same.py")
    response = older.getresponse()
    assert json.loads(response.read())["error"]["code"] == "cancelled"
    wait_for(lambda: running() == 2, "the newer one")
    for connection in (bystander, older, newer):
        connection.close()
    wait_for(lambda: running() == 0, "no busy slot")


def test_two_hundred_keys_leave_no_busy_slot(real: Home) -> None:
    """Each key abandons the request before it, with a closed connection or with a newer request."""
    kept: list[UnixConnection] = []
    for key in range(200):
        connection = UnixConnection(real.socket)
        asked = {
            **ASKED,
            "before": WINDOW[: key % 40],
            "after": WINDOW[key % 40 :],
            "form": "sweep",
        }
        connection.request("POST", PATH, json.dumps(asked))
        if key % 2:
            connection.close()
        else:
            kept.append(connection)
    wait_for(lambda: real.status()["running"] == 0, "no busy slot")
    last = json.loads(kept[-1].getresponse().read())
    assert "edits" in last or last["error"]["code"] == "cancelled"
    for connection in kept:
        connection.close()
    assert ask(real)["object"] == "next_edit"
