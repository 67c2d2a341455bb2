"""Anthropic's threads (`thread` of /v1/messages) through the official client, which uses them by default."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import beta_tool
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.daemon.test_forgetting import find_words
from tests.support.daemons import (
    Home,
    RunningDaemon,
    real_home,
    scripted_home,
    temporary_home,
    wait_for,
)
from tests.support.official_clients import (
    KNOWS_TOOLS,
    anthropic_client,
    async_anthropic_client,
)
from tests.support.official_clients import written_call as call
from tests.support.upstreams import scripted_server

BETA = "message-threads-2026-08-12"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
NOW: Any = {"name": "now", "input_schema": {"type": "object"}}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
UNKNOWN_ID = "msg_" + "0" * 24


class Wire:
    """The official client over a daemon's socket, and the bodies that it sent."""

    def __init__(self, home: Home) -> None:
        self.sent: list[dict[str, Any]] = []
        self.betas: list[str] = []
        self.client = anthropic_client(home, event_hooks={"request": [self._record]})

    def _record(self, request: httpx2.Request) -> None:
        self.sent.append(json.loads(request.content))
        self.betas.append(request.headers.get("anthropic-beta", ""))

    @property
    def threads(self) -> list[Any]:
        """Return the `thread` fields of the requests, ids left out."""
        return [(body.get("thread") or {}).get("type") for body in self.sent]


@contextmanager
def connect_wire(home: Home) -> Iterator[Wire]:
    wire = Wire(home)
    with wire.client:
        yield wire


@pytest.fixture
def wire(home: Home) -> Iterator[Wire]:
    with connect_wire(home) as wire:
        yield wire


def post(home: Home, messages: Any, thread: Any = None, **fields: Any) -> Any:
    """Send a request as the client does, with only what a test needs to see."""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    body = {"model": "", "max_tokens": 2000, "messages": messages, **fields}
    if thread is not None:
        body["thread"] = thread
    return home.request("POST", "/v1/messages?beta=true", body)


def create(home: Home, messages: Any, **fields: Any) -> Any:
    answer = post(home, messages, {"type": "create"}, **fields)
    assert answer.status == 200, answer.body
    return answer.json


def continue_from(name: str) -> dict[str, str]:
    return {"type": "continue", "previous_message_id": name}


def read_frame(message: Any) -> Any:
    """Return the frame that the engine echoed into an answer of the official client."""
    return json.loads(text_of(message.to_dict()))


def text_of(message: Any) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def prompt_after(home: Home, name: str, **fields: Any) -> Any:
    """Return the frame that the engine gets for the next question of a thread."""
    answer = post(home, "echo", continue_from(name), **fields)
    assert answer.status == 200, answer.body
    return json.loads(text_of(answer.json))


def read_contents(frame: Any) -> list[str]:
    return [message["content"] for message in frame["prompt"]["messages"]]


def code_of(answer: Any) -> str:
    """Return the error code that the client's thread helper acts on."""
    code: str = answer.error["details"]["error_code"]
    return code


def list_conversations(home: Home) -> list[Any]:
    listed: list[Any] = home.request("GET", "/localspec/conversations").json["conversations"]
    return listed


