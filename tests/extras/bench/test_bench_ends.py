"""Test a `localspec bench` that ends early: it always reports the answers it has."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.client import autostart
from localspec.errors import LoadFailed, NoDaemon
from localspec.extras.bench import distribution, drafts, measure, statistics
from localspec.extras.bench import report as reports
from localspec.extras.bench.asking import RequestOptions, TimedAnswer
from localspec.extras.bench.commands import command
from localspec.extras.bench.prompts import Prompt, Work
from localspec.extras.bench.report import Round
from localspec.extras.bench.running import Bench, BenchPlan, Trial, plan_trials
from tests.support.daemons import Home, scripted_home, temporary_home, wait_for
from tests.support.patience import PATIENCE
from tests.support.terminal import terminal

SCHEMA = functools.cache(lambda: json.loads(reports.schema_text()))


class Daemon:
    """A fake daemon in this process that answers at once. It ends at question number `dies`."""

    name = "localspec"

    def __init__(self, model: str = "") -> None:
        self.model, self.autostart = model, True

    dies = 0
    questions = 0

    def ask(self, prompt: Prompt, options: RequestOptions) -> TimedAnswer:
        Daemon.questions += 1
        if "none" in self.model:
            raise LoadFailed("It does not load.")
        if Daemon.questions == Daemon.dies:
            raise NoDaemon("The daemon ended.")
        drafted = options.speculative != {"enabled": False}
        answer = TimedAnswer(prompt.ask[:3] or "x", 12, 0.01, 0.1, "stop")
        answer.timings = {"predicted_ms": 90.0, "draft_n": 4.0 * drafted, "predicted_n": 12}
        answer.rounds = [Round(3, 4 * drafted, 2 * drafted, "draft")]
        return answer

    def status(self) -> dict[str, Any]:
        costs = {"target_ms": {"1": 5.0, "8": 8.0}, "draft_ms": {"1": 1.0}, "overhead_ms": 0.1}
        pair = {
            "name": "fake",
            "target": "t",
            "draft": "d",
            "n_ctx": 512,
            "memory": 1,
            "backend": None,
        }
        return {
            "pid": os.getpid(), "pairs": [], "running": 0, "waiting": 0, "pair": {**pair, "costs": costs}
        }  # fmt: skip

    def pairs(self) -> dict[str, Any]:
        return {"pairs": []}

    def sampling(self) -> dict[str, Any]:
        return {}

    def token_lead(self, *_: Any) -> float:
        return 0.5

    def unload(self, _: str) -> list[str]:
        return ["fake"]

    def pair(self, name: str) -> dict[str, Any]:
        return {"name": name, "target": {"path": __file__}, "draft": {"path": f"{__file__}/{name}"}}


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "DaemonServer", Daemon)
    monkeypatch.setattr(measure, "PairsClient", Daemon)
    monkeypatch.setattr(drafts, "PairsClient", Daemon)
    monkeypatch.setattr(
        drafts, "_rank", lambda name, report, *_: reports.Ranked(name, report.overall)
    )
    monkeypatch.setattr(measure, "_BUSY_SAMPLE_S", 0.0)
    # Every line is traced, so keep the number of lines small.
    monkeypatch.setattr(statistics, "RESAMPLES", 4)
    monkeypatch.setattr(distribution, "_SHUFFLES", 4)
    monkeypatch.setattr(distribution, "ANSWERS_PER_MODE", 4)
    monkeypatch.setattr(Daemon, "dies", 0)
    monkeypatch.setattr(Daemon, "questions", 0)


def run_with_signal(
    function: Callable[[], int], line_number: int, signal_number: int
) -> tuple[int, int]:
    """Run a function and raise a signal before the given line of the bench (0: never).

    Returns the exit code and the number of lines that ran.
    """
    count, folder = 0, str(Path(measure.__file__).parent)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        code = frame.f_code
        if not code.co_filename.startswith(folder) or code.co_name == "watching":
            return None  # everything is reported once the watching has ended
        if code.co_filename.endswith("measure.py") or count:
            count += event == "line"
            if count == line_number and event == "line":
                signal.raise_signal(signal_number)
        return trace

    sys.settrace(trace)
    try:
        return function(), count
    except KeyboardInterrupt:
        return -1, count
    finally:
        sys.settrace(None)


@pytest.fixture(autouse=True)
def default_signal_handlers() -> Iterator[None]:
    """Restore the default signal handlers, which `nohup` or a background shell may have disabled."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def drop_other_load(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs without the load of other processes, which differs from call to call."""
    return [{key: value for key, value in run.items() if key != "others"} for run in runs]


