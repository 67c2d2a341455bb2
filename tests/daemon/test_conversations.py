"""Conversations: stored on request, continued, searched and deleted."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import stat
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from localspec.daemon.history import database
from tests.support.daemons import Home, RunningDaemon, wait_for


def ask_question(
    home: Home, text: str, conversation: str = "new", title: str | None = None, **fields: Any
) -> Any:
    ours = {"conversation": conversation, "title": title}
    answer = home.chat(text, localspec=ours, **fields)
    assert answer.status == 200, answer.body
    return answer.json


def get_conversation(home: Home, name: str = "last") -> Any:
    return home.request("GET", f"/localspec/conversations/{name}").json


def list_messages(home: Home, name: str = "last") -> list[tuple[str, str]]:
    return [
        (message["role"], message["content"])
        for message in get_conversation(home, name)["messages"]
    ]


def list_ids(home: Home, query: str = "") -> list[str]:
    listed = home.request("GET", f"/localspec/conversations{query}").json
    return [conversation["id"] for conversation in listed["conversations"]]


def test_question_and_answer_are_stored_with_their_statistics(api: Home) -> None:
    answer = ask_question(api, "say hello")
    conversation = get_conversation(api, answer["localspec"]["conversation"])
    assert [message["content"] for message in conversation["messages"]] == ["say hello", "hello"]
    reply = conversation["messages"][1]
    assert reply["finish"] == "stop"
    assert (reply["drafted"], reply["accepted"], reply["speed_up"]) == (4, 3, 1.8)
    assert conversation["title"] == "say hello"
    assert conversation["model"] == str(api.model)


def test_nothing_is_stored_unless_requested(api: Home) -> None:
    before = list_ids(api)
    assert "conversation" not in api.chat("say hello").json["localspec"]
    assert list_ids(api) == before


def test_a_conversation_is_continued_with_its_history(api: Home) -> None:
    first = ask_question(api, "say one")["localspec"]["conversation"]
    echoed = json.loads(ask_question(api, "echo", first)["choices"][0]["message"]["content"])
    assert [message["content"] for message in echoed["prompt"]["messages"]] == [
        "say one",
        "one",
        "echo",
    ]
    assert [role for role, _ in list_messages(api, first)] == ["user", "assistant"] * 2
    assert ask_question(api, "say two", "last")["localspec"]["conversation"] == first
    assert len(list_messages(api, first)) == 6


def test_a_question_right_after_an_answer_sees_that_answer(api: Home) -> None:
    name = ask_question(api, "say 0")["localspec"]["conversation"]
    for number in range(1, 20):
        with api.streaming(f"say {number}", localspec={"conversation": "last"}) as stream:
            stream.read()
    assert len(list_messages(api, name)) == 40


def test_a_stream_names_its_conversation_in_its_first_chunk(api: Home) -> None:
    with api.streaming("say hello", localspec={"conversation": "new"}) as stream:
        first = json.loads(stream.readline().removeprefix(b"data: "))
        stream.read()
    assert list_messages(api, first["localspec"]["conversation"])[1] == ("assistant", "hello")


def test_a_new_system_message_replaces_the_old_one(api: Home) -> None:
    def turn(system: str, name: str) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "echo"}]
        body = {"messages": messages, "localspec": {"conversation": name}}
        return api.request("POST", "/v1/chat/completions", body).json

    name = turn("be brief", "new")["localspec"]["conversation"]
    echoed = json.loads(turn("be long", name)["choices"][0]["message"]["content"])
    roles = [(message["role"], message["content"]) for message in echoed["prompt"]["messages"]]
    assert roles[0] == ("system", "be long")
    assert [role for role, _ in roles].count("system") == 1
    assert list_messages(api, name)[0] == ("system", "be long")
    assert [role for role, _ in list_messages(api, name)].count("system") == 1


def test_an_interrupted_answer_is_stored_and_marked(api: Home) -> None:
    with api.streaming("forever", localspec={"conversation": "new"}) as stream:
        for _ in range(5):
            stream.readline()
    reply = wait_for(lambda: get_last_answer(api, "forever"), "the partial answer")
    assert reply["finish"] == "interrupted"
    assert reply["content"].startswith("0 ")


def test_a_question_right_after_an_interruption_continues_it(api: Home) -> None:
    """The client knows the conversation's name before the daemon knows that it has left."""
    for _ in range(10):
        with api.streaming("forever", localspec={"conversation": "new"}) as stream:
            first = json.loads(stream.readline().removeprefix(b"data: "))
            name = first["localspec"]["conversation"]
            for _ in range(4):
                stream.readline()
        for question in ("echo", "echo again"):
            ask_question(api, question, name)
        roles = [role for role, _ in list_messages(api, name)]
        assert roles == ["user", "assistant"] * 3
        assert list_messages(api, name)[0] == ("user", "forever")