@pytest.mark.parametrize("streamed", [False, True])
def test_a_thread_remembers_earlier_messages(wire: Wire, streamed: bool) -> None:
    thread = wire.client.beta.messages.thread(model="", max_tokens=2000, system="Be brief.")

    def send(text: str) -> Any:
        if not streamed:
            return thread.send({"role": "user", "content": text})
        with thread.stream({"role": "user", "content": text}) as stream:
            return stream.get_final_message()

    send("say My name is Ada and my dog is called Rex.")
    send("say You have a dog.")
    frame = read_frame(send("echo"))
    assert read_contents(frame) == [
        "Be brief.",
        "say My name is Ada and my dog is called Rex.",
        "My name is Ada and my dog is called Rex.",
        "say You have a dog.",
        "You have a dog.",
        "echo",
    ]
    assert wire.threads == ["create", "continue", "continue"]
    assert [len(body["messages"]) for body in wire.sent] == [1, 1, 1]
    assert all(BETA in beta for beta in wire.betas)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner_sends_its_tools_once(wire: Wire, streamed: bool) -> None:
    """Each tool result is what the scripted model writes next."""
    script = [f"raw One more.\n{call('get_weather', location='Oslo')}", "echo"]

    @beta_tool
    def get_weather(location: str) -> str:
        """Tell the weather.

        Args:
            location: A city.
        """
        assert location in ("Paris", "Oslo")
        return script.pop(0)

    runner: Any = wire.client.beta.messages.tool_runner(
        model="",
        max_tokens=4000,
        system="Be brief.",
        tools=[get_weather],
        tool_choice={"type": "auto"},
        messages=[{"role": "user", "content": f"raw {call('get_weather', location='Paris')}"}],
        stream=streamed,
    )
    *_, final = [step.get_final_message() if streamed else step for step in runner]
    frame = read_frame(final)
    roles = [message["role"] for message in frame["prompt"]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert [tool["function"]["name"] for tool in frame["prompt"]["tools"]] == ["get_weather"]
    assert wire.threads == ["create", "continue", "continue"]
    assert ["tools" in body for body in wire.sent] == [True, False, False]
    cities = [
        message["extra"]["tool_calls"][0]["function"]["arguments"]["location"]
        for message in frame["prompt"]["messages"]
        if message["role"] == "assistant"
    ]
    assert cities == ["Paris", "Oslo"]


def test_a_tool_can_be_required_in_later_turns(home: Home) -> None:
    question = f"raw {call('weather', city='Paris')}"
    first = create(home, question, tools=[WEATHER], tool_choice={"type": "any"})
    use = first["content"][0]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "echo"}
    messages = [{"role": "user", "content": [result]}]
    answer = post(home, messages, continue_from(first["id"]), tool_choice={"type": "any"})
    assert answer.status == 200, answer.body
    assert json.loads(text_of(answer.json))["tools"]["required"] is True


def test_the_asynchronous_client_continues_a_thread(home: Home) -> None:
    async def use() -> Any:
        async with async_anthropic_client(home) as client:
            thread = client.beta.messages.thread(model="", max_tokens=2000)
            await thread.send({"role": "user", "content": "say one"})
            async with thread.stream({"role": "user", "content": "echo"}) as stream:
                return await stream.get_final_message()

    frame = read_frame(asyncio.run(use()))
    assert read_contents(frame) == ["say one", "one", "echo"]


def test_the_client_resends_a_deleted_thread(home: Home, wire: Wire) -> None:
    thread = wire.client.beta.messages.thread(model="", max_tokens=2000, system="Be brief.")
    thread.send({"role": "user", "content": "say one"})
    home.request("DELETE", "/localspec/conversations/last")
    frame = read_frame(thread.send({"role": "user", "content": "echo"}))
    assert read_contents(frame) == ["Be brief.", "say one", "one", "echo"]
    assert wire.threads == ["create", "continue", "create"]
    thread.send({"role": "user", "content": "say two"})
    assert wire.threads[-1] == "continue"


