"""Test that no control character reaches a terminal, whatever its source and whichever the command."""

from __future__ import annotations

import json
import re
import shlex
import socketserver
import threading
import unicodedata
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import click
import pytest

from localspec.cli.terminal.render import MarkdownPrinter
from localspec.errors import replace_control_characters
from tests.support.commands import list_commands
from tests.support.daemons import Home, UnixConnection, scripted_home, temporary_home
from tests.support.extras import has_command
from tests.support.many import Job, in_a_terminal, in_pipes
from tests.support.terminal import terminal

BIDI = {0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}


def is_harmful(code: int) -> bool:
    return unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp") or code in BIDI


# Each character is put between two marks that localspec never prints, so that leaks are found.
BAD = [chr(code) for code in range(0x110000) if is_harmful(code) and chr(code) not in "\n\t"]
POISON = "".join(f"❮{char}❯" for char in BAD)
_ANY = "|".join(map(re.escape, BAD))
_THROUGH = re.compile(f"❮(?:{_ANY})|(?:{_ANY})❯")


def find_unescaped(output: str) -> list[str]:
    """Return the control characters that were not replaced; a terminal's own line ends are harmless."""
    return _THROUGH.findall(output.replace("\r\n", "\n").replace("\r\x1b[", "\x1b["))


def test_harmful_characters_are_replaced_by_visible_ones() -> None:
    for code in range(0x110000):
        char = chr(code)
        replaced = replace_control_characters(char)
        if is_harmful(code) and char not in "\n\t":
            assert len(replaced) == 1
            assert not is_harmful(ord(replaced))
        else:
            assert replaced == char
    assert replace_control_characters("a\n\tb") == "a\n\tb"
    assert replace_control_characters("a\n\tb\x1b[2J", lines=False) == "a␊␉b␛[2J"


UNPOISONED_KEYS = {
    "state",
    "role",
    "object",
    "code",
    "source",
    "fits",
    "finish_reason",
    "id",
    "version",
    "type",
}


