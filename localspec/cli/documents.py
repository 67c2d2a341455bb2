"""The text of Jupyter notebooks and of PDF documents, and the text files in a folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localspec.cli.terminal import render
from localspec.errors import UsageError
from localspec.files import format_size
from localspec.installation import install_extra_command

_MAX_OUTPUT_CHARACTERS = 2000  # of a cell's output


def notebook_text(name: str, data: str) -> str:
    """Return the cells of a Jupyter notebook in order, with the output of code cells.

    Raises:
        UsageError: `data` is not a notebook of format 4.
    """
    try:
        notebook = json.loads(data)
        cells, metadata = notebook["cells"], notebook.get("metadata") or {}
        language = _join_lines((metadata.get("language_info") or {}).get("name"))
        return "\n\n".join(filter(None, (_format_cell(cell, language) for cell in cells)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{name} is not a Jupyter notebook of format 4; to ask about it as it is: "
            f"localspec ask … < {name}"
        ) from error


def _format_cell(cell: dict[str, Any], language: str) -> str:
    source = _join_lines(cell.get("source")).strip("\n")
    if cell["cell_type"] != "code":
        return source
    parts = [f"```{language}\n{source}\n```"] if source else []
    for output in cell.get("outputs") or []:
        data = output.get("data") or {}
        failure = f"{output.get('ename')}: {output.get('evalue')}" if "ename" in output else ""
        printed = _join_lines(output.get("text")) or _join_lines(data.get("text/plain")) or failure
        if printed := re.sub(r"\x1b\[[0-9;]*m", "", printed).strip("\n"):
            ellipsis = "…" if len(printed) > _MAX_OUTPUT_CHARACTERS else ""
            parts.append(f"Output:\n```\n{printed[:_MAX_OUTPUT_CHARACTERS]}{ellipsis}\n```")
    return "\n".join(parts)


def _join_lines(value: object) -> str:
    """Return a text, which notebooks may also store as a list of lines."""
    if isinstance(value, list):
        return "".join(line for line in value if isinstance(line, str))
    return value if isinstance(value, str) else ""


_PDFTOTEXT_TIMEOUT_S = 60.0


def pdf_text(name: str, data: bytes | None = None) -> str:
    """Return the text of a PDF document, as extracted by pdftotext: of `data`, or else of the file.

    Raises UsageError if pdftotext is not installed, cannot read the document, or finds no text in it.
    """
    path = str(Path(name).absolute()) if data is None else "-"
    command = ["pdftotext", "-layout", "-enc", "UTF-8", path, "-"]
    try:
        result = subprocess.run(
            command, input=data or b"", capture_output=True, timeout=_PDFTOTEXT_TIMEOUT_S
        )
    except FileNotFoundError:
        raise UsageError(
            f"{name} is a PDF document, and pdftotext, which reads them, is not installed; it is in the "
            "package poppler-utils (macOS: brew install poppler). For `ask -f`, this does as well: "
            f"{install_extra_command('pictures')}"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{name}: pdftotext does not work: {error}.") from error
    if result.returncode:
        reasons = result.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = reasons[-1] if reasons else "no reason is given"
        raise UsageError(f"{name} is a PDF document that pdftotext cannot read: {reason}")
    content = result.stdout.decode("utf-8", "replace").replace("\f", "\n\n").strip()
    if not content:
        raise UsageError(
            f"{name} is a PDF document without text, of scanned pages perhaps; ocrmypdf adds their text."
        )
    return content


_MAX_FILE_BYTES = 256 << 10  # a larger file is probably data
_MAX_TOTAL_BYTES = 4 << 20  # no context holds more
_GIT_TIMEOUT_S = 60.0
# Folders of generated files. They are left out only if git cannot list the files itself.
_GENERATED_FOLDERS = {"node_modules", "__pycache__", "venv", "target", "build", "dist"}


def list_text_files(folder: str) -> list[str]:
    """Return the text files in a folder and below it, and summarize them on stderr.

    Files that git ignores, hidden files and very large ones are left out. Raises UsageError if there are
    none, or more than any context holds.
    """
    files, omitted, total = list[str](), dict[str, list[str]](), 0
    for name in _list_with_git(folder) or _walk(folder):
        path = Path(folder, name)
        if any(part.startswith(".") for part in Path(name).parts):
            omitted.setdefault("hidden", []).append(name)
        elif not path.is_file():  # a broken link, a pipe, or a deleted file that git still lists
            continue
        elif (length := path.stat().st_size) > _MAX_FILE_BYTES:
            omitted.setdefault(f"over {format_size(_MAX_FILE_BYTES)}", []).append(name)
        elif not _is_text(path):
            omitted.setdefault("not text", []).append(name)
        else:
            files.append(str(path))
            total += length
        if total > _MAX_TOTAL_BYTES:
            raise UsageError(
                f"{folder} has more than {format_size(_MAX_TOTAL_BYTES)} of text. Choose files with a "
                f"quoted pattern, for example: -f '{folder.rstrip('/')}/**/*.py'"
            )
    omissions = []
    for reason, names in omitted.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        omissions.append(f"{len(names)} {reason} ({', '.join(names[:3])}{more})")
    left_out = f"; left out: {'; '.join(omissions)}" if omissions else ""
    if not files:
        raise UsageError(f"{folder} has no text files{left_out}.")
    count = f"{len(files)} file{'s' * (len(files) > 1)}, {format_size(total)}"
    render.note(f"{folder}: {count}{left_out}.")
    return files


def _list_with_git(folder: str) -> list[str] | None:
    """Return tracked and new files without ignored ones; None without git or outside a repository."""
    # A repository's configuration may name a program that watches its files. It must not be run,
    # since the repository may come from anyone.
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-co", "--exclude-standard"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    return sorted({os.fsdecode(name) for name in result.stdout.split(b"\0") if name})


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        shown = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(name for name in shown if name not in _GENERATED_FOLDERS)
        yield from (os.path.relpath(Path(parent, name), folder) for name in sorted(names))


def _is_text(path: Path) -> bool:
    try:
        data = path.read_bytes()
        data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return b"\0" not in data or data.startswith((b"\xff\xfe", b"\xfe\xff"))
