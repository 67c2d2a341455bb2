"""Test the extension for VS Code under Node, with a stand-in for VS Code's interface for extensions.

A real VS Code is too large for a test suite. What only it can show, keys and drawing, is tried by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.extras.editors import lsp, vscode
from tests.support.daemons import Home, temporary_home, wait_for
from tests.support.editors import Scripted, infill, json_response, scripted
from tests.support.patience import PATIENCE

NODE = shutil.which("node")
STAND_IN = Path(__file__).parents[2] / "support" / "vscode.js"
# The extension is JavaScript that VS Code brings an interpreter for; localspec itself needs none.
needs_node = pytest.mark.skipif(NODE is None, reason="this machine has no node among its editors")
CODE = "def add(a, b):\n    return\n\n\nprint(add(1, 2))\n"
AT_RETURN = CODE.index("return") + len("return")


class Code:
    """The stand-in with a file open in it."""

    def __init__(self, folder: Path, file: Path, environment: dict[str, str]) -> None:
        command = [str(NODE), str(STAND_IN), str(folder), str(file)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, *words: Any) -> dict[str, Any]:
        """Do something and return the state after it."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(words or ["state"]) + "\n")
        self.process.stdin.flush()
        state: dict[str, Any] = json.loads(self.process.stdout.readline())
        return state

    def type(self, text: str) -> None:
        for character in text:
            self("type", character)

    def until(self, name: str, expected: Any) -> dict[str, Any]:
        """Wait until a part of the state is as expected, and return the state."""

        def reached() -> dict[str, Any] | None:
            state = self()
            is_so = expected(state[name]) if callable(expected) else state[name] == expected
            return state if is_so else None

        result: dict[str, Any] = wait_for(reached, f"{name}: {expected}")
        return result


@contextlib.contextmanager
def coding(home: Home, text: str = CODE, **settings: Any) -> Iterator[Code]:
    """Yield the stand-in with the extension as it is installed, the cursor behind `return`."""
    file, folder = home.root / "sum.py", home.root / "extension"
    file.write_bytes(text.encode())
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(vscode.__file__).parent / "vscode" / "package.json", folder)
    (folder / "main.js").write_text(vscode.text("vscode"))
    environment = {**home.environment, "VSCODE_SETTINGS": json.dumps(settings)}
    code = Code(folder, file, environment)
    try:
        code(
            "move",
            text.replace("\r\n", "\n").index("return") + len("return") + text.count("\r\n", 0, 20),
        )
        yield code
    finally:
        assert code.process.stdin
        code.process.stdin.close()
        code.process.wait(timeout=PATIENCE)
        if code.process.stdout:
            code.process.stdout.close()


