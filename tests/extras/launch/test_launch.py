"""Test `localspec launch` with programs that stand for the agents, and send real requests."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.extras.launch import bridge
from localspec.extras.launch.agents import AGENTS, Endpoint
from tests.support.daemons import Home, wait_for
from tests.support.gguf_files import STRING, U32, model
from tests.support.patience import PATIENCE
from tests.support.templates import FAMILIES

FAKE = Path(__file__).with_name("fake_agent.py")
CONTEXT = 40_960


def install(home: Home, *names: str) -> None:
    """Give the home an empty HOME, and a PATH whose first folder has these agents."""
    programs = home.root / "bin"
    programs.mkdir()
    (home.root / "user").mkdir()
    for name in names:
        program = programs / name
        program.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        program.chmod(0o755)
    home.environment |= {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(home.root / "user"),
    }


def use_pair(home: Home, *, context: int = CONTEXT, template: str = "chatml.jinja") -> None:
    """Let the home have a pair that an agent can use, and that the scripted engine answers for."""
    gguf = model().put("llama.context_length", U32, context)
    if template:
        text = (FAMILIES / template).read_text()
        gguf = gguf.put("tokenizer.chat_template", STRING, text)
    gguf.write(home.model)
    home.use_fake()


@pytest.fixture
def agents(home: Home) -> Home:
    install(home, *AGENTS)
    use_pair(home)
    return home


def read_answer(text: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(text)
    return shown


def start(home: Home, name: str, *words: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start an agent that has its answer and waits, and return it with what it printed."""
    process = home.open_command("launch", name, "--", *words)
    assert process.stdout
    return process, read_answer(process.stdout.readline())


