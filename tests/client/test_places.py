"""Whatever is in the place of a folder or file of ours: the command works, or one sentence names the remedy.

Every run has a few cases; LOCALSPEC_TEST_PLACES=all tests everything at every place with every command, which
takes half an hour.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localspec.paths import Paths
from tests.support.daemons import Home, RunningDaemon, wait_for
from tests.support.extras import has_command

# Every path of Paths, and files that other modules add.
PLACES = (
    *(name for name in Paths._fields),
    *(name for name, value in vars(Paths).items() if isinstance(value, property)),
)
MORE = {
    "starters' lock": "run/start.lock",
    "history": "data/conversations.sqlite",
    "history's log": "data/conversations.sqlite-wal",
    "safe mode": "state/safe-mode.json",
    "older log": "state/daemon.log.1",
    "records": "data/models/pairs",
    "record": "data/models/pairs/mine.json",
    "downloads": "data/models/blobs",
    "templates": "config/templates",
    "template": "config/templates/brief.toml",
}
FOLDERS = {
    "runtime",
    "config",
    "data",
    "state",
    "cache",
    "model_states",
    "store",
    "records",
    "downloads",
    "templates",
}


def place(home: Home, name: str) -> Path:
    root = home.root
    paths = Paths(*(root / folder for folder in ("run", "config", "data", "state", "cache")))
    return root / MORE[name] if name in MORE else getattr(paths, name)


def wrong_kind(path: Path, folder: bool) -> None:
    if folder:
        path.write_text("in the way")
    else:
        path.mkdir()


def dangling(path: Path, folder: bool) -> None:
    path.symlink_to(path.with_name("nowhere") / "at-all")


def loop(path: Path, folder: bool) -> None:
    path.symlink_to(path)


def pipe(path: Path, folder: bool) -> None:
    os.mkfifo(path)


def open_to_all(path: Path, folder: bool) -> None:
    if folder:
        path.mkdir()
    else:
        path.touch()
    path.chmod(0o777)


def empty(path: Path, folder: bool) -> None:
    path.mkdir(mode=0o700) if folder else path.touch(mode=0o600)


CONDITIONS: list[Callable[[Path, bool], None]] = [
    wrong_kind, dangling, loop, pipe, open_to_all, empty,
]  # fmt: skip
COMMANDS = [
    ["ask", "say hello"], ["list"], ["config"], ["config", "set", "queue", "9"], ["doctor"],
    ["status"], ["start", "--listen", "127.0.0.1:0"], ["history"], ["history", "rm", "--all", "-y"],
    ["logs"], ["stop"], ["ask", "-t", "brief", "x"], ["ask", "--save", "brief", "x"], ["gc", "-y"],
    ["show", "builtin"], ["verify", "mine"],
]  # fmt: skip
FEW_COMMANDS = [COMMANDS[at] for at in (0, 5, 6)]  # for tests in which commands hardly differ
COMMANDS = [command for command in COMMANDS if has_command(command[0])]


def assert_works_or_explains(run: subprocess.CompletedProcess[str], case: object) -> None:
    """Assert that the command worked, or printed one sentence."""
    details = (case, run.stdout, run.stderr)
    assert run.returncode in (0, 1, 2, 3), details
    assert "Traceback" not in run.stdout + run.stderr, details
    assert "bug in localspec" not in run.stderr, details
    if run.returncode and "BAD" not in run.stdout:  # doctor reports problems on stdout
        lines = run.stderr.strip().splitlines()
        assert len(lines) == 1, details
        assert lines[0].startswith("localspec: "), details
        assert len(lines[0]) > 30, details


def check_case(
    home: Home, name: str, condition: Callable[[Path, bool], None], line: list[str]
) -> None:
    path = place(home, name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        condition(path, name in FOLDERS)
    try:
        # home.run has a timeout of 30 s.
        assert_works_or_explains(home.run(*line), (name, condition.__name__, line))
    finally:
        if path.is_fifo():  # nothing may block on it when the home is removed
            path.unlink()


Case = tuple[str, Callable[[Path, bool], None], list[str]]


def case_id(case: Case) -> str:
    name, condition, line = case
    return f"{name} {condition.__name__} {' '.join(line)}"


# Cases that once failed: by waiting forever, with a traceback, or with a wrong message.
SAMPLE: list[Case] = [
    ("model_states", pipe, ["history", "rm", "--all", "-y"]),
    ("typed_lines", pipe, ["history", "rm", "--all", "-y"]),
    ("safe mode", pipe, ["ask", "say hello"]),
    ("config_file", pipe, ["config", "set", "queue", "9"]),
    ("log", pipe, ["logs"]),
    ("socket", dangling, ["ask", "say hello"]),
    ("lock", pipe, ["ask", "say hello"]),
]
ALL: list[Case] = list(itertools.product((*PLACES, *MORE), CONDITIONS, COMMANDS))


@pytest.mark.parametrize(
    "case", ALL if os.environ.get("LOCALSPEC_TEST_PLACES") == "all" else SAMPLE, ids=case_id
)
def test_any_obstacle_is_handled_or_explained(home: Home, case: Case) -> None:
    home.use_fake()
    check_case(home, *case)


@pytest.mark.parametrize(
    ("root", "line"),
    [
        *(("/proc/localspec", line) for line in [*FEW_COMMANDS, ["list"], ["status"]]),
        ("/dev/null/localspec", FEW_COMMANDS[0]),
    ],
)
def test_a_home_that_cannot_be_created_is_explained(home: Home, root: str, line: list[str]) -> None:
    home.use_fake()
    home.environment["LOCALSPEC_HOME"] = root
    assert_works_or_explains(home.run(*line), (root, line))


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("line", [*FEW_COMMANDS[:2], ["config", "set", "queue", "9"]], ids=" ".join)
def test_a_full_disk_is_explained(home: Home, line: list[str]) -> None:
    home.use_fake()
    run = home.run(*line, preexec_fn=limit_files)
    assert_works_or_explains(run, line)
    if line[0] == "ask":
        assert run.stdout == "hello\n"


def test_a_full_disk_leaves_no_partial_token(home: Home) -> None:
    home.use_fake()
    line = ["start", "--listen", "127.0.0.1:0"]
    run = home.run(*line, preexec_fn=limit_files)
    assert run.returncode == 3
    assert "cannot be written" in run.stderr
    state = home.root / "state"
    assert not [path for path in state.iterdir() if "token" in path.name]
    (state / "token").touch(mode=0o600)  # as written by earlier versions
    assert home.run(*line).returncode == 0
    assert len((state / "token").read_text().strip()) == 64
    assert (state / "token").stat().st_mode & 0o777 == 0o600


def test_a_missing_runtime_folder_is_created(home: Home) -> None:
    """The daemon must not find it too open, or it would listen elsewhere."""
    home.use_fake()
    del home.environment["LOCALSPEC_HOME"]
    home.root.chmod(0o700)
    for name in ("CONFIG_HOME", "DATA_HOME", "STATE_HOME", "CACHE_HOME"):
        home.environment[f"XDG_{name}"] = str(home.root / name)
    home.environment["XDG_RUNTIME_DIR"] = str(home.root / "run" / "one/more")
    run = home.run("ask", "say hello")
    assert (run.returncode, run.stdout) == (0, "hello\n"), run.stderr
    assert home.run("stop").returncode == 0


def test_a_deleted_working_folder_is_explained(home: Home) -> None:
    gone = home.root / "gone"
    gone.mkdir()
    home.environment["LOCALSPEC_HOME"] = "relative"
    program = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m localspec status"
    run = subprocess.run(
        ["/bin/sh", "-c", program], env=home.environment, capture_output=True, text=True
    )
    assert_works_or_explains(run, "a folder that is gone")


@pytest.mark.parametrize(
    ("length", "line"),
    [
        (80, FEW_COMMANDS[0]),
        (104, FEW_COMMANDS[0]),
        (4000, FEW_COMMANDS[0]),
        (4000, FEW_COMMANDS[2]),
    ],
)
def test_a_long_path_works_or_is_explained(home: Home, length: int, line: list[str]) -> None:
    home.use_fake()
    root = str(home.root)
    while len(root) < length:
        root += "/" + "x" * min(200, length - len(root))
    home.environment["LOCALSPEC_HOME"] = root
    try:
        assert_works_or_explains(home.run(*line), (length, line))
    finally:
        home.run("stop")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_an_inherited_abstract_socket_is_served_beside_ours(home: Home) -> None:
    home.use_fake()
    name = f"\0{home.root}/abstract"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        number = listening.fileno()
        program = (
            f"import os, sys; os.dup2({number}, 3) if {number} != 3 else os.set_inheritable(3, True)\n"
            "os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'localspec.daemon'])"
        )
        daemon = RunningDaemon(home, program, pass_fds=[number])
        assert home.status()["pid"] == daemon.pid
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"200" in wait_for(lambda: client.recv(1000), "an answer")
        assert daemon.stop() == 0
