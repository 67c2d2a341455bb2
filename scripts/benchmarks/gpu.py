"""Check on this machine's GPU that everything holds (`scripts/gpu_check`).

Runs the engine's tests, then measures a synthetic pair of a real pair's size (8 B and 0.5 B, 150 k
vocabulary, written on the spot: 6 GB per acceptance rate asked): what a pass of each width costs,
plain, every fixed depth and `auto`, beside llama-server where its path is given, exact mode's cost and
whether it is the same bit for bit with and without drafts, and memory. Everything goes into
FOLDER/gpu_check.json and FOLDER/gpu_check.md, and with another build of llama.cpp also into
FOLDER/other-build and FOLDER/builds.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import engine
from benchmarks.command import say
from benchmarks.load import load_report
from benchmarks.measuring.runs import PLAIN, Setting
from localspec import machine
from localspec.engine import environment
from localspec.errors import InvalidRequest, LocalspecError

if TYPE_CHECKING:
    from benchmarks.measuring.interleaved import Plan
    from benchmarks.measuring.runner import Runner
    from benchmarks.measuring.workloads import Text

ROOT = Path(__file__).parents[2]
WIDEST = 32
DRAFT_WIDEST = 8
# The workload on which widths, exact mode and memory are measured.
USUAL = "0.7"
NO_GPU = (
    "There is no GPU that this build of llama.cpp can use. `localspec doctor` says why and what to "
    "do; afterwards `scripts/setup --again` builds for it. With --cpu everything runs here, on the "
    "CPU; choose --quick then.\n"
)


def main(arguments: list[str]) -> int:
    """0: everything holds; 1: something does not, or there is no GPU; 2: usage."""
    environment.prepare()
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan = engine.plan_of(options)
    except ValueError as error:
        parser.error(str(error))
    from localspec.engine import llama

    llama.initialise()
    if not llama.gpus() and not options.cpu:
        sys.stderr.write(NO_GPU)
        return 1
    try:
        status = _check(options, plan)
        if options.other_build:
            status = max(status, _check_other(options.other_build, arguments, options.out))
        return status
    except (LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = engine.options_parser("scripts/gpu_check", str(__doc__))
    add = parser.add_argument
    add("--cpu", action="store_true", help="run on the CPU where there is no GPU")
    add("--out", type=Path, default=Path(), metavar="FOLDER", help="for the two files (here)")
    add("--no-tests", action="store_true", help="leave the engine's tests out")
    add("--other-build", default="", metavar="FOLDER",
        help="with another build's libraries (…/llama_cpp/lib): measure both")  # fmt: skip
    add("--exact-texts", type=int, default=50, help="texts compared in exact mode (50)")
    add("--exact-tokens", type=int, default=256, help="tokens of each (256)")
    parser.set_defaults(size="gpu", heads=None, architecture="llama")
    return parser


@dataclass(frozen=True, slots=True)
class Widths:
    """Milliseconds of a pass, by rows."""

    target: dict[int, float]
    draft: dict[int, float]
    change: tuple[float, float]  # what the first and the second pass of another width cost more


@dataclass(frozen=True, slots=True)
class Exact:
    """Exact mode: tokens per second, and texts that differ with and without drafts.

    A text counts as the same only if every token's log-probability is the same bit for bit.
    """

    texts: int
    tokens: int
    differing: int
    plain_speed: float
    drafted_speed: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Free GPU memory in MiB, by GPU: before the pair was loaded, while it was, and afterwards."""

    before: list[int]
    loaded: list[int]
    after: list[int]


@dataclass(frozen=True, slots=True)
class Details:
    """What is measured on one loaded pair beside the speeds."""

    backend: str
    gpus: list[str]
    load_s: float
    widths: Widths
    exact: Exact | None
    exact_refused: str
    memory: Memory


def _check(options: argparse.Namespace, plan: Plan) -> int:
    from benchmarks.measuring import report
    from benchmarks.measuring.interleaved import measure

    tests = None if options.no_tests else _tests()
    before = load_report()
    details = _details(options, plan)
    measured = measure(plan, say)
    limits = report.Limits(auto_server_mean=1.2, python=0.05)
    notes = [
        f"{details.backend}: {', '.join(details.gpus) or 'no GPU'}",
        f"pair {plan.sizes.name}: target {plan.sizes.target}, draft {plan.sizes.draft}",
        f"loaded in {details.load_s:.1f} s; before: {before}",
        "the engine's tests: " + {None: "left out", True: "passed", False: "FAILED"}[tests],
    ]
    text = report.markdown("GPU check", notes, measured, limits) + _markdown(details)
    facts = {"notes": notes, "tests": tests, "details": asdict(details)}
    content = json.dumps(report.as_json(facts, measured, limits), indent=1)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_check.md").write_text(text, encoding="utf-8")
    (options.out / "gpu_check.json").write_text(content + "\n", encoding="utf-8")
    sys.stdout.write(text)
    right = all(run.correct for entry in measured for run in entry.runs)
    same = details.exact is None or details.exact.differing == 0
    # How fast small passes are says nothing about the mission's machine.
    speeds = report.verdicts([report.row(entry) for entry in measured], limits)
    fast = plan.sizes.name != "gpu" or options.cpu or all(entry.holds for entry in speeds)
    return 0 if right and same and fast and tests is not False else 1