def left_files(home: Home) -> list[Path]:
    return [path for path in (home.root / "user").rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_led_to_the_daemon_and_no_file_is_left(agents: Home, name: str) -> None:
    run = agents.run("launch", name, "--", "-p", "hello")
    assert run.returncode == 7, run.stderr
    shown = read_answer(run.stdout)
    assert "hello" in shown["answer"]
    assert shown["words"][-2:] == ["-p", "hello"]
    assert shown["token"] not in " ".join(shown["words"])
    assert f"with a context of {4096:,} tokens" in run.stderr  # the scripted engine's
    assert left_files(agents) == []


def test_settings_of_the_user_do_not_lead_elsewhere(agents: Home) -> None:
    """Claude Code replaces variables by `env` of settings.json, where our page once had them written."""
    file = agents.root / "user" / ".claude" / "settings.json"
    file.parent.mkdir()
    names = ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL")
    text = json.dumps({"env": dict.fromkeys(names, "http://127.0.0.1:9")})
    file.write_text(text)
    agents.environment |= {"ANTHROPIC_API_KEY": "theirs", "HTTP_PROXY": "http://127.0.0.1:9"}
    assert "hello" in read_answer(agents.run("launch", "claude", "--", "hello").stdout)["answer"]
    assert file.read_text() == text
    assert left_files(agents) == [file]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_agent_and_its_bridge_ends_with_it(
    agents: Home, number: signal.Signals
) -> None:
    process, shown = start(agents, "pi", "wait")
    with process:
        assert shown["pid"] == process.pid  # the agent is the process that the shell waits for
        process.send_signal(number)
        assert process.wait(PATIENCE) == -number
    port = int(shown["url"].split(":")[2].split("/")[0])
    wait_for(lambda: not is_open(port), "the end of the bridge")


def test_an_agent_ignores_no_signal_that_python_ignores(agents: Home) -> None:
    (agents.root / "bin" / "pi").write_text("#!/bin/sh\nkill -PIPE $$\n")
    assert agents.run("launch", "pi").returncode == -signal.SIGPIPE


def is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def send(url: str, **headers: str) -> int:
    """Send a request, and return its status."""
    message = {"role": "user", "content": "say x"}
    body = json.dumps({"max_tokens": 9, "messages": [message]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            status: int = response.status
    except urllib.error.HTTPError as error:
        status = error.code
    return status


def test_the_bridge_serves_only_who_has_the_token_and_outlives_a_daemon(agents: Home) -> None:
    process, shown = start(agents, "pi", "wait")
    url, token = shown["url"], shown["token"]
    with process:
        try:
            assert send(url, **{"X-Api-Key": token}) == 200
            assert send(url, Authorization=f"Bearer {token}") == 200
            for wrong in ({}, {"Authorization": f"Bearer {token[1:]}"}, {"X-Api-Key": f"{token}0"}):
                assert send(url, **wrong) == 401
            assert agents.run("stop").returncode == 0
            assert send(url, **{"X-Api-Key": token}) == 503
            assert agents.run("start").returncode == 0
            assert send(url, **{"X-Api-Key": token}) == 200
        finally:
            process.kill()


def test_the_bridge_says_whose_requests_it_forwards(agents: Home) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    process, shown = start(agents, "pi", "wait")
    with process:
        try:
            body = {"max_tokens": 9, "messages": [{"role": "user", "content": "say x"}]}
            headers = {"X-Api-Key": shown["token"], "Content-Type": "application/json"}
            ahead = {"messages": body["messages"], "localspec": {"ahead": True, "agent": "pi"}}

            def is_known() -> bool:
                data = json.dumps({**body, "tools": [tool]}).encode()
                urllib.request.urlopen(urllib.request.Request(shown["url"], data, headers)).read()
                return agents.request("POST", "/v1/chat/completions", ahead).status == 200

            wait_for(is_known, "the beginning of a session of pi")
        finally:
            process.kill()


def test_an_agent_that_leaves_frees_its_slot(agents: Home) -> None:
    agents.use_fake("--pace", "0.2")
    process, shown = start(agents, "pi", "wait")
    port = int(shown["url"].split(":")[2].split("/")[0])
    with process:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                message = {"role": "user", "content": f"say {'word ' * 500}"}
                body = json.dumps({"max_tokens": 900, "stream": True, "messages": [message]})
                head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Api-Key: {shown['token']}\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall((head + body).encode())
                assert connection.recv(1 << 16)
                assert agents.status()["running"] == 1
            wait_for(lambda: agents.status()["running"] == 0, "the end of the answer")
        finally:
            process.kill()


def test_without_a_name_the_agents_are_listed(home: Home) -> None:
    install(home, "codex")
    lines = home.must_run("launch").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(AGENTS)
    assert [str(home.root / "bin" / "codex") in line for line in lines[1:]] == [
        name == "codex" for name in AGENTS
    ]
    assert sum("npm install -g " in line for line in lines) == len(AGENTS) - 1


def test_what_is_missing_is_said_before_anything_starts(home: Home) -> None:
    install(home, "claude")
    use_pair(home, context=8192)
    assert "npm install -g @openai/codex" in home.refused("launch", "codex")
    assert not home.socket.exists()
    short = home.refused("launch", "claude")
    assert "has a context of 8,192 tokens, and Claude Code needs 32,768" in short
    assert "localspec catalogue" in short
    use_pair(home, template="")
    assert "has no chat template" in home.refused("launch", "claude")
    use_pair(home)
    home.configure(context=4096)
    assert home.run("restart").returncode == 0
    assert "localspec config set context 32768" in home.refused("launch", "claude")
    assert home.status()["worker_pid"] is None


def test_a_model_without_tools_gets_a_note(agents: Home) -> None:
    use_pair(agents, template="plain_turns.jinja")
    assert "was not trained to call tools" in agents.run("launch", "pi", "--", "hello").stderr


def test_the_printed_variables_lead_a_shell_to_the_daemon(agents: Home) -> None:
    assert "localspec config set listen" in agents.run("launch", "pi", "--print").stderr
    agents.must_run("config", "set", "listen", "127.0.0.1:0")
    printed = agents.must_run("launch", "pi", "--print", "--", "hello")
    assert agents.must_run("token").strip() not in printed
    command = printed.splitlines()[-1].removeprefix("# ")
    program = agents.root / "bin" / "localspec"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m localspec "$@"\n')
    program.chmod(0o755)
    run = subprocess.run(
        ["sh", "-c", f"{printed}\n{command}"],
        env=agents.environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 7, run.stderr
    shown = read_answer(run.stdout)
    assert "hello" in shown["answer"]
    assert shown["token"] == agents.must_run("token").strip()


@given(st.text(), st.integers(0, 1 << 20))
def test_any_name_and_context_reach_an_agent_whole(pair: str, context: int) -> None:
    endpoint = Endpoint("http://127.0.0.1:1", "secret", pair, context)
    for agent in AGENTS.values():
        variables, arguments = agent.launch(endpoint)
        assert not any("secret" in argument for argument in arguments)
        answer = variables.get("CLAUDE_AUTOCOMPACT_PCT_OVERRIDE", "1")
        assert 1 <= int(answer) <= 90


@given(
    st.binary(max_size=70).filter(lambda given_: given_.strip(b" \r\n") != b"ab" * 32),
    st.sampled_from([b"Authorization: Bearer %s", b"authorization: bearer %s", b"X-API-KEY:%s"]),
)
def test_only_the_token_opens_the_bridge(given_: bytes, header: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n"
    token = "ab" * 32
    assert not bridge.has_token(head % (header % given_), token)
    assert bridge.has_token(head % (header % token.encode()), token)
    assert not bridge.has_token(head % (b"Cookie: " + header % token.encode()), token)
