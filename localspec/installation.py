"""The command that adds packages, or an optional part ("bench", "lsp", "acp"), to this installation.

It names this installation's own Python, or the program that made it. It never is a bare `pip install
'localspec[…]'`: the pip on the PATH is usually another one, and it would look for that name on an index.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

_SETUP = Path(__file__).parents[1] / "scripts" / "setup"


def add_extra(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, as a shell takes it."""
    # scripts/setup keeps what was once asked for; the stamp shows that it made this installation.
    if _SETUP.is_file() and (Path(sys.prefix) / "localspec.stamp").is_file():
        return shlex.join([str(_SETUP), extra])
    return add_packages(*requirements(extra))


def add_packages(*packages: str, dependencies: bool = True) -> str:
    """Return the command that installs packages, without what they depend on if so wanted."""
    flags = [] if dependencies else ["--no-deps"]
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file():
        pip_args = [f"--pip-args={' '.join(flags)}"] if flags else []
        return shlex.join(["pipx", "inject", *pip_args, prefix.name, *packages])
    if find_spec("pip") is None:  # as in what `uv tool install` and `uv venv` make
        uv = ["uv", "pip", "install", "--python", sys.executable]
        return shlex.join([*uv, *flags, *packages])
    return shlex.join([sys.executable, "-m", "pip", "install", *flags, *packages])


def requirements(extra: str) -> list[str]:
    """Return the packages of an extra with the versions that are known to work, as in "pygls>=2.1.1"."""
    from importlib import metadata

    found = []
    for stated in metadata.requires("localspec") or ():
        package, _, marker = stated.partition(";")
        if re.search(rf"\bextra\s*==\s*['\"]{re.escape(extra)}['\"]", marker):
            found.append(re.sub(r"\s", "", package))
    return found
