"""Read models.toml and config.toml again when they change. A file with an error changes nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from pathlib import Path

from localspec.daemon.state import State

log = logging.getLogger("localspec.watch")

_START_DELAY_S = 0.5  # the request that started the daemon comes first
_MAX_LINKS = 40  # as many as Linux follows (MAXSYMLINKS)
# These intervals are long, because each wakes a thread of a process that is idle most of the day.
# The interval of the checks of links, and the time until the watch is known to work.
_LINK_CHECK_MS = 1000
_EVENT_POLL_MS = 200  # interval of the checks for events of the file system


def start(state: State, configure: Callable[[], None]) -> threading.Event:
    """Watch the files in a thread until the returned event is set. Callers need not wait for its end.

    `configure` is called in that thread to read config.toml again.
    """
    stop = threading.Event()
    arguments = (state, stop, configure)
    threading.Thread(target=_watch, args=arguments, name="watch", daemon=True).start()
    return stop


def _watch(state: State, stop: threading.Event, configure: Callable[[], None]) -> None:
    if stop.wait(_START_DELAY_S):
        return
    import watchfiles

    from localspec.registry.catalogue import shipped_catalogue

    config, catalogue = state.paths.config_file, state.paths.user_catalogue
    # Folders are watched, because editors replace files. Ours must exist, or its creation would be missed.
    with suppress(OSError):
        config.parent.mkdir(parents=True, exist_ok=True)
    try:
        while not stop.is_set():
            watched_paths = {file: way(file) for file in (config, catalogue, shipped_catalogue())}
            files_by_path = {
                str(path): file for file, paths in watched_paths.items() for path in paths
            }
            folders = {Path(path).parent for path in files_by_path}
            is_watching = False
            for changes in watchfiles.watch(
                *(folder for folder in folders if folder.is_dir()),
                watch_filter=partial(_is_watched, files_by_path),
                recursive=False,
                debounce=_EVENT_POLL_MS,
                step=_EVENT_POLL_MS,
                stop_event=stop,
                raise_interrupt=False,
                rust_timeout=_LINK_CHECK_MS,
                yield_on_timeout=True,
            ):
                if not is_watching:  # files may have been edited since the daemon read them
                    is_watching = True
                    _read_again(state, {config.name, catalogue.name}, configure)
                elif changes:
                    names = {files_by_path[path].name for _, path in changes}
                    log.info("changed: %s", ", ".join(sorted(names)))
                    _read_again(state, names, configure)
                if any(way(file) != paths for file, paths in watched_paths.items()):
                    break  # a link has a new target
    except (OSError, RuntimeError) as error:  # no watches are left, or a folder is gone
        log.warning("edits of %s are not seen: %s", ", ".join(sorted(files_by_path)), error)


def way(file: Path) -> list[Path]:
    """Return every link on the way to a file, and finally the file, each with its real folder.

    These paths must be watched to notice every change of the file, through whichever name it is made.
    """
    links: list[Path] = []
    followed = 0
    folder, remaining = Path(file.anchor), list(file.absolute().parts[1:])
    while remaining:
        part = remaining.pop(0)
        if part == "..":
            folder = folder.parent
            continue
        path = folder / part
        if not path.is_symlink():
            folder = path
            continue
        followed += 1
        if followed > _MAX_LINKS:  # the links form a cycle
            return links
        if path not in links:
            links.append(path)
        target = path.readlink()
        folder = Path(target.anchor) if target.is_absolute() else folder
        remaining = [*target.parts[target.is_absolute() :], *remaining]
    return [*links, folder]


def _read_again(state: State, changed: set[str], configure: Callable[[], None]) -> None:
    if state.paths.user_catalogue.name in changed:
        state.registry.reload()
        if state.registry.problem:
            log.warning("%s", state.registry.problem)
    if state.paths.config_file.name in changed:
        configure()


def _is_watched(paths: Container[str], _change: object, path: str) -> bool:
    return path in paths
