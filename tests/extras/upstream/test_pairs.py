"""Pairs on another server, through the whole daemon: a second localspec, or a scripted server."""

from __future__ import annotations

import base64
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

from tests.support.daemons import Home, RunningDaemon, scripted_home, temporary_home, wait_for
from tests.support.documents import SQUARE, pdf, show
from tests.support.patience import PATIENCE
from tests.support.upstreams import ScriptedServer, encode_chat, scripted_server

QUESTION = "What does shutil.copytree do?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@dataclass
class Hosts:
    """A daemon with the builtin pair, and a local one that has it as `big` beside a scripted engine."""

    remote: Home
    local: Home
    key: str

    def request_both(self, method: str, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """Return the answers of the remote daemon and of the local one to the same request."""
        answers = []
        for home, model in ((self.remote, "builtin"), (self.local, "big")):
            answer = home.request(method, path, {**body, "model": model})
            assert answer.status == 200, answer.body
            answers.append(answer.json)
        return answers[0], answers[1]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with temporary_home() as remote, temporary_home() as local:
        remote.environment |= {"LOCALSPEC_LISTEN": "127.0.0.1:0", "LOCALSPEC_CONTEXT": "512"}
        local.use_fake()
        daemons = [RunningDaemon(remote), RunningDaemon(local)]
        status = remote.status()
        file = status["token_file"]
        output = local.must_run(
            *("add", "big", "--upstream", f"{status['listen']}/v1", "--key-file", file),
            *("--role", "chat", "--role", "fim", "--upstream-model", "builtin"),
        )
        assert "unencrypted" in output
        yield Hosts(remote, local, Path(file).read_text().strip())
        for daemon in daemons:
            daemon.stop()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], **GREEDY, **fields}


