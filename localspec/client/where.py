"""Where the daemon's socket is, found without pathlib and platformdirs, whose imports cost 30 ms.

Only the two cases that need no thought are decided here; `paths.default_paths` decides the others,
and a test holds both to the same answer.
"""

# ruff: noqa: PTH100, PTH118 - pathlib is what is avoided here
from __future__ import annotations

import os
import stat
import sys

_MAX = 103  # paths.MAX_SOCKET_PATH


def socket_path() -> str:
    """The path of this user's socket.

    Raises:
        UnsafePath: longer than the operating system takes.
    """
    path = _plainly()
    if path is None or len(os.fsencode(path)) > _MAX:
        from localspec import paths

        return str(paths.check_socket_path(paths.default_paths().socket))
    return path


def _plainly() -> str | None:
    home = os.environ.get("LOCALSPEC_HOME")
    if home:
        return os.path.join(os.path.abspath(home), "run", "localspec.sock")
    if sys.platform != "linux":
        return None
    standard = f"/run/user/{os.getuid()}"
    if os.environ.get("XDG_RUNTIME_DIR") != standard:
        return None
    try:
        info = os.lstat(standard)
    except OSError:
        return None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        return None
    return os.path.join(standard, "localspec", "localspec.sock")
