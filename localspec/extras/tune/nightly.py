"""Check tuned drafts by night, and tune the configured pair as `localspec tune --auto` asks for."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
import time

from localspec.daemon.state import DaemonState
from localspec.machine import Host, is_on_battery
from localspec.protocol.tuned import RECORD_FILE

CHECK_INTERVAL_S = 600.0
POLL_INTERVAL_S = 1.0
NIGHT_HOURS = range(1, 6)  # local time
MINUTES = 120  # that a run may take

_log = logging.getLogger("localspec.tune")


def start(state: DaemonState, stop: threading.Event) -> threading.Thread:
    """Return a thread that looks, until `stop` is set, whether it is time for a run, and then ends that."""
    thread = threading.Thread(target=_watch, args=(state, stop), name="tune", daemon=True)
    thread.start()
    return thread


def _watch(state: DaemonState, stop: threading.Event) -> None:
    last_night, last_count = -1, -1
    while not stop.wait(CHECK_INTERVAL_S):
        now, count = time.localtime(), state.pairs.metrics.counts.requests
        is_quiet, last_count = count == last_count, count  # nobody has asked since the last look
        if (
            now.tm_hour in NIGHT_HOURS
            and now.tm_yday != last_night
            and is_quiet
            and not is_on_battery(Host.current())
        ):
            last_night = now.tm_yday
            if any(state.paths.tuned.glob(f"*/{RECORD_FILE}")):
                _run(stop, "--check", "--yes")
            if state.config.tune_by_night:
                _run(stop, "--by-night", "--minutes", str(MINUTES))


def _run(stop: threading.Event, *options: str) -> None:
    """Run `localspec tune`, until the daemon ends, and log what it says."""
    command = [sys.executable, "-P", "-m", "localspec", "tune", *options]
    with tempfile.TemporaryFile() as output:  # a pipe could fill up
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            _log.warning("cannot run localspec tune by night: %s", error)
            return
        _log.info("localspec tune %s by night", options[0])
        while process.poll() is None:
            if stop.wait(POLL_INTERVAL_S):
                process.kill()  # it leaves what the next run goes on with
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    _log.info("localspec tune ended with code %d: %s", process.returncode, text)