@pytest.mark.parametrize("options", [[], ["--drafts", "one", "none", "two"]])
def test_a_signal_at_any_moment_loses_nothing(
    daemon: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """A signal at any line between the load and the last figure gives one valid, marked report."""
    del daemon
    file = tmp_path / "prompts"
    file.write_text("first?\n\nsecond?")
    arguments = [
        "--json",
        "--prompts",
        str(file),
        "-n",
        "12",
        *(["pair", *options] if options else []),
    ]

    def run() -> int:
        Daemon.questions = 0
        return int(command.main(arguments, standalone_mode=False))

    code, lines = run_with_signal(run, 0, signal.SIGINT)
    full_report = json.loads(capsys.readouterr().out)
    assert (code, full_report["partial"]) == (0, False)
    rng = random.Random(1)
    for line_number in [1, *rng.sample(range(2, lines), 40)]:
        signal_number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        code, _ = run_with_signal(run, line_number, signal_number)
        report = json.loads(capsys.readouterr().out)
        jsonschema_rs.validate(SCHEMA(), report)
        assert code == -signal_number, line_number
        assert len(report["runs"]) <= len(full_report["runs"])
        assert report["partial"] or drop_other_load(report["runs"]) == drop_other_load(
            full_report["runs"]
        ), line_number
        if options:
            assert {draft["draft"] for draft in report["drafts"]} == {"one", "none", "two"}


@pytest.mark.parametrize("dies", [1, 2, 3, 4, 10, 17])
def test_a_daemon_that_ends_leaves_a_partial_report(
    daemon: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], dies: int
) -> None:
    """The first questions warm up; without any answer there is only the error."""
    del daemon
    file = tmp_path / "prompts"
    file.write_text("first?\n\nsecond?")
    Daemon.dies = dies
    arguments = ["--json", "--prompts", str(file)]
    if dies <= 3:
        with pytest.raises(NoDaemon, match=r"The daemon ended\."):
            command.main(arguments, standalone_mode=False)
        return
    assert command.main(arguments, standalone_mode=False) == 1
    report = json.loads(capsys.readouterr().out)
    jsonschema_rs.validate(SCHEMA(), report)
    assert (report["partial"], "The daemon ended." in report["notes"]) == (True, True)
    assert len(report["runs"]) + len(report["their_runs"]) >= min(dies - 3, 8)


WORKS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(WORKS, st.integers(1, 4), st.booleans())
def test_plain_and_speculative_runs_alternate_in_going_first(
    counts: list[int], repetitions: int, own: bool
) -> None:
    """The second mode finds a warm cache, so the modes take turns within every workload."""
    works = [
        Work(str(number), "text", [Prompt("a")] * count) for number, count in enumerate(counts)
    ]
    plan = BenchPlan(works, 8, repetitions, own=own)
    bench = Bench(Daemon(), plan, None, ())  # type: ignore[arg-type]
    first_modes: dict[tuple[str, str], list[str]] = {}
    trial: Trial
    for trial in plan_trials(plan):
        if not trial.probe:
            mode = next(iter(bench._modes_of(trial)))
            first_modes.setdefault((trial.work.name, trial.sampling), []).append(str(mode))
    for modes in first_modes.values():
        assert abs(modes.count("plain") - modes.count("speculative")) <= 1


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts"
    file.write_text("say one two three four five six\n\nslow 40\n")
    return file


