"""Test commands with broken streams and homes: each prints a sentence and has the right exit code.

Every run tests some random cases; LOCALSPEC_TEST_STREAMS=2000 runs more.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from localspec.cli.app import COMMANDS, Commands, app
from tests.support.daemons import Home, wait_for
from tests.support.patience import PATIENCE
from tests.support.terminal import terminal

ROUNDS = int(os.environ.get("LOCALSPEC_TEST_STREAMS", "25"))

# Arguments that make a command do something; other commands run without arguments.
WORDS = {
    "ask": ["say hello"],
    "complete": ["code.py:1"],
    "completion": ["bash"],
    "config set": ["queue", "9"],
    "history search": ["hello"],
    "history rm": ["--all", "-y"],
    "import": ["folder"],
    "add": ["mine", "--target", "none.gguf"],
    "show": ["builtin"],
    "verify": ["builtin"],
    "gc": ["-y"],
    "rm": ["nothing", "-y"],
    "drafts": ["none.gguf"],
    "export": ["builtin", "--to", "llama-server"],
    "pull": ["nothing-of-that-name"],
    "pulls cancel": ["nothing"],
    "service install": ["--help"],  # It would install a service on the machine of the tests.
    "service uninstall": ["--help"],
    "start": ["--help"],  # A daemon with the limits of this test would serve other tests.
    "stop": ["--help"],
    "uninstall": ["--help"],
    "rpc-worker": ["--help"],  # It would run until it is ended.
}
MORE = [
    ["ask", "--save", "brief", "x"], ["ask", "-x", "say ```\n1\n```"], ["ask", "--json", "say 1"], ["ask"],
    ["--version"], ["--help"], ["ask", "--help"], ["nonsense"], ["ask", "-u", "say 1"],
]  # fmt: skip


def command_lines() -> Iterator[list[str]]:
    for name in COMMANDS:
        context = click.Context(app)
        command = Commands.get_command(app, context, name)
        subcommands = command.list_commands(context) if isinstance(command, click.Group) else []
        for subcommand in ["", *subcommands]:
            line = f"{name} {subcommand}".strip()
            yield [*line.split(), *WORDS.get(line, [])]
    yield from MORE


def open_unread_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


# States of a stream that a shell can create; None closes it.
OUTPUTS: dict[str, Callable[[], int | None]] = {
    "as usual": lambda: subprocess.PIPE,
    "a full disk": lambda: os.open("/dev/full", os.O_WRONLY),
    "closed": lambda: None,
    "a pipe nobody reads": open_unread_pipe,
}
INPUTS: dict[str, Callable[[], int | None]] = {
    "nothing": lambda: subprocess.DEVNULL,
    "closed": lambda: None,
    "only to be written": lambda: os.open(os.devnull, os.O_WRONLY),
}
# Constants of <linux/prctl.h> and <linux/capability.h>.
_CAPBSET_DROP, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2
PLACES = ["as usual", "a full disk", "read-only", "/proc/localspec", "/dev/null/localspec"]


def run(
    home: Home, line: list[str], stdin: str, out: str, err: str, place: str
) -> subprocess.CompletedProcess[bytes]:
    streams = [INPUTS[stdin](), OUTPUTS[out](), OUTPUTS[err]()]

    def prepare_streams() -> None:
        for number, stream in enumerate(streams):
            if stream is None:
                os.close(number)
        if place == "a full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        if place == "read-only":  # Without these capabilities, even root cannot write there.
            for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
                ctypes.CDLL(None).prctl(_CAPBSET_DROP, capability, 0, 0, 0)

    environment = home.environment | {"EDITOR": "true", "VISUAL": "true"}
    if place == "read-only":
        (home.root / place).mkdir(mode=0o500, exist_ok=True)
    if place == "read-only" or place.startswith("/"):
        root = str(home.root / place)
        environment |= {"LOCALSPEC_HOME": root, "HOME": root}
    try:
        return subprocess.run(
            [sys.executable, "-m", "localspec", *line],
            env=environment,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            preexec_fn=prepare_streams,
            timeout=PATIENCE,
            cwd=home.root,
        )
    finally:
        for stream in streams:
            if stream is not None and stream >= 0:
                os.close(stream)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_every_command_with_broken_streams_and_places(warm: Home) -> None:
    (warm.root / "code.py").write_text("x = \n")
    (warm.root / "folder").mkdir(exist_ok=True)
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    lines = list(command_lines())
    for _ in range(ROUNDS):
        line, stdin = rng.choice(lines), rng.choice(list(INPUTS))
        out, err, place = rng.choice(list(OUTPUTS)), rng.choice(list(OUTPUTS)), "as usual"
        if rng.random() < 0.3:
            place = rng.choice(PLACES)
        case = (seed, line, f"stdin {stdin}, stdout {out}, stderr {err}, home {place}")
        result = run(warm, line, stdin, out, err, place)
        stderr_text = (result.stderr or b"").decode()
        stdout_text = (result.stdout or b"").decode()
        assert result.returncode in (0, 1, 2, 3), (case, stderr_text)
        for wrong in ("Traceback", "in localspec (", "Exception ignored", "NoneType", "Errno"):
            assert wrong not in stderr_text + stdout_text, (case, stderr_text, stdout_text)
        if out in ("a full disk", "closed") and result.returncode == 0:
            usual = run(warm, line, stdin, "as usual", err, place)
            assert usual.stdout == b"", (case, "what it wrote is lost and nobody knows")
        if out in ("a full disk", "closed") and result.returncode == 1 and err == "as usual":
            assert stderr_text.startswith("localspec: "), (case, stderr_text)


def test_a_result_that_cannot_be_written_is_an_error(home: Home) -> None:
    for broken, reason in (("/dev/full", "No space left on device"), ("&-", "it is closed")):
        shell = f"{sys.executable} -m localspec config show >{broken}"
        result = subprocess.run(["sh", "-c", shell], env=home.environment, stderr=subprocess.PIPE)
        assert result.returncode == 1
        assert (
            result.stderr.decode() == f"localspec: Standard output cannot be written: {reason}.\n"
        )


@pytest.mark.parametrize("broken", ["/dev/full", "&-"])
def test_a_broken_stderr_does_not_change_the_exit_code(home: Home, broken: str) -> None:
    shell = f"{sys.executable} -m localspec ask </dev/null 2>{broken}"
    assert subprocess.run(["sh", "-c", shell], env=home.environment).returncode == 2


def test_a_closed_pipe_is_not_an_error(warm: Home) -> None:
    with contextlib.closing(os.fdopen(open_unread_pipe(), "w")) as pipe:
        for line in ("config show", "--help", "completion bash", "ask forever"):
            process = warm.open_command(*line.split(), stdout=pipe)
            _, stderr = process.communicate(timeout=PATIENCE)
            assert (process.returncode, stderr) == (0, ""), line


def test_output_interrupted_by_ctrl_c_is_written_once(home: Home) -> None:
    """A full pipe accepts a part of the output; the rest follows after Ctrl-C."""
    program = (
        "import sys; from localspec.cli import streams; streams.prepare()\n"
        "try:\n sys.stdout.write(' '.join(map(str, range(1500)))); sys.stdout.flush()\n"
        "except KeyboardInterrupt: print('stopped', file=sys.stderr, flush=True)\n"
        "sys.stdout.flush()"
    )
    reading, writing = os.pipe()
    pipe_size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=home.environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    ) as writer:
        os.close(writing)
        wait_for(lambda: count_waiting_bytes(reading) == pipe_size, "a full pipe")
        writer.send_signal(signal.SIGINT)
        assert writer.stderr is not None
        assert writer.stderr.readline() == "stopped\n"
        with os.fdopen(reading) as pipe:
            assert pipe.read() == " ".join(map(str, range(1500)))
    assert writer.returncode == 0


def count_waiting_bytes(pipe: int) -> int:
    """Return the number of bytes that can be read from a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_chat_works_on_a_full_disk(warm: Home) -> None:
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "from localspec.cli import main; sys.exit(main(['chat']))"
    )
    with terminal(warm.environment, program=("-c", program), columns=200) as session:
        session.expect("›")
        session.send("say one\r")
        session.expect("localspec: Input history is not saved")
        session.expect("one\n\n›")
        session.send("say two\r")
        session.expect("two\n\n›")
        assert session.text.count("is not saved") == 1
        session.send("/exit\r")
        assert session.wait() == 0
