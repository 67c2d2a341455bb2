"""Delete pairs, and files that no pair needs any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from localspec.errors import Conflict
from localspec.files import UNFINISHED, sync_folder
from localspec.paths import remove_tree
from localspec.protocol.pairs import CollectedView, RemovedView
from localspec.registry.store.files import locked, store_error
from localspec.registry.store.records import Record
from localspec.registry.store.store import PULLS_LOCK, Store


def remove(store: Store, name: str, in_use: Callable[[str], bool] = lambda _: False) -> RemovedView:
    """Remove a pair and delete the store's files that no other pair needs.

    Raises:
        Conflict: `in_use` returns that the pair is loaded.
    """
    record = store.get(name)
    if in_use(name):
        raise Conflict(f"The pair '{name}' is in use; wait until it is idle, then try again.")
    store.prepare()
    try:
        store.record_path(name).unlink()
        sync_folder(store.pairs)
    except OSError as error:
        raise store_error(error, store.record_path(name)) from error
    with locked(store.parts / PULLS_LOCK, wait=False) as is_locked:
        if not is_locked:
            return RemovedView(
                name, 0, ("its files, until the running pull is done; then run: localspec gc",)
            )
        return _delete_files(store, record)


def _delete_files(store: Store, record: Record) -> RemovedView:
    """Delete the files of a removed pair."""
    needed = _find_owners(store)
    freed, remaining = 0, []
    for part in {part.sha256 or part.path: part for part in record.parts}.values():
        if part.path:
            remaining.append(f"{part.path} (your own file)")
        elif part.sha256 in needed:
            remaining.append(f"{part.file} (used by {', '.join(needed[part.sha256])})")
        else:
            freed += _delete_file(store.blob(part.sha256))
            remove_tree(store.shards / part.sha256)
    return RemovedView(record.name, freed, tuple(remaining))


def collect(store: Store, *, dry_run: bool = False) -> CollectedView:
    """Delete what no pair needs: files, temporary files, and downloads that nobody will resume.

    Raises:
        Conflict: a pull is running, or a record cannot be read, whose files might be needed.
    """
    if not store.root.is_dir():
        return CollectedView(0, (), dry_run)
    problems = store.listing().problems
    if problems:
        raise Conflict(f"Nothing was deleted: {problems[0]}")
    store.prepare()
    with locked(store.parts / PULLS_LOCK, wait=False) as is_locked:
        if not is_locked:
            raise Conflict("A pull is running; wait until it is done or cancel it, then try again.")
        freed, deleted = 0, []
        for path in list(_find_garbage(store)):
            # Allocated bytes, since unfinished files have holes.
            size = path.lstat().st_blocks * 512
            if path.suffix != ".lock":
                deleted.append(path.name)
            freed += size
            if not dry_run:
                _delete_file(path)
        return CollectedView(freed, tuple(deleted), dry_run)


def _find_garbage(store: Store) -> Iterator[Path]:
    """Yield every file of the store that no pair and no unfinished pull needs."""
    needed = _find_owners(store)
    for path in sorted(store.blobs.glob("*.gguf")):
        if path.stem not in needed:
            yield path
    unfinished = store.wanted()
    for path in sorted(store.parts.iterdir()):
        if path.name != PULLS_LOCK and path.stem not in unfinished:
            yield path
    yield from sorted(store.pairs.glob(UNFINISHED))
    for folder in sorted(store.shards.glob("*")):
        if folder.name not in needed:
            yield from sorted(folder.iterdir())


def _find_owners(store: Store) -> dict[str, list[str]]:
    """Return the names of the pairs that need each file, by the file's hash."""
    needed: dict[str, list[str]] = {}
    for record in store.listing().records:
        for part in record.parts:
            if not part.path:
                needed.setdefault(part.sha256, []).append(record.name)
    for sha256 in store.wanted():
        needed.setdefault(sha256, []).append("an interrupted pull that will resume")
    return needed


def _delete_file(path: Path) -> int:
    """Delete one file of the store and return the bytes freed."""
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error(error, path) from error
    return size
