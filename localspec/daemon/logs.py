"""The daemon's log: one file, rotated. Prompts are not in it unless `log_prompts` is set."""

from __future__ import annotations

import logging
import logging.handlers
import os
from io import TextIOWrapper
from pathlib import Path

MAX_BYTES = 1 << 20
KEPT = 3


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Readable by its owner only, in whatever folder."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def start(file: Path, *, verbose: bool = False) -> None:
    """Send every log record to `file`. A full or read-only disk does not stop the daemon."""
    logging.raiseExceptions = False
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler: logging.Handler = _PrivateFile(
            file, maxBytes=MAX_BYTES, backupCount=KEPT, encoding="utf-8", delay=True
        )
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")
    )
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    # The HTTP library tells every address at INFO, and a storage's carry a signature.
    for name in ("asyncio", "httpx2", "httpcore2", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
