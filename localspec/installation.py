"""The command that adds packages, or an extra ("lsp", "acp", …), to this installation.

The command names this installation's own Python, or the program that created it. It is never a bare `pip
install 'localspec[…]'`: the pip on the PATH usually belongs to another installation and would look for
that name on an index.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

_SETUP_SCRIPT = Path(__file__).parents[1] / "scripts" / "setup"


def install_extra_command(extra: str) -> str:
    """Return the shell command that installs an extra of pyproject.toml."""
    # The stamp shows that scripts/setup created this installation; that script keeps earlier extras.
    if _SETUP_SCRIPT.is_file() and (Path(sys.prefix) / "localspec.stamp").is_file():
        return shlex.join([str(_SETUP_SCRIPT), extra])
    return install_packages_command(*extra_requirements(extra))


def install_packages_command(*packages: str, dependencies: bool = True) -> str:
    """Return the shell command that installs packages, and with `dependencies` what they depend on."""
    flags = [] if dependencies else ["--no-deps"]
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file():
        pip_args = [f"--pip-args={' '.join(flags)}"] if flags else []
        return shlex.join(["pipx", "inject", *pip_args, prefix.name, *packages])
    if find_spec("pip") is None:  # `uv tool install` and `uv venv` install no pip
        uv = ["uv", "pip", "install", "--python", sys.executable]
        return shlex.join([*uv, *flags, *packages])
    return shlex.join([sys.executable, "-m", "pip", "install", *flags, *packages])


def extra_requirements(extra: str) -> list[str]:
    """Return the packages of an extra with the versions that are known to work ("pygls>=2.1.1")."""
    from importlib import metadata

    packages = []
    for requirement in metadata.requires("localspec") or ():
        package, _, marker = requirement.partition(";")
        if re.search(rf"\bextra\s*==\s*['\"]{re.escape(extra)}['\"]", marker):
            packages.append(re.sub(r"\s", "", package))
    return packages
