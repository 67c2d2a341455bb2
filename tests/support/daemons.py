"""Real daemons for tests, each in a home folder of its own."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localspec.client import autostart
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
FAKE_WORKER = ROOT / "tests" / "support" / "fake_worker.py"
SLOW_ENGINE = ROOT / "tests" / "support" / "slow_engine.py"


def wait_for(condition: Callable[[], Any], description: str) -> Any:
    """Return the first true result of `condition`; fail with `description` when there is none."""
    deadline = time.monotonic() + PATIENCE
    while True:
        if result := condition():
            return result
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {description}"
        time.sleep(0.005)


class UnixConnection(http.client.HTTPConnection):
    """http.client over a Unix socket: another reader of HTTP than our own."""

    def __init__(self, path: Path) -> None:
        super().__init__("localspec", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(self._path))


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def text(self) -> str:
        content: str = self.json["choices"][0]["message"]["content"]
        return content

    @property
    def events(self) -> list[str]:
        """Return the data of the server-sent events, split as the standard says; some have a name, too."""
        parts = self.body.decode().split("\n\n")
        return [part.split("\n")[-1].removeprefix("data: ") for part in parts if part]


class Stream:
    """A streamed chat that is being read line by line."""

    def __init__(self, path: Path, prompt: str, fields: dict[str, Any]) -> None:
        self._connection = UnixConnection(path)
        messages = [{"role": "user", "content": prompt}]
        body = json.dumps({"messages": messages, "stream": True, **fields})
        try:
            self._connection.request("POST", "/v1/chat/completions", body)
            self._response = self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise

    def readline(self) -> bytes:
        return self._response.readline()

    def read(self) -> bytes:
        return self._response.read()

    def await_text(self) -> None:
        """Read up to the first event with text; every stream begins with one that has none."""
        while b'"content":"' not in (line := self.readline()).replace(b'"content":""', b""):
            assert line, "the stream ended without text"

    def leave(self) -> None:
        """Close the connection, as a client does that needs no more."""
        self._response.close()
        self._connection.close()


# Variables that are not inherited from the environment: settings, and the size of the terminal.
IGNORED_PREFIXES = ("LOCALSPEC_", "COLUMNS", "LINES")


class Home:
    """A folder for one user's daemon, and the environment that leads there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / "run" / "localspec.sock"
        self.log = root / "state" / "daemon.log"
        self.model = root / "fake.gguf"
        self.model.touch()
        self.daemons: list[RunningDaemon] = []  # started here, and ended with the home
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(IGNORED_PREFIXES)},
            "PYTHONPATH": str(ROOT),
            "LOCALSPEC_HOME": str(root),
            "PAGER": "cat",  # nobody is there to leave a pager
        }

    def use_slow_engine(self, seconds: float = 0.01) -> Path:
        """Slow the real engine to so many seconds for each row of a pass; return the file that hangs it.

        With the default, an answer of 900 tokens takes nine seconds at least, whatever drafts for it.
        """
        hang = self.root / "hang"
        command = [sys.executable, "-P", str(SLOW_ENGINE), str(seconds), str(hang)]
        self.environment["LOCALSPEC_ENGINE"] = shlex.join(command)
        return hang

    def configure(self, **config: object) -> None:
        """Set variables of the configuration, by key."""
        for key, value in config.items():
            self.environment[f"LOCALSPEC_{key.upper()}"] = str(value)

    def use_fake(self, *arguments: str, **config: object) -> None:
        """Let daemons of this home start the scripted engine."""
        engine = shlex.join([sys.executable, str(FAKE_WORKER), *arguments])
        self.configure(**{"engine": engine, "pair": self.model, **config})

    def start(self, *arguments: str, program: str = "", **config: object) -> RunningDaemon:
        """Start a daemon with the scripted engine; it is ended with the home, if not before."""
        self.use_fake(*arguments, **config)
        return RunningDaemon(self, program)

    def run(
        self, *arguments: str, stdin: str = "", timeout: float = PATIENCE, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `localspec` with these arguments. timeout: in seconds.

        stdin, and what is returned, hold bytes that are no UTF-8 as `os.fsdecode` does.
        """
        return subprocess.run(
            [sys.executable, "-m", "localspec", *arguments],
            env=self.environment,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            input=stdin,
            timeout=timeout,
            **options,
        )

    def must_run(self, *arguments: str, **options: Any) -> str:
        """Run `localspec`, which must not fail, and return what it printed."""
        run = self.run(*arguments, **options)
        assert run.returncode == 0, run.stderr or run.stdout
        return run.stdout

    def refused(self, *arguments: str, code: int = 1, **options: Any) -> str:
        """Run `localspec`, which must fail with this exit code, and return what it says of it."""
        run = self.run(*arguments, **options)
        assert run.returncode == code, run.stderr or run.stdout
        return run.stderr

    def open_command(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start `localspec` with these arguments, without input and with its output in pipes."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "localspec", *arguments]
        return subprocess.Popen(command, env=self.environment, text=True, **{**pipes, **options})

    def run_python(self, program: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a program in Python with this home's environment."""
        command = [sys.executable, *options, "-c", program]
        return subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def spawn_daemon(self, program: str = "", **options: Any) -> subprocess.Popen[str]:
        """Start `python -m localspec.daemon`, or `program` instead."""
        return subprocess.Popen(
            [sys.executable, *(["-c", program] if program else ["-m", "localspec.daemon"])],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            **options,
        )

    def put_profile(self) -> None:
        """Let engines of this home know what passes of the built-in pair cost, if it is the one in use."""
        state = self.root / "state"
        if not (state.exists() or {"LOCALSPEC_ENGINE", "LOCALSPEC_PAIR"} & self.environment.keys()):
            state.mkdir(mode=0o700)
            for name, profile in measure_builtin().items():
                (state / name).write_text(profile)

    def request(self, method: str, target: str, body: Any = None) -> Answer:
        """Send one request through http.client. `body` is sent as it is, or as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = UnixConnection(self.socket)
        try:
            connection.request(method, target, data, {"Content-Type": "application/json"})
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def chat(self, prompt: str, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": prompt}]
        return self.request("POST", "/v1/chat/completions", {"messages": messages, **fields})

    def open(self, target: str, prompt: str, **fields: Any) -> UnixConnection:
        """Send a chat and return the connection, from which the answer can be read."""
        connection = UnixConnection(self.socket)
        messages = [{"role": "user", "content": prompt}]
        connection.request("POST", target, json.dumps({"messages": messages, **fields}))
        return connection

    def status(self) -> Any:
        return self.request("GET", "/localspec/status").json

    @contextlib.contextmanager
    def streaming(self, prompt: str, **fields: Any) -> Iterator[Stream]:
        """Yield a streamed chat whose head has been read; close the connection at the end."""
        stream = Stream(self.socket, prompt, fields)
        try:
            yield stream
        finally:
            stream.leave()

    def end(self) -> None:
        """End the daemons of this home, those of its commands too."""
        with contextlib.ExitStack() as stack:
            for daemon in self.daemons:
                stack.callback(daemon.stop)
        if self.socket.is_socket() and autostart.listens(str(self.socket)):
            pid: int = self.status()["pid"]
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: not alive(pid), "the daemon's end")


@functools.cache
def measure_builtin() -> dict[str, str]:
    """Return the profile of the built-in pair by the name of its file, of one load in this process.

    Each home would measure the same passes: half of what a load costs, and again after each answer while the
    machine is busy. So the profile counts as one of a quiet machine.
    """
    with temporary_home() as home:
        home.must_run("load")
        home.must_run("stop")
        profiles = {
            file: json.loads(file.read_text()) for file in home.root.rglob("profile-*.json")
        }
        return {file.name: json.dumps(content | {"noise": 0}) for file, content in profiles.items()}


@contextlib.contextmanager
def temporary_home() -> Iterator[Home]:
    """Yield a home with a short path: a socket's path has at most 103 bytes, and pytest's are long."""
    root = Path(tempfile.mkdtemp(prefix="ls-"))
    home = Home(root)
    try:
        yield home
    finally:
        home.end()
        shutil.rmtree(root)


class RunningDaemon:
    """A daemon that the test has started and waits for."""

    def __init__(self, home: Home, program: str = "", **options: Any) -> None:
        """Start a daemon; `program` is Home.spawn_daemon's, and `options` are subprocess's."""
        self.home = home
        home.put_profile()
        self.process = home.spawn_daemon(program, **options)
        home.daemons.append(self)
        wait_for(
            lambda: autostart.listens(str(home.socket)) or self.process.poll() is not None, "it"
        )
        if self.process.poll() is not None:
            raise AssertionError(self.process.communicate()[0])

    @property
    def pid(self) -> int:
        return self.process.pid

    def worker_pid(self) -> int:
        pid: int = wait_for(lambda: self.home.status()["worker_pid"], "a worker")
        return pid

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=PATIENCE)
        assert not output, output
        return self.process.returncode


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123
            return stat.read().rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if sys.platform == "linux":
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def scripted_home(*arguments: str, program: str = "", **config: object) -> Iterator[Home]:
    """Yield a home whose daemon, or `program`, runs with the scripted engine."""
    with temporary_home() as home:
        home.start(*arguments, program=program, **config)
        yield home


@contextlib.contextmanager
def real_home(**config: object) -> Iterator[Home]:
    """Yield a home whose daemon runs with the real engine and the pair it comes with, or as configured."""
    with temporary_home() as home:
        home.configure(**{"threads": 1, **config})
        RunningDaemon(home)
        yield home
