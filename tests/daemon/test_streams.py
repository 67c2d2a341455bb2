"""llama-server's resumable streams, read over real sockets that are cut at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

from localspec.daemon.http.recordings import MAX_BYTES, MAX_RECORDINGS
from tests.support.daemons import (
    Answer,
    Home,
    UnixConnection,
    scripted_home,
    temporary_home,
    wait_for,
)
from tests.support.official_clients import KNOWS_TOOLS, openai_client


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with scripted_home("--template", KNOWS_TOOLS) as home:
        yield home


def begin(
    home: Home, conversation: str | bytes, text: str, **fields: Any
) -> tuple[UnixConnection, Any]:
    connection = UnixConnection(home.socket)
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **fields}
    name = conversation.encode() if isinstance(conversation, str) else conversation
    headers = {"X-Conversation-Id": name}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection, connection.getresponse()


def stream_whole(home: Home, conversation: str | bytes, text: str) -> bytes:
    connection, response = begin(home, conversation, text)
    assert response.status == 200
    data: bytes = response.read()
    connection.close()
    return data


def target(conversation: str, **query: object) -> str:
    rest = "".join(f"&{name}={value}" for name, value in query.items())
    return f"/v1/stream?conv_id={quote(conversation, safe='')}{rest}"


def resume(home: Home, conversation: str, **query: object) -> Answer:
    return home.request("GET", target(conversation, **query))


def look_up(home: Home, *conversations: str) -> list[Any]:
    answer = home.request("POST", "/v1/streams/lookup", {"conversation_ids": conversations})
    assert answer.status == 200
    states: list[Any] = answer.json
    return states


def await_end(home: Home, conversation: str) -> None:
    wait_for(lambda: look_up(home, conversation)[0]["is_done"], "the stream's end")


def join_text(data: bytes) -> str:
    lines = [line for line in data.decode().split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("Gespräch", "utf-8"),
        ("对话 1", "utf-8"),
        ("é😀", "utf-8"),
        ("Gespräch", "latin-1"),
        ("a%C3%A4", "utf-8"),
    ],
)
def test_a_stream_is_found_by_any_name(served: Home, name: str, encoding: str) -> None:
    data = stream_whole(served, name.encode(encoding), "say it")
    assert resume(served, name).body == data
    assert look_up(served, name)[0]["conversation_id"] == name


KEPT = {"conversation": "new"}


@pytest.mark.parametrize("removed", ["its own", "all", "another"])
@pytest.mark.parametrize("options", [KEPT, {"private": True}], ids=["kept", "private"])
def test_a_removed_conversation_has_no_stream(
    home: Home, removed: str, options: dict[str, Any]
) -> None:
    """That of a private chat goes with any, since nothing says what it belongs to."""
    home.start("--template", KNOWS_TOOLS)
    other = home.chat("say other", localspec=KEPT).json["localspec"]["conversation"]
    connection, response = begin(home, "a", "say secret", localspec=options)
    data = response.read()
    connection.close()
    assert resume(home, "a").body == data
    entries = home.request("GET", "/localspec/conversations").json["conversations"]
    names = {"another": f"/{other}", "its own": f"/{entries[0]['id']}", "all": ""}
    home.request("DELETE", f"/localspec/conversations{names[removed]}")
    is_kept = removed == "another" and options is KEPT
    assert (resume(home, "a").status == 200) is is_kept


def test_a_stream_under_way_is_forgotten_at_its_end(home: Home) -> None:
    home.start("--template", KNOWS_TOOLS)
    connection, response = begin(home, "a", "slow 100", localspec=KEPT)
    line = next(line for line in iter(response.readline, b"") if b'"conversation":' in line)
    name = json.loads(line[6:])["localspec"]["conversation"]
    assert home.request("DELETE", f"/localspec/conversations/{name}").status == 200
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    wait_for(lambda: resume(home, "a").status == 404, "the end of its recording")


def assert_cancelled(data: bytes) -> None:
    """Check that a stream ends with an error, so that nobody takes the answer for a whole one."""
    assert b"[DONE]" not in data
    last = data.strip().rpartition(b"\n\n")[2]  # a first line may have been read before
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "cancelled"


def is_idle(home: Home) -> bool:
    return bool(home.status()["running"] == 0)


@pytest.mark.parametrize("seed", range(4))
def test_cut_connections_lose_nothing(served: Home, seed: int) -> None:
    draws = random.Random(seed)
    conversation, count = f"conv-{seed}::org/model:Q8_0", draws.randint(5, 40)
    with served.streaming("slow 30") as bystander:
        connection, response = begin(served, conversation, f"slow {count}", sse_ping_interval=1)
        data = response.read(draws.randint(1, 400))
        while True:
            connection.close()
            connection = UnixConnection(served.socket)
            connection.request("GET", target(conversation, **{"from": len(data)}))
            response = connection.getresponse()
            assert response.status == 200
            more = response.read(draws.randint(1, 900))
            if not more:
                break
            data += more
        connection.close()
        assert b"[DONE]" in bystander.read()
    assert resume(served, conversation).body == data
    assert data.endswith(b"data: [DONE]\n\n")
    assert join_text(data).split() == [*map(str, range(count))]


def test_the_first_client_gets_what_is_recorded(served: Home) -> None:
    data = stream_whole(served, "whole", "say one two")
    assert join_text(data) == "one two"
    assert resume(served, "whole").body == data
    assert resume(served, "whole", **{"from": 10}).body == data[10:]
    assert resume(served, "whole", **{"from": len(data)}).body == b""
    assert resume(served, "whole", **{"from": len(data) + 99}).body == b""


def test_without_the_header_a_client_that_leaves_frees_its_slot(served: Home) -> None:
    with served.streaming("forever") as stream:
        stream.await_text()
    wait_for(lambda: is_idle(served), "the free slot")


def test_a_complete_answer_is_not_kept(served: Home) -> None:
    connection, response = begin(served, "complete", "say one", stream=False)
    assert json.loads(response.read())["choices"][0]["message"]["content"] == "one"
    connection.close()
    assert resume(served, "complete").status == 404


def test_stopping_frees_the_slot_and_forgets_the_stream(served: Home) -> None:
    connection, response = begin(served, "stopped", "forever")
    response.readline()
    assert served.request("DELETE", target("stopped")).status == 204
    assert is_idle(served)
    assert_cancelled(response.read())
    connection.close()
    assert resume(served, "stopped").status == 404
    assert served.request("DELETE", target("stopped")).status == 204


def test_a_removal_of_all_conversations_forgets_streams(served: Home) -> None:
    stream_whole(served, "forgotten", "say secret")
    connection, response = begin(served, "running", "forever")
    response.readline()
    assert served.request("DELETE", "/localspec/conversations").status == 200
    assert resume(served, "forgotten").status == 404
    assert response.readline()  # what runs goes on
    served.request("DELETE", target("running"))
    response.read()
    connection.close()


def test_a_new_stream_replaces_the_conversations_last(served: Home) -> None:
    connection, response = begin(served, "replaced", "forever")
    response.readline()
    data = stream_whole(served, "replaced", "say two")
    assert_cancelled(response.read())
    connection.close()
    wait_for(lambda: is_idle(served), "the first one's end")
    assert resume(served, "replaced").body == data


def test_only_known_streams_are_listed(served: Home) -> None:
    names = ["listed", "listed::a", "listed::b/c", "listed2"]
    lengths = {name: len(stream_whole(served, name, "say yes")) for name in names}
    states = look_up(served, "listed", "unknown", "")
    assert [state["conversation_id"] for state in states] == names[:3]
    for state in states:
        assert state["is_done"] is True
        assert state["total_bytes"] == lengths[state["conversation_id"]]
        assert state["completed_at"] >= state["started_at"] > 0
    connection, response = begin(served, "listed", "forever")
    response.readline()
    [running, *_] = [s for s in look_up(served, "listed") if s["conversation_id"] == "listed"]
    assert (running["is_done"], running["completed_at"]) == (False, 0)
    served.request("DELETE", target("listed"))
    response.read()
    connection.close()
    assert look_up(served) == []


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "1e3", "٣", "9" * 40, "0x1", "%00"])
def test_a_hostile_offset_is_refused(served: Home, value: str) -> None:
    stream_whole(served, "hostile", "say yes")
    answer = resume(served, "hostile", **{"from": quote(value, safe="%")})
    assert (answer.status, answer.error["param"]) == (400, "from")
    assert served.request("GET", "/v1/stream").error["param"] == "conv_id"


def test_a_request_that_is_refused_leaves_no_stream(served: Home) -> None:
    for text, fields in (("refuse invalid_request", {}), ("x", {"temperature": -1})):
        connection, response = begin(served, "refused", text, **fields)
        assert response.status == 400
        assert json.loads(response.read())["error"]["type"] == "invalid_request_error"
        connection.close()
        assert resume(served, "refused").status == 404


def test_a_stream_that_fails_ends_for_all_readers(served: Home) -> None:
    data = stream_whole(served, "failing", "die SIGKILL")
    assert b'"error"' in data
    assert resume(served, "failing").body == data


def test_a_client_that_leaves_while_a_pair_is_loaded() -> None:
    """Also where tools need the pair before the request is known."""
    with scripted_home("--load-delay", "0.5", "--template", KNOWS_TOOLS) as home:
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        connection = UnixConnection(home.socket)
        messages = [{"role": "user", "content": "say loaded"}]
        body = {"messages": messages, "stream": True, "tools": [tool]}
        headers = {"X-Conversation-Id": "early"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        wait_for(lambda: look_up(home, "early"), "the stream")
        connection.close()
        assert join_text(resume(home, "early").body) == "loaded"


def test_the_beginning_of_a_long_stream_is_dropped(served: Home) -> None:
    """The engine writes 10 MiB. A reader that is late learns that its offset is lost."""
    connection, _ = begin(served, "long", "flood")
    await_end(served, "long")
    connection.close()
    [state] = look_up(served, "long")
    total = state["total_bytes"]
    assert total > MAX_BYTES
    answer = resume(served, "long")
    assert (answer.status, answer.error["param"]) == (400, "from")
    kept = resume(served, "long", **{"from": total - 70_000}).body
    assert len(kept) == 70_000
    assert kept.endswith(b"data: [DONE]\n\n")


def test_clients_that_never_come_back(served: Home) -> None:
    """Streams without a reader end by themselves, and only the newest are kept."""
    names = [f"gone-{number}" for number in range(MAX_RECORDINGS + 4)]
    for name in names:
        connection, response = begin(served, name, "slow 2")
        response.readline()
        connection.close()
        await_end(served, name)
    assert [bool(look_up(served, name)) for name in names] == [False] * 4 + [True] * MAX_RECORDINGS
    assert is_idle(served)


def test_the_official_client_takes_a_resumable_stream(served: Home) -> None:
    with openai_client(served) as client:
        chunks = client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "say one two"}],
            stream=True,
            extra_headers={"X-Conversation-Id": "official"},
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "one two"
    assert join_text(resume(served, "official").body) == text


def test_a_stream_that_is_deleted_before_it_begins_is_an_error() -> None:
    with scripted_home("--load-delay", "20") as home:
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(begin, home, "early", "say never")
            wait_for(lambda: look_up(home, "early"), "the stream")
            assert home.request("DELETE", target("early")).status == 204
            connection, response = begun.result()
        assert response.status == 499
        assert json.loads(response.read())["error"]["code"] == "cancelled"
        connection.close()


def test_a_daemon_that_stops_ends_its_streams() -> None:
    with temporary_home() as home:
        daemon = home.start()
        connection, response = begin(home, "ending", "forever")
        response.readline()
        connection.close()
        daemon.process.terminate()
        assert daemon.stop() == 0
