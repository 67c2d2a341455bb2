"""`python -m localspec.daemon`: run the daemon here until SIGTERM, SIGINT or /localspec/shutdown.

LOCALSPEC_ENGINE, split like a shell does, replaces the command that starts the engine worker;
`--fd N` is appended. It is there to run the daemon with an engine under a debugger, or with another
engine.
"""

from __future__ import annotations

import os
import sys

from localspec import paths
from localspec.daemon import lock
from localspec.errors import LocalspecError


def main() -> int:
    """Exit code 0 after a clean end, 1 with one line on stderr when it may not or cannot start."""
    try:
        locations = paths.default_paths()
        paths.check_socket_path(locations.socket)
        paths.private_directory(locations.runtime)
        held = lock.acquire(locations.lock, locations.socket)
        _serve(locations)
        held.release()
    except LocalspecError as error:
        sys.stderr.write(f"localspec: {error.message}\n")
        return error.exit_code
    return 0


def _serve(locations: paths.Paths) -> None:
    # After the lock: whoever does not get it has no use for a web server.
    import asyncio
    import shlex

    from localspec.config import load_config
    from localspec.daemon import logs
    from localspec.daemon.lifecycle import Daemon
    from localspec.daemon.worker import DEFAULT_COMMAND

    logs.start(locations.log)
    config = load_config(locations.config_file)
    engine = os.environ.get("LOCALSPEC_ENGINE")
    command = shlex.split(engine) if engine else DEFAULT_COMMAND

    async def run() -> None:
        await Daemon(config, locations, worker_command=command).run()

    asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
