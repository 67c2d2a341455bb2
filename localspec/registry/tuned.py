"""The tuned drafts of one user: `localspec tune` writes them, and the daemon uses and retires them.

data/tuned/KEY/NAME.gguf      the draft
data/tuned/KEY/record.json    what it was made from; it is written last, and makes the daemon use the draft
data/tuned/training-NAME      a draft in the making
data/tuned/attempt-KEY        an empty file, as old as the last attempt that made no draft

KEY is made of the paths of the target and of the pair's own draft.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from localspec.files import remove_abandoned
from localspec.paths import read_file
from localspec.protocol.tuned import RECORD_FILE, WORK_PREFIX, TunedDraft, tuned_folder


def find_tuned_draft(root: Path, target: str, base: str) -> tuple[Path, TunedDraft] | None:
    """Return the tuned draft of a pair with its record, or None.

    base: path of the pair's own draft, "" if it has none. A tuned draft does not count if this file, or
    without one the target's, has changed since.
    """
    folder = tuned_folder(root, target, base)
    record = _read_record(folder)
    if record is None:
        return None
    try:
        info = Path(base or target).stat()
    except OSError:
        return None
    draft = folder / Path(record.file).name
    is_current = (info.st_size, info.st_mtime_ns) == (record.base_size, record.base_changed)
    return (draft, record) if is_current and draft.is_file() else None


def remove_tuned_drafts(root: Path, conversation: str | None) -> list[TunedDraft]:
    """Delete the tuned drafts that learned from a conversation, or all with None, and return their records.

    Deleted is also what may have learned from it: drafts that no record names, and what a training left
    behind that was killed. One that runs notices by itself that the conversation is gone.

    Raises:
        OSError: a file cannot be deleted.
    """
    removed = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        if folder.name.startswith(WORK_PREFIX):
            remove_abandoned(folder)
            continue
        record = _read_record(folder)
        if record is None or conversation is None or conversation in record.conversations:
            shutil.rmtree(folder)
            removed += [record] if record else []
            continue
        for draft in folder.glob("*.gguf"):  # of an adoption that was killed before its record
            if draft.name != Path(record.file).name:
                draft.unlink(missing_ok=True)
    return removed


def collect_tuned_drafts(
    root: Path, pairs: Iterable[tuple[str, str]], *, dry_run: bool = False
) -> list[tuple[str, int]]:
    """Delete the tuned drafts of all but some pairs, and return the names and sizes in bytes of their files.

    pairs: of each, the paths of the target and of its own draft, "" if it has none.

    Raises:
        OSError: a file cannot be deleted.
    """
    used = {tuned_folder(root, target, base).name for target, base in pairs}
    removed = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        if folder.name not in used and not folder.name.startswith(WORK_PREFIX):
            for file in sorted(folder.iterdir()):
                removed.append((f"{folder.name}/{file.name}", file.lstat().st_size))
            if not dry_run:
                shutil.rmtree(folder)
    return removed


def _read_record(folder: Path) -> TunedDraft | None:
    """Return the record in a folder, or None if there is none that this version understands."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(read_file(folder / RECORD_FILE), type=TunedDraft)
    return None
