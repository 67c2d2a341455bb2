"""Pairs that another server answers for, through the whole daemon: a real one there, or a scripted one."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Home, RunningDaemon, temporary_home, wait_for
from tests.support.upstreams import ScriptedServer, said, scripted_server

QUESTION = "What does shutil.copytree do?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@dataclass
class Both:
    """A daemon with the shipped pair, and one that has it as `big` and a scripted engine of its own."""

    there: Home
    here: Home
    key: str

    def same(self, method: str, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """The answers to one request: asked there, and here of `big`."""
        found = []
        for home, model in ((self.there, "builtin"), (self.here, "big")):
            answer = home.request(method, path, {**body, "model": model})
            assert answer.status == 200, answer.body
            found.append(answer.json)
        return found[0], found[1]


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with temporary_home() as there, temporary_home() as here:
        there.environment |= {"LOCALSPEC_LISTEN": "127.0.0.1:0", "LOCALSPEC_CONTEXT": "512"}
        here.use_fake()
        daemons = [RunningDaemon(there), RunningDaemon(here)]
        status = there.status()
        file = status["token_file"]
        added = here.run(
            *("add", "big", "--upstream", f"{status['listen']}/v1", "--key-file", file),
            *("--role", "chat", "--role", "fim", "--upstream-model", "builtin"),
        )
        assert added.returncode == 0, added.stderr
        assert "unencrypted" in added.stdout
        yield Both(there, here, Path(file).read_text().strip())
        for daemon in daemons:
            daemon.stop()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], **GREEDY, **fields}


def test_a_pair_of_another_localspec_answers_as_it_does_itself(both: Both) -> None:
    # Only what no rounding decides: two greedy answers of one daemon may part where two tokens are near.
    theirs, ours = both.same("POST", "/v1/chat/completions", chat(logprobs=True, top_logprobs=2))
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    (choice,) = ours["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens).strip() == choice["message"]["content"].strip()
    assert len(tokens) == ours["usage"]["completion_tokens"] == ours["timings"]["predicted_n"]
    assert {len(each["top_logprobs"]) for each in tokens} == {2}
    assert ours["localspec"]["speculation"]["drafted"] == ours["timings"]["draft_n"]
    assert ours["model"] == "big"

    written: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "import os\n", "n": 2, **GREEDY}, "choices"),
        ("/completion", {"prompt": "def main(", **GREEDY}, "content"),
        ("/infill", {"input_prefix": "import o", "input_suffix": "\n", **GREEDY}, "content"),
        ("/v1/messages", {**chat(), "max_tokens": 8}, "content"),
    ]  # fmt: skip
    for path, body, key in written:
        theirs, ours = both.same("POST", path, body)
        assert (type(ours[key]), len(ours) > 2) == (type(theirs[key]), True), path
    told: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {"content": "import os", "with_pieces": True}, "tokens"),
        ("/detokenize", {"tokens": [40, 41, 42]}, "content"),
        ("/apply-template", {"messages": chat()["messages"]}, "prompt"),
        ("/v1/chat/completions/input_tokens", {"messages": chat()["messages"]}, "input_tokens"),
    ]  # fmt: skip
    for path, body, key in told:
        theirs, ours = both.same("POST", path, body)
        assert ours[key] == theirs[key], path
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    _, ours = both.same("POST", "/v1/chat/completions", chat(json_schema=schema))
    assert ours["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_a_stream_comes_and_ends_as_others_do(both: Both) -> None:
    streams = []
    for home, model in ((both.there, "builtin"), (both.here, "big")):
        answer = home.request(
            "POST", "/v1/chat/completions", chat(stream=True, model=model, max_tokens=8)
        )
        assert answer.events[-1] == "[DONE]"
        chunks = [json.loads(each) for each in answer.events[:-1]]
        streams.append("".join(each["choices"][0]["delta"].get("content", "") for each in chunks))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(streams)


def test_what_there_is_shows_the_pair_and_its_figures_and_never_its_key(both: Both) -> None:
    here = both.here
    assert here.request("POST", "/v1/chat/completions", chat(model="big")).status == 200
    said_ = [
        here.run(*words)
        for words in (
            ["list"], ["show", "big"], ["status"], ["ask", "-u", "-m", "big", "-n", "8", QUESTION],
            ["list", "--json"], ["show", "big", "--json"],
        )
    ]  # fmt: skip
    assert "elsewhere" in said_[0].stdout
    assert both.there.status()["listen"] in said_[1].stdout
    template = here.run("show", "big", "--template")
    assert (template.returncode, "'big' is on its server" in template.stderr) == (1, True)
    (status,) = here.status()["upstreams"]
    assert (status["name"], status["kind"], status["model"]) == ("big", "localspec", "builtin")
    assert status["requests"] > 0
    assert status["tokens"] > 0
    assert "upstream" in said_[2].stdout
    assert "big: localspec at http://127.0.0.1" in said_[2].stdout
    metrics = here.request("GET", "/metrics").body.decode()
    assert f'localspec_upstream_requests_total{{pair="big"}} {status["requests"]}' in metrics
    models = {each["id"] for each in here.request("GET", "/v1/models").json["data"]}
    assert "big" in models
    refused = here.request("POST", "/v1/embeddings", {"model": "big", "input": "x"})
    assert refused.error["param"] == "model"
    texts = [each.stdout + each.stderr for each in said_]
    texts += [metrics, json.dumps(here.status()), refused.body.decode()]
    texts += [
        each.read_text("utf-8", "replace")
        for each in here.root.rglob("*")
        if each.is_file() and each.stat().st_size < 1 << 20 and each.suffix != ".sqlite"
    ]
    assert not [each for each in texts if both.key in each]
    assert here.run("rm", "nobody").returncode == 1


def test_servers_are_not_added_over_tcp(both: Both) -> None:
    status = both.there.status()
    host, _, port = status["listen"].removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    body = json.dumps({"name": "evil", "upstream": "http://x/v1", "key_file": "/etc/passwd"})
    connection.request(
        "POST", "/localspec/upstreams", body, {"authorization": f"Bearer {both.key}"}
    )
    assert connection.getresponse().status == 403
    connection.close()


# ------------------------------------------------------------------------ a scripted server


@pytest.fixture
def here() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake()
        daemon = RunningDaemon(home)
        yield home
        daemon.stop()


def add(home: Home, server: ScriptedServer, **said_: Any) -> None:
    body = {"name": "big", "upstream": server.url, **said_}
    answer = home.request("POST", "/localspec/upstreams", body)
    assert answer.status == 201, answer.body


def test_adding_contacts_nobody_and_says_what_is_wrong(here: Home) -> None:
    with scripted_server() as there:
        add(here, there, upstream_model="tiny", key_env="NOT_SET")
        assert here.run("list").returncode == 0
        assert here.run("status").returncode == 0
        assert not there.seen
        again = here.run("add", "big", "--upstream", there.url)
        assert (again.returncode, "--replace" in again.stderr) == (1, True)
        wrong = [
            (["--upstream", "http://user:word@x/v1"], "no user or password"),
            (["--upstream", "ftp://x"], "http://HOST:PORT"),
            (
                ["--upstream", there.url, "--key-env", "sk-my key"],
                "name of an environment variable",
            ),
            (["--upstream", there.url, "--fallback", "nobody"], "no pair 'nobody'"),
            (["--upstream", there.url, "--target", "x.gguf"], "either --target or --upstream"),
            (["--key-env", "X", "--target", "x.gguf"], "needs --upstream"),
        ]
        for words, told in wrong:
            run = here.run("add", "other", *words)
            assert run.returncode, words
            assert told in run.stderr, run.stderr
            assert "sk-my key" not in run.stderr
        assert not there.seen
        assert here.run("rm", "big").returncode == 0
        assert "big" not in here.run("list").stdout


def test_drafts_of_another_server_are_not_measured_here(here: Home) -> None:
    """They cannot be switched off there, and two answers with the same drafts compare nothing."""
    with scripted_server() as there:
        add(here, there)
        for words in (("big",), ("big", "--drafts", "ngram")):
            run = here.run("bench", *words, "--quick")
            assert run.returncode
            assert "'big' is served by" in run.stderr
        assert not there.seen


def test_another_pair_answers_while_the_server_does_not_and_a_conversation_goes_on(
    here: Home,
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with scripted_server(stream=said("from afar")) as there:
        port = int(there.url.rpartition(":")[2].removesuffix("/v1"))
        add(here, there, fallback=str(here.model))
        first = here.chat("say one", model="big", localspec={"conversation": "new"})
        assert first.text == "from afar"
        talk = {"conversation": first.json["localspec"]["conversation"]}
        told = here.chat("say tools", model="big", tools=[tool])
        assert there.seen[-1].body["tools"][0]["function"]["name"] == "look"
        assert told.text == "from afar"
    # What its last answers left open are closed with it.
    answer = here.chat("say from here", model="big", localspec=talk)
    assert answer.text == "from here"
    assert answer.json["localspec"]["news"].endswith("answers in its place.")
    assert "answers in its place" in here.run("ask", "-m", "big", "say hi").stderr
    assert (
        here.chat("echo", model="big", tools=[tool]).status == 200
    )  # told of tools in the question
    assert here.status()["upstreams"][0]["away"]
    with scripted_server(port, stream=said("back again")) as there:
        wait_for(lambda: not here.status()["upstreams"][0]["away"], "it to be tried again")
        answer = here.chat("say two", model="big", localspec=talk)
        assert answer.text == "back again"
        contents = [each["content"] for each in there.seen[-1].body["messages"]]
        assert contents == ["say one", "from afar", "say from here", "from here", "say two"]
    kept = here.request("GET", f"/localspec/conversations/{talk['conversation']}").json
    wrote = [each["model"] for each in kept["messages"] if each["role"] == "assistant"]
    assert wrote == ["big", here.status()["pair"]["name"], "big"]  # whose speed each figure is


def test_a_server_that_has_just_answered_and_falls_silent_is_not_waited_for(here: Home) -> None:
    with scripted_server(stream=said("from afar")) as there:
        add(here, there, fallback=str(here.model))
        assert here.chat("say one", model="big").text == "from afar"
        there.silent = True
        answer = here.chat("say from here", model="big")
        assert answer.text == "from here"
        assert answer.json["localspec"]["news"].endswith("answers in its place.")
        there.silent = False
        wait_for(lambda: not here.status()["upstreams"][0]["away"], "it to be tried again")
        assert here.chat("say two", model="big").text == "from afar"


def test_a_client_that_leaves_closes_the_servers_connection(here: Home) -> None:
    from tests.support.upstreams import HEAD, Seen, chunked, event

    def answer(seen: Seen, connection: socket.socket) -> None:
        piece = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
        connection.sendall(HEAD + chunked(event(piece)))
        there.watch(seen, connection)

    with scripted_server(answer=answer) as there:
        add(here, there)
        with here.streaming("hi", model="big") as stream:
            while b'"x"' not in stream.readline():
                pass
        wait_for(lambda: there.seen[-1].left, "the connection's end")
        wait_for(lambda: not here.status()["running"], "the request's end")


# ------------------------------------------------------------------------ who answers in a place


def chain(
    start: str, fallbacks: dict[str, str], alive: set[str], gone: set[str]
) -> tuple[list[str], str]:
    """Follow fallbacks by hand: the servers that do not answer, and who does, "" for nobody."""
    dead: list[str] = []
    name = start
    while name and name not in dead and name not in gone:
        if name in alive or name == "local":
            return dead, name
        dead.append(name)
        name = fallbacks.get(name, "")
    return dead, ""


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_of_fallbacks_is_followed_to_who_answers(here: Home, seed: int) -> None:
    """Whatever graph they make: chains, circles, pairs that are gone, and two that lead to one."""
    draw = random.Random(seed)
    names = [f"p{at}" for at in range(7)]
    table = here.root / "config" / "models.toml"
    table.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        closed.close()
        alive = {each for each in names if draw.random() < 0.2}
        urls = {
            each: stack.enter_context(scripted_server(stream=said(f"I am {each}"))).url
            if each in alive
            else nobody
            for each in names
        }
        fallbacks = {
            each: draw.choice([*(n for n in names if n != each), "local", "gone", ""])
            for each in names
        }
        lines = []
        for each in names:
            name = {"local": str(here.model), "gone": "gone"}.get(fallbacks[each], fallbacks[each])
            lines += [f"[pairs.{each}]", f'upstream = "{urls[each]}"', f'fallback = "{name}"']
            lines += ['upstream_model = "tiny"', 'upstream_kind = "vllm"']
        table.write_text("\n".join(lines) + "\n")
        wait_for(lambda: "p6" in here.run("list").stdout, "the pairs to be read")
        for each in names:
            dead, who = chain(each, fallbacks, alive, {"gone"})
            answer = here.chat("say I am local", model=each)
            if who:
                assert answer.text == f"I am {who}", (fallbacks, alive)
                news = answer.json["localspec"].get("news") or ""
                assert bool(news) == bool(dead)
                assert all(f"The server of '{one}'" in news for one in dead)
            else:
                assert answer.status == 502, (fallbacks, alive, answer.body)
                message = answer.error["message"]
                assert f"The server of '{each}' ({nobody.removesuffix('/v1')}) does not" in message
                assert all(f"The server of '{one}'" in message for one in dead)
                missing = "Its fallback 'gone' does not exist." in message
                assert missing == (fallbacks[dead[-1]] == "gone")


def test_a_key_that_others_can_read_is_refused(here: Home, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1")
    with scripted_server() as there:
        for mode in (0o604, 0o640, 0o644, 0o602, 0o620, 0o666):
            file.chmod(mode)
            body = {"name": "big", "upstream": there.url, "key_file": str(file)}
            refused = here.request("POST", "/localspec/upstreams", body)
            assert (refused.status, refused.error["param"]) == (400, "key_file"), mode
            assert "open to other users" in refused.error["message"]
        file.chmod(0o600)
        add(here, there, key_file=str(file))
        assert here.chat("say hello", model="big").status == 200
        file.chmod(0o640)  # since
        count = len(there.seen)
        refused = here.chat("say hello", model="big")
        assert (refused.status, len(there.seen)) == (502, count)
        assert "open to other users" in refused.error["message"]
        assert str(file) not in refused.error["message"]


def test_where_a_key_is_is_not_told_over_tcp(tmp_path: Path) -> None:
    file = tmp_path / "zqkey"
    file.write_text("sk-1")
    file.chmod(0o600)
    with temporary_home() as home, scripted_server() as there:
        home.use_fake(listen="127.0.0.1:0")
        daemon = RunningDaemon(home)
        add(home, there, key_file=str(file), ca="/zqca.pem")
        assert "zqkey" in home.request("GET", "/localspec/pairs/big").body.decode()
        status = home.status()
        token = Path(status["token_file"]).read_text().strip()
        chat_ = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}
        file.unlink()
        for method, path, body in (
            ("GET", "/localspec/pairs/big", None),
            ("GET", "/localspec/pairs", None),
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/big", None),
            ("POST", "/api/show", {"model": "big"}),
            ("GET", "/api/tags", None),
            ("POST", "/v1/chat/completions", chat_),
            ("POST", "/tokenize", {"model": "big", "content": "x"}),
            ("GET", "/localspec/status", None),
        ):
            connection = http.client.HTTPConnection(status["listen"].removeprefix("http://"))
            head = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, head)
            text = connection.getresponse().read().decode()
            connection.close()
            assert "big" in text, path
            assert "zqkey" not in text, path
            assert "zqca" not in text, path
        daemon.stop()
