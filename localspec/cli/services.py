"""The daemon as a service of the system: units for systemd, an agent for launchd.

With systemd the socket is there from login on and the daemon is started by the first request. launchd
has no such hand-over for a plain program, so there the daemon itself is started at login.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from localspec.errors import LocalspecError, UsageError, visible
from localspec.files import write_whole

LABEL = "org.localspec.daemon"
_COMMAND = (sys.executable, "-P", "-m", "localspec.daemon")
# Where things are: the manager does not know what a login shell was told.
_PLACES = (
    "LOCALSPEC_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "XDG_CACHE_HOME",
)
_PATIENCE = 60.0  # seconds; `enable --now` waits for a drain at worst


class Manager(Protocol):
    """What starts the daemon here."""

    def files(self) -> Mapping[Path, str]:
        """What it needs to know, by the path where it looks for it."""

    def require(self) -> None:
        """Raise LocalspecError when it does not run here; before anything is changed."""

    def install(self) -> None:
        """Write the files and use them."""

    def uninstall(self) -> bool:
        """Stop and forget the service; False when there was none."""

    def state(self) -> str:
        """One line for a person."""


def manager(socket: Path, *, always: bool) -> Manager:
    """This system's. `socket` is where the daemon listens; `always`: do not wait for a request."""
    environment = {name: os.environ[name] for name in _PLACES if os.environ.get(name)}
    if "LOCALSPEC_HOME" in environment:
        environment["LOCALSPEC_HOME"] = str(Path(environment["LOCALSPEC_HOME"]).absolute())
    for text in (str(socket), *_COMMAND, *environment.values()):
        if any(ord(character) < 0x20 or character == "\x7f" for character in text):
            raise UsageError(
                f"A path has characters that no service file can hold: {visible(text)}"
            )
    if sys.platform == "darwin":
        return Launchd(environment)
    return Systemd(socket, environment, always)


@dataclass(frozen=True)
class Systemd:
    """Two user units: a socket that is always there, and the daemon behind it."""

    socket: Path
    environment: Mapping[str, str]
    always: bool

    @property
    def folder(self) -> Path:
        base = os.environ.get("XDG_CONFIG_HOME", "")
        root = Path(base) if base.startswith("/") else Path.home() / ".config"
        return root / "systemd" / "user"

    def files(self) -> Mapping[Path, str]:
        return {
            self.folder / "localspec.socket": _SOCKET.format(path=_literal(str(self.socket))),
            self.folder / "localspec.service": _SERVICE.format(
                # In a command, but not in Environment=, a dollar is the beginning of a variable.
                command=" ".join(_quoted(word).replace("$", "$$") for word in _COMMAND),
                environment="".join(
                    f"Environment={_quoted(f'{name}={value}')}\n"
                    for name, value in self.environment.items()
                ),
            ),
        }

    def require(self) -> None:
        self._systemctl("show", "--property=Version")

    def install(self) -> None:
        for path, text in self.files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
        self._systemctl("daemon-reload")
        units = ["localspec.socket", *(["localspec.service"] if self.always else [])]
        self._systemctl("enable", "--now", *units)

    def uninstall(self) -> bool:
        there = [path for path in self.files() if path.exists()]
        if there:
            self._systemctl("disable", "--now", *(path.name for path in there))
            for path in there:
                path.unlink()
            self._systemctl("daemon-reload")
        return bool(there)

    def state(self) -> str:
        if not any(path.exists() for path in self.files()):
            return "Not installed. To install it: localspec service install"
        states = [
            f"{path.name} is {_output('systemctl', '--user', 'is-active', path.name)}"
            for path in self.files()
        ]
        return f"Installed in {self.folder}: {', '.join(states)}."

    def _systemctl(self, *arguments: str) -> None:
        _run("systemctl", "--user", *arguments)


@dataclass(frozen=True)
class Launchd:
    """An agent that runs the daemon while its user is logged in."""

    environment: Mapping[str, str]

    @property
    def file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def files(self) -> Mapping[Path, str]:
        agent = {
            "Label": LABEL,
            "ProgramArguments": list(_COMMAND),
            "WorkingDirectory": "/",  # `-m` would import from the folder it is started in
            "EnvironmentVariables": dict(self.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ProcessType": "Interactive",
        }
        return {self.file: plistlib.dumps(agent).decode()}

    def require(self) -> None:
        _run("launchctl", "print", self._domain)

    def install(self) -> None:
        for path, text in self.files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
        if self._known:
            _run("launchctl", "bootout", f"{self._domain}/{LABEL}")
        _run("launchctl", "bootstrap", self._domain, str(self.file))

    def uninstall(self) -> bool:
        there = self.file.exists()
        if self._known:
            _run("launchctl", "bootout", f"{self._domain}/{LABEL}")
        self.file.unlink(missing_ok=True)
        return there

    def state(self) -> str:
        if not self.file.exists():
            return "Not installed. To install it: localspec service install"
        return f"Installed as {self.file}: {'loaded' if self._known else 'not loaded'}."

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _known(self) -> bool:
        return bool(_output("launchctl", "print", f"{self._domain}/{LABEL}"))


_SOCKET = """\
# Written by `localspec service install`.
[Unit]
Description=Socket of localspec, a local assistant

[Socket]
ListenStream={path}
SocketMode=0600
DirectoryMode=0700

[Install]
WantedBy=sockets.target
"""

# mixed: the daemon lets answers finish, so the engine must not be told to end beside it.
# OOMPolicy: the kernel may end the engine; the daemon starts another one.
_SERVICE = """\
# Written by `localspec service install`.
[Unit]
Description=localspec, a local assistant
Requires=localspec.socket
After=localspec.socket

[Service]
Type=notify
ExecStart={command}
WorkingDirectory=/
{environment}KillMode=mixed
OOMPolicy=continue
Restart=on-failure
NoNewPrivileges=yes

[Install]
WantedBy=default.target
Also=localspec.socket
"""


def _literal(text: str) -> str:
    """Without meaning to systemd, which puts values in for %i and the like."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """One word, as systemd reads it."""
    inner = _literal(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


def _run(*command: str) -> None:
    """Run a manager's program; what it says when it fails is the reason."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
        )
    except FileNotFoundError:
        raise LocalspecError(
            f"{command[0]} was not found, so no service can be installed. None is needed: the daemon "
            "starts with the first question. `--print` shows what would be written."
        ) from None
    except subprocess.TimeoutExpired:
        raise LocalspecError(
            f"`{' '.join(command)}` did not finish within {_PATIENCE:.0f} s."
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        reason = said[-1] if said else f"exit status {done.returncode}"
        raise LocalspecError(f"`{' '.join(command)}` failed: {reason}")


def _output(*command: str) -> str:
    """What a manager's program says about a state, whatever its exit status; "" without one."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
