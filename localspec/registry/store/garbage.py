"""What no pair needs any more, and how it goes."""

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
    """Forget a pair and delete the store's files that no other pair needs.

    Raises:
        Conflict: `in_use` says that the pair is loaded.
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
    with locked(store.parts / PULLS_LOCK, wait=False) as alone:
        if not alone:
            return RemovedView(
                name, 0, ("its files, until the running pull is done; then run: localspec gc",)
            )
        return _delete(store, record)


def _delete(store: Store, record: Record) -> RemovedView:
    """The files of a removed pair."""
    needed = _needed(store)
    freed, kept = 0, []
    for part in {part.sha256 or part.path: part for part in record.parts}.values():
        if part.path:
            kept.append(f"{part.path} (your own file)")
        elif part.sha256 in needed:
            kept.append(f"{part.file} (used by {', '.join(needed[part.sha256])})")
        else:
            freed += _delete_file(store.blob(part.sha256))
            remove_tree(store.shards / part.sha256)
    return RemovedView(record.name, freed, tuple(kept))


def collect(store: Store, *, dry_run: bool = False) -> CollectedView:
    """Delete what no pair needs: files, temporary ones, downloads that nobody waits for.

    Raises:
        Conflict: a pull is running, or a record cannot be read (its files might be needed).
    """
    if not store.root.is_dir():
        return CollectedView(0, (), dry_run)
    problems = store.listing().problems
    if problems:
        raise Conflict(f"Nothing was deleted: {problems[0]}")
    store.prepare()
    with locked(store.parts / PULLS_LOCK, wait=False) as alone:
        if not alone:
            raise Conflict("A pull is running; wait until it is done or cancel it, then try again.")
        freed, gone = 0, []
        for path in list(_garbage(store)):
            size = path.lstat().st_blocks * 512  # unfinished files have holes
            if path.suffix != ".lock":
                gone.append(path.name)
            freed += size
            if not dry_run:
                _delete_file(path)
        return CollectedView(freed, tuple(gone), dry_run)


def _garbage(store: Store) -> Iterator[Path]:
    needed = _needed(store)
    for path in sorted(store.blobs.glob("*.gguf")):
        if path.stem not in needed:
            yield path
    wanted = store.wanted()
    for path in sorted(store.parts.iterdir()):
        if path.name != PULLS_LOCK and path.stem not in wanted:
            yield path
    yield from sorted(store.pairs.glob(UNFINISHED))
    for folder in sorted(store.shards.glob("*")):
        if folder.name not in needed:
            yield from sorted(folder.iterdir())


def _needed(store: Store) -> dict[str, list[str]]:
    """Hash → names of the pairs that need the file."""
    needed: dict[str, list[str]] = {}
    for record in store.listing().records:
        for part in record.parts:
            if not part.path:
                needed.setdefault(part.sha256, []).append(record.name)
    for sha256 in store.wanted():
        needed.setdefault(sha256, []).append("an interrupted pull that will resume")
    return needed


def _delete_file(path: Path) -> int:
    """Delete one file of the store; the bytes freed."""
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error(error, path) from error
    return size
