"""Extract the text of PDF documents."""

from __future__ import annotations

import subprocess
from pathlib import Path

from localspec.errors import UsageError

_PDFTOTEXT_TIMEOUT_S = 60.0


def text(name: str) -> str:
    """Return the text of a PDF document, as extracted by pdftotext.

    Raises:
        UsageError: pdftotext is not installed, cannot read the document, or finds no text in it.
    """
    command = ["pdftotext", "-layout", "-enc", "UTF-8", str(Path(name).absolute()), "-"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PDFTOTEXT_TIMEOUT_S
        )
    except FileNotFoundError:
        raise UsageError(
            f"{name} is a PDF document, and pdftotext, which reads them, is not installed; it is in the "
            "package poppler-utils (macOS: brew install poppler)."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{name}: pdftotext does not work: {error}.") from error
    content = result.stdout.decode("utf-8", "replace").replace("\f", "\n\n").strip()
    if result.returncode:
        reasons = result.stderr.decode("utf-8", "replace").strip().splitlines() or [
            "no reason is given"
        ]
        raise UsageError(f"{name} is a PDF document that pdftotext cannot read: {reasons[-1]}")
    if not content:
        raise UsageError(
            f"{name} is a PDF document without text, of scanned pages perhaps; ocrmypdf adds their text."
        )
    return content