def test_the_tool_runner_works_without_stored_threads(home: Home, wire: Wire) -> None:
    @beta_tool
    def get_weather(location: str) -> str:
        """Tell the weather."""
        return f"echo {location}"

    before = list_conversations(home)
    home.run("config", "set", "keep_responses", "false")
    try:
        runner = wire.client.beta.messages.tool_runner(
            model="",
            max_tokens=4000,
            tools=[get_weather],
            messages=[{"role": "user", "content": f"raw {call('get_weather', location='Paris')}"}],
        )
        frame = read_frame(runner.until_done())
        refused = post(home, "say x", {"type": "create"})
    finally:
        home.run("config", "unset", "keep_responses")
    roles = [message["role"] for message in frame["prompt"]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert wire.threads == ["create", None, None]
    assert list_conversations(home) == before
    assert (refused.status, code_of(refused)) == (400, "thread_unsupported_request")
    assert refused.error["details"]["unsupported"] == ["thread"]
    assert "keep_responses" in refused.error["message"]


class Node:
    """A state of a conversation: the answer to continue from, and the history that a client has."""

    def __init__(self, name: str, history: list[Any], shared: dict[str, Any]) -> None:
        self.name = name
        self.history = history
        self.shared = shared


class Player:
    """Random turns and branches of threads; `nodes` are the answers that can be continued."""

    def __init__(self, home: Home, client: anthropic.Anthropic, chance: random.Random) -> None:
        self.home = home
        self.client = client
        self.chance = chance
        self.nodes: list[Node] = []

    def _words(self) -> str:
        word = self.chance.choice(["sun", "rain", "ß→😀", "a\n\nb", "  x ", '{"a": 1}', "<b>"])
        return f"{word}{self.chance.randrange(10**6)}"

    def _script(self) -> str:
        """Return what the scripted model is to write: thoughts, text and calls, or nothing."""
        parts = []
        if self.chance.random() < 0.3:
            parts.append(f"<think>{self._words()}</think>")
        if self.chance.random() < 0.6:
            parts.append(self._words())
        for _ in range(self.chance.choice([0, 0, 1, 2])):
            name, city = self.chance.choice(["weather", "now"]), self._words()
            parts.append(call(name, city=city))
        return "raw " + "\n".join(parts)

    def _user(self, results: list[str], script: str) -> Any:
        """Return a user's message with results of the calls before it."""
        blocks: list[Any] = [
            {
                "type": "tool_result",
                "tool_use_id": call_id,
                "content": self.chance.choice([[{"type": "text", "text": script}], script]),
                **self.chance.choice([{}, {"is_error": False}]),
            }
            for call_id in results
        ]
        if not results or self.chance.random() < 0.3:
            blocks += [{"type": "text", "text": script}]
        if not results and self.chance.random() < 0.5:
            return {"role": "user", "content": script}
        return {"role": "user", "content": blocks}

    def _begin(self) -> tuple[dict[str, Any], list[Any]]:
        """Return what all turns of a thread share, and what a client imports from elsewhere."""
        shared: dict[str, Any] = {}
        system = [{"type": "text", "text": self._words()}, {"type": "text", "text": self._words()}]
        if value := self.chance.choice([None, "Be brief.", system]):
            shared["system"] = value
        if value := self.chance.choice([None, [WEATHER, NOW], [NOW, SEARCH, WEATHER]]):
            shared["tools"] = value
        use = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"b": [1], "a": None}}
        thoughts = {"type": "thinking", "thinking": self._words(), "signature": "x"}
        imported: list[Any] = [
            {"role": "user", "content": self._words()},
            {"role": "assistant", "content": [thoughts, {"type": "text", "text": "Hm."}, use]},
            self._user(["toolu_1"], "noon"),
            {"role": "assistant", "content": self._words()},
        ]
        return shared, imported[: self.chance.choice([0, 0, 2, 3, 4])]

    def _added(self, history: list[Any]) -> list[Any]:
        """Return the messages of the next turn."""
        last = history[-1]["content"] if history else ""
        results = (
            [block["id"] for block in last if block["type"] == "tool_use"]
            if isinstance(last, list)
            else []
        )
        added = [self._user(results, self._script())]
        if not results and self.chance.random() < 0.2:
            added.insert(0, {"role": "system", "content": self._words()})
        return added

    def play(self) -> None:
        if not self.nodes or self.chance.random() < 0.15:
            shared, history = self._begin()
            thread: Any = {"type": "create"}
            initial: dict[str, Any] = dict(shared)
            added = self._added(history)
            messages = [*history, *added]
        else:
            node = self.chance.choice([*self.nodes, self.nodes[-1]])
            shared, history, thread, initial = (
                node.shared,
                node.history,
                continue_from(node.name),
                {},
            )
            added = messages = self._added(history)
        thinking = self.chance.choice([{}, {"thinking": {"type": "adaptive"}}])
        body: dict[str, Any] = {"model": "", "max_tokens": 1000, "messages": messages}
        body |= {**initial, **thinking, "extra_body": {"thread": thread}}
        if self.chance.random() < 0.5:
            with self.client.messages.stream(**body) as stream:
                answer = stream.get_final_message()
        else:
            answer = self.client.messages.create(**body)
        reply = {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
        self.nodes.append(Node(answer.id, [*history, *added, reply], shared))

    def check(self, node: Node) -> None:
        """Check that a thread and a resent history give the model the same prompt."""
        last = node.history[-1]["content"]
        results = [block["id"] for block in last if block["type"] == "tool_use"]
        question = [self._user(results, "echo")]
        threaded = post(self.home, question, continue_from(node.name))
        complete = post(self.home, [*node.history, *question], **node.shared)
        assert (threaded.status, complete.status) == (200, 200), (threaded.body, complete.body)
        frames = [json.loads(text_of(answer.json)) for answer in (threaded, complete)]
        for frame in frames:
            frame.pop("id", None)
            frame.pop("conversation", None)
            frame["sampling"].pop("seed", None)
        assert frames[0] == frames[1]
        ignored = [answer.json["localspec"].get("ignored", []) for answer in (threaded, complete)]
        assert all(note in ignored[1] for note in ignored[0])


# A failing example is not shrunk: that would take minutes, and its requests are short already.
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(chance=st.randoms(use_true_random=False))
def test_a_thread_gives_the_same_prompt_as_the_whole_history(
    home: Home, wire: Wire, chance: random.Random
) -> None:
    player = Player(home, wire.client, chance)
    for _ in range(10):
        player.play()
    for node in player.nodes:
        player.check(node)


def test_token_counts_of_a_thread_include_its_history() -> None:
    """The builtin pair counts the tokens, so that every message is in the count."""
    tools = [WEATHER, NOW]
    with real_home() as home:
        fields: dict[str, Any] = {"system": "Be brief.", "tools": tools}
        first = create(home, "One?", max_tokens=5, **fields)
        second = post(home, "And two?", continue_from(first["id"]), max_tokens=5).json
        history = [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": "And two?"},
            {"role": "assistant", "content": second["content"]},
        ]

        def count(messages: list[Any], **more: Any) -> int:
            turns = [*messages, {"role": "user", "content": "And three?"}]
            body = {"model": "", "messages": turns, **more}
            answer = home.request("POST", "/v1/messages/count_tokens?beta=true", body)
            assert answer.status == 200, answer.body
            tokens: int = answer.json["input_tokens"]
            return tokens

        whole = count(history, **fields)
        assert count([], thread=continue_from(second["id"])) == whole
        assert count([], thread=continue_from(first["id"])) == count(history[:2], **fields) < whole
        assert count(history, thread={"type": "create"}, **fields) == whole
        asked = {"model": "", "messages": history[:1], "thread": continue_from(UNKNOWN_ID)}
        unknown = home.request("POST", "/v1/messages/count_tokens", asked)
        assert (unknown.status, code_of(unknown)) == (404, "thread_not_found")


def test_a_prefilled_answer_and_its_rest_are_one_message(home: Home) -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "say The answer"},
    ]
    first = create(home, messages)
    [_, turn, _] = read_contents(prompt_after(home, first["id"]))
    assert turn == "say The answer" + text_of(first)
    repeated = post(home, messages, continue_from(first["id"])).json
    assert read_contents(prompt_after(home, repeated["id"])) == ["?", turn, "?", turn, "echo"]


