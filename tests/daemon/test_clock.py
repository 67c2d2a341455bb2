"""The wall clock may jump, so that waits must use the monotonic clock."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.support.daemons import Home, wait_for

# A wall clock that is alternately a day ahead and a day behind.
JUMPING = """
import itertools, sys, time
now, sign = time.time, itertools.cycle([86400, -86400])
time.time = lambda: now() + next(sign)
from localspec.daemon.__main__ import main
sys.exit(main())
"""

# Where the wall clock is read, and why it does no harm there.
WALL_CLOCK = {
    "cli/chat/talk.py": "when something was said",
    "extras/ollama/": "`created_at` of an answer, and when an idle pair is to be unloaded",
    "daemon/completion/openai.py": "`created` of an answer",
    "extras/tune/tuning.py": "which answers are newer than the last attempt, as answers have the wall clock",
    "extras/tune/running.py": "since when a tuned draft is used, which people read",
    "extras/responses/": "`created_at` and `completed_at` of a response",
    "daemon/history/statistics.py": "which day is today",
    "daemon/history/store.py": "when an unfinished answer was last written",
    "daemon/history/turn.py": "when something was said",
    "daemon/handlers/control.py": "when the process began, as llama-server tells it",
    "daemon/handlers/models.py": "`created` of a model",
    "ended.py": "when a daemon started and ended, for a person",
    "registry/hub/network.py": "how long until a date that a server names, where it tells no time itself",
    "engine/prompt/template.py": "today's date, where a template asks for it",
    "engine/prompt/template_child.py": "the date that a chat template may ask for",
    "daemon/worker/loaded.py": "since when a pair is loaded",
    "cli/terminal/figures.py": "for how long, which people read",
    "registry/store/local.py": "when a pair was added",
    "registry/pulls/pull.py": "when a pair was added",
    "daemon/http/recordings.py": "when a resumable stream began and ended, as llama-server reports it",
}


def test_every_wait_is_as_long_as_it_should_be(home: Home) -> None:
    daemon = home.start(watchdog=1, idle_unload=0.2, parallel=1, program=JUMPING)
    with home.streaming("slow 30") as stream:  # neither the watchdog nor a deadline cuts it off
        assert stream.read().endswith(b"data: [DONE]\n\n")
    wait_for(lambda: home.status()["worker_pid"] is None, "the idle unload")
    assert home.status()["counts"]["worker_deaths"] == 0
    assert 0 <= home.status()["uptime"] < 3600

    with home.streaming("forever") as stream:
        stream.readline()
        os.kill(daemon.worker_pid(), signal.SIGSTOP)
        assert b"worker_timeout" in stream.read()
    with home.streaming("slow 20") as stream:  # and the drain has its time
        stream.readline()
        daemon.process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert daemon.stop() == 0


def test_the_wall_clock_is_read_for_dates_alone() -> None:
    package = Path(__file__).parents[2] / "localspec"
    reads = re.compile(r"\btime\.time\(|\bfrom time import .*\btime\b|\bdatetime\.(?:utc)?now\(")
    lines = [
        f"{path.relative_to(package).as_posix()}:{number}"
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reads.search(line)
    ]
    wrong = [place for place in lines if not place.startswith(tuple(WALL_CLOCK))]
    for allowed in WALL_CLOCK:
        if allowed.startswith("extras/") and not (package / allowed).exists():
            continue
        assert any(place.startswith(allowed) for place in lines), f"nothing in {allowed} reads it"
    assert not wrong, "use time.monotonic(), or say in WALL_CLOCK why a jump does no harm"
