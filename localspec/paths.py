"""Where things live. One place decides; `LOCALSPEC_HOME` moves everything under one folder.

Platform conventions come from platformdirs. Its runtime directory falls back to a shared temporary
folder and sets no mode, so `private_directory` creates 0700 and refuses what is not ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from localspec.errors import UnsafePath

# sun_path holds 104 bytes on macOS (108 on Linux), the final NUL among them.
MAX_SOCKET_PATH = 103


# The variables that say where other programs keep their models.
MODEL_PLACES = (
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "LLAMA_CACHE", "OLLAMA_MODELS"),
    *("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"),
)


def model_files(name: str) -> list[str]:
    """Split "TARGET,DRAFT" into the two names; one without a draft stays as it is.

    A comma may also be part of a file's name: then the name is split where both parts are there.
    """
    parts = name.split(",")
    if len(parts) == 1 or _is_model(name):
        return [name]
    for at in range(1, len(parts)):
        target, draft = ",".join(parts[:at]), ",".join(parts[at:])
        if _is_model(target) and _is_model(draft):
            return [target, draft]
    return parts


def _is_model(name: str) -> bool:
    """Return whether a name is a file that is there, or may be one of Ollama's."""
    if ":" in name and "," not in name and not name.startswith(("/", "~", ".")):
        return True
    return os.path.isfile(os.path.expanduser(name))  # noqa: PTH111, PTH113 - never raise


class Paths(NamedTuple):
    """The folders of one user. Nothing is created by looking."""

    runtime: Path
    config: Path
    data: Path
    state: Path
    cache: Path

    @property
    def socket(self) -> Path:
        return self.runtime / "localspec.sock"

    @property
    def lock(self) -> Path:
        return self.runtime / "daemon.lock"

    @property
    def log(self) -> Path:
        return self.state / "daemon.log"

    @property
    def last_run(self) -> Path:
        """How the daemon that ran last ended."""
        return self.state / "daemon.json"

    @property
    def token(self) -> Path:
        """The bearer token for TCP; not in the config folder, which people publish."""
        return self.state / "token"

    @property
    def typed_lines(self) -> Path:
        """What was typed in chats, for the arrow keys in the next one."""
        return self.state / "chat_history"

    @property
    def not_saved(self) -> Path:
        """Why the newest answer is not in the history; not beside that, whose disk may be full."""
        return self.runtime / "not-saved"

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"

    @property
    def user_catalogue(self) -> Path:
        return self.config / "models.toml"

    @property
    def states(self) -> Path:
        """What the models remember of conversations: large, and only a matter of time to get anew."""
        return self.cache / "conversations"

    @property
    def unfinished_pulls(self) -> Path:
        """Which pulls go on when the daemon starts."""
        return self.state / "pulls.json"

    @property
    def store(self) -> Path:
        return self.data / "models"


def default_paths() -> Paths:
    """The folders for this user and environment."""
    home = os.environ.get("LOCALSPEC_HOME")
    if home:
        root = Path(home).absolute()
        return Paths(root / "run", root / "config", root / "data", root / "state", root / "cache")
    import warnings

    import platformdirs  # 20 ms: not needed where LOCALSPEC_HOME decides

    try:
        with warnings.catch_warnings():
            # It warns when XDG_RUNTIME_DIR is not set, as in any container; the fallback will do.
            warnings.simplefilter("ignore")
            runtime = platformdirs.user_runtime_dir("localspec", appauthor=False)
    except PermissionError as error:
        raise UnsafePath(f"There is no safe folder for the socket: {error}.") from error
    return Paths(
        Path(runtime),
        Path(platformdirs.user_config_dir("localspec", appauthor=False)),
        Path(platformdirs.user_data_dir("localspec", appauthor=False)),
        Path(platformdirs.user_state_dir("localspec", appauthor=False)),
        Path(platformdirs.user_cache_dir("localspec", appauthor=False)),
    )


def hf_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The Hugging Face cache, found as huggingface_hub does, without importing it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return _expanded(environ[variable], environ)
    home = environ.get("HF_HOME")
    if not home:
        home = f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return _expanded(home, environ) / "hub"


def _expanded(path: str, environ: Mapping[str, str]) -> Path:
    """With its variables and `~` as they stand in `environ`."""
    if (path == "~" or path.startswith("~/")) and environ.get("HOME"):
        path = environ["HOME"] + path[1:]
    if "$" in path:
        from string import Template

        path = Template(path).safe_substitute(environ)
    return Path(path).expanduser()


def private_directory(path: Path) -> Path:
    """Create `path` as 0700, or check that it is a directory of ours that nobody else may enter.

    Raises:
        UnsafePath: it is a symbolic link, not a directory, another user's, or open to others.
    """
    try:
        # 0700 for every one above it too, whatever the umask: one of them may be XDG_RUNTIME_DIR, and
        # where a more open one is found, platformdirs leads the next process to another folder.
        for each in reversed([each for each in (path, *path.parents) if not each.is_dir()]):
            with contextlib.suppress(FileExistsError):
                each.mkdir(mode=0o700)
        info = os.lstat(path)
    except OSError as error:
        raise UnsafePath(
            f"The folder {path} cannot be made ({error.strerror}); set LOCALSPEC_HOME to a folder "
            "of yours that can be written."
        ) from error
    if not stat.S_ISDIR(info.st_mode):
        raise UnsafePath(f"{path} is not a directory (a link, perhaps); remove it and try again.")
    if info.st_uid != os.getuid():
        raise UnsafePath(f"{path} belongs to another user (uid {info.st_uid}); set LOCALSPEC_HOME.")
    if info.st_mode & 0o077:
        raise UnsafePath(f"{path} is open to other users; run: chmod 700 {path}")
    return path


def open_file(path: Path, flags: int) -> int:
    """Open a file of ours, made for its owner alone. A pipe in its place is not waited for.

    Raises:
        OSError: it cannot be opened, or is no file.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return handle


def read_file(path: Path, flags: int = 0) -> bytes:
    """A small file of ours, whole; `flags` beside reading, as O_NOFOLLOW.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    with os.fdopen(open_file(path, os.O_RDONLY | flags), "rb") as file:
        return file.read()


def read_private_file(path: Path) -> bytes:
    """Read a small file that is closed to all but its owner.

    Raises:
        PermissionError: others may read or write it. OSError: it cannot be read, or is no file.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise PermissionError(errno.EACCES, "it is open to other users", str(path))
        return file.read()


def remove_tree(path: Path) -> None:
    """Delete a folder of ours with all that is in it, or what lies in its place; as far as we may."""
    import shutil  # not needed on the way to the first word

    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:  # rmtree would wait at a pipe
            path.unlink()


def check_socket_path(path: Path) -> Path:
    """Refuse a socket path the operating system would cut.

    Raises:
        UnsafePath: longer than MAX_SOCKET_PATH bytes.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise UnsafePath(
            f"The socket path {path} is {length} bytes long and the limit is {MAX_SOCKET_PATH}; "
            "set LOCALSPEC_HOME (or XDG_RUNTIME_DIR) to a shorter folder."
        )
    return path
