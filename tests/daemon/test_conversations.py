"""Conversations: kept when asked for, continued, found again, forgotten."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import stat
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from localspec.daemon.history import database
from tests.support.daemons import Home, RunningDaemon, wait_for


def ask(
    home: Home, text: str, conversation: str = "new", title: str | None = None, **fields: Any
) -> Any:
    ours = {"conversation": conversation, "title": title}
    answer = home.chat(text, localspec=ours, **fields)
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


def test_a_question_after_one_that_was_interrupted_goes_on_with_it_however_soon(api: Home) -> None:
    """The client knows the conversation's name before the daemon knows that it has left."""
    for _ in range(10):
        with api.streaming("forever", localspec={"conversation": "new"}) as stream:
            first = json.loads(stream.readline().removeprefix(b"data: "))
            name = first["localspec"]["conversation"]
            for _ in range(4):
                stream.readline()
        for question in ("echo", "echo again"):
            ask(api, question, name)
        roles = [role for role, _ in said(api, name)]
        assert roles == ["user", "assistant"] * 3
        assert said(api, name)[0] == ("user", "forever")


def test_taking_back_a_question_at_once_takes_back_the_one_that_was_interrupted(api: Home) -> None:
    name = ask(api, "say hello")["localspec"]["conversation"]
    for _ in range(10):
        with api.streaming("forever", localspec={"conversation": name}) as stream:
            for _ in range(5):
                stream.readline()
        undone = api.request("POST", f"/localspec/conversations/{name}/undo", {})
        assert undone.json["question"] == "forever"
    assert said(api, name) == [("user", "say hello"), ("assistant", "hello")]


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


def test_thoughts_are_kept_apart_and_sent_as_such(api: Home) -> None:
    name = ask(api, "raw <think>Hm.</think>\n\nYes.")["localspec"]["conversation"]
    reply = kept(api, name)["messages"][1]
    assert (reply["content"], reply["reasoning_content"]) == ("Yes.", "Hm.")
    echoed = json.loads(ask(api, "echo", name)["choices"][0]["message"]["content"])
    answer = echoed["prompt"]["messages"][1]
    assert (answer["content"], answer["extra"]) == ("Yes.", {"reasoning_content": "Hm."})


def test_thoughts_stay_in_the_text_for_a_client_that_wants_them_there(api: Home) -> None:
    wanted = "<think>Hm.</think>\n\nYes."
    name = ask(api, f"raw {wanted}", reasoning_format="none")["localspec"]["conversation"]
    assert said(api, name)[1] == ("assistant", wanted)


def test_thoughts_that_were_cut_off_are_kept_as_thoughts(api: Home) -> None:
    with api.streaming("think", localspec={"conversation": "new"}) as stream:
        for _ in range(8):
            stream.readline()
    reply = wait_for(lambda: _last_answer(api, "think"), "the partial answer")
    assert reply["content"] == ""
    assert reply["reasoning_content"].startswith("0 ")


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_and_their_results_are_kept_and_sent_again(
    home: Home, start_daemon: Callable[..., RunningDaemon], streamed: bool
) -> None:
    start_daemon("--template", "{{ tools }}<tool_call>")
    fields = {"tools": [LOOK], "localspec": {"conversation": "new"}, "stream": streamed}
    answer = home.chat(f"raw Let me see. {CALL}", **fields)
    if streamed:
        deltas = [json.loads(event)["choices"][0]["delta"] for event in answer.events[:-1]]
        id = next(each["tool_calls"][0]["id"] for each in deltas if "tool_calls" in each)
    else:
        id = answer.json["choices"][0]["message"]["tool_calls"][0]["id"]
    reply = kept(home)["messages"][1]
    function = {"name": "look", "arguments": '{"at": "it"}'}
    assert reply["tool_calls"] == [{"id": id, "type": "function", "function": function}]
    assert (reply["content"], reply["finish"]) == ("Let me see.", "tool_calls")
    messages = [
        {"role": "tool", "tool_call_id": id, "name": "look", "content": "a cat"},
        {"role": "user", "content": "echo"},
    ]
    body = {"messages": messages, "tools": [LOOK], "localspec": {"conversation": "last"}}
    echoed = home.request("POST", "/v1/chat/completions", body)
    sent = json.loads(echoed.text)["prompt"]["messages"]
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "user"]
    calls = [{"id": id, "type": "function", "function": {**function, "arguments": {"at": "it"}}}]
    assert sent[1]["extra"] == {"tool_calls": calls}
    assert sent[2]["extra"] == {"name": "look", "tool_call_id": id}
    third = kept(home)["messages"][2]
    assert (third["content"], third["tool_call_id"], third["name"]) == ("a cat", id, "look")