def test_an_answer_cut_by_its_limit_is_continued(home: Home) -> None:
    first = create(home, "say one two three", max_tokens=2)
    assert first["stop_reason"] == "max_tokens"
    assert read_contents(prompt_after(home, first["id"]))[1] == text_of(first) == "one two"


def test_a_call_that_was_cut_off_has_no_input(home: Home) -> None:
    """The client has it in the same form, so that the result finds its call."""
    text = 'raw <tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    first = create(home, text, tools=[WEATHER])
    [use] = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "echo"}
    messages = [{"role": "user", "content": [result]}]
    frame = json.loads(text_of(post(home, messages, continue_from(first["id"])).json))
    [_, turn, tool] = frame["prompt"]["messages"]
    [tool_call] = turn["extra"]["tool_calls"]
    assert (tool_call["function"]["arguments"], tool_call["id"]) == (
        {},
        tool["extra"]["tool_call_id"],
    )


@pytest.mark.parametrize("name", [UNKNOWN_ID, "", "msg_x", "msg_", "resp_" + "0" * 24, "x" * 9999])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_message_is_not_found(home: Home, name: str, stream: bool) -> None:
    answer = post(home, "say x", continue_from(name), stream=stream)
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")
    assert code_of(answer) == "thread_not_found"
    assert answer.error["param"] == "thread.previous_message_id"
    assert len(answer.error["message"]) < 400


