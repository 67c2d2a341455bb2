"""Test `localspec service` with fakes of systemctl and launchctl that log their arguments."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemons import Home, RunningDaemon
from tests.support.patience import PATIENCE

# The fake fails if its arguments contain the word in FAIL; "is-active" has a reply.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$TOLD"
case " $* " in
    *" $FAIL "*) echo "Failed to connect to bus: No medium found" >&2; exit 1 ;;
    *" is-active "*) echo active ;;
    *" print gui/"*"/"*) [ -e "$TOLD.agent" ] && echo there || exit 113 ;;
    *" bootstrap "*) touch "$TOLD.agent" ;;
    *" bootout "*) rm "$TOLD.agent" ;;
esac
"""
MACOS = """
import sys
sys.platform = "darwin"
from localspec.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Machine:
    """A home whose PATH contains only fake programs."""

    def __init__(self, home: Home, *programs: str) -> None:
        self.home = home
        folder = home.root / "bin"
        folder.mkdir()
        for name in programs:
            (folder / name).write_text(FAKE)
            (folder / name).chmod(0o755)
        self._call_log = home.root / "told"
        self.units = home.root / "xdg" / "systemd" / "user"
        home.environment |= {
            "PATH": f"{folder}:/usr/bin:/bin" if programs else str(folder),
            "TOLD": str(self._call_log),
            "HOME": str(home.root),
            "XDG_CONFIG_HOME": str(home.root / "xdg"),
        }

    def take_calls(self) -> list[str]:
        """Return the calls since the last time, and clear the log."""
        lines = self._call_log.read_text().splitlines() if self._call_log.exists() else []
        self._call_log.unlink(missing_ok=True)
        return lines

    def on_macos(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", MACOS, *arguments],
            env=self.home.environment,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def linux(home: Home) -> Machine:
    return Machine(home, "systemctl")


def test_install_writes_two_units_and_enables_the_socket(linux: Machine) -> None:
    run = linux.home.run("service", "install")
    assert (run.returncode, run.stderr) == (0, "")
    assert "localspec.socket is active" in run.stdout
    assert linux.take_calls()[:3] == [
        "systemctl --user show --property=Version",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now localspec.socket",
    ]
    unit = (linux.units / "localspec.socket").read_text()
    assert f"\nListenStream={linux.home.socket}\n" in unit
    assert "\nSocketMode=0600\n" in unit
    service = (linux.units / "localspec.service").read_text()
    assert f'\nExecStart="{sys.executable}" "-P" "-m" "localspec.daemon"\n' in service
    assert f'\nEnvironment="LOCALSPEC_HOME={linux.home.root}"\n' in service
    assert "\nType=notify\n" in service
    assert "\nKillMode=mixed\n" in service


def test_uninstall_removes_only_what_install_wrote(linux: Machine) -> None:
    linux.home.run("service", "install")
    (linux.units / "other.service").write_text("")
    linux.take_calls()
    assert linux.home.run("service", "uninstall", "-y").stdout == "The service has been removed.\n"
    assert linux.take_calls() == [
        "systemctl --user disable --now localspec.socket localspec.service",
        "systemctl --user daemon-reload",
    ]
    assert [path.name for path in linux.units.iterdir()] == ["other.service"]
    assert linux.home.run("service", "uninstall", "-y").stdout == "No service is installed.\n"
    assert linux.home.run("service", "status").stdout == (
        "Not installed. To install it: localspec service install\n"
    )


def test_with_tcp_the_daemon_is_enabled_too(linux: Machine) -> None:
    linux.home.environment["LOCALSPEC_LISTEN"] = "127.0.0.1:0"
    linux.home.run("service", "install")
    assert "systemctl --user enable --now localspec.socket localspec.service" in linux.take_calls()


def test_a_running_daemon_is_replaced_by_the_service(linux: Machine) -> None:
    linux.home.use_fake()
    daemon = RunningDaemon(linux.home)
    assert linux.home.run("service", "install").returncode == 0
    assert daemon.process.wait(timeout=PATIENCE) == 0


def test_print_shows_the_units_and_changes_nothing(linux: Machine) -> None:
    run = linux.home.run("service", "install", "--print")
    assert f"# {linux.units / 'localspec.socket'}\n" in run.stdout
    assert "ExecStart=" in run.stdout
    assert linux.take_calls() == []
    assert not linux.units.exists()


@pytest.mark.parametrize(
    ("programs", "reason"),
    [([], "systemctl was not found"), (["systemctl"], "loginctl enable-linger")],
)
def test_without_a_service_manager_nothing_is_written(
    home: Home, programs: list[str], reason: str
) -> None:
    machine = Machine(home, *programs)
    home.environment["FAIL"] = "show"
    daemon = home.start()
    message = home.refused("service", "install")
    assert reason in message
    assert message.count("\n") == 1
    assert not machine.units.exists()
    assert home.status()["pid"] == daemon.pid  # The daemon is still running.


def test_special_characters_are_quoted_for_systemd(linux: Machine) -> None:
    root = linux.home.root / 'a %i "$b'
    linux.home.environment["LOCALSPEC_HOME"] = str(root)
    run = linux.home.run("service", "install", "--print")
    quoted = f'{linux.home.root}/a %%i \\"$b'
    assert f'\nEnvironment="LOCALSPEC_HOME={quoted}"\n' in run.stdout
    assert f'\nListenStream={linux.home.root}/a %%i "$b/run/localspec.sock\n' in run.stdout


def test_on_macos_an_agent_is_loaded_replaced_and_removed(home: Home) -> None:
    machine = Machine(home, "launchctl")
    domain = f"gui/{os.getuid()}"
    file = home.root / "Library" / "LaunchAgents" / "org.localspec.daemon.plist"
    run = machine.on_macos("service", "install")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == f"Installed as {file}: loaded.\n"
    assert f"launchctl bootstrap {domain} {file}" in machine.take_calls()
    agent = plistlib.loads(file.read_bytes())
    assert agent["ProgramArguments"] == [sys.executable, "-P", "-m", "localspec.daemon"]
    assert agent["EnvironmentVariables"]["LOCALSPEC_HOME"] == str(home.root)
    assert agent["WorkingDirectory"] == "/"

    machine.on_macos("service", "install")
    calls = machine.take_calls()
    assert calls.index(f"launchctl bootout {domain}/org.localspec.daemon") < calls.index(
        f"launchctl bootstrap {domain} {file}"
    )
    assert (
        machine.on_macos("service", "uninstall", "-y").stdout == "The service has been removed.\n"
    )
    assert not file.exists()


def test_units_are_in_the_default_folder_without_xdg(linux: Machine) -> None:
    del linux.home.environment["XDG_CONFIG_HOME"]
    linux.home.run("service", "install")
    assert Path(linux.home.root, ".config/systemd/user/localspec.socket").is_file()
