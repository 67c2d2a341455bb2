"""Saved states of conversations: reuse after a restart, deletion and failures to write."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.daemons import Home, RunningDaemon
from tests.support.extras import needs

OPENING = "What does this do? " + " ".join(f"copy(a{at}, b{at})" for at in range(60))
FOLLOWING = "And what does shutil.move do?"
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@contextlib.contextmanager
def daemon(home: Home) -> Iterator[RunningDaemon]:
    running = RunningDaemon(home)
    yield running
    assert running.stop() == 0


def turn(home: Home, question: str, conversation: str, **more: Any) -> Any:
    answer = home.chat(
        question, **GREEDY, **more, exact=True, localspec={"conversation": conversation}
    )
    assert answer.status == 200, answer.body
    return answer.json


def states(home: Home) -> list[Path]:
    return sorted((home.root / "cache" / "conversations").glob("*/*"))


def begin(home: Home) -> str:
    """Create a conversation that is long enough to be saved, stop the daemon and return the id."""
    with daemon(home):
        opened = turn(home, OPENING, "new")
    assert opened["usage"]["prompt_tokens"] > 400
    identity: str = opened["localspec"]["conversation"]
    return identity


def test_a_turn_after_a_restart_prefills_only_new_text(home: Home) -> None:
    begin(home)
    texts, saved = sorted(states(home), key=lambda path: path.stat().st_size)
    assert {path.suffix for path in (texts, saved)} == {".state", ".tokens"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (texts, saved)} == {0o600}
    content, names = saved.read_bytes(), texts.read_bytes()
    with daemon(home):
        second = turn(home, FOLLOWING, "last")
    total, cached = second["timings"]["prompt_n"], second["timings"]["cache_n"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == cached > 300
    assert total < 200  # the question, the previous answer, and the rest of an exact chunk

    # A daemon without a saved state prefills everything and writes the same text.
    with daemon(home):
        home.request("POST", "/localspec/conversations/last/undo")
    saved.parent.mkdir(mode=0o700, exist_ok=True)  # what was taken back has left no state
    texts.write_bytes(names)
    saved.write_bytes(content[:-1])
    with daemon(home):
        again = turn(home, FOLLOWING, "last")
    assert again["timings"]["cache_n"] == 0
    assert again["choices"][0]["message"] == second["choices"][0]["message"]
    assert "is not used: it is damaged" in home.log.read_text()


def test_deleting_a_conversation_deletes_its_state(home: Home) -> None:
    identity = begin(home)
    with daemon(home):
        turn(home, OPENING, "new")  # not on the disk yet
        home.request("DELETE", f"/localspec/conversations/{identity}")
        assert not states(home)
        home.request("DELETE", "/localspec/conversations")
    assert not states(home)


def test_a_question_that_is_taken_back_leaves_no_state(home: Home) -> None:
    """Those that remain before it are read again with the next one."""
    identity = begin(home)
    with daemon(home):
        turn(home, "Say more.", identity)
    assert states(home)
    with daemon(home):
        assert home.request("POST", f"/localspec/conversations/{identity}/undo", {}).status == 200
        assert not states(home)
    assert not states(home)


@needs("responses")
def test_a_deleted_response_leaves_no_state(home: Home) -> None:
    """No state is on the disk, and the engine does not save one when it ends."""
    body = {"model": "", "input": OPENING, "temperature": 0, "max_output_tokens": 24}
    with daemon(home):
        saved = home.request("POST", "/v1/responses", body).json["id"]
    assert states(home)
    with daemon(home):
        assert home.request("DELETE", f"/v1/responses/{saved}").status == 200
        assert not states(home)
    with daemon(home):
        response_id = home.request("POST", "/v1/responses", body).json["id"]
        assert home.request("DELETE", f"/v1/responses/{response_id}").status == 200
    assert not states(home)


def test_gc_deletes_the_states_of_conversations_that_are_gone(home: Home) -> None:
    home.use_fake()
    with daemon(home):
        existing = home.chat("say hello", localspec={"conversation": "new"}).json["localspec"]
        for name in (existing["conversation"], "0badcafe"):
            folder = home.root / "cache" / "conversations" / name
            folder.mkdir(parents=True)
            (folder / "pair.state").write_bytes(bytes(1000))
        result = json.loads(home.run("gc", "--dry-run", "--json").stdout)
        assert (result["files"], result["freed"]) == (["0badcafe/pair.state"], 1000)
        assert len(states(home)) == 2
        home.run("gc", "-y")
    assert [path.parent.name for path in states(home)] == [existing["conversation"]]


def test_saving_can_be_switched_off(home: Home) -> None:
    home.environment["LOCALSPEC_PREFIX_DISK"] = "0"
    begin(home)
    assert not states(home)


def test_a_read_only_disk_does_not_prevent_answers(home: Home) -> None:
    (home.root / "cache").mkdir()
    (home.root / "cache" / "conversations").write_text("in the way")
    begin(home)
    assert "is not saved" in home.log.read_text()
