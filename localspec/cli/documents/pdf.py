"""The text of PDF documents."""

from __future__ import annotations

import subprocess
from pathlib import Path

from localspec.errors import UsageError

_PATIENCE = 60.0  # seconds for the program that reads them


def text(name: str) -> str:
    """The text of a PDF document, by the program that is made for it.

    Raises:
        UsageError: it is not installed, cannot read the document, or finds no text in it.
    """
    command = ["pdftotext", "-layout", "-enc", "UTF-8", str(Path(name).absolute()), "-"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE
        )
    except FileNotFoundError:
        raise UsageError(
            f"{name} is a PDF document, and pdftotext, which reads them, is not installed; it is in the "
            "package poppler-utils (macOS: brew install poppler)."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{name}: pdftotext does not work: {error}.") from error
    found = done.stdout.decode("utf-8", "replace").replace("\f", "\n\n").strip()
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason is given"]
        raise UsageError(f"{name} is a PDF document that pdftotext cannot read: {why[-1]}")
    if not found:
        raise UsageError(
            f"{name} is a PDF document without text, of scanned pages perhaps; ocrmypdf adds their text."
        )
    return found