def start_bench(home: Home, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a bench and wait until its first question is running."""
    run = home.open_command("bench", *arguments, **options)
    wait_for(lambda: home.socket.is_socket() and home.status()["running"], "a question")
    return run


@pytest.mark.parametrize("seed", range(3))
def test_a_bench_that_is_signalled_reports(prompts: Path, seed: int) -> None:
    rng = random.Random(seed)
    with scripted_home("--load-delay", "0.3") as home:
        page = prompts.parent / "page.html"
        run = start_bench(home, "--json", "--prompts", str(prompts), "--html", str(page))
        time.sleep(rng.uniform(0, 2))
        sent = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[seed]
        run.send_signal(sent)
        stdout, stderr = run.communicate(timeout=PATIENCE)
    report = json.loads(stdout)
    jsonschema_rs.validate(SCHEMA(), report)
    assert (run.returncode, report["partial"]) == (-sent, True), stderr
    document = page.read_text()
    assert report["sentence"] in document.replace("&#x27;", "'")
    assert re.fullmatch(r"Saved .*\n", stderr)


def test_closing_the_terminal_still_writes_the_page(prompts: Path) -> None:
    page, (master, slave) = prompts.parent / "page.html", pty.openpty()
    with scripted_home() as home:
        run = start_bench(
            home, "--prompts", str(prompts), "--html", str(page),
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave), start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        wait_for(lambda: home.status()["counts"]["requests"] > 4, "two answers")
        os.close(master)
        run.wait(timeout=PATIENCE)
    assert "Interrupted: these are the answers" in page.read_text()


def test_a_bench_beside_another_answer_says_so_while_it_loads(prompts: Path) -> None:
    with scripted_home() as home:
        home.must_run("load")
        with home.streaming("forever") as response:
            response.readline()
            with terminal(home.environment, "bench", "--prompts", str(prompts)) as session:
                session.expect("Loading the pair beside 1 other request, which takes longer")
                session.process.send_signal(signal.SIGINT)
                session.wait()


def test_a_busy_machine_is_noticed(prompts: Path) -> None:
    prompts.write_text("slow 20")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with scripted_home() as home:
            run = home.run("bench", "--json", "--repetitions", "1", "--prompts", str(prompts))
    finally:
        busy.kill()
        busy.wait()
    report = json.loads(run.stdout)
    if not Path("/proc/stat").exists():
        assert report["quiet"] is None
        return
    assert report["quiet"] is False
    assert re.search(
        r"other programs \([^)]*python", " ".join(report["notes"])
    )  # The list may name other programs too.
    assert "answers other programs used" in " ".join(report["notes"])


def test_a_killed_daemon_is_reported_in_one_line(prompts: Path) -> None:
    with scripted_home() as home:
        run = start_bench(home, "--prompts", str(prompts))
        wait_for(
            lambda: home.status()["counts"]["requests"] > 4, "two answers"
        )  # The warm-up has its own requests.
        pid = home.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        stdout, stderr = run.communicate(timeout=PATIENCE)
        assert not autostart.listens(str(home.socket)), "nobody starts another one"
    assert (run.returncode, stderr) == (1, "")
    assert stdout.count("The daemon ended in the middle of its answer") == 1


@pytest.mark.parametrize("full", ["json", "html"])
def test_a_full_disk_spoils_only_one_of_two_outputs(prompts: Path, full: str) -> None:
    prompts.write_text("say one two three four five six")
    page = prompts.parent / "page.html"
    with scripted_home() as home, Path("/dev/full").open("w") as disk:
        html_path = "/dev/full" if full == "html" else str(page)
        arguments = ("--json", "--repetitions", "1", "--prompts", str(prompts), "--html", html_path)
        run = start_bench(home, *arguments, **({"stdout": disk} if full == "json" else {}))
        stdout, stderr = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    assert "No space left on device" in stderr
    if full == "html":
        jsonschema_rs.validate(SCHEMA(), json.loads(stdout))
        assert stderr.count("\n") == 1
    else:
        assert "<h1>" in page.read_text()


def test_an_unwritable_page_is_refused_before_measuring(tmp_path: Path) -> None:
    with temporary_home() as home:
        for path, reason in (
            (tmp_path, "it is a folder"),
            (tmp_path / "no" / "x", "no such folder"),
        ):
            run = home.run("bench", "--html", str(path))
            assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
            assert reason in run.stderr
        assert not home.socket.exists(), "no daemon was asked"
