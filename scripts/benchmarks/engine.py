"""`scripts/bench engine`: plain, every fixed depth and `auto` on pairs of known acceptance.

Synthetic pairs (benchmarks.synthetic), or targets with MTP heads (--heads), are written once and kept.
Per acceptance rate the pair is loaded once and all settings take turns on it, on the same texts, in an
order shuffled anew for each repetition; every output is checked token by token. `auto` starts with
nothing learned and keeps what it learns from text to text, as in real use. With --llama-server the same
files are given to a llama-server per setting, in the same turns.

`scripts/bench engine replay TRACE` replays depth policies on a trace written with --record.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import add_shared, positive, say
from benchmarks.load import load_report
from localspec.engine import environment
from localspec.errors import LocalspecError
from localspec.machine.host import MAX_NOISE_CORES
from localspec.paths import default_paths

if TYPE_CHECKING:
    from benchmarks.measuring.interleaved import Plan
    from benchmarks.measuring.workloads import Sizes, Workload


def main(arguments: list[str]) -> int:
    """Run it. 0: done (what was missed is in the report); 1: a wrong output or a failure; 2: usage."""
    # As in the worker (localspec.engine.__main__), and before llama_cpp is imported.
    environment.prepare()
    try:
        if arguments[:1] == ["replay"]:
            return _replay(_replay_parser().parse_args(arguments[1:]))
        parser = options_parser("scripts/bench engine", str(__doc__))
        _add_heads(parser)
        options = parser.parse_args(arguments)
        try:
            plan = plan_of(options)
        except ValueError as error:
            parser.error(str(error))
        if options.record is not None:
            return _record(options, plan)
        if options.rounds:
            return _soak(options, plan)
        return _measure(options, plan)
    except (LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1


def options_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of what to measure, for `scripts/bench engine` and `scripts/gpu_check`."""
    parser = argparse.ArgumentParser(
        program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a small pair: does it work, not how fast is it")
    add("--size", choices=["big", "gpu", "quick", "tiny"], default="big", help="of the pair (big)")
    add("--target-shape", metavar="K=V,…", help="e.g. layers=32,width=4096,ff=14336,heads=32,"
        "kv-heads=8,vocab=151936,quant=q4_0: changes to the size chosen")  # fmt: skip
    add("--draft-shape", metavar="K=V,…", help="the same for the draft")
    add("--acceptance", nargs="+", metavar="α", help="0.9, bursty, or HIGH/LOW for other bursts")
    add("--depths", default="1,2,3,4,5,6,7,8", help="fixed depths, separated by commas")
    add("--tokens", type=positive, default=256, help="to generate (256)")
    add("--prompt", type=positive, default=64, help="tokens to read before (64)")
    add("--skip", type=int, default=64, help="tokens the second figure leaves out (64)")
    add("--repetitions", type=positive, default=3, help="texts per acceptance rate (3)")
    add("--context", type=int, default=0, help="tokens; 0: as many as a text needs")
    add("--gpu-layers", type=int, default=-1, help="-1: all that fit")
    add(
        "--rpc",
        nargs="+",
        default=[],
        metavar="HOST:PORT",
        help="workers (localspec rpc-worker) that have the target's layers",
    )
    add("--kv", choices=["f16", "q8_0"], default="f16", help="type of the KV cache")
    add("--no-extra-buffers", action="store_true", help="llama.cpp's repacked CPU kernels off")
    add("--server-argument", action="append", default=[], metavar="ARG",
        help="hand it this as well (may be repeated)")  # fmt: skip
    add("--rounds", type=int, default=0, metavar="N",
        help="instead: does memory grow over N rounds, on a very small pair?")  # fmt: skip
    add("--record", type=Path, metavar="TRACE",
        help="instead: write a trace for `replay`, of the first --acceptance or of --target")  # fmt: skip
    add("--target", type=Path, help="with --record: a real pair's target, and")
    add("--draft", type=Path, help="with --record: its draft")
    add("--text", type=Path, help="with --record and --target: a file with the prompt")
    add_shared(parser)
    return parser


def _add_heads(parser: argparse.ArgumentParser) -> None:
    from benchmarks.measuring.workloads import HEADS, LAYER_READERS, TARGETS

    what = "a target that is drafted for by MTP heads in its file, or by a sidecar"
    parser.add_argument("--heads", choices=HEADS, help=what)
    what = f"architecture of a target with a sidecar of these: {', '.join(LAYER_READERS)} (llama)"
    parser.add_argument("--architecture", choices=TARGETS, default="llama", help=what)


def _sizes(options: argparse.Namespace) -> Sizes:
    from benchmarks.measuring.workloads import SIZES, SOAK, Sizes, shape

    size = SIZES["quick" if options.quick else options.size]
    if options.rounds and not options.quick and options.size == "big":
        size = SOAK
    if not options.target_shape and not options.draft_shape:
        return size
    target = shape(options.target_shape, size.target) if options.target_shape else size.target
    draft = shape(options.draft_shape, size.draft) if options.draft_shape else size.draft
    if draft.n_vocab != target.n_vocab:  # a pair has one vocabulary: the target's
        draft = replace(draft, n_vocab=target.n_vocab)
    return Sizes("custom", target, draft)


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what was asked for. Raises ValueError."""
    from benchmarks.measuring.interleaved import Plan
    from benchmarks.measuring.workloads import LAYER_READERS, WORKLOADS, workload
    from localspec.protocol.frames import EngineSettings

    workloads: list[Workload] = [workload(text) for text in options.acceptance or ()]
    depths = sorted({int(part) for part in options.depths.split(",")})
    if depths[0] < 1 or depths[-1] > 16:
        raise ValueError("--depths: from 1 to 16")
    if options.heads and (options.record or options.rounds):
        raise ValueError("--heads: neither with --record nor with --rounds")
    if options.architecture != "llama" and options.heads not in LAYER_READERS:
        raise ValueError(f"--architecture: with --heads {', '.join(LAYER_READERS)}")
    sizes = _sizes(options)
    if options.heads:
        sizes = sizes.with_heads(options.heads, options.architecture)
    return Plan(
        work=(options.work or default_paths().cache / "bench").absolute(),
        sizes=sizes,
        workloads=workloads or WORKLOADS,
        depths=depths,
        prompt=options.prompt,
        tokens=options.tokens,
        skip=options.skip if options.skip < options.tokens else 0,
        repetitions=options.repetitions,
        seed=options.seed,
        engine=EngineSettings(
            n_ctx=options.context,
            n_threads=options.threads,
            n_gpu_layers=options.gpu_layers,
            type_kv=options.kv,
            extra_buffers=not options.no_extra_buffers,
        ),
        server=options.llama_server.absolute() if options.llama_server else None,
        server_arguments=options.server_argument,
        rpc=tuple(options.rpc),
    )


def _measure(options: argparse.Namespace, plan: Plan) -> int:
    from benchmarks.measuring import report
    from benchmarks.measuring.interleaved import measure
    from localspec.engine import llama

    llama.initialise()
    before = load_report()
    say(before)
    measured = measure(plan, say)
    load_after = load_report()
    limits = report.Limits()
    settings = plan.engine_settings(None)
    noise = max((run.others or 0.0 for entry in measured for run in entry.runs), default=0.0)
    grown = max(entry.rss_mb[1] - entry.rss_mb[0] for entry in measured)
    largest = max(entry.rss_mb[1] for entry in measured)
    notes = [
        f"{platform.machine()}, {os.cpu_count()} cores, {settings.n_threads} threads; "
        f"llama-cpp-python {llama.llama_version()}; {llama.system_info()}",
        f"pair {plan.sizes.name}: target {plan.sizes.target}, draft {plan.sizes.draft}"
        + (f", MTP heads: {plan.sizes.heads}" if plan.sizes.heads else ""),
        f"{plan.repetitions} texts per α, {plan.prompt} tokens read, {plan.tokens} generated; "
        f"`later` leaves out the first {plan.skip}",
        f"before: {before}",
        f"after: {load_after}",
        f"other processes' work during a run: {noise * 100:.0f} % of a core at most"
        + (" (WARNING: more than 10 %)" if noise > MAX_NOISE_CORES else ""),
        f"resident memory: {largest:.0f} MB at most; from the first run of a pair to its last "
        f"{grown:+.0f} MB at most",
    ]
    if plan.sizes.name in ("quick", "tiny"):
        notes.append(
            "what must hold is meant for large pairs: small passes cost no more than Python"
        )
    sys.stdout.write(report.markdown("Engine", notes, measured, limits))
    facts = {"notes": notes, "sizes": plan.sizes.name, "engine": settings, "seed": plan.seed}
    _write(options.json, report.as_json(facts, measured, limits))
    return 0 if all(run.correct for entry in measured for run in entry.runs) else 1


def _write(path: Path | None, content: object) -> None:
    if path is not None:
        import msgspec

        text = json.dumps(msgspec.to_builtins(content), indent=1)
        path.write_text(text + "\n", encoding="utf-8")


def _soak(options: argparse.Namespace, plan: Plan) -> int:
    from benchmarks.measuring.report import table
    from benchmarks.measuring.soak import soak
    from benchmarks.measuring.workloads import workload
    from localspec.engine import llama

    llama.initialise()
    if not options.acceptance:
        plan = replace(plan, workloads=[workload("0.7")])
    result = soak(plan, options.rounds, say)
    rows = ([str(rounds), f"{mb:.1f}"] for rounds, mb in result.readings)
    word = "flat" if result.flat else "it GROWS"
    sys.stdout.write(
        "# Memory over many rounds\n\n" + table(["rounds", "resident MB"], rows) + "\n"
        f"- {result.growth_mb:+.1f} MB after the first tenth: {word}\n"
    )
    _write(options.json, {"readings": list(result.readings), "growth_mb": result.growth_mb})
    return 0 if result.flat else 1


def _record(options: argparse.Namespace, plan: Plan) -> int:
    import random

    from benchmarks.measuring.workloads import build, text
    from benchmarks.traces.trace import record
    from localspec.engine import llama

    llama.initialise()
    prompt: list[int] | str
    settings = plan.engine_settings(None)
    if options.target is not None:
        if options.draft is None or options.text is None:
            raise LocalspecError("--target needs --draft and --text.")
        target, draft = options.target, options.draft
        prompt, name = options.text.read_text(encoding="utf-8"), options.target.stem
        settings.n_ctx = options.context  # the prompt's length is not known yet
    else:
        first_workload = plan.workloads[0]
        files = build(plan.work, plan.sizes, first_workload, say)
        sample = text(files, plan.prompt, plan.tokens, random.Random(plan.seed))
        target, draft, prompt = files.target, files.draft, sample.prompt
        name = f"{plan.sizes.name}, α = {first_workload.name}"
    trace = record(target, draft, prompt, plan.tokens, settings, name)
    trace.save(options.record)
    say(f"{len(trace.target)} tokens, {sum(trace.hits)} guessed right: {options.record}")
    return 0


def _replay_parser() -> argparse.ArgumentParser:
    from benchmarks.traces.trace import EXAMPLE_COSTS

    parser = argparse.ArgumentParser("scripts/bench engine replay", description=_replay.__doc__)
    add = parser.add_argument
    add("trace", type=Path)
    add("--costs", choices=["trace", *EXAMPLE_COSTS], default="trace",
        help="those measured when the trace was recorded, or those of an example machine")  # fmt: skip
    add("--depths", default="1,2,3,4,5,6,7,8", help="fixed depths to compare with")
    add("--passes", type=positive, default=3, help="times auto reads the trace, learning (3)")
    add("--json", type=Path, metavar="FILE")
    return parser


def _replay(options: argparse.Namespace) -> int:
    """Regret of `auto` against the best fixed depth and the clairvoyant shortest path."""
    from benchmarks.traces import replay
    from benchmarks.traces.trace import EXAMPLE_COSTS, Trace, cost_profile

    try:
        trace = Trace.load(options.trace)
        costs = trace.costs if options.costs == "trace" else EXAMPLE_COSTS[options.costs]
        depths = sorted({int(part) for part in options.depths.split(",")})
        regret = replay.regret(trace, cost_profile(costs), depths, options.passes)
    except ValueError as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 2
    sys.stdout.write(replay.markdown(trace, regret))
    _write(options.json, regret)
    return 0