def test_undo_right_after_an_interruption_removes_that_question(api: Home) -> None:
    name = ask_question(api, "say hello")["localspec"]["conversation"]
    for _ in range(10):
        with api.streaming("forever", localspec={"conversation": name}) as stream:
            for _ in range(5):
                stream.readline()
        undone = api.request("POST", f"/localspec/conversations/{name}/undo", {})
        assert undone.json["question"] == "forever"
    assert list_messages(api, name) == [("user", "say hello"), ("assistant", "hello")]


LOOK_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


def test_thoughts_are_stored_and_resent_as_thoughts(api: Home) -> None:
    name = ask_question(api, "raw <think>Hm.</think>\n\nYes.")["localspec"]["conversation"]
    reply = get_conversation(api, name)["messages"][1]
    assert (reply["content"], reply["reasoning_content"]) == ("Yes.", "Hm.")
    echoed = json.loads(ask_question(api, "echo", name)["choices"][0]["message"]["content"])
    answer = echoed["prompt"]["messages"][1]
    assert (answer["content"], answer["extra"]) == ("Yes.", {"reasoning_content": "Hm."})


def test_thoughts_stay_in_the_text_on_request(api: Home) -> None:
    text = "<think>Hm.</think>\n\nYes."
    name = ask_question(api, f"raw {text}", reasoning_format="none")["localspec"]["conversation"]
    assert list_messages(api, name)[1] == ("assistant", text)


def test_thoughts_that_were_cut_off_are_stored_as_thoughts(api: Home) -> None:
    with api.streaming("think", localspec={"conversation": "new"}) as stream:
        for _ in range(8):
            stream.readline()
    reply = wait_for(lambda: get_last_answer(api, "think"), "the partial answer")
    assert reply["content"] == ""
    assert reply["reasoning_content"].startswith("0 ")


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_and_results_are_stored_and_resent(home: Home, streamed: bool) -> None:
    home.start("--template", "{{ tools }}<tool_call>")
    fields = {"tools": [LOOK_TOOL], "localspec": {"conversation": "new"}, "stream": streamed}
    answer = home.chat(f"raw Let me see. {CALL}", **fields)
    if streamed:
        deltas = [json.loads(event)["choices"][0]["delta"] for event in answer.events[:-1]]
        call_id = next(delta["tool_calls"][0]["id"] for delta in deltas if "tool_calls" in delta)
    else:
        call_id = answer.json["choices"][0]["message"]["tool_calls"][0]["id"]
    reply = get_conversation(home)["messages"][1]
    function = {"name": "look", "arguments": '{"at": "it"}'}
    assert reply["tool_calls"] == [{"id": call_id, "type": "function", "function": function}]
    assert (reply["content"], reply["finish"]) == ("Let me see.", "tool_calls")
    messages = [
        {"role": "tool", "tool_call_id": call_id, "name": "look", "content": "a cat"},
        {"role": "user", "content": "echo"},
    ]
    body = {"messages": messages, "tools": [LOOK_TOOL], "localspec": {"conversation": "last"}}
    echoed = home.request("POST", "/v1/chat/completions", body)
    prompt_messages = json.loads(echoed.text)["prompt"]["messages"]
    assert [message["role"] for message in prompt_messages] == ["user", "assistant", "tool", "user"]
    calls = [
        {"id": call_id, "type": "function", "function": {**function, "arguments": {"at": "it"}}}
    ]
    assert prompt_messages[1]["extra"] == {"tool_calls": calls}
    assert prompt_messages[2]["extra"] == {"name": "look", "tool_call_id": call_id}
    tool_message = get_conversation(home)["messages"][2]
    assert (tool_message["content"], tool_message["tool_call_id"], tool_message["name"]) == (
        "a cat",
        call_id,
        "look",
    )


