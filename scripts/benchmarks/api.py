"""`scripts/bench api`: what the daemon makes of the engine, by its socket.

A daemon of the benchmark's own, with nothing of yours. Three things: how soon the next turn of a long
conversation begins (with --llama-server beside it, on the same files, each with its cache); whether an
editor that drops a request at every keystroke leaves anything busy; and what several clients get in all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import quiet
from benchmarks.command import add_shared, positive, say
from benchmarks.measuring.runs import WARM_TOKENS
from localspec.errors import LocalspecError
from localspec.paths import default_paths

if TYPE_CHECKING:
    from benchmarks.measuring.report import Verdict
    from benchmarks.measuring.workloads import Files, Sizes
    from benchmarks.servers.api_parts import Reissued, Together, Turn

PARTS = ("conversation", "editor", "clients")
TURN_LIMIT = 1.2  # of llama-server's time to the first token
CLIENTS_LIMIT = 1.5  # four clients' tokens per second over one's


@dataclass(frozen=True, slots=True)
class Shared:
    """One and four clients on the pair of one acceptance rate."""

    acceptance: str
    runs: Sequence[Together]
    plain: Sequence[Together]

    def ratio(self, plain: bool = False) -> float:
        """Four clients over one; plain: over one that decodes without drafts."""
        from benchmarks.servers.api_parts import medians

        several = max(run.clients for run in self.runs)
        alone = medians(self.plain if plain else self.runs)[1]
        return medians(self.runs)[several] / alone


def main(arguments: list[str]) -> int:
    """Run it. 0: done (what was missed is in the report); 1: a wrong output or a failure; 2: usage."""
    options = _parser().parse_args(arguments)
    try:
        return _measure(options)
    except (LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scripts/bench api",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    add("--size", choices=["big", "quick", "tiny"], default="big", help="of the pair (big)")
    add("--acceptance", nargs="+", default=["0", "0.7"], metavar="α",
        help="of the pairs for `clients` (0 0.7)")  # fmt: skip
    add("--length", type=positive, default=3000, help="tokens of the conversation (3000)")
    add("--turns", type=positive, default=9, help="that follow its first (9)")
    add("--keystrokes", type=positive, default=200, help="requests cancelled and reissued (200)")
    add("--interval", type=float, default=20.0, help="milliseconds between them (20)")
    add("--clients", type=positive, default=4, help="at once (4)")
    add("--tokens", type=positive, default=128, help="for each client (128)")
    add("--repetitions", type=positive, default=3, help="of `clients` (3)")
    add_shared(parser)
    return parser


# ------------------------------------------------------------------------------------- parts


def _measure(options: argparse.Namespace) -> int:
    from benchmarks.measuring.workloads import SIZES
    from localspec.engine.pair.models import physical_cores

    parts = options.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        raise LocalspecError(f"There is no part '{min(unknown)}'; they are {', '.join(PARTS)}.")
    sizes: Sizes = SIZES[options.size]
    threads = options.threads or physical_cores()
    before = quiet.report()
    say(before)
    turns: list[Turn] = []
    shared: list[Shared] = []
    typed: Reissued | None = None
    if "conversation" in parts:
        turns = _conversation(options, sizes, threads)
    if "editor" in parts:
        typed = _editor(options, threads)
    if "clients" in parts:
        shared = [_clients(options, sizes, threads, name) for name in options.acceptance]
    notes = [
        f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads; pair {sizes.name}: "
        f"target {sizes.target}, draft {sizes.draft}; the editor's is the shipped one",
        f"before: {before}",
        f"after: {quiet.report()}",
    ]
    sys.stdout.write(_markdown(notes, turns, typed, shared))
    if options.json is not None:
        facts = {
            "version": 1,
            "notes": notes,
            "turns": [asdict(turn) for turn in turns],
            "editor": asdict(typed) if typed else None,
            "clients": [asdict(each) for each in shared],
            "verdicts": [asdict(v) | {"holds": v.holds} for v in _verdicts(turns, typed, shared)],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    wrong = _wrong(turns, typed, shared)
    return 1 if wrong else 0


def _conversation(options: argparse.Namespace, sizes: Sizes, threads: int) -> list[Turn]:
    from benchmarks.measuring.runs import Setting
    from benchmarks.servers.api_parts import Conversation, continue_conversation
    from benchmarks.servers.daemon import Daemon
    from benchmarks.servers.llama_server import Running, Server

    files = _files(options, sizes, options.acceptance[-1])
    wanted = Conversation(options.length, options.turns)
    with ExitStack() as stack:
        server = None
        if options.llama_server is not None:
            program = options.llama_server.absolute()
            plan = Server(program, files.target, files.draft, wanted.context, threads)
            server = stack.enter_context(Running(plan, Setting(0, server=True)))
        daemon = stack.enter_context(
            Daemon(pair=_pair(files), context=wanted.context, threads=threads)
        )
        rng = random.Random(f"{options.seed} conversation")
        return continue_conversation(daemon, server, files, wanted, rng, say)


def _editor(options: argparse.Namespace, threads: int) -> Reissued:
    from benchmarks.servers.api_parts import reissue
    from benchmarks.servers.daemon import Daemon

    with Daemon(pair="builtin", threads=threads) as daemon:  # the synthetic ones have no FIM tokens
        say("an editor types")
        return reissue(daemon, options.keystrokes, options.interval / 1e3)


def _clients(options: argparse.Namespace, sizes: Sizes, threads: int, name: str) -> Shared:
    from benchmarks.servers.api_parts import write_together
    from benchmarks.servers.daemon import Daemon

    files = _files(options, sizes, name)
    rng = random.Random(f"{options.seed} {name}")
    found: dict[str, list[Together]] = {"one": [], "plain": [], "all": []}
    room = options.clients * (options.tokens + 128)
    with Daemon(
        pair=_pair(files), context=max(room, 1024), threads=threads, parallel=options.clients
    ) as daemon:
        for repetition in range(-1, options.repetitions):  # the first one is for warming up
            for kind in rng.sample(list(found), len(found)):
                count = options.clients if kind == "all" else 1
                tokens = options.tokens if repetition >= 0 else WARM_TOKENS
                run = write_together(
                    daemon, files, count, tokens, 16, repetition, rng, kind == "plain"
                )
                if repetition >= 0:
                    found[kind].append(run)
                    say(f"α = {name}, {kind}: {run.speed:.1f} tokens/s")
    return Shared(name, [*found["one"], *found["all"]], found["plain"])


def _files(options: argparse.Namespace, sizes: Sizes, name: str) -> Files:
    from benchmarks.measuring.workloads import build, workload

    return build(_work(options), sizes, workload(name), say)


def _pair(files: Files) -> str:
    return f"{files.target},{files.draft}"


def _work(options: argparse.Namespace) -> Path:
    return Path(options.work or default_paths().cache / "bench").absolute()


# ------------------------------------------------------------------------------------- report


def _verdicts(
    turns: Sequence[Turn], typed: Reissued | None, shared: Sequence[Shared]
) -> list[Verdict]:
    from benchmarks.measuring.report import Verdict

    found = []
    ratios = [turn.ours_ms / turn.theirs_ms for turn in turns if turn.theirs_ms]
    if ratios:
        what = "first token of the next turn / llama-server's"
        found.append(Verdict(what, statistics.median(ratios), TURN_LIMIT, at_least=False))
    if typed is not None:
        busy = int(typed.settled_ms is None)
        found.append(Verdict("slots busy after the last keystroke", busy, 0, at_least=False))
    for each in shared:
        what = f"all clients / one that decodes plainly, α = {each.acceptance}"
        found.append(Verdict(what, each.ratio(plain=True), CLIENTS_LIMIT))
        what = f"all clients / one, α = {each.acceptance}"
        found.append(Verdict(what, each.ratio(), CLIENTS_LIMIT))
    return found


def _wrong(turns: Sequence[Turn], typed: Reissued | None, shared: Sequence[Shared]) -> int:
    runs = [run for each in shared for run in (*each.runs, *each.plain)]
    wrong = sum(not turn.correct for turn in turns) + sum(not run.correct for run in runs)
    return wrong + (typed is not None and not typed.correct)


def _markdown(
    notes: Sequence[str],
    turns: Sequence[Turn],
    typed: Reissued | None,
    shared: Sequence[Shared],
) -> str:
    from benchmarks.measuring.report import table, verdict_line
    from benchmarks.servers.api_parts import medians

    parts = ["# API\n\n", *(f"- {note}\n" for note in notes)]
    if turns:
        header = ["turn of tokens", "read", "first token ms", "engine ms", "llama-server ms", "×"]
        rows = (
            [
                str(turn.prompt),
                str(turn.read),
                f"{turn.ours_ms:.1f}",
                f"{turn.engine_ms:.1f}",
                _or(turn.theirs_ms, ".1f"),
                _or(turn.theirs_ms and turn.ours_ms / turn.theirs_ms, ".2f"),
            ]
            for turn in turns
        )
        parts += ["\nA conversation goes on:\n\n", table(header, rows)]
    if typed is not None:
        settled = "more than a second" if typed.settled_ms is None else f"{typed.settled_ms:.0f} ms"
        parts.append(
            f"\nAn editor types: {typed.requests} requests, one every {typed.interval_ms:g} ms, "
            f"{typed.finished} answered before they were dropped; the last one's first text after "
            f"{typed.last_first_ms:.1f} ms, all at rest after {settled}.\n"
        )
    if shared:
        header = ["α", "one, plain", "one", "all", "all/plain", "all/one", "drafted by all"]
        rows = (_client_row(each, medians(each.runs), medians(each.plain)) for each in shared)
        parts += ["\nSeveral clients at once, tokens/s:\n\n", table(header, rows)]
    parts += ["\n", *(verdict_line(v) for v in _verdicts(turns, typed, shared))]
    parts.append(f"- outputs that left the right text: {_wrong(turns, typed, shared)}\n")
    return "".join(parts)


def _client_row(each: Shared, speeds: dict[int, float], plain: dict[int, float]) -> list[str]:
    several = max(speeds)
    drafted = sum(run.drafted for run in each.runs if run.clients == several)
    return [
        each.acceptance,
        f"{plain[1]:.1f}",
        f"{speeds[1]:.1f}",
        f"{speeds[several]:.1f}",
        f"{each.ratio(plain=True):.2f}",
        f"{each.ratio():.2f}",
        str(drafted),
    ]


def _or(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
