"""`scripts/bench placement FILE`: a mixture of experts beside a GPU that does not hold it.

The same file is read and continued with the experts placed apart as the daemon plans it, with whole layers in
main memory, and by llama-server with its `--fit` (where its path is given), each within the same memory of
the device. Ten minutes are enough on a GPU. Without one, `--rpc` takes a worker of llama.cpp's RPC backend
(`localspec rpc-worker`) for the device, which shows that everything is carried out, and nothing about speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import msgspec

from benchmarks.command import add_shared, positive, say
from localspec.engine import environment
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.daemon.worker.plan import LoadPlan

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
APART, WHOLE, SERVER = "experts apart", "whole layers", "llama-server --fit"


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of reading and of writing, the best of all repetitions. placed: in words."""

    way: str
    placed: str
    reading: float
    writing: float


def main(arguments: list[str]) -> int:
    """0: measured; 1: a load or an answer failed; 2: usage."""
    environment.prepare()
    options = _parser().parse_args(arguments)
    from benchmarks.measuring.runs import BenchError
    from localspec.engine import llama

    llama.initialise()
    speeds: list[Speed] = []
    try:
        for speed in _measure(options):
            speeds.append(speed)
            rates = f"reads {speed.reading:8.1f} tokens/s, writes {speed.writing:7.2f}"
            sys.stdout.write(f"{speed.way:20}{rates}  ({speed.placed})\n")
    except (BenchError, LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1
    if options.json:
        content = json.dumps([asdict(speed) for speed in speeds], indent=1)
        options.json.write_text(content + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("scripts/bench placement", description=__doc__)
    add_shared(parser)
    add = parser.add_argument
    add("file", type=Path, help="a GGUF file of a mixture")
    add("--memory", type=positive, required=True, metavar="MIB", help="of the device, to be used")
    add("--rpc", default="", metavar="HOST:PORT", help="a worker that stands in for a GPU")
    add("--prompt", type=positive, default=2048, help="tokens that are read (2048)")
    add("--tokens", type=positive, default=128, help="tokens that are written (128)")
    add("--context", type=positive, default=8192, help="tokens (8192)")
    add("--repetitions", type=positive, default=3, help="of each way (3)")
    return parser


def _measure(options: argparse.Namespace) -> Iterator[Speed]:
    from benchmarks.measuring.runner import Runner

    rpc, prompt = (options.rpc,) if options.rpc else (), list[int]()
    # Real text, of which neighbouring tokens choose some of the same experts.
    text = "\n".join(page.read_text() for page in sorted(ROOT.glob("localspec/docs/*.md")))
    for way in (APART, WHOLE):
        say(f"loading: {way}")
        plan = _plan(options, whole=way == WHOLE)
        with Runner(options.file, None, plan.settings, rpc) as runner:
            vocab = runner.pair.models.target.vocab
            prompt = vocab.tokenize(text, add_special=True, parse_special=False)[: options.prompt]
            timings = [
                runner.timed(prompt, options.tokens) for _ in range(options.repetitions + 1)
            ][1:]
        yield Speed(
            way,
            _describe(plan),
            max(timing.prompt_per_second for timing in timings),
            max(timing.predicted_per_second for timing in timings),
        )
    if options.llama_server:
        say(f"loading: {SERVER}")
        yield _ask_server(options, prompt)


def _plan(options: argparse.Namespace, *, whole: bool) -> LoadPlan:
    """Return the daemon's plan for this memory. whole: the best one with whole layers."""
    from localspec.daemon.worker.plan import LoadPlanner, free_memory
    from localspec.engine import llama
    from localspec.protocol.frames import EngineSettings, PairFiles
    from localspec.registry.header import fit

    settings = EngineSettings(
        n_ctx=options.context, parallel=1, n_threads=options.threads, own_heads=False
    )
    built = "vulkan" if options.rpc else llama.backend()  # no kernels are known of a worker
    planner = LoadPlanner(PairFiles("bench", str(options.file)), settings, built)
    divide, kept = fit._divide_target, 1 if whole else None

    def divisions(*given: object) -> Iterator[fit._Division]:
        return itertools.islice(divide(*given), kept)  # type: ignore[arg-type]

    with mock.patch.object(fit, "_divide_target", divisions):
        plan = planner.plan(fit.FreeMemory(free_memory().ram, options.memory * MIB))
    return plan._replace(
        settings=msgspec.structs.replace(plan.settings, rpc_needed=bool(options.rpc))
    )


def _describe(plan: LoadPlan) -> str:
    layers, apart = plan.settings.n_gpu_layers, plan.plan.cpu_moe_layers if plan.plan else 0
    there = "all layers" if layers < 0 else f"{layers} layers"
    return f"{there} there{f', but the experts of the first {apart}' if apart else ''}"


def _ask_server(options: argparse.Namespace, prompt: list[int]) -> Speed:
    """Return the speeds of llama-server, which leaves as much memory free as we do."""
    from benchmarks.measuring.runs import PLAIN
    from benchmarks.servers.llama_server import Running, Server
    from localspec.engine import llama
    from localspec.engine.pair.models import physical_cores

    extra = ["--rpc", options.rpc] if options.rpc else []
    if not options.rpc:
        extra += ["--fit-target", str(max(llama.free_gpu_bytes() // MIB - options.memory, 0))]
    threads = options.threads or physical_cores()
    server = Server(options.llama_server, options.file, None, options.context, threads, extra=extra)
    body = {"prompt": prompt, "n_predict": options.tokens, "cache_prompt": False, "temperature": 0}
    with Running(server, PLAIN) as running:
        timings = [
            running.post("/completion", body)["timings"] for _ in range(options.repetitions + 1)
        ][1:]
    reading, writing = (
        max(float(timing.get(f"{part}_per_second", 0)) for timing in timings)
        for part in ("prompt", "predicted")
    )
    return Speed(SERVER, "as it chooses", reading, writing)
