"""The daemon's log: one file, rotated. Prompts are not in it unless `log_prompts` is set."""

from __future__ import annotations

import logging
import logging.handlers
import re
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from localspec.paths import open_file, read_file
from localspec.registry.store.files import write_whole

log = logging.getLogger("localspec.prompts")

MAX_BYTES = 1 << 20
KEPT = 3
# As `prompt` writes it; without a conversation it is of a request that asked to keep nothing.
_PROMPT = re.compile(
    rb"[-0-9]+ [:,0-9]+ INFO localspec[.\w]*\[\d+\]: prompt(?: of conversation (\w+))?: "
)


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Readable by its owner only, in whatever folder."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_private)

    def rewrite(self, keep: Callable[[bytes], bool]) -> None:
        """Leave only the lines to `keep`, in the old files too."""
        self.acquire()
        try:
            self.flush()
            for file in Path(self.baseFilename).parent.glob(f"{Path(self.baseFilename).name}*"):
                lines = read_file(file).splitlines(keepends=True)
                kept = [line for line in lines if keep(line)]
                if len(kept) < len(lines):
                    self.close()  # the next record opens it again
                    write_whole(file, b"".join(kept))
        finally:
            self.release()


def _private(path: str, flags: int) -> int:
    return open_file(Path(path), flags)


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
    for name in ("asyncio", "httpx2", "httpcore2", "huggingface_hub", "watchfiles"):
        logging.getLogger(name).setLevel(logging.WARNING)


def prompt(conversation: str | None, text: str) -> None:
    """Log a prompt, one line, so that it is found again when its conversation is removed."""
    log.info("prompt%s: %s", f" of conversation {conversation}" if conversation else "", text)


def forget_prompts(conversation: str | None) -> None:
    """Take the prompts of a conversation out of the log, with None all prompts.

    Raises:
        OSError, StoreError
    """

    def keep(line: bytes) -> bool:
        found = _PROMPT.match(line)
        if found is None:
            return True
        return conversation is not None and found[1] != conversation.encode()

    for handler in logging.getLogger().handlers:
        if isinstance(handler, _PrivateFile):
            handler.rewrite(keep)