def test_a_remote_localspec_answers_like_a_local_one(hosts: Hosts) -> None:
    # Texts are not compared: rounding may decide between two tokens that are nearly equally likely.
    remote_answer, local_answer = hosts.request_both(
        "POST", "/v1/chat/completions", chat(logprobs=True, top_logprobs=2)
    )
    assert local_answer["usage"]["prompt_tokens"] == remote_answer["usage"]["prompt_tokens"]
    (choice,) = local_answer["choices"]
    tokens = choice["logprobs"]["content"]
    assert (
        "".join(token["token"] for token in tokens).strip() == choice["message"]["content"].strip()
    )
    assert (
        len(tokens)
        == local_answer["usage"]["completion_tokens"]
        == local_answer["timings"]["predicted_n"]
    )
    assert {len(token["top_logprobs"]) for token in tokens} == {2}
    assert local_answer["localspec"]["speculation"]["drafted"] == local_answer["timings"]["draft_n"]
    assert local_answer["model"] == "big"

    generations: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "import os\n", "n": 2, **GREEDY}, "choices"),
        ("/completion", {"prompt": "def main(", **GREEDY}, "content"),
        ("/infill", {"input_prefix": "import o", "input_suffix": "\n", **GREEDY}, "content"),
        ("/v1/messages", {**chat(), "max_tokens": 8}, "content"),
    ]  # fmt: skip
    for path, body, key in generations:
        remote_answer, local_answer = hosts.request_both("POST", path, body)
        assert (type(local_answer[key]), len(local_answer) > 2) == (
            type(remote_answer[key]),
            True,
        ), path
    token_requests: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {"content": "import os", "with_pieces": True}, "tokens"),
        ("/detokenize", {"tokens": [40, 41, 42]}, "content"),
        ("/apply-template", {"messages": chat()["messages"]}, "prompt"),
        ("/v1/chat/completions/input_tokens", {"messages": chat()["messages"]}, "input_tokens"),
    ]  # fmt: skip
    for path, body, key in token_requests:
        remote_answer, local_answer = hosts.request_both("POST", path, body)
        assert local_answer[key] == remote_answer[key], path
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    _, local_answer = hosts.request_both("POST", "/v1/chat/completions", chat(json_schema=schema))
    assert local_answer["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_a_remote_stream_ends_like_a_local_one(hosts: Hosts) -> None:
    streams = []
    for home, model in ((hosts.remote, "builtin"), (hosts.local, "big")):
        answer = home.request(
            "POST", "/v1/chat/completions", chat(stream=True, model=model, max_tokens=8)
        )
        assert answer.events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in answer.events[:-1]]
        streams.append("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(streams)


def test_commands_show_the_pair_and_its_figures_but_not_its_key(hosts: Hosts) -> None:
    local = hosts.local
    assert local.request("POST", "/v1/chat/completions", chat(model="big")).status == 200
    results = [
        local.run(*words)
        for words in (
            ["list"], ["show", "big"], ["status"], ["ask", "-u", "-m", "big", "-n", "8", QUESTION],
            ["list", "--json"], ["show", "big", "--json"],
        )
    ]  # fmt: skip
    assert "elsewhere" in results[0].stdout
    assert hosts.remote.status()["listen"] in results[1].stdout
    assert "'big' is on its server" in local.refused("show", "big", "--template")
    (status,) = local.status()["upstreams"]
    assert (status["name"], status["kind"], status["model"]) == ("big", "localspec", "builtin")
    assert status["requests"] > 0
    assert status["tokens"] > 0
    assert "upstream" in results[2].stdout
    assert "big: localspec at http://127.0.0.1" in results[2].stdout
    metrics = local.request("GET", "/metrics").body.decode()
    assert f'localspec_upstream_requests_total{{pair="big"}} {status["requests"]}' in metrics
    models = {item["id"] for item in local.request("GET", "/v1/models").json["data"]}
    assert "big" in models
    refused = local.request("POST", "/v1/embeddings", {"model": "big", "input": "x"})
    assert refused.error["param"] == "model"
    texts = [result.stdout + result.stderr for result in results]
    texts += [metrics, json.dumps(local.status()), refused.body.decode()]
    texts += [
        path.read_text("utf-8", "replace")
        for path in local.root.rglob("*")
        if path.is_file() and path.stat().st_size < 1 << 20 and path.suffix != ".sqlite"
    ]
    assert not [text for text in texts if hosts.key in text]
    assert local.run("rm", "-y", "nobody").returncode == 1


def test_servers_are_not_added_over_tcp(hosts: Hosts) -> None:
    status = hosts.remote.status()
    host, _, port = status["listen"].removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    body = json.dumps({"name": "evil", "upstream": "http://x/v1", "key_file": "/etc/passwd"})
    connection.request(
        "POST", "/localspec/upstreams", body, {"authorization": f"Bearer {hosts.key}"}
    )
    assert connection.getresponse().status == 403
    connection.close()


@pytest.fixture
def local() -> Iterator[Home]:
    with scripted_home() as home:
        yield home


def add_server(home: Home, server: ScriptedServer, **fields: Any) -> None:
    body = {"name": "big", "upstream": server.url, **fields}
    answer = home.request("POST", "/localspec/upstreams", body)
    assert answer.status == 201, answer.body


def test_adding_a_server_does_not_contact_it_and_checks_the_options(local: Home) -> None:
    with scripted_server() as remote:
        add_server(local, remote, upstream_model="tiny", key_env="NOT_SET")
        assert local.run("list").returncode == 0
        assert local.run("status").returncode == 0
        assert not remote.requests
        assert "--replace" in local.refused("add", "big", "--upstream", remote.url)
        wrong = [
            (["--upstream", "http://user:word@x/v1"], "no user or password"),
            (["--upstream", "ftp://x"], "http://HOST:PORT"),
            (
                ["--upstream", remote.url, "--key-env", "sk-my key"],
                "name of an environment variable",
            ),
            (["--upstream", remote.url, "--fallback", "nobody"], "no pair 'nobody'"),
            (["--upstream", remote.url, "--target", "x.gguf"], "either --target or --upstream"),
            (["--key-env", "X", "--target", "x.gguf"], "needs --upstream"),
        ]
        for words, message in wrong:
            run = local.run("add", "other", *words)
            assert run.returncode, words
            assert message in run.stderr, run.stderr
            assert "sk-my key" not in run.stderr
        assert not remote.requests
        assert local.run("rm", "-y", "big").returncode == 0
        assert "big" not in local.run("list").stdout


def test_what_is_unknown_of_a_model_elsewhere_is_left_out(hosts: Hosts) -> None:
    """An agent would take 0 for the length of its context."""
    entry = hosts.local.request("GET", "/v1/models/big").json
    assert "chat" in hosts.local.run("show", "big").stdout
    assert entry["capabilities"]
    assert not entry.keys() & {"context_length", "meta"}
    shown = hosts.local.request("POST", "/api/show", {"model": "big"}).json
    assert (shown["model_info"], "num_ctx" in shown["parameters"]) == ({}, False)
    assert shown["details"]["parameter_size"] == ""


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_removed_pair_leaves_no_trace_in_the_status(by_hand: bool) -> None:
    with temporary_home() as home, socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        closed.close()
        home.start()
        assert home.run("add", "up", "--upstream", url).returncode == 0
        assert home.chat("hi", model="up").status == 502
        assert "upstream  up: " in home.run("status").stdout
        assert 'localspec_upstream_failed_total{pair="up"} 1' in read_metrics(home)
        if by_hand:
            (home.root / "config" / "models.toml").write_text("")
            wait_for(lambda: not home.status()["upstreams"], "the file to be read again")
        else:
            assert home.run("rm", "up", "--yes").returncode == 0
        assert home.status()["upstreams"] == []
        assert 'pair="up"' not in read_metrics(home)
        assert "upstream" not in home.run("status").stdout
        if not by_hand:
            assert home.run("add", "up", "--upstream", url).returncode == 0
            home.run("list")
            assert home.status()["upstreams"] == []


def read_metrics(home: Home) -> str:
    return home.request("GET", "/metrics").body.decode()


def test_bench_refuses_remote_pairs(local: Home) -> None:
    """Drafts on a server cannot be switched off, so a benchmark would have nothing to compare."""
    with scripted_server() as remote:
        add_server(local, remote)
        for words in (("big",), ("big", "--drafts", "ngram")):
            run = local.run("bench", *words, "--quick")
            assert run.returncode
            assert "'big' is served by" in run.stderr
        assert not remote.requests


def test_another_server_gets_the_text_of_a_document(local: Home) -> None:
    data = base64.b64encode(pdf(f"{show('Hello')} {SQUARE}")).decode()
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}
    content = [file, {"type": "text", "text": "What?"}]
    body = {"model": "big", "messages": [{"role": "user", "content": content}]}
    with scripted_server() as remote:
        add_server(local, remote)
        answer = local.request("POST", "/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        [message] = remote.requests[-1].body["messages"]
    assert message["content"] == "a.pdf, page 1 of 1:\nHello\n\nWhat?"
    assert "drawings and pictures on 1 page" in answer.json["localspec"]["note"]


def test_a_fallback_continues_the_conversation_while_the_server_is_down(local: Home) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with scripted_server(stream=encode_chat("from afar")) as remote:
        port = int(remote.url.rpartition(":")[2].removesuffix("/v1"))
        add_server(local, remote, fallback=str(local.model))
        first = local.chat("say one", model="big", localspec={"conversation": "new"})
        assert first.text == "from afar"
        talk = {"conversation": first.json["localspec"]["conversation"]}
        answer_with_tools = local.chat("say tools", model="big", tools=[tool])
        assert remote.requests[-1].body["tools"][0]["function"]["name"] == "look"
        assert answer_with_tools.text == "from afar"
    # The server's open connections were closed with it.
    answer = local.chat("say from here", model="big", localspec=talk)
    assert answer.text == "from here"
    assert answer.json["localspec"]["news"].endswith("answers in its place.")
    assert "answers in its place" in local.run("ask", "-m", "big", "say hi").stderr
    # The fallback's prompt describes the tools in the question.
    assert local.chat("echo", model="big", tools=[tool]).status == 200
    assert local.status()["upstreams"][0]["away"]
    with scripted_server(port, stream=encode_chat("back again")) as remote:
        wait_for(lambda: not local.status()["upstreams"][0]["away"], "it to be tried again")
        answer = local.chat("say two", model="big", localspec=talk)
        assert answer.text == "back again"
        contents = [message["content"] for message in remote.requests[-1].body["messages"]]
        assert contents == ["say one", "from afar", "say from here", "from here", "say two"]
    conversation = local.request("GET", f"/localspec/conversations/{talk['conversation']}").json
    models = [
        message["model"] for message in conversation["messages"] if message["role"] == "assistant"
    ]
    assert models == [
        "big",
        local.status()["pair"]["name"],
        "big",
    ]  # the pair that each speed belongs to


def test_the_fallback_answers_for_a_server_that_falls_silent(local: Home) -> None:
    with scripted_server(stream=encode_chat("from afar")) as remote:
        add_server(local, remote, fallback=str(local.model))
        assert local.chat("say one", model="big").text == "from afar"
        remote.silent = True
        answer = local.chat("say from here", model="big")
        assert answer.text == "from here"
        assert answer.json["localspec"]["news"].endswith("answers in its place.")
        remote.silent = False
        wait_for(lambda: not local.status()["upstreams"][0]["away"], "it to be tried again")
        assert local.chat("say two", model="big").text == "from afar"


def test_a_disconnect_closes_the_connection_to_the_server(local: Home) -> None:
    from tests.support.upstreams import HEAD, ReceivedRequest, encode_chunk, encode_event

    def answer(seen: ReceivedRequest, connection: socket.socket) -> None:
        piece = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
        connection.sendall(HEAD + encode_chunk(encode_event(piece)))
        remote.watch(seen, connection)

    with scripted_server(answer=answer) as remote:
        add_server(local, remote)
        with local.streaming("hi", model="big") as stream:
            while b'"x"' not in stream.readline():
                pass
        wait_for(lambda: remote.requests[-1].closed_at, "the connection's end")
        wait_for(lambda: not local.status()["running"], "the request's end")


def follow_fallbacks(
    start: str, fallbacks: dict[str, str], alive: set[str], missing: set[str]
) -> tuple[list[str], str]:
    """Return the servers that do not answer, and the pair that does ("" for none)."""
    dead: list[str] = []
    name = start
    while name and name not in dead and name not in missing:
        if name in alive or name == "local":
            return dead, name
        dead.append(name)
        name = fallbacks.get(name, "")
    return dead, ""


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_of_fallbacks_ends_at_the_first_that_answers(local: Home, seed: int) -> None:
    """Random graphs have chains, cycles, missing pairs, and pairs with the same fallback."""
    draw = random.Random(seed)
    names = [f"p{at}" for at in range(7)]
    table = local.root / "config" / "models.toml"
    table.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as closed:
        unreachable_url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        closed.close()
        alive = {name for name in names if draw.random() < 0.2}
        urls = {
            name: stack.enter_context(scripted_server(stream=encode_chat(f"I am {name}"))).url
            if name in alive
            else unreachable_url
            for name in names
        }
        fallbacks = {
            name: draw.choice([*(n for n in names if n != name), "local", "gone", ""])
            for name in names
        }
        lines = []
        for pair in names:
            name = {"local": str(local.model), "gone": "gone"}.get(fallbacks[pair], fallbacks[pair])
            lines += [f"[pairs.{pair}]", f'upstream = "{urls[pair]}"', f'fallback = "{name}"']
            lines += ['upstream_model = "tiny"', 'upstream_kind = "vllm"']
        table.write_text("\n".join(lines) + "\n")
        wait_for(lambda: "p6" in local.run("list").stdout, "the pairs to be read")
        for pair in names:
            dead, responder = follow_fallbacks(pair, fallbacks, alive, {"gone"})
            answer = local.chat("say I am local", model=pair)
            if responder:
                assert answer.text == f"I am {responder}", (fallbacks, alive)
                news = answer.json["localspec"].get("news") or ""
                assert bool(news) == bool(dead)
                assert all(f"The server of '{server}'" in news for server in dead)
            else:
                assert answer.status == 502, (fallbacks, alive, answer.body)
                message = answer.error["message"]
                assert (
                    f"The server of '{pair}' ({unreachable_url.removesuffix('/v1')}) does not"
                    in message
                )
                assert all(f"The server of '{server}'" in message for server in dead)
                missing = "Its fallback 'gone' does not exist." in message
                assert missing == (fallbacks[dead[-1]] == "gone")


def test_a_key_file_open_to_other_users_is_refused(local: Home, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1")
    with scripted_server() as remote:
        for mode in (0o604, 0o640, 0o644, 0o602, 0o620, 0o666):
            file.chmod(mode)
            body = {"name": "big", "upstream": remote.url, "key_file": str(file)}
            refused = local.request("POST", "/localspec/upstreams", body)
            assert (refused.status, refused.error["param"]) == (400, "key_file"), mode
            assert "open to other users" in refused.error["message"]
        file.chmod(0o600)
        add_server(local, remote, key_file=str(file))
        assert local.chat("say hello", model="big").status == 200
        file.chmod(0o640)  # opened to the group after the pair was added
        count = len(remote.requests)
        refused = local.chat("say hello", model="big")
        assert (refused.status, len(remote.requests)) == (502, count)
        assert "open to other users" in refused.error["message"]
        assert str(file) not in refused.error["message"]


def test_the_place_of_a_key_is_not_reported_over_tcp(tmp_path: Path) -> None:
    file = tmp_path / "zqkey"
    file.write_text("sk-1")
    file.chmod(0o600)
    with temporary_home() as home, scripted_server() as remote:
        home.start(listen="127.0.0.1:0")
        add_server(home, remote, key_file=str(file), ca="/zqca.pem")
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
