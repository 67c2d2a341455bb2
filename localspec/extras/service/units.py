"""The daemon as a service of the operating system: units for systemd, an agent for launchd.

systemd creates the socket at login and starts the daemon at the first request. launchd cannot hand a socket
to a plain program, so it starts the daemon itself at login.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.errors import LocalspecError, UsageError, replace_control_characters
from localspec.files import write_atomically

LABEL = "org.localspec.daemon"
_COMMAND = (sys.executable, "-P", "-m", "localspec.daemon")
# Variables that locate localspec's folders. The service manager does not read the files of a login shell.
_XDG_VARIABLES = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
_PATH_VARIABLES = ("LOCALSPEC_HOME", *_XDG_VARIABLES)
_TIMEOUT_S = 60.0  # `enable --now` may wait until a running daemon has finished its answers


def manager(socket: Path, *, always: bool) -> Systemd | Launchd:
    """Return the service manager of this operating system.

    `socket` is the daemon's socket. With `always` the daemon starts at once and not at the first request.
    Raises UsageError if a path has characters that no service file can hold.
    """
    environment = {name: os.environ[name] for name in _PATH_VARIABLES if os.environ.get(name)}
    if "LOCALSPEC_HOME" in environment:
        environment["LOCALSPEC_HOME"] = str(Path(environment["LOCALSPEC_HOME"]).absolute())
    for text in (str(socket), *_COMMAND, *environment.values()):
        if any(ord(character) < 0x20 or character == "\x7f" for character in text):
            shown = replace_control_characters(text)
            raise UsageError(f"A path has characters that no service file can hold: {shown}")
    is_mac = sys.platform == "darwin"
    return Launchd(environment) if is_mac else Systemd(socket, environment, always)


@dataclass(frozen=True)
class Systemd:
    """Two user units of systemd: a socket that always exists, and the daemon behind it.

    Both managers have the same methods. `require` raises LocalspecError if the manager is not available, and
    is called before anything is changed. `uninstall` returns False if there was no service. `state` is one
    line for a person.
    """

    socket: Path
    environment: Mapping[str, str]
    always: bool

    @property
    def folder(self) -> Path:
        base = os.environ.get("XDG_CONFIG_HOME", "")
        root = Path(base) if base.startswith("/") else Path.home() / ".config"
        return root / "systemd" / "user"

    def files(self) -> Mapping[Path, str]:
        """Return the contents of the service's files by path."""
        # A dollar begins a variable in a command, but not in Environment=.
        command = " ".join(_quote_word(word).replace("$", "$$") for word in _COMMAND)
        settings = (_quote_word(f"{name}={value}") for name, value in self.environment.items())
        environment = "".join(f"Environment={setting}\n" for setting in settings)
        path = _escape_percent(str(self.socket))
        return {
            self.folder / "localspec.socket": _SOCKET_UNIT.format(path=path),
            self.folder / "localspec.service": _SERVICE_UNIT.format(
                command=command, environment=environment
            ),
        }

    def require(self) -> None:
        self._systemctl("show", "--property=Version")

    def install(self) -> None:
        _write_files(self.files())
        self._systemctl("daemon-reload")
        units = ["localspec.socket", *["localspec.service"] * self.always]
        self._systemctl("enable", "--now", *units)

    def uninstall(self) -> bool:
        existing = [path for path in self.files() if path.exists()]
        if existing:
            self._systemctl("disable", "--now", *(path.name for path in existing))
            for path in existing:
                path.unlink()
            self._systemctl("daemon-reload")
        return bool(existing)

    def state(self) -> str:
        names = [path.name for path in self.files()]
        if not any((self.folder / name).exists() for name in names):
            return _NOT_INSTALLED
        states = [f"{name} is {_read_output(*_SYSTEMCTL, 'is-active', name)}" for name in names]
        return f"Installed in {self.folder}: {', '.join(states)}."

    def _systemctl(self, *arguments: str) -> None:
        _run(*_SYSTEMCTL, *arguments)


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
            "WorkingDirectory": "/",  # `-m` would import modules from the current folder
            "EnvironmentVariables": dict(self.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ProcessType": "Interactive",
        }
        return {self.file: plistlib.dumps(agent).decode()}

    def require(self) -> None:
        _run("launchctl", "print", self._domain)

    def install(self) -> None:
        _write_files(self.files())
        if self._is_loaded:
            _run("launchctl", "bootout", f"{self._domain}/{LABEL}")
        _run("launchctl", "bootstrap", self._domain, str(self.file))

    def uninstall(self) -> bool:
        existed = self.file.exists()
        if self._is_loaded:
            _run("launchctl", "bootout", f"{self._domain}/{LABEL}")
        self.file.unlink(missing_ok=True)
        return existed

    def state(self) -> str:
        if not self.file.exists():
            return _NOT_INSTALLED
        return f"Installed as {self.file}: {'loaded' if self._is_loaded else 'not loaded'}."

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _is_loaded(self) -> bool:
        return bool(_read_output("launchctl", "print", f"{self._domain}/{LABEL}"))


_SYSTEMCTL = ("systemctl", "--user")
_NOT_INSTALLED = "Not installed. To install it: localspec service install"
_SOCKET_UNIT = """\
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

# KillMode=mixed: the daemon lets answers finish, so the engine must not get its own signal to end.
# OOMPolicy=continue: if the kernel kills the engine, the daemon starts another one.
_SERVICE_UNIT = """\
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


def _write_files(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())


def _escape_percent(text: str) -> str:
    """Return the text with percent signs escaped, with which systemd begins specifiers such as %i."""
    return text.replace("%", "%%")


def _quote_word(word: str) -> str:
    inner = _escape_percent(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


def _run(*command: str) -> None:
    """Run a program of the service manager.

    Raises LocalspecError with the last line of its output if it fails.
    """
    shown = f"`{' '.join(command)}`"
    try:
        process = _capture(command)
    except FileNotFoundError:
        raise LocalspecError(
            f"{command[0]} was not found, so no service can be installed. None is needed: the daemon "
            "starts with the first question. `--print` shows what would be written."
        ) from None
    except subprocess.TimeoutExpired:
        raise LocalspecError(f"{shown} did not finish within {_TIMEOUT_S:.0f} s.") from None
    if process.returncode:
        output_lines = (process.stderr or process.stdout).strip().splitlines()
        reason = output_lines[-1] if output_lines else f"exit status {process.returncode}"
        if "to bus" in reason:  # as after su or sudo, or in a session without systemd
            reason += (
                ". Your session has no service manager: log in directly, or have an administrator run "
                "`loginctl enable-linger` for you. No service is needed: the daemon starts with the "
                "first question"
            )
        raise LocalspecError(f"{shown} failed: {reason}")


def _capture(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
    )


def _read_output(*command: str) -> str:
    """Return the output of a manager's program whatever its exit status, or an empty string."""
    try:
        return _capture(command).stdout.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