def test_a_message_without_a_thread_is_not_stored(home: Home) -> None:
    before = list_conversations(home)
    threads: list[dict[str, Any]] = [{}, {"thread": None}]
    for thread in threads:
        body = {"model": "", "max_tokens": 9, "messages": [{"role": "user", "content": "say x"}]}
        answer = home.request("POST", "/v1/messages", body | thread)
        assert code_of(post(home, "say y", continue_from(answer.json["id"]))) == "thread_not_found"
    assert list_conversations(home) == before


def test_ids_of_responses_and_messages_are_not_interchangeable(home: Home) -> None:
    message = create(home, "say one")["id"]
    asked = {"input": "say one", "tools": [], "metadata": {}}
    response = home.request("POST", "/v1/responses", asked).json
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        body: dict[str, Any] | None = {} if method == "POST" else None
        assert home.request(method, f"/v1/responses/{message}{path}", body).status == 404
    asked = {"input": "say two", "previous_response_id": message}
    assert home.request("POST", "/v1/responses", asked).status == 400
    for name in (response["id"], response["output"][0]["id"]):
        assert code_of(post(home, "say two", continue_from(name))) == "thread_not_found"
    assert read_contents(prompt_after(home, message)) == ["say one", "one", "echo"]


@pytest.mark.parametrize(
    ("thread", "param"),
    [
        ({"type": "fork"}, "thread"),
        ({"type": "continue"}, "thread.previous_message_id"),
        ({"type": "continue", "previous_message_id": 1}, "thread.previous_message_id"),
        ({}, "thread"),
        ("create", "thread"),
        (True, "thread"),
    ],
)
def test_an_invalid_thread_is_refused_by_name(home: Home, thread: Any, param: str) -> None:
    answer = post(home, "say x", thread)
    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith(param)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"system": "Be long."}, ["'system'"]),
        ({"tools": [NOW]}, ["'tools'"]),
        ({"tools": []}, ["'tools'"]),
        ({"system": "Be long.", "tools": [NOW]}, ["'system'", "'tools'"]),
    ],
)
def test_system_and_tools_of_a_thread_cannot_change(
    home: Home, fields: Any, names: list[str]
) -> None:
    first = create(home, "say one", system="Be brief.", tools=[WEATHER])
    answer = post(home, "say two", continue_from(first["id"]), **fields)
    assert (answer.status, code_of(answer)) == (400, "thread_fingerprint_mismatch")
    assert all(name in answer.error["message"] for name in names)
    same = {"system": [{"type": "text", "text": "Be brief."}], "tools": [WEATHER]}
    assert read_contents(prompt_after(home, first["id"], **same))[0] == "Be brief."


def test_continuing_an_older_message_makes_a_branch(home: Home) -> None:
    first = create(home, "say one", system="Be brief.")["id"]
    second = post(home, "say two", continue_from(first)).json["id"]
    other = post(home, "say three", continue_from(first)).json["id"]
    assert read_contents(prompt_after(home, second)) == [
        *("Be brief.", "say one", "one", "say two", "two", "echo")
    ]
    assert read_contents(prompt_after(home, other)) == [
        *("Be brief.", "say one", "one", "say three", "three", "echo")
    ]


def test_concurrent_branches_of_a_thread_do_not_mix(home: Home) -> None:
    first = create(home, "say one")["id"]
    texts = [f"slow {number}" for number in range(5, 9)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: post(home, text, continue_from(first)).json, texts))
    for text, message in zip(texts, answers, strict=True):
        turns = read_contents(prompt_after(home, message["id"]))
        assert turns == ["say one", "one", text, text_of(message), "echo"]


def test_an_answer_can_be_continued_at_once(wire: Wire, home: Home) -> None:
    """Answers are stored in a thread of their own, and no client has to wait for that."""
    name = create(home, "say 0")["id"]
    for number in range(1, 20):
        name = post(home, f"say {number}", continue_from(name)).json["id"]
    assert len(read_contents(prompt_after(home, name))) == 41


