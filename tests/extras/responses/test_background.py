"""Responses in the background, through the official client and as raw bytes."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import openai
import pytest
from openai.types.responses import Response as Published

from localspec.daemon.completion.answer import PendingAnswer
from localspec.daemon.http.recordings import MAX_RECORDINGS
from localspec.errors import Cancelled
from localspec.extras.responses.answer import ItemStyle, ResponsesShape
from localspec.extras.responses.kept import RunningResponses
from localspec.extras.responses.request import ToolSet, new_response
from localspec.extras.responses.wire import ResponsesRequest
from localspec.protocol.frames import Generate, TextPrompt
from tests.extras.responses.test_responses import EVENT
from tests.support.asynchronous import asynchronous
from tests.support.daemons import (
    Home,
    RunningDaemon,
    UnixConnection,
    scripted_home,
    temporary_home,
    wait_for,
)
from tests.support.official_clients import async_openai_client, openai_client
from tests.support.patience import PATIENCE
from tests.support.upstreams import (
    HEAD,
    ReceivedRequest,
    encode_chat,
    encode_chunk,
    scripted_server,
)

ENDED = ("completed", "incomplete", "failed", "cancelled")


def create(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.responses.create(model="", input=text, background=True, **fields)


def await_end(client: openai.OpenAI, name: str) -> Any:
    def ended() -> Any:
        response = client.responses.retrieve(name)
        return response if response.status in ENDED else None

    return wait_for(ended, "the response's end")


def begin_stream(home: Home, text: str, **fields: Any) -> tuple[UnixConnection, Any]:
    """Return the connection of a streamed background response, and what reads its bytes."""
    connection = UnixConnection(home.socket)
    body = {"input": text, "background": True, "stream": True, **fields}
    connection.request("POST", "/v1/responses", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200
    return connection, response


def read_event(response: Any) -> bytes:
    """Return the bytes of the next event, b"" at the end."""
    event = b""
    while not event.endswith(b"\n\n"):
        if not (line := response.readline()):
            return b""
        event += line
    return bytes(event)


def read_after(home: Home, name: str, number: int | None = None) -> bytes:
    query = "?stream=true" + ("" if number is None else f"&starting_after={number}")
    answer = home.request("GET", f"/v1/responses/{name}{query}")
    assert answer.status == 200, answer.body
    return answer.body


def name_of(event: bytes) -> str:
    name: str = json.loads(event.partition(b"data: ")[2])["response"]["id"]
    return name


def split_events(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def is_idle(home: Home) -> bool:
    status = home.status()
    return (status["running"], status["waiting"]) == (0, 0)


def test_a_response_is_queued_and_completed(home: Home, client: openai.OpenAI) -> None:
    response = create(client, "say hello there")
    assert response.status in ("queued", "in_progress")
    assert (response.background, response.output) == (True, [])
    ended = await_end(client, response.id)
    assert (ended.status, ended.output_text, ended.background) == ("completed", "hello there", True)
    raw = home.request("GET", f"/v1/responses/{response.id}").body
    Published.model_validate_json(raw, strict=True)
    followed = client.responses.create(model="", input="echo", previous_response_id=response.id)
    contents = [m["content"] for m in json.loads(followed.output_text)["prompt"]["messages"]]
    assert contents == ["say hello there", "hello there", "echo"]


def test_a_response_can_be_read_while_it_is_written(client: openai.OpenAI) -> None:
    response = create(client, "forever")

    def begun() -> bool:
        return bool(client.responses.retrieve(response.id).status == "in_progress")

    wait_for(begun, "the answer's beginning")
    client.responses.cancel(response.id)


def test_a_limit_makes_it_incomplete(client: openai.OpenAI) -> None:
    ended = await_end(client, create(client, "slow 9", max_output_tokens=2).id)
    assert ended.status == "incomplete"
    assert ended.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("text", ["refuse invalid_request", "die SIGKILL"])
def test_a_failure_is_kept(client: openai.OpenAI, text: str) -> None:
    """A request that left nothing is kept too: its client learns of its end by its id alone."""
    ended = await_end(client, create(client, text).id)
    assert ended.status == "failed"
    assert ended.error.message
    again = client.responses.retrieve(ended.id)
    assert (again.status, again.error) == (ended.status, ended.error)


def test_events_of_a_stream_have_the_published_types(home: Home) -> None:
    connection, response = begin_stream(home, "raw <think>so so</think>well")
    events = split_events(response.read())
    connection.close()
    types = []
    for number, event in enumerate(events):
        data = event.partition(b"data: ")[2]
        EVENT.validate_json(data)
        assert json.loads(data)["sequence_number"] == number
        types.append(json.loads(data)["type"].removeprefix("response."))
    assert types[:3] == ["created", "queued", "in_progress"]
    assert types[-1] == "completed"
    statuses = [json.loads(e.partition(b"data: ")[2])["response"]["status"] for e in events[:3]]
    assert statuses == ["queued", "queued", "in_progress"]


def test_it_has_to_be_stored(home: Home, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="needs 'store' to be true") as refused:
        create(client, "say no", store=False)
    assert refused.value.param == "background"


def test_it_has_to_be_stored_against_the_configuration() -> None:
    with scripted_home(keep_responses="false") as home, openai_client(home) as client:
        with pytest.raises(openai.BadRequestError, match="'keep_responses'"):
            create(client, "say no")
        response = create(client, "say yes", store=True)
        assert await_end(client, response.id).output_text == "yes"


def test_a_stream_is_resumed_by_the_client(client: openai.OpenAI) -> None:
    text = " ".join(map(str, range(50)))
    stream = create(client, f"say {text}", stream=True)
    first = [next(stream) for _ in range(7)]
    stream.close()
    name = first[0].response.id
    rest = [*client.responses.retrieve(name, stream=True, starting_after=first[-1].sequence_number)]
    assert [event.sequence_number for event in first + rest] == [*range(len(first + rest))]
    assert rest[-1].response.output_text == text
    with client.responses.stream(response_id=name, starting_after=3) as resumed:
        assert resumed.get_final_response().output_text == text


def test_the_asynchronous_client(home: Home) -> None:
    async def ask() -> str:
        async with async_openai_client(home) as client:
            stream: Any = await client.responses.create(
                model="", input="slow 30", background=True, stream=True
            )
            number, name = -1, ""
            async for event in stream:
                number = event.sequence_number
                name = event.response.id if number == 0 else name
                if number == 8:
                    break
            await stream.close()
            rest: Any = await client.responses.retrieve(name, stream=True, starting_after=number)
            events = [event async for event in rest]
            assert events[0].sequence_number == number + 1
            text: str = events[-1].response.output_text
            return text

    assert asyncio.run(ask()) == "".join(f"{number} " for number in range(30))


@pytest.mark.parametrize("seed", range(4))
def test_cut_connections_lose_nothing(home: Home, seed: int) -> None:
    """Read one stream in parts, each from another connection, while a bystander reads to its end."""
    draws = random.Random(seed)
    text = f"slow {draws.randint(5, 40)}"
    with home.streaming("slow 30") as bystander:
        connection, response = begin_stream(home, text)
        events = [read_event(response)]
        name = name_of(events[0])
        while True:
            for _ in range(draws.randint(0, 6)):
                if event := read_event(response):
                    events.append(event)
            connection.close()
            if draws.random() < 0.3:
                read_after(home, name)  # somebody else reads to the end
            connection = UnixConnection(home.socket)
            target = f"/v1/responses/{name}?stream=true&starting_after={len(events) - 1}"
            connection.request("GET", target)
            response = connection.getresponse()
            if not (event := read_event(response)):
                break
            events.append(event)
        connection.close()
        assert b"[DONE]" in bystander.read()
    whole = read_after(home, name)
    assert b"".join(events) == whole
    assert json.loads(events[-1].partition(b"data: ")[2])["type"] == "response.completed"
    for number in (0, len(events) // 2, len(events) - 1):
        assert read_after(home, name, number) == b"".join(events[number + 1 :])


def test_several_readers_at_once_get_the_same(home: Home) -> None:
    connection, response = begin_stream(home, "slow 40")
    name = name_of(read_event(response))
    bodies: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: bodies.append(read_after(home, name))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.close()
    assert len(bodies) == 8
    assert len(set(bodies)) == 1


@pytest.mark.parametrize(
    "value",
    ["x", "-1", "1.5", "", " 1", "1e3", "0x10", "99999999999999999999", "١", "1&starting_after=y"],
)
def test_a_hostile_number_is_refused(home: Home, client: openai.OpenAI, value: str) -> None:
    name = await_end(client, create(client, "say yes").id).id
    target = f"/v1/responses/{name}?stream=true&starting_after={quote(value, safe='&=')}"
    answer = home.request("GET", target)
    assert (answer.status, answer.error["param"]) == (400, "starting_after")


def test_numbers_beyond_the_end_are_refused(home: Home, client: openai.OpenAI) -> None:
    name = await_end(client, create(client, "say yes").id).id
    count = len(split_events(read_after(home, name)))
    assert read_after(home, name, count - 1) == b""
    target = f"/v1/responses/{name}?stream=true&starting_after="
    for number in (count, count + 1, 10**17):
        answer = home.request("GET", f"{target}{number}")
        assert (answer.status, answer.error["param"]) == (400, "starting_after")
    assert home.request("GET", f"/v1/responses/{name}?stream=maybe").error["param"] == "stream"
    missing = home.request("GET", f"/v1/responses/resp_{'0' * 24}?stream=true")
    assert missing.status == 404


def test_a_response_in_the_foreground_has_no_events(home: Home, client: openai.OpenAI) -> None:
    name = client.responses.create(model="", input="say yes").id
    answer = home.request("GET", f"/v1/responses/{name}?stream=true")
    assert (answer.status, answer.error["param"]) == (400, "stream")


@pytest.mark.parametrize("text", ["late 60", "read 600", "forever", "think"])
def test_a_response_is_cancelled_in_any_state(home: Home, client: openai.OpenAI, text: str) -> None:
    stream = create(client, text, stream=True)
    name = next(stream).response.id
    wait_for(lambda: home.status()["running"] == 1, "the request's place")
    cancelled = client.responses.cancel(name)
    assert (cancelled.status, cancelled.id) == ("cancelled", name)
    assert is_idle(home)
    assert [*stream][-1].response.status == "cancelled"
    assert client.responses.cancel(name).status == "cancelled"
    assert client.responses.retrieve(name).status == "cancelled"
    assert await_end(client, create(client, "running").id).output_text == "0"


def test_a_cancellation_at_the_end_has_one_outcome(home: Home, client: openai.OpenAI) -> None:
    """Cancel at any event: the answer, the stored response and its events agree on how it ended."""
    draws = random.Random(7)
    for count in range(40):
        connection, response = begin_stream(home, "say a b c d e f")
        events = [read_event(response)]
        name = name_of(events[0])
        for _ in range(draws.randint(0, 16)):
            events.append(read_event(response))
        status = client.responses.cancel(name).status
        connection.close()
        ended = client.responses.retrieve(name)
        last = split_events(read_after(home, name))[-1]
        final = json.loads(last.partition(b"data: ")[2])
        assert ended.status == final["response"]["status"] == status, count
        assert (final["type"] == "response.completed") == (status == "completed")
        assert (ended.output_text == "a b c d e f") or status == "cancelled"


@asynchronous
async def test_everyone_who_cancels_waits_for_the_same_end() -> None:
    """Cancel at each step of an end that takes several, as that of an answer does."""
    generate = Generate(0, TextPrompt("x"))
    opening = new_response(ResponsesRequest(input="x"), "1", "m", [])
    shape = ResponsesShape(PendingAnswer("m", [generate], n=1), opening, ItemStyle("1", ToolSet()))
    running, begun = RunningResponses(), asyncio.Event()

    async def answer() -> None:
        async with running.under_way(shape):
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(8):
                    await asyncio.sleep(0)

    async def cancel(steps: int) -> str | None:
        for _ in range(steps):
            await asyncio.sleep(0)
        response = await running.cancel(opening.id)
        return response.status if response else None

    task = asyncio.create_task(answer())
    await begun.wait()
    statuses = await asyncio.gather(*map(cancel, range(8)))
    assert statuses == ["cancelled"] * 8
    with pytest.raises(Cancelled):
        await task
    assert running.get(opening.id) is None


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_many_clients_end_a_response(home: Home, client: openai.OpenAI, method: str) -> None:
    name = create(client, "forever").id
    target = f"/v1/responses/{name}" + ("/cancel" if method == "POST" else "")
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: home.request(method, target, b""), range(8))]
    statuses = [answer.status for answer in answers]
    if method == "POST":
        assert {answer.json["status"] for answer in answers} == {"cancelled"}
    else:  # the others find nothing to delete
        assert sorted(statuses) == [200] + [404] * 7
    assert is_idle(home)


def test_a_queued_response_is_cancelled() -> None:
    with (
        scripted_home(parallel=1) as home,
        openai_client(home) as client,
        home.streaming("forever") as first,
    ):
        first.await_text()
        response = create(client, "say never")
        assert response.status == "queued"
        assert client.responses.retrieve(response.id).status == "queued"
        assert home.status()["waiting"] == 1
        assert client.responses.cancel(response.id).status == "cancelled"
        assert home.status()["waiting"] == 0
        ended = client.responses.retrieve(response.id)
        assert (ended.status, ended.output) == ("cancelled", [])
        first.await_text()  # the bystander goes on


def test_a_response_is_cancelled_while_its_pair_is_loaded() -> None:
    with scripted_home("--load-delay", "0.5") as home, openai_client(home) as client:
        name = create(client, "say never").id
        assert client.responses.cancel(name).status == "cancelled"
        assert await_end(client, create(client, "say yes").id).output_text == "yes"
        assert client.responses.retrieve(name).status == "cancelled"


def test_a_response_that_has_ended_is_returned_by_a_cancellation(client: openai.OpenAI) -> None:
    ended = await_end(client, create(client, "say yes").id)
    assert client.responses.cancel(ended.id).output_text == "yes"
    assert client.responses.cancel(ended.id).status == "completed"


def test_a_deletion_cancels(home: Home, client: openai.OpenAI) -> None:
    stream = create(client, "forever", stream=True)
    name = next(stream).response.id
    client.responses.delete(name)
    assert is_idle(home)
    assert [*stream][-1].response.status == "cancelled"
    for target in (f"/v1/responses/{name}", f"/v1/responses/{name}?stream=true"):
        assert home.request("GET", target).status == 404
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(name)


def test_many_responses_that_nobody_reads(home: Home, client: openai.OpenAI) -> None:
    """More responses than events are kept of: all are answered, and the events of the newest are kept."""
    names = []
    for number in range(MAX_RECORDINGS + 8):
        names.append(create(client, f"say {number}").id)
        await_end(client, names[-1])
    texts = [client.responses.retrieve(name).output_text for name in names]
    assert texts == [str(number) for number in range(len(names))]
    kept = [
        home.request("GET", f"/v1/responses/{name}?stream=true").status == 200 for name in names
    ]
    assert kept == [False] * 8 + [True] * MAX_RECORDINGS


@pytest.mark.parametrize("seed", range(2))
def test_many_at_once_with_random_ends(home: Home, seed: int) -> None:
    """Clients leave, come back, cancel and delete as they like. A bystander is not harmed."""
    problems: list[str] = []

    def live(number: int) -> None:
        draws = random.Random(f"{seed} {number}")
        count = draws.randint(1, 25)
        text = "".join(f"{piece} " for piece in range(count))
        connection, response = begin_stream(home, f"slow {count}")
        name = name_of(read_event(response))
        for _ in range(draws.randint(0, 8)):
            read_event(response)
        connection.close()
        action = draws.choice(["leave", "resume", "cancel", "delete"])
        target = f"/v1/responses/{name}"
        if action == "resume":
            final = json.loads(split_events(read_after(home, name))[-1].partition(b"data: ")[2])
            if final["response"]["output"][0]["content"][0]["text"] != text:
                problems.append(f"{name}: {final}")
        elif action == "cancel":
            home.request("POST", f"{target}/cancel", b"")
        elif action == "delete":
            home.request("DELETE", target)
            if home.request("GET", target).status != 404:
                problems.append(f"{name} was not deleted")

    with home.streaming("slow 60") as bystander:
        threads = [threading.Thread(target=live, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        data = bystander.read()
    assert not problems
    assert data.endswith(b"data: [DONE]\n\n")
    assert data.count(b'"content":"') >= 60
    wait_for(lambda: is_idle(home), "the end of those whose clients left")


def test_a_full_queue_is_an_error_and_nothing_is_left() -> None:
    with scripted_home(parallel=1, queue=2) as home, openai_client(home) as client:
        names = [create(client, "forever").id for _ in range(3)]
        with pytest.raises(openai.InternalServerError) as refused:
            create(client, "say no")
        assert refused.value.status_code == 503
        assert refused.value.code == "queue_full"
        stream = home.request(
            "POST", "/v1/responses", {"input": "x", "background": True, "stream": True}
        )
        assert stream.status == 503
        for name in names:
            assert client.responses.cancel(name).status == "cancelled"
        assert await_end(client, create(client, "say yes").id).output_text == "yes"


def test_too_many_at_once_are_refused() -> None:
    with scripted_home(queue=MAX_RECORDINGS * 2) as home, openai_client(home) as client:
        names = [create(client, "forever").id for _ in range(MAX_RECORDINGS)]
        with pytest.raises(openai.InternalServerError, match="being written") as refused:
            create(client, "say no")
        assert refused.value.response.headers["retry-after"]
        client.responses.cancel(names[0])
        names[0] = create(client, "forever").id
        for name in names:
            client.responses.delete(name)
        assert await_end(client, create(client, "say yes").id).output_text == "yes"


def test_a_pair_of_another_server() -> None:
    """Its answer goes on when the client leaves, and cancelling it closes its connection."""
    more = threading.Event()

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        first, _, rest = encode_chat("from ", "afar").partition(b"\n\n")
        connection.sendall(HEAD + encode_chunk(first + b"\n\n"))
        if request.body["messages"][-1]["content"] == "wait":
            server.watch(request, connection)
        else:
            more.wait(PATIENCE)
            connection.sendall(encode_chunk(rest) + b"0\r\n\r\n")

    with temporary_home() as home, scripted_server(answer=answer) as server:
        home.start()
        assert home.run("add", "big", "--upstream", server.url).returncode == 0
        connection, response = begin_stream(home, "go on", model="big")
        beginning = [read_event(response) for _ in range(3)]
        name = name_of(beginning[0])
        connection.close()
        more.set()
        with openai_client(home) as client:
            assert await_end(client, name).output_text == "from afar"
            assert b"".join(beginning) + read_after(home, name, 2) == read_after(home, name)
            waiting = client.responses.create(model="big", input="wait", background=True)
            received = wait_for(
                lambda: [
                    request
                    for request in server.requests
                    if request.body and request.body["messages"][-1]["content"] == "wait"
                ],
                "the request",
            )
            assert client.responses.cancel(waiting.id).status == "cancelled"
        wait_for(lambda: received[0].closed_at, "the end of its connection")


def test_a_daemon_that_stops_fails_what_is_unfinished() -> None:
    with temporary_home() as home:
        daemon = home.start(parallel=1)
        with openai_client(home) as client:
            decoding, queued = (create(client, "forever").id for _ in range(2))
            short = create(client, "say never").id
            connection, response = begin_stream(home, "forever")
            read_event(response)
        wait_for(lambda: home.status()["waiting"] == 3, "the queue")
        daemon.process.terminate()
        daemon.process.terminate()
        assert daemon.stop() == 0
        rest = response.read()
        connection.close()
        assert b"response.failed" in rest
        daemon = RunningDaemon(home)
        with openai_client(home) as client:
            for name in (decoding, queued, short):
                response = client.responses.retrieve(name)
                assert response.status == "failed"
                assert response.error
                assert response.error.message == "The daemon was stopped."
                assert client.responses.cancel(name).status == "failed"
                client.responses.delete(name)


def test_a_daemon_that_is_killed_leaves_failed_responses() -> None:
    """Of a response that was being written they keep the question and what was written of the answer."""
    with temporary_home() as home:
        daemon = home.start()
        with openai_client(home) as client:
            ended = await_end(client, create(client, "say kept").id).id
            metadata = {"secret": "metal"}
            running = create(client, "forever", instructions="Be brief.", metadata=metadata).id
            history = sqlite3.connect(home.root / "data" / "conversations.sqlite")
            query = "SELECT count(*) FROM unfinished_answers"
            wait_for(lambda: history.execute(query).fetchone()[0], "its text")
            history.close()
        daemon.process.kill()
        daemon.stop()
        daemon = RunningDaemon(home)
        with openai_client(home) as client:
            assert client.responses.retrieve(ended).output_text == "kept"
            response = client.responses.retrieve(running)
            assert (response.id, response.status) == (running, "failed")
            assert response.error
            assert response.error.message == "The daemon ended before this response did."
            Published.model_validate_json(
                home.request("GET", f"/v1/responses/{running}").body, strict=True
            )
            assert response.output_text.startswith("0 ")
            assert (response.instructions, response.metadata) == ("Be brief.", metadata)
            assert client.responses.cancel(running).status == "failed"
            create(client, "say more", previous_response_id=running)
            with pytest.raises(openai.BadRequestError):
                client.responses.retrieve(running, stream=True)
            client.responses.delete(running)
            for call in (client.responses.retrieve, client.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    call(running)


def test_a_daemon_that_stops_lets_short_answers_end() -> None:
    with temporary_home() as home:
        daemon = home.start()
        with openai_client(home) as client:
            name = create(client, "slow 40").id
            wait_for(lambda: client.responses.retrieve(name).status != "queued", "the beginning")
        assert daemon.stop() == 0
        daemon = RunningDaemon(home)
        with openai_client(home) as client:
            response = client.responses.retrieve(name)
            assert response.status == "completed"
            assert response.output_text.split() == [*map(str, range(40))]
