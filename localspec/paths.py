"""The folders and files of one user. Only this module decides where they are.

`LOCALSPEC_HOME` moves all of them under one folder. Otherwise platformdirs gives the conventions of the
platform. Its runtime directory falls back to a shared temporary folder and sets no mode, so
`make_private_directory` creates folders as 0700 and refuses those of other users.
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

# Bytes. sun_path holds 104 bytes on macOS (108 on Linux), including the final NUL.
MAX_SOCKET_PATH_BYTES = 103

# The environment variables that name the folders where other programs keep models.
MODEL_FOLDER_VARIABLES = (
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "LLAMA_CACHE", "OLLAMA_MODELS"),
    *("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"),
)


def split_model_names(name: str) -> list[str]:
    """Split "TARGET,DRAFT" into the two names; a name without a draft is returned alone.

    A comma may also be part of a file name, so the name is split where both parts exist.
    """
    parts = name.split(",")
    if len(parts) == 1 or _looks_like_model(name):
        return [name]
    for index in range(1, len(parts)):
        target, draft = ",".join(parts[:index]), ",".join(parts[index:])
        if _looks_like_model(target) and _looks_like_model(draft):
            return [target, draft]
    return parts


def _looks_like_model(name: str) -> bool:
    """Return whether a name is an existing file or has the form of an Ollama name."""
    if ":" in name and "," not in name and not name.startswith(("/", "~", ".")):
        return True
    return os.path.isfile(os.path.expanduser(name))  # noqa: PTH111, PTH113 - never raise


def expand_user(name: str) -> Path:
    """Return the path with `~` and `~user` expanded. The name of an unknown user stays as it is.

    `Path.expanduser` raises RuntimeError for it.
    """
    return Path(os.path.expanduser(name))  # noqa: PTH111


class Paths(NamedTuple):
    """The folders of one user. Reading a path creates nothing."""

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
        """The record of how the previous daemon ended."""
        return self.state / "daemon.json"

    @property
    def token(self) -> Path:
        """The bearer token for TCP. It is not in the config folder, which people publish."""
        return self.state / "token"

    @property
    def typed_lines(self) -> Path:
        """The lines typed in chats, which the arrow keys recall in the next chat."""
        return self.state / "chat_history"

    @property
    def unsaved_notice(self) -> Path:
        """The reason why the newest answer is not in the history, whose disk may be full."""
        return self.runtime / "not-saved"

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"

    @property
    def user_catalogue(self) -> Path:
        return self.config / "models.toml"

    @property
    def model_states(self) -> Path:
        """The saved model states of conversations: large, and only costly in time to compute again."""
        return self.cache / "conversations"

    @property
    def unfinished_pulls(self) -> Path:
        """The list of pulls that resume when the daemon starts."""
        return self.state / "pulls.json"

    @property
    def store(self) -> Path:
        return self.data / "models"

    @property
    def tuned(self) -> Path:
        """The drafts that were trained on this user's conversations."""
        return self.data / "tuned"


def default_paths() -> Paths:
    """Return the folders for this user and environment. Raises UnsafePath if none is safe for the socket."""
    home = os.environ.get("LOCALSPEC_HOME")
    if home:
        root = Path(home).absolute()
        return Paths(root / "run", root / "config", root / "data", root / "state", root / "cache")
    import warnings

    import platformdirs  # takes 20 ms and is not needed with LOCALSPEC_HOME

    try:
        with warnings.catch_warnings():
            # It warns if XDG_RUNTIME_DIR is not set, as in most containers; its fallback is fine.
            warnings.simplefilter("ignore")
            runtime = platformdirs.user_runtime_dir("localspec", appauthor=False)
    except PermissionError as error:
        raise UnsafePath(f"There is no safe folder for the socket: {error}.") from error
    kinds = ("config", "data", "state", "cache")
    folders = (getattr(platformdirs, f"user_{kind}_dir") for kind in kinds)
    return Paths(Path(runtime), *(Path(find("localspec", appauthor=False)) for find in folders))


def hf_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the Hugging Face cache.

    It follows the rules of huggingface_hub, without the cost of importing it.
    """
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return _expand(environ[variable], environ)
    home = environ.get("HF_HOME")
    if not home:
        home = f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return _expand(home, environ) / "hub"


def _expand(path: str, environ: Mapping[str, str]) -> Path:
    """Return the path with its variables and `~` replaced by their values in `environ`."""
    if (path == "~" or path.startswith("~/")) and environ.get("HOME"):
        path = environ["HOME"] + path[1:]
    if "$" in path:
        from string import Template

        path = Template(path).safe_substitute(environ)
    return expand_user(path)


def make_private_directory(path: Path) -> Path:
    """Create `path` as 0700, or check that it is a directory of this user that nobody else may enter.

    Raises UnsafePath if it is a symbolic link, not a directory, another user's, or open to others.
    """
    try:
        # Missing parents become 0700 too, whatever the umask is. One of them may be XDG_RUNTIME_DIR, and
        # if that is open to others, platformdirs chooses another folder in the next process.
        for folder in reversed([folder for folder in (path, *path.parents) if not folder.is_dir()]):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
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


def open_file(path: str | Path, flags: int) -> int:
    """Open a regular file and return its descriptor. A file that is created is readable by its owner only.

    A pipe in the file's place is refused without waiting for its other end. Raises OSError if it cannot be
    opened or is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return descriptor


def read_file(path: Path, flags: int = 0) -> bytes:
    """Read a whole small file. `flags` are further ones for open(2). Raises OSError as `open_file`."""
    with os.fdopen(open_file(path, os.O_RDONLY | flags), "rb") as file:
        return file.read()


def read_private_file(path: Path) -> bytes:
    """Read a whole small file. Raises PermissionError if others may read or write it, and as `read_file`."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise PermissionError(errno.EACCES, "it is open to other users", str(path))
        return file.read()


def remove_tree(path: Path) -> None:
    """Delete a folder and its content, or the file in its place. Failures are ignored."""
    import shutil  # imported late, since most commands do not need it

    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:  # rmtree would block on a pipe
            path.unlink()


def check_socket_path(path: Path) -> Path:
    """Return `path` if the operating system accepts a socket path of that length. Raises UnsafePath."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise UnsafePath(
            f"The socket path {path} is {length} bytes long and the limit is {MAX_SOCKET_PATH_BYTES}; "
            "set LOCALSPEC_HOME (or XDG_RUNTIME_DIR) to a shorter folder."
        )
    return path