def test_a_continued_answer_is_stored_as_one(api: Home) -> None:
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "say one two"},
    ]
    body = {"messages": messages, "localspec": {"conversation": "new"}}
    api.request("POST", "/v1/chat/completions", body)
    assert list_messages(api) == [("user", "Count."), ("assistant", "say one twoone two")]


def test_a_file_of_an_older_version_is_migrated(home: Home, daemon: RunningDaemon) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    with sqlite3.connect(file) as db:
        db.executescript(VERSION_1)
    db.close()
    conversation = get_conversation(home, "0a1b2c3d")
    assert conversation["title"] == "Why?"
    rows = [(e["role"], e["content"], e.get("reasoning_content")) for e in conversation["messages"]]
    assert rows == [
        ("system", "Be brief.", None),
        ("user", "Why?", None),
        ("assistant", "Because.", "Hm, <b>."),
        ("user", "<think>so</think> what is this?", None),
        ("assistant", "Thinking ends with </think>.", None),
    ]
    assert (conversation["messages"][2]["finish"], conversation["messages"][2]["tokens"]) == (
        "stop",
        7,
    )
    ask_question(home, "say more", "last")
    assert len(list_messages(home)) == 7
    with sqlite3.connect(file) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (4,)
    db.close()


# A file as the first version wrote it.
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


def test_an_answer_cut_off_by_a_death_is_stored_and_marked(api: Home) -> None:
    with api.streaming("die SIGKILL", localspec={"conversation": "new"}) as stream:
        stream.read()
    reply = wait_for(lambda: get_last_answer(api, "die SIGKILL"), "the partial answer")
    assert (reply["finish"], reply["content"]) == ("failed", "one two ")


def get_last_answer(home: Home, question: str) -> Any:
    conversation = get_conversation(home)
    return conversation["messages"][-1] if conversation["title"] == question else None


def test_a_refused_request_leaves_nothing(api: Home) -> None:
    before = list_ids(api)
    refused = api.chat("refuse context_length_exceeded", localspec={"conversation": "new"})
    assert refused.status == 400
    assert list_ids(api) == before


def test_the_pair_of_a_conversation_is_used_again(api: Home) -> None:
    other_model = str(api.root / "other.gguf")
    (api.root / "other.gguf").touch()
    name = ask_question(api, "say hi", model=other_model)["localspec"]["conversation"]
    assert ask_question(api, "say again", name)["model"] == other_model
    assert ask_question(api, "say once more", name, model=str(api.model))["model"] == str(api.model)


def test_undo_takes_the_last_question_back(api: Home) -> None:
    name = ask_question(api, "say one")["localspec"]["conversation"]
    ask_question(api, "say two", name)
    undone = api.request("POST", f"/localspec/conversations/{name}/undo").json
    assert undone == {"id": name, "question": "say two", "left": 1}
    assert list_messages(api, name) == [("user", "say one"), ("assistant", "one")]


def test_undoing_the_only_question_deletes_the_conversation(api: Home) -> None:
    older = ask_question(api, "say before")["localspec"]["conversation"]
    turns = [("system", "Be brief."), ("user", "say one")]
    messages = [{"role": role, "content": text} for role, text in turns]
    body = {"messages": messages, "localspec": {"conversation": "new"}}
    name = api.request("POST", "/v1/chat/completions", body).json["localspec"]["conversation"]
    undone = api.request("POST", f"/localspec/conversations/{name}/undo").json
    assert undone["left"] == 0
    assert get_conversation(api, "last")["id"] == older
    empty = api.request("POST", f"/localspec/conversations/{name}/undo")
    assert (empty.status, empty.error["code"]) == (404, "not_found")


def test_wait_returns_the_conversation_after_the_running_answer(api: Home) -> None:
    name = ask_question(api, "say one")["localspec"]["conversation"]
    for _ in range(10):
        with api.streaming("forever", localspec={"conversation": name}) as stream:
            for _ in range(5):
                stream.readline()
        messages = api.request("GET", f"/localspec/conversations/{name}?wait=true").json["messages"]
        assert messages[-2]["content"] == "forever"
        assert messages[-1]["finish"] == "interrupted"
        api.request("POST", f"/localspec/conversations/{name}/undo")
    assert api.request("GET", f"/localspec/conversations/{name}?wait=1").status == 400