class Replies:
    """A scripted daemon: what it suggests and proposes, and what it was asked."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.suggestion, self.hangs = " a + b", False
        self.edits: list[dict[str, Any]] = []
        home.socket.parent.mkdir(parents=True, exist_ok=True)
        self.server: Scripted

    def reply(self, target: str, body: dict[str, Any]) -> list[bytes] | None:
        if target == "/localspec/next-edit":
            return json_response({"edits": self.edits, "model": "scripted"})
        if self.hangs:
            return None
        return infill(f"{self.suggestion}{body.get('seed', '')}" if body["n_predict"] else "")

    def wait_for(self, target: str, count: int) -> None:
        wait_for(lambda: len(self.bodies(target)) == count, f"{count} requests")

    def wait_for_ends(self, count: int) -> None:
        wait_for(lambda: self.server.left == count, f"{count} closed connections")

    def bodies(self, target: str) -> list[dict[str, Any]]:
        return [body for name, body in self.server.requests if name == target]


@pytest.fixture
def replies() -> Iterator[Replies]:
    with temporary_home() as home:
        replies = Replies(home)
        with scripted(home.socket, replies.reply) as replies.server:
            yield replies


def edit(start: int, old: list[str], new: list[str]) -> dict[str, Any]:
    return {"start": start, "end": start + len(old), "old": old, "new": new}


@needs_node
def test_a_suggestion_is_typed_through_and_accepted(replies: Replies) -> None:
    replies.suggestion = "a + b\n\n\ndef sub(a, b):\n    return a - b"
    with coding(replies.home) as code:
        code("type", " ")
        code.until("ghost", [replies.suggestion])
        (body,) = replies.bodies("/infill")
        assert (body["input_prefix"], body["prompt"]) == ("def add(a, b):\n", "    return ")
        assert body["input_suffix"] == "\n\n\nprint(add(1, 2))\n"
        code.type("a +")
        assert code.until("ghost", [replies.suggestion[3:]])["status"] == "$(sparkle) scripted"
        assert len(replies.bodies("/infill")) == 1
        code("key", "tab")
        assert code()["text"] == CODE.replace("return", f"return {replies.suggestion}", 1)
        replies.suggestion = "other"
        code.type("\nx")
        code.until("ghost", ["other"])
        code("key", "escape")
        assert code()["ghost"] == []


@needs_node
@pytest.mark.parametrize("how", ["click", "save"])
def test_a_document_is_announced_as_its_first_suggestion_asks(replies: Replies, how: str) -> None:
    with coding(replies.home) as code:
        announced = replies.server.announced
        wait_for(lambda: announced, "the opened document")
        announced.clear()
        code(how, *([CODE.index("return") + len("return")] if how == "click" else []))
        wait_for(lambda: announced, "the document again")
        code("type", " ")
        replies.wait_for("/infill", 1)
        (asked,) = replies.bodies("/infill")
        assert announced[-1]["n_predict"] == 0
        assert asked["prompt"] == announced[-1]["prompt"] + " "
        for name in ("input_extra", "input_prefix", "input_suffix"):
            assert asked[name] == announced[-1][name]


@needs_node
def test_another_suggestion_is_asked_for(replies: Replies) -> None:
    with coding(replies.home) as code:
        code("type", " ")
        replies.suggestion = "b"
        code("key", "backspace")
        code.until("ghost", ["b"])
        code("key", "another")
        code.until("ghost", ["b1", "b"])
        assert replies.bodies("/infill")[-1]["seed"] == 1


@needs_node
def test_text_after_the_cursor_is_not_suggested_again() -> None:
    """The same suggestions are trimmed in the same way as by the language server."""
    rng = random.Random(70)
    words = [
        "a",
        "(",
        ")",
        " ",
        "\n",
        "\n    b",
        "\nprint(add(1, 2))",
        "",
        "x = 1",
        "\r\n",
        "é",
        "\t",
    ]
    cases: list[tuple[str, str, list[str]]] = []
    for _ in range(400):
        text, after = ("".join(rng.choices(words, k=rng.randrange(6))) for _ in range(2))
        below = rng.choices(["", "    b", "print(add(1, 2))", "x = 1"], k=rng.randrange(4))
        cases.append((text, after.replace("\r", "").replace("\n", ""), below))
    program = "const {trim} = require(process.argv[1] + '/ghost.js');" + (
        "console.log(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map((each) => trim(...each))))"
    )
    folder = Path(vscode.__file__).parent / "vscode"
    run = subprocess.run(
        [str(NODE), "-e", program, str(folder)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [lsp.trim_suggestion(*case) for case in cases]


@needs_node
def test_a_key_ends_the_request_before_it(replies: Replies) -> None:
    replies.hangs = True
    with coding(replies.home) as code:
        for count, key in enumerate(" xyz", 1):
            code("type", key)
            replies.wait_for("/infill", count)
            replies.wait_for_ends(count - 1)
        assert code()["status"].startswith("$(loading~spin)")
        code("command", "cancel")
        replies.wait_for_ends(4)
        assert code.until("status", "$(sparkle) localspec")["tooltip"] == "localspec"


@needs_node
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_next_edit_is_shown_and_accepted(replies: Replies, line_end: str) -> None:
    replies.suggestion = ""
    replies.edits = [
        edit(0, ["def add(a, b):"], ["def add(a, b, c):"]),
        edit(2, [], ["", "def sub(a, b):"]),
        edit(4, ["print(add(1, 2))"], ["print(add(1, 2, 3))", "print(4)"]),
    ]
    with coding(replies.home, CODE.replace("\n", line_end), nextEdit=True) as code:
        code.type(" a + b + c")
        state = code.until("added", [", c"])
        assert state["contexts"]["localspec.proposed"]
        body = replies.bodies("/localspec/next-edit")[-1]
        changed = CODE.replace("return", "return a + b + c", 1)
        cursor = changed.index("\n\n")
        assert (body["before"], body["after"]) == (changed[:cursor], changed[cursor:])
        assert body["edits"] == [{"path": "sum.py", "line": 1, "old": CODE, "new": changed}]
        assert body["diagnostics"] == [{"line": 1, "severity": "warning", "message": "unused"}]
        code("key", "tab")
        code.until("added", [" ", "def sub(a, b):"])
        code("key", "tab")
        state = code.until("added", ["print(add(1, 2, 3))", "print(4)"])
        assert state["removed"] == ["print(add(1, 2))"]
        replies.edits = []
        code("key", "tab")
        state = code.until("contexts", lambda contexts: not contexts["localspec.proposed"])
        expected = changed.replace("b)", "b, c)").replace("+ b, c)", "+ b)")
        expected = expected.replace("\n\n\n", "\n\ndef sub(a, b):\n\n\n").replace(
            "2))", "2, 3))\nprint(4)"
        )
        assert state["text"] == expected.replace("\n", line_end)
        assert state["text"][: state["offset"]].endswith("print(4)")


@needs_node
def test_a_rejected_edit_is_not_shown_again_and_typing_drops_one(replies: Replies) -> None:
    replies.suggestion = ""
    replies.edits = [edit(0, ["def add(a, b):"], ["def add(a, b, c):"])]
    with coding(replies.home, nextEdit=True) as code:
        code.type(" c")
        code.until("added", [", c"])
        code("key", "escape")
        assert code()["added"] == []
        code("command", "nextEdit")
        code.until("messages", ["localspec: nothing to propose"])
        replies.edits = [edit(0, ["def add(a, b):"], ["def add(a, b, d):"])]
        code("command", "nextEdit")
        code.until("added", [", d"])
        count = len(replies.bodies("/localspec/next-edit"))
        assert code("type", "x")["added"] == []
        code.until("added", [", d"])
        assert len(replies.bodies("/localspec/next-edit")) == count + 1
        assert code()["text"] == CODE.replace("return", "return cx", 1)


@needs_node
def test_an_edit_of_an_older_text_is_dropped(replies: Replies) -> None:
    replies.suggestion = ""
    replies.edits = [edit(0, ["def add(a, b):"], ["def add(a, b, c):"])]
    with coding(replies.home) as code:
        for _ in range(5):
            code("command", "nextEdit")
            assert code("type", "x")["added"] == []
        assert "nextEdit" not in str(code()["messages"])


@needs_node
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_are_noted(replies: Replies, seed: int) -> None:
    """Undoing the noted edits from the last to the first gives the text as it was."""
    replies.suggestion = ""
    rng = random.Random(seed)
    text = "return\n" + "".join(f"line {number}\n" for number in range(30))
    keys = [("type", "\n"), ("type", "ab"), ("type", "x\ny"), ("key", "backspace")]
    with coding(replies.home, text) as code:
        for count in range(1, 8):
            code("move", rng.randrange(10, len(code()["text"])))
            for _ in range(rng.randrange(1, 5)):
                code(*rng.choice(keys))
            code("command", "nextEdit")
            replies.wait_for("/localspec/next-edit", count)
        lines = code()["text"].split("\n")
    for noted in reversed(replies.bodies("/localspec/next-edit")[-1]["edits"]):
        old, new = (noted[name].split("\n")[:-1] for name in ("old", "new"))
        first = noted["line"] - 1
        assert lines[first : first + len(new)] == new
        lines[first : first + len(new)] = old
    assert "\n".join(lines) == text


@needs_node
def test_the_pair_is_chosen_and_the_extension_turned_off(replies: Replies) -> None:
    with coding(replies.home) as code:
        replies.server.reply = lambda target, body: (
            json_response({"data": [{"id": "one"}, {"id": "two"}]})
            if target == "/v1/models"
            else replies.reply(target, body)
        )
        code("command", "choosePair")
        code.until("settings", {"model": "two"})
        code("type", " ")
        code.until("ghost", [" a + b"])
        assert replies.bodies("/infill")[-1]["model"] == "two"
        code("command", "toggle")
        code.until("status", lambda status: status.startswith("$(circle-slash)"))
        count = len(replies.server.requests)
        code("type", "x")
        assert (code()["ghost"], len(replies.server.requests)) == ([], count)
        code("command", "log")
        assert code()["messages"][-1]["shellArgs"][-2:] == ["logs", "--follow"]


@needs_node
def test_a_daemon_that_cannot_be_started_is_said_in_the_status_bar() -> None:
    with temporary_home() as home, coding(home, command=["/nonexistent"]) as code:
        code.type(" x")
        state = code.until("status", "$(warning) localspec")
        assert "/nonexistent" in state["tooltip"]
        assert state["messages"] == []
        code("command", "start")
        assert "/nonexistent" in code.until("messages", lambda messages: messages)["messages"][0]
    with temporary_home() as home, coding(home, start=False) as code:
        code("type", " ")
        state = code.until("status", "$(warning) localspec")
        assert state["tooltip"] == "The daemon is not running. To start it: localspec start"


@needs_node
def test_two_hundred_keys_leave_no_busy_slot() -> None:
    """The shipped pair suggests. The daemon is started by the first key."""
    text = "import shutil\n\n\ndef copy(a, b):\n    return"
    with temporary_home() as home, coding(home, text) as code:
        code("type", "\n    x = shutil.c")
        code.until("ghost", bool)
        typed = "opytree(a, b, symlinks=True) # " * 7
        code.type(typed[:200])
        wait_for(lambda: home.status()["running"] + home.status()["waiting"] == 0, "no busy slot")
        assert code()["text"] == f"{text}\n    x = shutil.c{typed[:200]}"
        assert code()["messages"] == []


@needs_node
def test_a_daemon_that_dies_with_a_request_is_started_again(tmp_path: Path) -> None:
    """One that was killed still takes connections for a moment, and resets them."""
    with temporary_home() as home, socket.socket(socket.AF_UNIX) as dying:
        home.socket.parent.mkdir(parents=True)
        dying.bind(str(home.socket))
        dying.listen()
        new_socket = home.root / "new.sock"
        program = tmp_path / "localspec"
        program.write_text(f"#!/bin/sh\necho '{json.dumps({'socket': str(new_socket)})}'\n")
        program.chmod(0o755)
        with (
            scripted(new_socket, lambda target, body: infill("a + b")),
            coding(home, command=[str(program)]) as code,
        ):
            code("type", " ")
            connection, _ = dying.accept()
            assert connection.recv(1, socket.MSG_PEEK) == b"P"
            dying.close()
            connection.close()  # before it was read: a reset
            code.until("ghost", ["a + b"])


FAKE_EDITOR = """\
#!/bin/sh
echo "$@" >> {log}
case "$1" in --uninstall-extension) echo "Extension 'x' is not installed." >&2; exit 1;; esac
exit {code}
"""


def test_the_extension_is_installed_and_removed_by_the_editors_own_programs(tmp_path: Path) -> None:
    bin_folder, log = tmp_path / "bin", tmp_path / "log"
    bin_folder.mkdir()
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "LOCALSPEC_HOME": str(tmp_path / "ls"),
    }
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "localspec", "editor", *arguments, "vscode"]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )

    refused = run("install")
    vsix = tmp_path / "ls" / "data" / "localspec.vsix"
    assert refused.returncode == 1
    assert (
        "None of code, code-insiders, code-oss, codium, … is on the PATH. In the editor, choose"
        in refused.stderr
    )
    assert str(vsix) in refused.stderr
    for name in ("code", "codium"):
        program = bin_folder / name
        program.write_text(FAKE_EDITOR.format(log=log, code=0))
        program.chmod(0o755)
    assert run("install").stdout.startswith(f"Written: {vsix}\n")
    assert log.read_text() == f"--install-extension {vsix} --force\n" * 2
    with zipfile.ZipFile(vsix) as archive:
        package = json.loads(archive.read("extension/package.json"))
        assert archive.read("extension/main.js").decode() == vscode.text("vscode")
        assert package["main"] == "main.js"
        assert package["version"] != "0.0.0"
    assert run("uninstall", "-y").stdout == f"Removed: {vsix}\n"
    assert "--uninstall-extension localspec.localspec\n" in log.read_text()
    assert run("uninstall", "-y").stdout == "It is not installed.\n"
    (bin_folder / "code").write_text("#!/bin/sh\necho 'It is read-only.' >&2; exit 3\n")
    failed = run("install")
    assert (failed.returncode, "code: It is read-only." in failed.stderr) == (1, True)


@needs_node
def test_an_extension_whose_package_is_gone_says_so(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.py", tmp_path / "extension"
    file.write_text(CODE)
    folder.mkdir()
    shutil.copy(Path(vscode.__file__).parent / "vscode" / "package.json", folder)
    (folder / "main.js").write_text(vscode.text("vscode").replace("/vscode", "/gone"))
    code = Code(folder, file, dict(os.environ))
    (message,) = code()["messages"]
    assert message.endswith("is gone; run: localspec editor install vscode")
    code.process.communicate()