def _check_other(libraries: str, arguments: Sequence[str], out: Path) -> int:
    """Run the same check with another build of llama.cpp, and print its speeds beside ours."""
    there = out / "other-build"
    others = [*arguments, "--other-build", "", "--no-tests", "--out", str(there)]
    command = [sys.executable, str(ROOT / "scripts" / "benchmarks"), "gpu", *others]
    environ = os.environ | {"LLAMA_CPP_LIB_PATH": libraries}
    status = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL).returncode
    text = _compare(*(json.loads((at / "gpu_check.json").read_text()) for at in (out, there)))
    (out / "builds.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return status


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return the speeds of two builds as a table."""
    from benchmarks.measuring.report import table

    rows = []
    for row, other in zip(ours["rows"], theirs["rows"], strict=True):
        for setting, speed in row["speeds"].items():
            figures = speed, other["speeds"][setting], other["speeds"][setting] / speed
            rows.append([row["workload"], setting, *(f"{figure:.3g}" for figure in figures)])
    header = ["workload", "setting", "tokens/s", "other build", "other ÷ this"]
    costs = [facts["details"]["widths"]["change"] for facts in (ours, theirs)]
    return f"\nMilliseconds of a change of the width: {costs}\n\n" + table(header, rows)


def _tests() -> bool:
    """Run the engine's tests in a process of their own, and return whether they passed."""
    say("running the engine's tests")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/engine"]
    return subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode == 0


def _details(options: argparse.Namespace, plan: Plan) -> Details:
    from benchmarks.measuring.runner import Runner
    from benchmarks.measuring.workloads import build, text, workload
    from localspec.engine import llama

    files = build(plan.work, plan.sizes, workload(USUAL), say)
    settings = plan.engine_settings(None)
    room = -(-(plan.prompt + options.exact_tokens + 64) // 256) * 256
    settings.n_ctx = max(settings.n_ctx, room)
    before = _free_memory()
    start = time.monotonic()
    rng = random.Random(plan.seed)
    texts = [
        text(files, plan.prompt, options.exact_tokens, rng) for _ in range(options.exact_texts)
    ]
    with Runner(files.target, files.draft, settings) as runner:
        load_s = time.monotonic() - start
        say("measuring passes of every width")
        widths = _widths(runner)
        exact, refused = _exact(runner, texts)
        loaded = _free_memory()
        backend = runner.pair.info().backend
    memory = Memory(before, loaded, _free_memory())
    return Details(backend, llama.gpus(), load_s, widths, exact, refused, memory)


def _free_memory() -> list[int]:
    return [gpu.free for gpu in machine.nvidia_memory(machine.Host.current())]


def _widths(runner: Runner) -> Widths:
    from localspec.engine.llama import Batch
    from localspec.engine.pair.models import make_pass_runner as passes
    from localspec.engine.pair.profile import measure_passes

    pair, shared = runner.pair, runner.pair.shared
    shared.slots.clear(next(iter(shared.slots)))  # the passes are over this one's sequence
    target, draft = passes(shared.context, shared.batch), None
    if pair.drafter is not None:
        batch = Batch(pair.settings.n_batch)
        draft = passes(pair.drafter.context, batch, last_only=True)
    deadline = time.monotonic() + 60
    ours = measure_passes(target, range(1, WIDEST + 1), deadline)
    theirs = measure_passes(draft, range(1, DRAFT_WIDEST + 1), deadline).ms if draft else {}
    return Widths(ours.ms, theirs, ours.change)


def _exact(runner: Runner, texts: Sequence[Text]) -> tuple[Exact | None, str]:
    """Return the same texts with and without drafts, or why exact mode is not possible here."""
    differing = tokens = 0
    seconds = [0.0, 0.0]
    try:
        runner.pair.exact.lane()
    except InvalidRequest as error:
        return None, error.message
    for number, text in enumerate(texts, start=1):
        answers = []
        for at, setting in enumerate((PLAIN, Setting(4))):
            start = time.monotonic()
            answers.append(runner.exact(setting, text.prompt, len(text.expected)))
            seconds[at] += time.monotonic() - start
        plain, drafted = ([(token.id, token.logprob) for token in answer] for answer in answers)
        differing += plain != drafted
        tokens += len(plain)
        if number % 10 == 0 or number == len(texts):
            say(f"exact mode: {number} of {len(texts)} texts, {differing} differ")
    speeds = [tokens / text if text else 0.0 for text in seconds]
    return Exact(len(texts), tokens, differing, *speeds), ""


def _markdown(details: Details) -> str:
    from benchmarks.measuring.report import table

    widths = details.widths
    rows = [
        [
            str(width),
            f"{ms:.2f}",
            f"{ms / widths.target[1]:.2f}",
            f"{widths.draft[width]:.2f}" if width in widths.draft else "",
        ]
        for width, ms in widths.target.items()
    ]
    parts = ["\nMilliseconds of a pass (median):\n\n"]
    parts.append(table(["width", "target", "× width 1", "draft"], rows))
    first, second = widths.change
    parts.append(f"\n- a change of the width: {first:.2f} and {second:.2f} ms\n")
    if details.exact is None:
        parts.append(f"\n- exact mode: {details.exact_refused}\n")
    else:
        exact = details.exact
        word = "the same bit for bit" if not exact.differing else f"{exact.differing} DIFFER"
        parts.append(
            f"\n- exact mode, {exact.texts} texts, {exact.tokens} tokens, with and without drafts: "
            f"{word}; plain {exact.plain_speed:.1f} tokens/s, 4 drafted {exact.drafted_speed:.1f}, "
            "prompts included\n"
        )
    memory = details.memory
    if memory.before:
        parts.append(
            f"- free GPU memory in MiB: {memory.before} before, {memory.loaded} with the pair, "
            f"{memory.after} after it (llama.cpp's own, which goes with the process, apart)\n"
        )
    return "".join(parts)
