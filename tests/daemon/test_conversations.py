"""Conversations: kept when asked for, continued, found again, forgotten."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable
from typing import Any

from tests.support.daemons import Home, RunningDaemon, wait_for


def ask(home: Home, text: str, conversation: str = "new", **fields: Any) -> Any:
    answer = home.chat(text, localspec={"conversation": conversation}, **fields)
    assert answer.status == 200, answer.body
    return answer.json


def kept(home: Home, name: str = "last") -> Any:
    return home.request("GET", f"/localspec/conversations/{name}").json


def said(home: Home, name: str = "last") -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in kept(home, name)["messages"]]


def names(home: Home, query: str = "") -> list[str]:
    listed = home.request("GET", f"/localspec/conversations{query}").json
    return [each["id"] for each in listed["conversations"]]


def test_question_and_answer_are_kept_with_their_statistics(api: Home) -> None:
    answer = ask(api, "say hello")
    found = kept(api, answer["localspec"]["conversation"])
    assert [each["content"] for each in found["messages"]] == ["say hello", "hello"]
    reply = found["messages"][1]
    assert reply["finish"] == "stop"
    assert (reply["drafted"], reply["accepted"], reply["speed_up"]) == (4, 3, 1.8)
    assert found["title"] == "say hello"
    assert found["model"] == str(api.model)


def test_nothing_is_kept_for_a_request_that_does_not_ask(api: Home) -> None:
    before = names(api)
    assert "conversation" not in api.chat("say hello").json["localspec"]
    assert names(api) == before


def test_a_conversation_goes_on_with_all_that_was_said(api: Home) -> None:
    first = ask(api, "say one")["localspec"]["conversation"]
    echoed = json.loads(ask(api, "echo", first)["choices"][0]["message"]["content"])
    assert [each["content"] for each in echoed["prompt"]["messages"]] == ["say one", "one", "echo"]
    assert [role for role, _ in said(api, first)] == ["user", "assistant"] * 2
    assert ask(api, "say two", "last")["localspec"]["conversation"] == first
    assert len(said(api, first)) == 6


def test_a_question_that_follows_at_once_finds_the_answer_before(api: Home) -> None:
    name = ask(api, "say 0")["localspec"]["conversation"]
    for number in range(1, 20):
        with api.streaming(f"say {number}", localspec={"conversation": "last"}) as stream:
            stream.read()
    assert len(said(api, name)) == 40


def test_a_stream_names_its_conversation_in_its_first_chunk(api: Home) -> None:
    with api.streaming("say hello", localspec={"conversation": "new"}) as stream:
        first = json.loads(stream.readline().removeprefix(b"data: "))
        stream.read()
    assert said(api, first["localspec"]["conversation"])[1] == ("assistant", "hello")


def test_a_new_system_message_takes_the_place_of_the_old_one(api: Home) -> None:
    def turn(system: str, name: str) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "echo"}]
        body = {"messages": messages, "localspec": {"conversation": name}}
        return api.request("POST", "/v1/chat/completions", body).json

    name = turn("be brief", "new")["localspec"]["conversation"]
    echoed = json.loads(turn("be long", name)["choices"][0]["message"]["content"])
    roles = [(each["role"], each["content"]) for each in echoed["prompt"]["messages"]]
    assert roles[0] == ("system", "be long")
    assert [role for role, _ in roles].count("system") == 1
    assert said(api, name)[0] == ("system", "be long")
    assert [role for role, _ in said(api, name)].count("system") == 1


def test_an_answer_whose_reader_left_is_kept_and_marked(api: Home) -> None:
    with api.streaming("forever", localspec={"conversation": "new"}) as stream:
        for _ in range(5):
            stream.readline()
    reply = wait_for(lambda: _last_answer(api, "forever"), "the partial answer")
    assert reply["finish"] == "interrupted"
    assert reply["content"].startswith("0 ")


def test_an_answer_that_a_death_cut_off_is_kept_and_marked(api: Home) -> None:
    with api.streaming("die SIGKILL", localspec={"conversation": "new"}) as stream:
        stream.read()
    reply = wait_for(lambda: _last_answer(api, "die SIGKILL"), "the partial answer")
    assert (reply["finish"], reply["content"]) == ("failed", "one two ")


def _last_answer(home: Home, question: str) -> Any:
    found = kept(home)
    return found["messages"][-1] if found["title"] == question else None


def test_a_refused_request_leaves_nothing(api: Home) -> None:
    before = names(api)
    refused = api.chat("refuse context_length_exceeded", localspec={"conversation": "new"})
    assert refused.status == 400
    assert names(api) == before


def test_the_pair_of_a_conversation_is_used_again(api: Home) -> None:
    other = str(api.root / "other.gguf")
    (api.root / "other.gguf").touch()
    name = ask(api, "say hi", model=other)["localspec"]["conversation"]
    assert ask(api, "say again", name)["model"] == other
    assert ask(api, "say once more", name, model=str(api.model))["model"] == str(api.model)


def test_undo_takes_the_last_question_back(api: Home) -> None:
    name = ask(api, "say one")["localspec"]["conversation"]
    ask(api, "say two", name)
    undone = api.request("POST", f"/localspec/conversations/{name}/undo").json
    assert undone == {"id": name, "question": "say two"}
    assert said(api, name) == [("user", "say one"), ("assistant", "one")]
    api.request("POST", f"/localspec/conversations/{name}/undo")
    empty = api.request("POST", f"/localspec/conversations/{name}/undo")
    assert (empty.status, empty.error["code"]) == (404, "not_found")


def test_search_knows_no_case_and_no_wildcards(api: Home) -> None:
    name = ask(api, "say GRÜSSE 100%")["localspec"]["conversation"]
    assert names(api, "?search=gr%C3%BCsse") == [name]
    assert names(api, "?search=100%25") == [name]
    assert names(api, "?search=1_0%25") == []
    assert names(api, "?limit=1") == names(api)[:1]
    assert api.request("GET", "/localspec/conversations?limit=0").status == 400


def test_a_beginning_of_the_id_is_enough_when_it_is_the_only_one(api: Home) -> None:
    name = ask(api, "say hello")["localspec"]["conversation"]
    assert kept(api, name[:7])["id"] == name
    missing = api.request("GET", "/localspec/conversations/zzz")
    assert (missing.status, missing.error["message"]) == (
        404,
        "There is no conversation 'zzz'; `localspec history` lists them.",
    )


def test_forgetting_one_and_all(home: Home, daemon: RunningDaemon) -> None:
    first = ask(home, "say secret")["localspec"]["conversation"]
    ask(home, "say two")
    assert home.request("DELETE", f"/localspec/conversations/{first}").json["id"] == first
    assert len(names(home)) == 1
    assert home.request("DELETE", "/localspec/conversations").json["removed"] == 1
    assert names(home) == []
    daemon.stop()
    assert b"secret" not in (home.root / "data" / "conversations.sqlite").read_bytes()


def test_what_was_kept_outlives_the_daemon_and_is_for_its_user_alone(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    daemon = start_daemon()
    assert names(home) == []
    assert not (home.root / "data" / "conversations.sqlite").exists()
    name = ask(home, "say hello")["localspec"]["conversation"]
    daemon.stop()
    file = home.root / "data" / "conversations.sqlite"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600  # noqa: PTH116
    start_daemon()
    assert said(home, name) == [("user", "say hello"), ("assistant", "hello")]


def test_a_newer_file_is_refused_untouched_and_answers_still_come(
    home: Home, daemon: RunningDaemon
) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = file.read_bytes()
    assert ask(home, "say hello")["choices"][0]["message"]["content"] == "hello"
    refused = home.chat("say hello", localspec={"conversation": "last"})
    assert "was written by a newer localspec" in refused.error["message"]
    assert file.read_bytes() == before


def test_a_link_and_a_broken_file_are_refused_with_a_sentence(
    home: Home, daemon: RunningDaemon
) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    (home.root / "elsewhere").touch()
    file.symlink_to(home.root / "elsewhere")
    assert ask(home, "say hello")["choices"][0]["message"]["content"] == "hello"
    assert "is a link" in home.request("GET", "/localspec/conversations").error["message"]
    file.unlink()
    file.write_bytes(b"this is no database" * 100)
    broken = home.request("GET", "/localspec/conversations")
    assert (broken.status, "cannot be used" in broken.error["message"]) == (409, True)
    assert daemon.process.poll() is None
