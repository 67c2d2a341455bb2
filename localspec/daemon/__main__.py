"""`python -m localspec.daemon`: run the daemon here until SIGTERM, SIGINT or /localspec/shutdown.

LOCALSPEC_ENGINE, split like a shell does, replaces the command that starts the engine worker;
`--fd N` is appended. It is there to run the daemon with an engine under a debugger, or with another
engine. `--listen` and `--listen-anywhere` are the configuration's keys.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localspec import ended, paths
from localspec.daemon.http import lock, sockets
from localspec.errors import LocalspecError, visible


def main() -> int:
    """Exit code 0 after a clean end, 1 with one line on stderr when it may not or cannot start."""
    try:
        locations = paths.default_paths()
        paths.check_socket_path(locations.socket)
        paths.private_directory(locations.runtime)
        handed = sockets.handed_over()
        held = lock.acquire(locations.lock, None if handed else locations.socket)
        ended.begin(locations.last_run)
        with _last_words(locations.last_run):
            _serve(locations)
        held.release()
    except LocalspecError as error:
        sys.stderr.write(f"localspec: {visible(error.message)}\n")
        return error.exit_code
    except OSError as error:
        name = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(f"localspec: {visible(f'{name}{error.strerror or error}.')}\n")
        return 1
    return 0


@contextlib.contextmanager
def _last_words(file: Path) -> Iterator[None]:
    """Why the daemon ends is written down: nobody may be reading what it says."""
    try:
        yield
    except LocalspecError as error:
        ended.end(file, error.message)
        raise
    except OSError as error:
        ended.end(file, f"{error}.")
        raise
    except BaseException as error:
        ended.end(file, f"This is a bug in localspec ({type(error).__name__}: {error}).")
        raise
    ended.end(file)


def _serve(locations: paths.Paths) -> None:
    # After the lock: whoever does not get it has no use for a web server.
    import asyncio
    import shlex

    from localspec.config import Config, load_config
    from localspec.daemon import logs
    from localspec.daemon.lifecycle import Daemon
    from localspec.daemon.worker.process import DEFAULT_COMMAND

    logs.start(locations.log)
    flags = _flags(sys.argv[1:])

    def read(last: Config) -> Config:
        return load_config(locations.config_file, flags=flags, last=last)

    config = read(Config())
    engine = os.environ.get("LOCALSPEC_ENGINE")
    command = shlex.split(engine) if engine else DEFAULT_COMMAND

    async def run() -> None:
        await Daemon(config, locations, worker_command=command, read=read).run()

    asyncio.run(run())


def _flags(arguments: list[str]) -> dict[str, Any]:
    """Configuration by key, from --listen ADDRESS:PORT and --listen-anywhere."""
    if not arguments:
        return {}
    import argparse

    parser = argparse.ArgumentParser("localspec.daemon", argument_default=argparse.SUPPRESS)
    parser.add_argument("--listen", metavar="ADDRESS:PORT")
    parser.add_argument("--listen-anywhere", action="store_true")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