def test_an_interrupted_answer_cannot_be_continued(home: Home, wire: Wire) -> None:
    """The client has another part of it than was stored, and sends its own as a new thread."""
    thread = wire.client.beta.messages.thread(model="", max_tokens=10**6)
    with thread.stream({"role": "user", "content": "forever"}) as stream:
        next(event for event in stream if event.type == "text")
        name = stream.current_message_snapshot.id
    answer = post(home, "say x", continue_from(name))
    assert code_of(answer) == "thread_not_found"
    assert "cut off" in answer.error["message"]
    frame = read_frame(thread.send({"role": "user", "content": "echo"}, max_tokens=5000))
    question, partial, echo = read_contents(frame)
    assert (question, echo, partial[:2]) == ("forever", "echo", "0 ")
    assert wire.threads == ["create", "create"]
    wait_for(lambda: home.status()["running"] == 0, "the engine to be free")


def test_a_failed_answer_cannot_be_continued(home: Home) -> None:
    answer = post(home, "die SIGKILL", {"type": "create"}, stream=True)
    start, *_, final = [json.loads(event) for event in answer.events]
    assert (start["type"], final["type"]) == ("message_start", "error")
    assert code_of(post(home, "say x", continue_from(start["message"]["id"]))) == "thread_not_found"


def test_another_pair_can_continue_a_thread() -> None:
    """That includes the fallback of a server that has gone."""
    with scripted_home("--template", KNOWS_TOOLS) as home:
        with scripted_server() as server:
            options = ("--upstream-model", "tiny", "--fallback", "builtin", "--role", "chat")
            home.must_run("add", "big", "--upstream", server.url, *options)
            first = create(home, "hi", model="big", system="Be brief.", tools=[WEATHER])["id"]
            frame = prompt_after(home, first, model="builtin")
            turns = ["Be brief.", "hi", "hello there"]
            assert read_contents(frame) == [*turns, "echo"]
            assert [tool["function"]["name"] for tool in frame["prompt"]["tools"]] == ["weather"]
            second = post(home, "more", continue_from(first), model="big").json["id"]
            body = server.requests[-1].body
            assert [message["content"] for message in body["messages"]] == [*turns, "more"]
            assert [tool["function"]["name"] for tool in body["tools"]] == ["weather"]
        turns += ["more", "hello there"]
        fallback_turns = read_contents(prompt_after(home, second, model="big"))
        # The fallback's prompt describes the tools in the text.
        assert fallback_turns[1].endswith("hi")
        assert fallback_turns[2:] == [*turns[2:], "echo"]
        # Without a model the thread's last pair answers.
        assert post(home, "say x", continue_from(second)).json["model"] == "big"
        unknown = post(home, "say x", continue_from(first), model="no-such-pair")
        assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")
        assert "details" not in unknown.error


def test_a_thread_survives_a_restart_and_a_crash() -> None:
    with temporary_home() as home:
        daemon = home.start("--template", KNOWS_TOOLS)
        name = create(home, "say one", system="Be brief.", tools=[WEATHER])["id"]
        for ending in (signal.SIGTERM, signal.SIGKILL):
            daemon.process.send_signal(ending)
            daemon.process.communicate()
            daemon = RunningDaemon(home)
            frame = prompt_after(home, name)
            assert read_contents(frame) == ["Be brief.", "say one", "one", "echo"]
            assert [tool["function"]["name"] for tool in frame["prompt"]["tools"]] == ["weather"]


@contextmanager
def logging_home() -> Iterator[Home]:
    """Run a daemon that also logs prompts, because the log holds texts as well."""
    with scripted_home("--template", KNOWS_TOOLS, log_prompts="true") as home:
        yield home


def undo(home: Home, name: str) -> None:
    home.request("POST", f"/localspec/conversations/{name}/undo")


def delete(home: Home, name: str) -> None:
    home.request("DELETE", f"/localspec/conversations/{name}")


def remove(home: Home, name: str) -> None:
    assert home.run("history", "rm", "-y", name).returncode == 0