def test_search_ignores_case_and_has_no_wildcards(api: Home) -> None:
    name = ask_question(api, "say GRÜSSE 100%")["localspec"]["conversation"]
    assert list_ids(api, "?search=gr%C3%BCsse") == [name]
    assert list_ids(api, "?search=100%25") == [name]
    assert list_ids(api, "?search=1_0%25") == []
    assert list_ids(api, "?limit=1") == list_ids(api)[:1]
    assert api.request("GET", "/localspec/conversations?limit=0").status == 400


def find_match(home: Home, text: str) -> Any:
    target = f"/localspec/conversations?search={quote(text)}"
    (entry,) = home.request("GET", target).json["conversations"]
    match = entry["match"]
    return match["role"], match["line"], match["line"][match["start"] : match["end"]]


def test_search_reports_the_matching_line(api: Home) -> None:
    ask_question(api, "say x\nfirst\n  the STRASSE is long\nlast")
    line = "  the STRASSE is long"
    assert find_match(api, "straße") == ("user", line, "STRASSE")
    assert find_match(api, "is long\nlast") == ("user", line, "is long")
    long = f"{'a' * 500} needle {'b' * 500}"
    ask_question(api, f"say {long}")
    role, line, text = find_match(api, "NEEDLE")
    assert (role, text, len(line) < 400) == ("user", "needle", True)
    assert line.strip("…") in long
    ask_question(api, "say y", title="Quarterly figures")
    assert find_match(api, "quarterly") == ("title", "Quarterly figures", "Quarterly")
    assert "match" not in api.request("GET", "/localspec/conversations").json["conversations"][0]


@given(st.text(st.sampled_from("aßſİK ﬁ\n\u0307x"), max_size=30), st.data())
def test_the_reported_match_contains_the_query(text: str, data: st.DataObject) -> None:
    query_start = data.draw(st.integers(0, len(text)))
    query = text[query_start : data.draw(st.integers(query_start, len(text)))].casefold()
    assume(query)
    line, first, end = database.locate_match(text, query)
    assert line in text.split("\n")
    assert 0 <= first <= end <= len(line)
    assert query.partition("\n")[0] in line[first:end].casefold()
    assert len(line[first:end].casefold()) <= len(query) + 4  # casefolding may split a character


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
def test_the_title_comes_from_the_question(api: Home, question: str, title: str) -> None:
    assert (
        get_conversation(api, ask_question(api, question)["localspec"]["conversation"])["title"]
        == title
    )
    titled = ask_question(api, question, title="\nMine\nmore")["localspec"]["conversation"]
    assert get_conversation(api, titled)["title"] == "Mine"


def test_a_unique_prefix_of_the_id_is_enough(api: Home) -> None:
    name = ask_question(api, "say hello")["localspec"]["conversation"]
    assert get_conversation(api, name[:7])["id"] == name
    missing = api.request("GET", "/localspec/conversations/zzz")
    assert (missing.status, missing.error["message"]) == (
        404,
        "There is no conversation 'zzz'. See: localspec history",
    )


def test_delete_one_conversation_and_all(home: Home, daemon: RunningDaemon) -> None:
    def find_words() -> set[bytes]:
        """Return the words that are in any file of the history, the write-ahead log included."""
        contents = [
            path.read_bytes() for path in (home.root / "data").glob("conversations.sqlite*")
        ]
        assert contents
        return {
            word for word in (b"secret", b"zqother") if any(word in content for content in contents)
        }

    first = ask_question(home, "say secret")["localspec"]["conversation"]
    ask_question(home, "say zqother")
    assert find_words() == {b"secret", b"zqother"}
    assert home.request("DELETE", f"/localspec/conversations/{first}").json["id"] == first
    assert len(list_ids(home)) == 1
    assert find_words() == {b"zqother"}
    assert home.request("DELETE", "/localspec/conversations").json["removed"] == 1
    assert list_ids(home) == []
    assert not find_words()
    daemon.stop()
    assert not find_words()


def test_the_history_survives_a_restart_and_is_private(home: Home) -> None:
    daemon = home.start()
    assert list_ids(home) == []
    assert not (home.root / "data" / "conversations.sqlite").exists()
    name = ask_question(home, "say hello")["localspec"]["conversation"]
    daemon.stop()
    file = home.root / "data" / "conversations.sqlite"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600  # noqa: PTH116
    home.start()
    assert list_messages(home, name) == [("user", "say hello"), ("assistant", "hello")]


