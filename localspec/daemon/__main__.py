"""`python -m localspec.daemon`: run the daemon until SIGTERM, SIGINT or /localspec/shutdown.

LOCALSPEC_ENGINE, split like a shell does, replaces the command that starts the engine worker. `--fd N` is
appended. It serves to run the engine under a debugger, or to run another engine. `--listen` and
`--listen-anywhere` are keys of the configuration.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localspec import ended, paths
from localspec.daemon.http import sockets
from localspec.errors import LocalspecError, replace_control_characters


def main() -> int:
    """Run the daemon and return its exit code. An error is written to stderr as one line."""
    try:
        locations = paths.default_paths()
        paths.check_socket_path(locations.socket)
        paths.make_private_directory(locations.runtime)
        handed = sockets.has_inherited_sockets()
        daemon_lock = sockets.acquire(locations.lock, None if handed else locations.socket)
        ended.record_start(locations.last_run)
        with _record_end(locations.last_run):
            _serve(locations)
        daemon_lock.release()
    except LocalspecError as error:
        sys.stderr.write(f"localspec: {replace_control_characters(error.message)}\n")
        return error.exit_code
    except OSError as error:
        name = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(
            f"localspec: {replace_control_characters(f'{name}{error.strerror or error}.')}\n"
        )
        return 1
    return 0


@contextlib.contextmanager
def _record_end(file: Path) -> Iterator[None]:
    """Write down why the daemon ends, because its output may go nowhere."""
    why = ""
    try:
        yield
    except (SystemExit, KeyboardInterrupt):  # wrong arguments, or Ctrl-C before it is handled
        raise
    except LocalspecError as error:
        why = error.message
        raise
    except OSError as error:
        why = f"{error}."
        raise
    except BaseException as error:
        why = f"This is a bug in localspec ({type(error).__name__}: {error})."
        raise
    finally:
        ended.record_end(file, why)


def _serve(locations: paths.Paths) -> None:
    # Imported after the lock is held, because a daemon that does not get it needs no web server.
    import asyncio
    import shlex

    from localspec.config import Config, load_config
    from localspec.daemon import logs
    from localspec.daemon.lifecycle import Daemon
    from localspec.daemon.worker.process import DEFAULT_COMMAND

    logs.start(locations.log)
    flags: dict[str, Any] = {}  # configuration values by key
    if len(sys.argv) > 1:
        import argparse

        parser = argparse.ArgumentParser("localspec.daemon", argument_default=argparse.SUPPRESS)
        parser.add_argument("--listen", metavar="ADDRESS:PORT")
        parser.add_argument("--listen-anywhere", action="store_true")
        flags = vars(parser.parse_args())

    def read_config(last: Config) -> Config:
        return load_config(locations.config_file, flags=flags, last=last)

    config = read_config(Config())
    engine = os.environ.get("LOCALSPEC_ENGINE")
    command = shlex.split(engine) if engine else DEFAULT_COMMAND

    async def run() -> None:
        await Daemon(config, locations, worker_command=command, read=read_config).run()

    asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