def test_an_answer_that_was_continued_is_kept_whole(api: Home) -> None:
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "say one two"},
    ]
    body = {"messages": messages, "localspec": {"conversation": "new"}}
    api.request("POST", "/v1/chat/completions", body)
    assert said(api) == [("user", "Count."), ("assistant", "say one twoone two")]


def test_an_older_file_is_read_and_nothing_of_it_is_lost(home: Home, daemon: RunningDaemon) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    with sqlite3.connect(file) as db:
        db.executescript(VERSION_1)
    db.close()
    found = kept(home, "0a1b2c3d")
    assert found["title"] == "Why?"
    rows = [(e["role"], e["content"], e.get("reasoning_content")) for e in found["messages"]]
    assert rows == [
        ("system", "Be brief.", None),
        ("user", "Why?", None),
        ("assistant", "Because.", "Hm, <b>."),
        ("user", "<think>so</think> what is this?", None),
        ("assistant", "Thinking ends with </think>.", None),
    ]
    assert (found["messages"][2]["finish"], found["messages"][2]["tokens"]) == ("stop", 7)
    ask(home, "say more", "last")
    assert len(said(home)) == 7
    with sqlite3.connect(file) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (4,)
    db.close()


# What the first version wrote.
VERSION_1 = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, created REAL NOT NULL, updated REAL NOT NULL,
    model TEXT NOT NULL, title TEXT NOT NULL
) STRICT;
CREATE INDEX conversations_updated ON conversations (updated);
CREATE TABLE messages (
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER NOT NULL, role TEXT NOT NULL, content TEXT NOT NULL, created REAL NOT NULL,
    finish TEXT, model TEXT, tokens INTEGER, tokens_per_second REAL, drafted INTEGER,
    accepted INTEGER, speed_up REAL,
    PRIMARY KEY (conversation, position)
) STRICT;
INSERT INTO conversations VALUES ('0a1b2c3d', 1.0, 2.0, '', 'Why?');
INSERT INTO messages (conversation, position, role, content, created, finish, tokens) VALUES
    ('0a1b2c3d', 0, 'system', 'Be brief.', 1.0, NULL, NULL),
    ('0a1b2c3d', 1, 'user', 'Why?', 1.0, NULL, NULL),
    ('0a1b2c3d', 2, 'assistant', '<think>\nHm, <b>.\n</think>\n\nBecause.', 2.0, 'stop', 7),
    ('0a1b2c3d', 3, 'user', '<think>so</think> what is this?', 1.0, NULL, NULL),
    ('0a1b2c3d', 4, 'assistant', 'Thinking ends with </think>.', 2.0, 'stop', 7);