def test_a_file_of_a_newer_version_is_refused_and_left_unchanged(
    home: Home, daemon: RunningDaemon
) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = file.read_bytes()
    assert ask_question(home, "say hello")["choices"][0]["message"]["content"] == "hello"
    refused = home.chat("say hello", localspec={"conversation": "last"})
    assert "was written by a newer localspec" in refused.error["message"]
    assert file.read_bytes() == before


def test_a_failure_to_store_is_reported_and_blocks_last(home: Home, daemon: RunningDaemon) -> None:
    older = ask_question(home, "say older")["localspec"]["conversation"]
    file = home.root / "data" / "conversations.sqlite"
    if hasattr(resource, "prlimit"):
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    else:
        file.chmod(0o400)
    lost = ask_question(home, "say lost")
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
    assert list_messages(home, older) == [("user", "say older"), ("assistant", "older")]
    assert "not_kept" not in ask_question(home, "say on", older)["localspec"]
    assert ask_question(home, "say on", "last")["localspec"]["conversation"] == older


def test_a_failure_to_store_is_remembered_across_restarts(home: Home) -> None:
    file = home.root / "data" / "conversations.sqlite"
    first = home.start()
    ask_question(home, "say older")
    file.rename(file.with_suffix(".old"))
    file.symlink_to(home.root / "elsewhere")
    first.stop()
    second = home.start()
    assert "symbolic link" in ask_question(home, "say lost")["localspec"]["not_kept"]
    second.stop()
    file.unlink()
    file.with_suffix(".old").rename(file)
    home.start()
    refused = home.chat("say no", localspec={"conversation": "last"})
    assert refused.error["message"].startswith("The last answer was not saved")
    name = ask_question(home, "say new")["localspec"]["conversation"]
    assert ask_question(home, "say on", "last")["localspec"]["conversation"] == name
    assert not (home.root / "run" / "not-saved").exists()


def test_a_symbolic_link_and_a_broken_file_are_refused(home: Home, daemon: RunningDaemon) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    (home.root / "elsewhere").touch()
    file.symlink_to(home.root / "elsewhere")
    assert ask_question(home, "say hello")["choices"][0]["message"]["content"] == "hello"
    assert "is a symbolic link" in home.request("GET", "/localspec/conversations").error["message"]
    file.unlink()
    file.write_bytes(b"this is no database" * 100)
    broken = home.request("GET", "/localspec/conversations")
    assert (broken.status, "cannot be used" in broken.error["message"]) == (409, True)
    assert daemon.process.poll() is None


def continue_answer(home: Home, conversation: str = "last", **fields: Any) -> Any:
    ours = {"conversation": conversation}
    body = {"messages": [], "continue_final_message": True, "localspec": ours, **fields}
    return home.request("POST", "/v1/chat/completions", body)


def test_an_answer_cut_by_a_limit_is_continued_and_stored_as_one(api: Home) -> None:
    first = ask_question(api, "say one two three", max_tokens=2)
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["localspec"]["limit"] == "tokens"
    second = continue_answer(api).json  # the scripted engine repeats its prompt
    assert second["choices"][0]["message"]["content"] == "one two"
    assert second["localspec"]["conversation"] == first["localspec"]["conversation"]
    assert "limit" not in second["localspec"]
    assert list_messages(api) == [("user", "say one two three"), ("assistant", "one twoone two")]
    reply = get_conversation(api)["messages"][1]
    assert (reply["finish"], reply["tokens"], reply["drafted"]) == ("stop", 3, 8)


def test_a_full_context_is_distinguished_from_a_token_limit(api: Home) -> None:
    assert ask_question(api, "full")["localspec"]["limit"] == "context"
    with api.streaming("full") as stream:
        assert b'"limit":"context"' in stream.read()


def test_an_interrupted_answer_is_continued(api: Home) -> None:
    with api.streaming("forever", localspec={"conversation": "new"}) as stream:
        while b"3 " not in stream.readline():
            pass
    wait_for(lambda: len(get_conversation(api)["messages"]) == 2, "the partial answer")
    partial = get_conversation(api)["messages"][1]["content"]
    continued = continue_answer(api)
    assert continued.status == 200, continued.body
    assert [message["content"] for message in get_conversation(api)["messages"]] == [
        "forever",
        partial + partial,
    ]