def poison(value: Any, key: str = "") -> Any:
    """Return `value` with the poison in every text that is not a word of the protocol."""
    if isinstance(value, dict):
        return {name: poison(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poison(item, key) for item in value]
    if isinstance(value, str) and key not in UNPOISONED_KEYS:
        return f"{value}{POISON} &#8238;&#12;"
    return value


class HostileHandler(BaseHTTPRequestHandler):
    """Forwards requests to a real daemon and poisons the responses, or refuses them with poison."""

    server: HostileServer
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.refuses:
            error = {
                "message": f"Refused{POISON}",
                "type": "x",
                "param": POISON,
                "code": "conflict",
            }
            self._send(409, "application/json", json.dumps({"error": error}).encode())
            return
        connection = UnixConnection(self.server.real)
        try:
            connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content_type, data = answer.headers["Content-Type"], answer.read()
        finally:
            connection.close()
        if "event-stream" in content_type:
            events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
            data = b"".join(
                b"data: %s\n\n" % (event if event == b"[DONE]" else self._poisoned(event))
                for event in events
            )
        else:
            data = self._poisoned(data)
        self._send(answer.status, content_type, data)

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815

    def _poisoned(self, data: bytes) -> bytes:
        return json.dumps(poison(json.loads(data))).encode()

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class HostileServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    real: Path
    refuses = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect early."""


@pytest.fixture(scope="module")
def hostile() -> Iterator[tuple[Home, HostileServer]]:
    """Yield a home with poison in its path, its log and every response of its daemon."""
    with scripted_home() as real, temporary_home() as outer:
        real.chat("say hello", localspec={"conversation": "new"})
        root = outer.root / "❮\x1b❯❮\x9b❯"
        root.mkdir()
        home = Home(root)
        (root / "run").mkdir(mode=0o700)
        home.log.parent.mkdir()
        home.log.write_text(f"one {POISON}\n", newline="")
        (root / "config" / "templates").mkdir(parents=True)
        for name, prompt in (("good", '"❮\\u001b❯ $input"'), ("bad❮\x1b❯", "❮\x1b❯")):
            file = root / "config" / "templates" / f"{name}.toml"
            file.write_text(f"prompt = {prompt}\n")
        with HostileServer(str(home.socket), HostileHandler) as server:
            server.real = real.socket
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            yield home, server
            server.shutdown()
            thread.join()


# Arguments for each command that make it print something.
ARGUMENTS: dict[str, list[str]] = {
    "ask": ["", "--plain", "--show-draft", "-u", "--no-stream", "--json", "-x", "-m ❮\x1b❯"],
    "chat": [],  # A separate test types into a chat.
    "run": ["missing❮\x1b❯ hello"],
    "help": ["", "ask", "❮\x1b❯"],
    "list": ["", "--all", "--json"],
    "catalogue": ["", "--json"],
    "pull": ["tiny❮\x1b❯"],
    "pulls": ["", "--json"],
    "pulls cancel": ["tiny❮\x1b❯"],
    "show": ["builtin", "builtin --json"],
    "verify": ["builtin❮\x1b❯"],
    "rm": ["builtin❮\x1b❯ -y"],
    "gc": ["--dry-run"],
    "add": ["mine --target /❮\x1b❯.gguf"],
    "import": ["", "--json"],
    "drafts": ["builtin"],
    "export": [
        "builtin --to llama-server",
        "builtin --to compose --engine llama-server",
        "❮\x1b❯ --to vllm",
    ],
    "load": ["", "❮\x1b❯"],
    "unload": ["", "❮\x1b❯"],
    "start": [""],
    "service install": ["--print"],
    "service uninstall": ["-y"],
    "service status": [""],
    "embed": ["❮\x1b❯"],
    "complete": [f"{__file__}:3", "❮\x1b❯:3"],
    "launch": ["", "pi --print", "❮\x1b❯"],
    "editor install": ["--print vim", "--print emacs", "❮\x1b❯"],
    "editor uninstall": ["❮\x1b❯ -y"],
    "editor config": ["gptel", "❮\x1b❯"],
    "acp": [""],
    "lsp": ["-m ❮\x1b❯"],
    "cmd": ["hello", "❮\x1b❯"],
    "commit": ["--hook"],
    "explain": ["❮\x1b❯", "--plain ❮\x1b❯"],
    "history": ["", "list", "show", "search hello", "export"],
    "history list": ["", "--json"],
    "history search": ["hello", "❮\x1b❯"],
    "history show": ["last", "last --json", "❮\x1b❯"],
    "history rm": ["❮\x1b❯ -y"],
    "history export": [""],
    "templates": [""],
    "templates list": ["", "--json"],
    "templates show": ["good", "❮\x1b❯"],
    "templates edit": ["good"],
    "templates rm": ["❮\x1b❯ -y"],
    "templates path": ["", "good"],
    "stats": ["", "--json", "--html -", "--pair ❮\x1b❯"],
    "tune": ["--status", "--revert -y"],
    "bench": ["--quick --repetitions 1", "❮\x1b❯", "compare ❮\x1b❯ x"],
    "config": [""],
    "config get": ["pair", "❮\x1b❯"],
    "config path": [""],
    "config show": ["", "--json"],
    "config set": ["pair ❮\x1b❯", "❮\x1b❯ 1", "pair ❮\x1b❯.gguf"],
    "config unset": ["❮\x1b❯"],
    "config edit": [""],
    "logs": ["", "--path"],
    "status": ["", "-v", "--json"],
    "use": ["", "❮\x1b❯"],
    "restart": [],  # It is like stop.
    "uninstall": [],  # It is like stop, and would uninstall what is on the machine of the tests.
    "stop": [],  # It waits for a lock at the end and prints only its own texts.
    "doctor": ["", "--json"],
    "rpc-worker": ["--ssh ❮\x1b❯", "--listen-insecure ❮\x1b❯"],
    "token": ["", "--json"],
    "completion": ["bash", "❮\x1b❯"],
}
ARGUMENTS = {name: ARGUMENTS[name] for name in ARGUMENTS if has_command(name.split()[0])}


def test_every_command_has_arguments_for_these_tests() -> None:
    lines = {
        line
        for line, command in list_commands()
        if not isinstance(command, click.Group) or (line and command.invoke_without_command)
    }
    assert lines == set(ARGUMENTS)


LINES = [f"{name} {more}".strip() for name, variants in ARGUMENTS.items() for more in variants]


def make_job(line: str) -> Job:
    return [*shlex.split(line), *(["say", "hello"] if line.startswith("ask") else [])], {}


@pytest.mark.parametrize("refuses", [False, True])
def test_commands_send_no_control_characters_to_a_terminal(
    hostile: tuple[Home, HostileServer], refuses: bool
) -> None:
    home, server = hostile
    server.refuses = refuses
    home.environment["EDITOR"] = "true"
    lines = (
        [f"{name} {output[0]}" for name, output in ARGUMENTS.items() if output]
        if refuses
        else LINES
    )
    outputs = in_a_terminal(home.environment, [make_job(line) for line in lines], columns=4000)
    for line, output in zip(lines, outputs, strict=True):
        assert not find_unescaped(output), line
        assert "Traceback" not in output
    # The poison arrived and was replaced.
    assert sum("❮␛❯" in output for output in outputs) > len(lines) // 2


def test_a_chat_sends_no_control_characters(hostile: tuple[Home, HostileServer]) -> None:
    home, server = hostile
    server.refuses = False
    with terminal(home.environment, "chat", columns=400) as session:
        for typed, answer in (
            ("say hello", "hello❮"),
            ("/pair", "builtin"),
            ("/stats", "speculation"),
            ("/pair x", "No pair"),
            ("/nothing", "Unknown command"),
            ("/file /nowhere", "cannot be read"),
        ):
            session.expect("›")
            session.send(f"{typed}\r")
            session.expect(answer)
        session.expect("›")
        session.send("/pair \t\t")
        session.send("\x03\x04")
        session.wait()
    assert "❮␛❯" in session.raw
    assert not find_unescaped(session.raw)


def test_in_a_pipe_only_the_answer_is_unchanged(hostile: tuple[Home, HostileServer]) -> None:
    home, server = hostile
    server.refuses = False
    home.environment["EDITOR"] = "true"
    results = in_pipes(home.environment, [make_job(line) for line in LINES])
    for line, (code, stdout, stderr) in zip(LINES, results, strict=True):
        assert not find_unescaped(stderr), line
        command = line.split()[0]
        answers = command in ("ask", "complete", "explain") or line in (
            "history show",
            "history show last",
        )
        if "--json" in line:
            if "❮" in stdout:
                assert "❮\x1b❯" in json.dumps(json.loads(stdout), ensure_ascii=False).replace(
                    "\\u001b", "\x1b"
                )
            assert not find_unescaped(stdout)
        elif answers and code == 0:
            assert POISON in stdout
        elif "path" not in line:
            assert not find_unescaped(stdout), line


def test_completion_offers_nothing_harmful(hostile: tuple[Home, HostileServer]) -> None:
    home, server = hostile
    server.refuses = False
    jobs: list[Job] = [
        (
            [],
            {
                "_LOCALSPEC_COMPLETE": f"{shell}_complete",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split())) if shell != "fish" else "",
            },
        )
        for shell in ("bash", "zsh", "fish")
        for line in ("localspec history show ", "localspec show ", "localspec ask -m ")
    ]
    results = in_pipes(home.environment, jobs)
    for (_, variables), result in zip(jobs, results, strict=True):
        assert not find_unescaped(result.out + result.err)
        # Only bash shows no title beside a completion; a name with poison could not be typed.
        titles = (
            "history" in variables["COMP_WORDS"] and "bash" not in variables["_LOCALSPEC_COMPLETE"]
        )
        assert ("❮␛❯" in result.out) == titles


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_markdown_in_pieces(capsys: pytest.CaptureFixture[str], size: int) -> None:
    """Control characters are replaced even where Markdown has entities for them."""
    text = (
        f"# A {POISON[:200]}\n\n- `{POISON}`\n\n```\n{POISON}\n```\n\n&#8238;x&#x2066; [a](b)\n\n"
    )
    printer = MarkdownPrinter()
    for position in range(0, len(text), size):
        printer.text(text[position : position + size], [])
    printer.close()
    output = re.sub(r"\x1b\[[0-9;]*[mAJ]|\r(?=\x1b)", "", capsys.readouterr().out)
    assert not [char for char in output if is_harmful(ord(char)) and char not in "\n\t"]


def test_internal_errors_contain_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from localspec import cli

    def fail(message: str) -> Callable[[list[str]], int]:
        def dispatch(_: list[str]) -> int:
            raise RuntimeError(message)

        return dispatch

    monkeypatch.setattr(cli, "_dispatch", fail(POISON))
    for arguments in (["status"], ["--debug", "status"]):
        assert cli.main(arguments) == 1
        assert not find_unescaped(capsys.readouterr().err)