PRAGMA user_version = 1;
"""


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
    assert undone == {"id": name, "question": "say two", "left": 1}
    assert said(api, name) == [("user", "say one"), ("assistant", "one")]


def test_a_conversation_of_which_all_is_taken_back_is_gone(api: Home) -> None:
    before = ask(api, "say before")["localspec"]["conversation"]
    asked = [("system", "Be brief."), ("user", "say one")]
    messages = [{"role": role, "content": text} for role, text in asked]
    body = {"messages": messages, "localspec": {"conversation": "new"}}
    name = api.request("POST", "/v1/chat/completions", body).json["localspec"]["conversation"]
    undone = api.request("POST", f"/localspec/conversations/{name}/undo").json
    assert undone["left"] == 0
    assert kept(api, "last")["id"] == before
    empty = api.request("POST", f"/localspec/conversations/{name}/undo")
    assert (empty.status, empty.error["code"]) == (404, "not_found")


def test_a_reader_can_wait_for_what_is_under_way(api: Home) -> None:
    name = ask(api, "say one")["localspec"]["conversation"]
    for _ in range(10):
        with api.streaming("forever", localspec={"conversation": name}) as stream:
            for _ in range(5):
                stream.readline()
        found = api.request("GET", f"/localspec/conversations/{name}?wait=true").json["messages"]
        assert found[-2]["content"] == "forever"
        assert found[-1]["finish"] == "interrupted"
        api.request("POST", f"/localspec/conversations/{name}/undo")
    assert api.request("GET", f"/localspec/conversations/{name}?wait=1").status == 400


def test_search_knows_no_case_and_no_wildcards(api: Home) -> None:
    name = ask(api, "say GRÜSSE 100%")["localspec"]["conversation"]
    assert names(api, "?search=gr%C3%BCsse") == [name]
    assert names(api, "?search=100%25") == [name]
    assert names(api, "?search=1_0%25") == []
    assert names(api, "?limit=1") == names(api)[:1]
    assert api.request("GET", "/localspec/conversations?limit=0").status == 400


def found(home: Home, text: str) -> Any:
    target = f"/localspec/conversations?search={quote(text)}"
    (entry,) = home.request("GET", target).json["conversations"]
    match = entry["match"]
    return match["role"], match["line"], match["line"][match["start"] : match["end"]]


def test_search_says_where(api: Home) -> None:
    ask(api, "say x\nfirst\n  the STRASSE is long\nlast")
    line = "  the STRASSE is long"
    assert found(api, "straße") == ("user", line, "STRASSE")
    assert found(api, "is long\nlast") == ("user", line, "is long")
    long = f"{'a' * 500} needle {'b' * 500}"
    ask(api, f"say {long}")
    role, line, text = found(api, "NEEDLE")
    assert (role, text, len(line) < 400) == ("user", "needle", True)
    assert line.strip("…") in long
    ask(api, "say y", title="Quarterly figures")
    assert found(api, "quarterly") == ("title", "Quarterly figures", "Quarterly")
    assert "match" not in api.request("GET", "/localspec/conversations").json["conversations"][0]


@given(st.text(st.sampled_from("aßſİK ﬁ\n\u0307x"), max_size=30), st.data())
def test_what_is_found_is_what_was_searched(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    wanted = text[start : data.draw(st.integers(start, len(text)))].casefold()
    assume(wanted)
    line, first, last = database.locate_match(text, wanted)
    assert line in text.split("\n")
    assert 0 <= first <= last <= len(line)
    assert wanted.partition("\n")[0] in line[first:last].casefold()
    assert len(line[first:last].casefold()) <= len(wanted) + 4  # half a character is shown whole


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("say one\ntwo", "say one"),
        ("\n\n  say  \n", "say"),
        ("```python\nimport os\n```\n\nsay it", "say it"),
        ("````\n```\nimport os\n```\n````\nsay it", "say it"),
        ("```\nimport os\n```", "```"),
        ("say " + "x" * 100, "say " + "x" * 75 + "…"),
    ],
)
def test_the_title_is_what_a_person_said(api: Home, question: str, title: str) -> None:
    assert kept(api, ask(api, question)["localspec"]["conversation"])["title"] == title
    named = ask(api, question, title="\nMine\nmore")["localspec"]["conversation"]
    assert kept(api, named)["title"] == "Mine"


def test_a_beginning_of_the_id_is_enough_when_it_is_the_only_one(api: Home) -> None:
    name = ask(api, "say hello")["localspec"]["conversation"]
    assert kept(api, name[:7])["id"] == name
    missing = api.request("GET", "/localspec/conversations/zzz")
    assert (missing.status, missing.error["message"]) == (
        404,
        "There is no conversation 'zzz'. See: localspec history",
    )


def test_forgetting_one_and_all(home: Home, daemon: RunningDaemon) -> None:
    def in_files() -> set[bytes]:
        """Which of the words are in any file of the history, what is not yet in the main one included."""
        data = [each.read_bytes() for each in (home.root / "data").glob("conversations.sqlite*")]
        assert data
        return {word for word in (b"secret", b"zqother") if any(word in each for each in data)}

    first = ask(home, "say secret")["localspec"]["conversation"]
    ask(home, "say zqother")
    assert in_files() == {b"secret", b"zqother"}
    assert home.request("DELETE", f"/localspec/conversations/{first}").json["id"] == first
    assert len(names(home)) == 1
    assert in_files() == {b"zqother"}
    assert home.request("DELETE", "/localspec/conversations").json["removed"] == 1
    assert names(home) == []
    assert not in_files()
    daemon.stop()
    assert not in_files()


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


def test_an_answer_that_cannot_be_kept_says_so_and_nothing_else_is_taken_for_the_last(
    home: Home, daemon: RunningDaemon
) -> None:
    older = ask(home, "say older")["localspec"]["conversation"]
    file = home.root / "data" / "conversations.sqlite"
    if hasattr(resource, "prlimit"):
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    else:
        file.chmod(0o400)
    lost = ask(home, "say lost")
    assert lost["choices"][0]["message"]["content"] == "lost"
    assert str(file) in lost["localspec"]["not_kept"]
    with home.streaming("say lost", localspec={"conversation": older}) as stream:
        events = [line[6:] for line in stream.read().split(b"\n") if line.startswith(b"data: {")]
    assert str(file) in json.loads(events[-1])["localspec"]["not_kept"]
    if hasattr(resource, "prlimit"):
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, limits)
    else:
        file.chmod(0o600)
    for method, target in (("GET", "last"), ("DELETE", "last"), ("POST", "last/undo")):
        refused = home.request(method, f"/localspec/conversations/{target}")
        assert refused.error["message"].startswith("The last answer was not saved"), refused.body
    refused = home.chat("say no", localspec={"conversation": "last"})
    assert (refused.status, refused.error["code"]) == (409, "conflict")
    assert said(home, older) == [("user", "say older"), ("assistant", "older")]
    assert "not_kept" not in ask(home, "say on", older)["localspec"]
    assert ask(home, "say on", "last")["localspec"]["conversation"] == older


def test_that_an_answer_was_not_saved_outlives_the_daemon(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    file = home.root / "data" / "conversations.sqlite"
    first = start_daemon()
    ask(home, "say older")
    file.rename(file.with_suffix(".old"))
    file.symlink_to(home.root / "elsewhere")
    first.stop()
    second = start_daemon()
    assert "symbolic link" in ask(home, "say lost")["localspec"]["not_kept"]
    second.stop()
    file.unlink()
    file.with_suffix(".old").rename(file)
    start_daemon()
    refused = home.chat("say no", localspec={"conversation": "last"})
    assert refused.error["message"].startswith("The last answer was not saved")
    name = ask(home, "say new")["localspec"]["conversation"]
    assert ask(home, "say on", "last")["localspec"]["conversation"] == name
    assert not (home.root / "run" / "not-saved").exists()


def test_a_link_and_a_broken_file_are_refused_with_a_sentence(
    home: Home, daemon: RunningDaemon
) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    (home.root / "elsewhere").touch()
    file.symlink_to(home.root / "elsewhere")
    assert ask(home, "say hello")["choices"][0]["message"]["content"] == "hello"
    assert "is a symbolic link" in home.request("GET", "/localspec/conversations").error["message"]
    file.unlink()
    file.write_bytes(b"this is no database" * 100)
    broken = home.request("GET", "/localspec/conversations")
    assert (broken.status, "cannot be used" in broken.error["message"]) == (409, True)
    assert daemon.process.poll() is None


def going_on(home: Home, conversation: str = "last", **fields: Any) -> Any:
    ours = {"conversation": conversation}
    body = {"messages": [], "continue_final_message": True, "localspec": ours, **fields}
    return home.request("POST", "/v1/chat/completions", body)


def test_an_answer_that_was_cut_off_goes_on_and_is_kept_as_one(api: Home) -> None:
    first = ask(api, "say one two three", max_tokens=2)
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["localspec"]["limit"] == "tokens"
    second = going_on(api).json  # the scripted engine repeats what it reads
    assert second["choices"][0]["message"]["content"] == "one two"
    assert second["localspec"]["conversation"] == first["localspec"]["conversation"]
    assert "limit" not in second["localspec"]
    assert said(api) == [("user", "say one two three"), ("assistant", "one twoone two")]
    reply = kept(api)["messages"][1]
    assert (reply["finish"], reply["tokens"], reply["drafted"]) == ("stop", 3, 8)


def test_a_full_context_is_told_from_a_limit(api: Home) -> None:
    assert ask(api, "full")["localspec"]["limit"] == "context"
    with api.streaming("full") as stream:
        assert b'"limit":"context"' in stream.read()


def test_an_answer_that_was_interrupted_goes_on(api: Home) -> None:
    with api.streaming("forever", localspec={"conversation": "new"}) as stream:
        while b"3 " not in stream.readline():
            pass
    wait_for(lambda: len(kept(api)["messages"]) == 2, "what came of it")
    begun = kept(api)["messages"][1]["content"]
    again = going_on(api)
    assert again.status == 200, again.body
    assert [each["content"] for each in kept(api)["messages"]] == ["forever", begun + begun]


def test_what_the_engine_reads_ends_where_the_answer_was_cut_off(api: Home) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "echo"},
    ]
    ask(api, "raw echo   more", max_tokens=2)
    assert said(api)[1] == ("assistant", "echo  ")
    schema: dict[str, Any] = {"json_schema": {"type": "object"}}
    sent = json.loads(going_on(api, **schema).json["choices"][0]["message"]["content"])
    assert sent["prompt"]["continued"] == "content"
    assert sent["prompt"]["answer_prefix"] == "echo  "
    assert sent["constraint"]["begun"] == "echo  "
    # and where a client sends it all itself, the constraint is on what is new alone
    body = {"messages": messages, **schema}
    sent = json.loads(api.request("POST", "/v1/chat/completions", body).text)
    assert "begun" not in sent["constraint"] or sent["constraint"]["begun"] == ""


@pytest.mark.parametrize("conversation", ["last", "new", None])
def test_there_must_be_an_answer_that_was_cut_off(api: Home, conversation: str | None) -> None:
    ask(api, "say all")
    before = said(api)
    refused = going_on(api, conversation) if conversation else going_on(api, localspec=None)
    assert (refused.status, refused.error["param"]) == (400, "messages")
    wanted = "is complete" if conversation == "last" else "must have at least 1 item"
    assert wanted in refused.error["message"]
    assert said(api) == before


def test_an_answer_that_is_removed_while_it_goes_on_stays_removed(api: Home) -> None:
    name = ask(api, "raw forever more", max_tokens=3)["localspec"]["conversation"]
    body = {"messages": [], "continue_final_message": True, "localspec": {"conversation": name}}
    with api.streaming("", **body) as stream:
        while b"2 " not in stream.readline():
            pass
        assert api.request("DELETE", f"/localspec/conversations/{name}").status == 200
    wait_for(lambda: api.status()["running"] == 0, "the end of the answer")
    assert name not in names(api)