def test_a_continued_prompt_ends_with_the_partial_answer(api: Home) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "echo"}]
    ask_question(api, "raw echo   more", max_tokens=2)
    assert list_messages(api)[1] == ("assistant", "echo  ")
    schema: dict[str, Any] = {"json_schema": {"type": "object"}}
    frame = json.loads(continue_answer(api, **schema).json["choices"][0]["message"]["content"])
    assert frame["prompt"]["continued"] == "content"
    assert frame["prompt"]["answer_prefix"] == "echo  "
    assert frame["constraint"]["begun"] == "echo  "
    # If the client itself sends the partial answer, only the new text is constrained.
    body = {"messages": messages, **schema}
    frame = json.loads(api.request("POST", "/v1/chat/completions", body).text)
    assert "begun" not in frame["constraint"] or frame["constraint"]["begun"] == ""


@pytest.mark.parametrize("conversation", ["last", "new", None])
def test_continuing_requires_a_partial_answer(api: Home, conversation: str | None) -> None:
    ask_question(api, "say all")
    before = list_messages(api)
    refused = (
        continue_answer(api, conversation) if conversation else continue_answer(api, localspec=None)
    )
    assert (refused.status, refused.error["param"]) == (400, "messages")
    message = "is complete" if conversation == "last" else "must have at least 1 item"
    assert message in refused.error["message"]
    assert list_messages(api) == before


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_parts_of_a_message_are_stored_as_the_model_reads_them(api: Home) -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    messages = [
        {"role": "user", "content": text_parts("one", "", "two\n", "three")},
        {"role": "assistant", "content": [*text_parts("Why?"), refusal]},
        {"role": "user", "content": text_parts("echo")},
    ]
    body = {"messages": messages, "localspec": {"conversation": "new"}}
    answer = api.request("POST", "/v1/chat/completions", body)
    read = [message["content"] for message in json.loads(answer.text)["prompt"]["messages"]]
    name = answer.json["localspec"]["conversation"]
    assert [content for _, content in list_messages(api, name)[:3]] == read
    assert read[:2] == ["one\n\ntwo\n\nthree", "Why?\nNo."]


def test_the_beginning_of_an_answer_is_stored_as_the_model_reads_it(api: Home) -> None:
    beginning = {"role": "assistant", "content": text_parts("So", "it is")}
    messages = [{"role": "user", "content": "Well?"}, beginning]
    body = {"messages": messages, "localspec": {"conversation": "new"}}
    answer = api.request("POST", "/v1/chat/completions", body)
    stored = list_messages(api, answer.json["localspec"]["conversation"])
    assert stored[1] == ("assistant", f"So\n\nit is{answer.text}")


def test_a_conversation_deleted_during_an_answer_stays_deleted(api: Home) -> None:
    name = ask_question(api, "raw forever more", max_tokens=3)["localspec"]["conversation"]
    body = {"messages": [], "continue_final_message": True, "localspec": {"conversation": name}}
    with api.streaming("", **body) as stream:
        while b"2 " not in stream.readline():
            pass
        assert api.request("DELETE", f"/localspec/conversations/{name}").status == 200
    wait_for(lambda: api.status()["running"] == 0, "the end of the answer")
    assert name not in list_ids(api)


def test_a_question_that_is_only_begun_is_not_stored(home: Home, daemon: RunningDaemon) -> None:
    def begin(**options: Any) -> Any:
        messages = [{"role": "user", "content": "say what is typ"}]
        body = {"messages": messages, "localspec": {"ahead": True, **options}}
        return home.request("POST", "/v1/chat/completions", body)

    name = home.chat("say one", localspec={"conversation": "new"}).json["localspec"]["conversation"]
    before = home.request("GET", f"/localspec/conversations/{name}").json
    begun = begin(conversation=name)
    assert (begun.status, begun.text) == (200, "")
    assert home.request("GET", f"/localspec/conversations/{name}").json == before
    assert begin(conversation="nothing").status == 404
    for options in ({}, {"conversation": "new"}):
        assert begin(**options).error["param"] == "localspec.ahead"
    with home.streaming("slow 100"):
        wait_for(lambda: home.status()["running"], "a running answer")
        assert begin(conversation=name).status == 409
    home.run("unload")
    assert begin(conversation=name).status == 409
    assert home.status()["pair"]["state"] == "unloaded"