@pytest.mark.parametrize("way", [delete, remove])
def test_a_deleted_thread_leaves_nothing(way: Callable[[Home, str], None]) -> None:
    tool = {**WEATHER, "description": "secret-tool"}
    with logging_home() as home:
        unrelated = create(home, "say one")["id"]
        first = create(home, "say secret-1", system="secret-system", tools=[tool])["id"]
        second = post(home, "say secret-2", continue_from(first)).json["id"]
        assert find_words(home, "secret-system", "secret-tool", "secret-2", second)
        [thread] = [each for each in list_conversations(home) if "secret" in each["title"]]
        way(home, thread["id"])
        assert code_of(post(home, "say x", continue_from(first))) == "thread_not_found"
        assert code_of(post(home, "say x", continue_from(second))) == "thread_not_found"
        words = ("secret-system", "secret-tool", "secret-1", "secret-2", first, second)
        assert not find_words(home, *words)
        assert read_contents(prompt_after(home, unrelated))[0] == "say one"


def test_undo_removes_the_message_of_the_question() -> None:
    with logging_home() as home:
        first = create(home, "say one", system="Be brief.")["id"]
        second = post(home, "say two", continue_from(first)).json["id"]
        undo(home, "last")
        assert code_of(post(home, "say x", continue_from(second))) == "thread_not_found"
        replacement = post(home, "say three", continue_from(first)).json["id"]
        assert read_contents(prompt_after(home, replacement)) == [
            *("Be brief.", "say one", "one", "say three", "three", "echo")
        ]
        [thread] = list_conversations(home)
        assert thread["messages"] == 6


def test_deleted_branches_leave_no_text_on_disk() -> None:
    """Some branches are answered concurrently, before the daemon knows that they are branches."""
    with logging_home() as home:
        first = create(home, "say one")["id"]
        post(home, "say two", continue_from(first))
        texts = [f"slow {number} secret-{number}" for number in range(20, 24)]
        with ThreadPoolExecutor(4) as pool:
            branches = list(
                pool.map(lambda text: post(home, text, continue_from(first)).json, texts)
            )
        newest = post(home, "say one more", continue_from(branches[0]["id"])).json["id"]
        racing = [post(home, text, continue_from(newest)).json for text in texts]
        assert len({message["id"] for message in racing}) == 4
        for conversation in list_conversations(home):
            shown = home.request("GET", f"/localspec/conversations/{conversation['id']}").json
            if any("secret" in message["content"] for message in shown["messages"]):
                delete(home, conversation["id"])
        assert not find_words(home, *(f"secret-{number}" for number in range(20, 24)))
        assert read_contents(prompt_after(home, first)) == ["say one", "one", "echo"]


def test_a_thread_deleted_during_an_answer_stays_deleted() -> None:
    with logging_home() as home:
        first = create(home, "say one")["id"]
        with connect_wire(home) as wire:
            body: Any = {"model": "", "max_tokens": 100}
            body["messages"] = [{"role": "user", "content": "slow 30 secret"}]
            body["extra_body"] = {"thread": continue_from(first)}
            with wire.client.messages.stream(**body) as stream:
                next(event for event in stream if event.type == "text")
                delete(home, "last")
                final = stream.get_final_message()
        assert code_of(post(home, "say x", continue_from(final.id))) == "thread_not_found"
        assert list_conversations(home) == []
        assert not find_words(home, "secret")


def test_a_thread_appears_in_the_history(home: Home) -> None:
    first = create(
        home, f"raw {call('weather', city='Paris')}", tools=[WEATHER], system="Be brief."
    )
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": "say so"}
    post(home, [{"role": "user", "content": [result]}], continue_from(first["id"]))
    messages = home.request("GET", "/localspec/conversations/last").json["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    body = {
        "messages": [{"role": "user", "content": "echo"}],
        "localspec": {"conversation": "last"},
    }
    answer = home.request("POST", "/v1/chat/completions", body)
    assert len(json.loads(answer.text)["prompt"]["messages"]) == 6
    assert home.run("history", "show", "last").stdout.count("weather(") == 1


def test_a_failure_to_store_is_reported() -> None:
    """The client then has to send the whole conversation itself."""
    with temporary_home() as home:
        daemon = home.start()
        create(home, "say one")
        file = home.root / "data" / "conversations.sqlite"
        daemon.stop()
        file.write_bytes(b"no database at all" * 300)
        daemon = RunningDaemon(home)
        answer = create(home, "say two")
        assert "cannot be used" in answer["localspec"]["not_kept"]
        missing = post(home, "say x", continue_from(answer["id"]))
        assert (missing.status, code_of(missing)) == (404, "thread_not_found")
