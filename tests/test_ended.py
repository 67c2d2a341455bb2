"""How the previous daemon ended, as `status` reports it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec import ended
from tests.support.daemons import Home, alive, wait_for


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGTERM, "was stopped at"),
        (signal.SIGKILL, "was killed."),
        (signal.SIGSEGV, "crashed (Segmentation fault); where is in"),
        (signal.SIGABRT, "crashed (Aborted); where is in"),
    ],
)
def test_status_says_how_the_daemon_ended(number: signal.Signals, message: str, home: Home) -> None:
    daemon = home.start()
    assert "The previous daemon" not in home.run("status").stdout
    os.kill(daemon.pid, number)
    daemon.process.communicate()
    assert not alive(daemon.pid)
    run = home.run("status")
    assert run.returncode == 3
    first_line, last_line, *_ = run.stderr.splitlines()
    assert first_line == "localspec: No daemon is running; start one with: localspec start"
    assert last_line.startswith(f"The previous daemon (pid {daemon.pid}, started ")
    assert message in run.stderr


def test_status_reports_the_bug_that_ended_a_daemon(home: Home) -> None:
    home.use_fake()
    program = (
        "from localspec.daemon import lifecycle, __main__ as main\n"
        "async def run(self): raise KeyError('lost')\n"
        "lifecycle.Daemon.run = run\n"
        "main.main()"
    )
    home.spawn_daemon(program).communicate()
    assert "This is a bug in localspec (KeyError: 'lost')" in home.run("status").stderr


def test_wrong_arguments_are_no_bug(home: Home) -> None:
    home.use_fake()
    program = (
        "import sys\nfrom localspec.daemon import __main__ as main\nsys.argv = ['x', '--bogus']\n"
        "main.main()"
    )
    process = home.spawn_daemon(program)
    process.communicate()
    assert process.returncode != 0
    assert "bug in localspec" not in home.run("status").stderr


def test_status_reports_why_a_daemon_could_not_start(home: Home) -> None:
    home.use_fake()
    home.socket.mkdir(parents=True)
    home.socket.parent.chmod(0o700)
    assert home.run("start").returncode == 3
    home.socket.rmdir()
    assert "is not a socket; remove it and try again." in home.run("status").stderr


def test_a_daemon_that_is_starting_was_not_killed(home: Home) -> None:
    home.use_fake()
    program = (
        "import time\nfrom localspec.daemon import __main__ as main\nbegin = main.ended.record_start\n"
        "def slow(file): begin(file); time.sleep(600)\nmain.ended.record_start = slow\nmain.main()"
    )
    process = home.spawn_daemon(program)
    wait_for((home.root / "state" / "daemon.json").exists, "its beginning")
    assert "killed" not in home.run("status").stderr
    process.kill()
    process.communicate()
    assert "was killed" in home.run("status").stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boot": "another"}, "ended with the machine"),
        ({"oom_kills": -1}, "ended processes for want of memory"),
        ({"boot": "", "oom_kills": None}, "was killed"),
        ({"ended": 1.0, "why": "It was tired."}, "ended at 1970-01-01 "),
    ],
)
def test_the_end_is_derived_from_the_recorded_start(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "daemon.json"
    run = {"pid": 1, "started": 0.0, "boot": ended._read_boot_id(), "oom_kills": 1 << 60}
    file.write_text(json.dumps({**run, **changes}))
    assert message in ended.describe_last_end(file)


@given(
    st.binary(max_size=60)
    | st.dictionaries(
        st.sampled_from(["pid", "started", "ended", "boot", "oom_kills", "why"]),
        st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none()),
    ).map(lambda run: json.dumps(run).encode())
)
def test_any_content_of_the_file_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "daemon.json"
    file.write_bytes(data)
    assert isinstance(ended.describe_last_end(file), str)
