"""models.toml and config.toml are read again when they change; a broken edit changes nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from pathlib import Path

from localspec.daemon.state import State

log = logging.getLogger("localspec.watch")

_LATER = 0.5  # seconds: what started the daemon wants its answer first
_LINKS = 40  # as many as Linux follows (MAXSYMLINKS)
# Milliseconds. Each look wakes a thread of a process that does nothing else most of the day.
_STANDS = 1000  # until the watch says for the first time that it stands, and between looks at links
_STEP = 200  # between two looks at what the system has told


def start(state: State, configure: Callable[[], None]) -> threading.Event:
    """Follow the files in a thread until the event is set; nobody needs to wait for its end.

    `configure`, called in that thread, has config.toml read again.
    """
    stop = threading.Event()
    arguments = (state, stop, configure)
    threading.Thread(target=_watch, args=arguments, name="watch", daemon=True).start()
    return stop


def _watch(state: State, stop: threading.Event, configure: Callable[[], None]) -> None:
    if stop.wait(_LATER):
        return
    import watchfiles

    from localspec.registry.catalogue import shipped_catalogue

    config, catalogue = state.paths.config_file, state.paths.user_catalogue
    # Folders, because editors replace files; ours must exist, or its creation would go unseen.
    with suppress(OSError):
        config.parent.mkdir(parents=True, exist_ok=True)
    try:
        while not stop.is_set():
            ways = {file: way(file) for file in (config, catalogue, shipped_catalogue())}
            steps = {str(step): file for file, found in ways.items() for step in found}
            folders = {Path(step).parent for step in steps}
            stands = False
            for changes in watchfiles.watch(
                *(folder for folder in folders if folder.is_dir()),
                watch_filter=partial(_among, steps),
                recursive=False,
                debounce=_STEP,
                step=_STEP,
                stop_event=stop,
                raise_interrupt=False,
                rust_timeout=_STANDS,
                yield_on_timeout=True,
            ):
                if not stands:  # what was edited since the daemon read it, nobody has seen
                    stands = True
                    _read_again(state, {config.name, catalogue.name}, configure)
                elif changes:
                    names = {steps[path].name for _, path in changes}
                    log.info("changed: %s", ", ".join(sorted(names)))
                    _read_again(state, names, configure)
                if any(way(file) != found for file, found in ways.items()):
                    break  # a link leads elsewhere now
    except (OSError, RuntimeError) as error:  # no more watches to be had, a folder gone
        log.warning("edits of %s are not seen: %s", ", ".join(sorted(steps)), error)


def way(file: Path) -> list[Path]:
    """Every link on the way to a file, and at last the file, each in its real folder: what must be
    watched so that no edit of it goes unseen, through whichever of its names it is made.
    """
    steps: list[Path] = []
    followed = 0
    at, left = Path(file.anchor), list(file.absolute().parts[1:])
    while left:
        step = left.pop(0)
        if step == "..":
            at = at.parent
            continue
        here = at / step
        if not here.is_symlink():
            at = here
            continue
        followed += 1
        if followed > _LINKS:  # a circle: it leads nowhere
            return steps
        if here not in steps:
            steps.append(here)
        leads = here.readlink()
        at = Path(leads.anchor) if leads.is_absolute() else at
        left = [*leads.parts[leads.is_absolute() :], *left]
    return [*steps, at]


def _read_again(state: State, changed: set[str], configure: Callable[[], None]) -> None:
    if state.paths.user_catalogue.name in changed:
        state.registry.reload()
        if state.registry.problem:
            log.warning("%s", state.registry.problem)
    if state.paths.config_file.name in changed:
        configure()


def _among(paths: Container[str], _change: object, path: str) -> bool:
    return path in paths
