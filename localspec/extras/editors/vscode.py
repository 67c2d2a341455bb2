"""Pack the extension for VS Code and its forks, and have their own programs install it.

The packed extension loads its code from the installed package, so upgrading localspec upgrades it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import localspec
from localspec.errors import LocalspecError
from localspec.extras.editors import plugin
from localspec.paths import default_paths, make_private_directory

# They know best where their editor, which may be at the other end of a connection, keeps its extensions.
_PROGRAMS = (
    "code code-insiders code-oss codium cursor windsurf code-server openvscode-server".split()
)
_MAC_PROGRAM = "/Applications/Visual Studio Code.app/Contents/Resources/app/bin/code"
_SOURCE = Path(__file__).resolve().parent / "vscode"
_MAIN = """\
// Written by `localspec editor install vscode`; `localspec editor uninstall vscode` removes it.
const [folder, command] = %s;
exports.activate = (context) => {
  const vscode = require("vscode");
  if (require("fs").existsSync(folder)) return require(folder + "/extension.js")(vscode, context, command);
  vscode.window.showWarningMessage(`${folder} is gone; run: localspec editor install vscode`);
};
"""


def file(_: str) -> Path:
    """Return where the packed extension lies while it is installed."""
    return default_paths().data / "localspec.vsix"


def text(_: str) -> str:
    """Return the code of the packed extension."""
    return _MAIN % json.dumps([str(_SOURCE), [sys.executable, "-P", "-m", "localspec"]])


def install(editor: str) -> Path:
    """Pack the extension and have it installed. Raises LocalspecError if none is here, or one refuses."""
    path, package = file(editor), json.loads((_SOURCE / "package.json").read_text(encoding="utf-8"))
    with plugin.explained(path, "written"):
        make_private_directory(path.parent)
        with zipfile.ZipFile(path, "w") as archive:
            package["version"] = localspec.__version__
            archive.writestr("extension/package.json", json.dumps(package))
            archive.writestr("extension/main.js", text(editor))
    if not _run_all("--install-extension", str(path), "--force"):
        names, cure = (
            ", ".join(_PROGRAMS[:4]),
            f'choose "Install from VSIX" among its extensions, and {path}',
        )
        raise LocalspecError(f"None of {names}, … is on the PATH. In the editor, {cure}.")
    return path


def uninstall(editor: str) -> Path | None:
    """Remove the extension; None if it was never installed. Raises LocalspecError if an editor refuses."""
    path = file(editor)
    if not path.exists():
        return None
    _run_all("--uninstall-extension", "localspec.localspec")
    with plugin.explained(path, "removed"):
        path.unlink()
    return path


def _run_all(*arguments: str) -> list[str]:
    """Run the programs that are here, and return them. Raises LocalspecError if one fails."""
    programs = [found for name in (*_PROGRAMS, _MAC_PROGRAM) if (found := shutil.which(name))]
    for program in programs:
        command = [program, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if run.returncode and "is not installed" not in run.stderr + run.stdout:
            raise LocalspecError(f"{program}: {(run.stderr or run.stdout).strip()}")
    return programs
