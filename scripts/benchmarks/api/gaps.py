"""A stream while somebody else's long prompt is read: its longest gap, and the newcomer's first text."""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from benchmarks import synthetic
from benchmarks.api.asking import COLD, same_text
from benchmarks.api.shared import Bench, Models, Section, in_turns, number, tokens_of_code, worst
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict, table
from benchmarks.measuring.runs import BenchError
from benchmarks.servers.daemon import ANSWER_S, Daemon
from benchmarks.servers.llama_server import Running

NAME = "gaps"
LIMIT_MS = 250  # between two pieces of a stream, beyond an ordinary pass
PROMPT = 32  # tokens that the stream begins with
ALONE = 24  # tokens of it before the newcomer
NEWCOMER = 8  # tokens that it writes
Stamps = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Gap:
    """One stream with one newcomer, in milliseconds.

    alone: median gap before the newcomer; longest: after it was sent, of the stream; newcomer: its first
    text. left: tokens of the stream that were still to come then: none means that it waited for nothing.
    """

    ours: bool
    length: int
    repetition: int
    alone: float
    longest: float
    newcomer: float
    left: int
    correct: bool

    @property
    def beyond(self) -> float:
        """The longest gap beyond an ordinary one."""
        return self.longest - self.alone


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(NAME).add_argument
    add("--arriving", type=positive, nargs="+", default=[500, 4000, 16_000], metavar="TOKENS",
        help="of prompts that arrive during a stream, one each (500 4000 16000)")  # fmt: skip
    add("--stream", type=positive, default=500, help="tokens of the stream (500)")


def measure(bench: Bench) -> Section:
    options = bench.options
    models = bench.models(options.acceptance[0])
    room = -(-(max(*options.arriving, options.stream) + PROMPT + NEWCOMER + 256) // 256) * 256
    measured: list[Gap] = []
    with (
        bench.server(models, room, parallel=2) as server,
        # Each place of llama-server holds the longest prompt; ours share what there is.
        bench.daemon(models, room + options.stream + 512, 2) as daemon,
    ):
        code = tokens_of_code(daemon, 2 * max(options.arriving))
        both = [True] if server is None else [True, False]
        for length in options.arriving:
            rng = bench.rng(NAME, length)
            for repetition, ours in in_turns(both, options.repetitions, rng):
                start = rng.randrange(len(code) - length)
                stream = _Stream(
                    daemon, models, code, options.stream, rng.randrange(len(code) - PROMPT)
                )
                asked_server = daemon if ours or server is None else server
                measured.append(
                    stream.met(asked_server, ours, code[start : start + length], repetition)
                )
                gap = measured[-1]
                say(f"{length} tokens arrive{'' if ours else ' at llama-server'}: longest gap "
                    f"{gap.longest:.0f} ms, first text after {gap.newcomer:.0f} ms")  # fmt: skip
    wrong = sum(not gap.correct for gap in measured)
    return Section(_report(measured), verdicts(measured), wrong, [asdict(gap) for gap in measured])


class _Stream:
    """A text that is written while a newcomer arrives; what is right is known of a synthetic pair."""

    def __init__(
        self, daemon: Daemon, models: Models, code: Sequence[int], tokens: int, start: int
    ) -> None:
        self._tokens = tokens
        self._expected: str | None = None
        self._prompt = list(code[start : start + PROMPT])
        if models.files is not None:
            right = synthetic.follow(models.files.cycle, self._prompt[-1], tokens)
            self._expected = str(daemon.post("/detokenize", {"tokens": right})["content"])

    def met(
        self, server: Daemon | Running, ours: bool, newcomer: Sequence[int], repetition: int
    ) -> Gap:
        under_way = threading.Event()

        def heard(tokens: int) -> None:
            if tokens >= ALONE:
                under_way.set()

        body = {**COLD, "prompt": self._prompt, "n_predict": self._tokens, "ignore_eos": True}
        late = {**COLD, "prompt": newcomer, "n_predict": NEWCOMER, "ignore_eos": True}
        pool = ThreadPoolExecutor(1)
        try:
            writing = pool.submit(server.stream, "/completion", body, heard=heard)
            writing.add_done_callback(lambda _: under_way.set())
            under_way.wait(ANSWER_S)
            sent = time.perf_counter()
            second = server.stream("/completion", late)
            first = writing.result()
        finally:
            pool.shutdown(wait=False)  # who is stopped meanwhile waits for no answer
        alone, longest = gaps(first.stamps, sent, second.stamps[-1][0])
        done = max((t for at, t in first.stamps if at <= sent + second.first_s), default=0)
        return Gap(
            ours,
            len(newcomer),
            repetition,
            alone * 1e3,
            longest * 1e3,
            second.first_s * 1e3,
            self._tokens - done,
            self._expected is None or same_text(first.text, self._expected),
        )


def gaps(stamps: Stamps, sent: float, done: float) -> tuple[float, float]:
    """Return two gaps in seconds: the usual one, and the longest one beside a newcomer.

    The usual one is the median between pieces before `sent`. The longest ends after `sent` and begins before
    the newcomer was `done`, because a stream alone may write many tokens at once.

    Raises:
        BenchError: nothing came before, or nothing after it.
    """
    between = [(a, b, b - a) for (a, _), (b, _) in itertools.pairwise(stamps)]
    before = [gap for _, end, gap in between if end <= sent]
    after = [gap for begin, end, gap in between if end > sent and begin < done]
    if not before or not after:
        raise BenchError("The stream was over when the newcomer came; let --stream be longer.")
    return statistics.median(before), max(after)


def verdicts(measured: Sequence[Gap]) -> list[Verdict]:
    """Ours, the worst length."""
    lengths = dict.fromkeys(gap.length for gap in measured)
    beyond = {f"{n} tokens arriving": _median(measured, n, True, "beyond") for n in lengths}
    what = "longest gap of a stream beyond an ordinary one, ms"
    return worst(what, beyond, LIMIT_MS, at_least=False)


def _median(measured: Sequence[Gap], length: int, ours: bool, name: str) -> float | None:
    values = [getattr(gap, name) for gap in measured if (gap.ours, gap.length) == (ours, length)]
    return statistics.median(values) if values else None


def _report(measured: Sequence[Gap]) -> str:
    header = [
        "prompt of tokens",
        "gap alone ms",
        "longest",
        "newcomer's first text",
        "stream's left",
    ]
    header += ["llama-server: alone", "longest", "newcomer's first text", "stream's left"]
    names = ("alone", "longest", "newcomer", "left")
    rows = (
        [
            str(length),
            *(
                number(_median(measured, length, ours, n), ".0f")
                for ours in (True, False)
                for n in names
            ),
        ]
        for length in dict.fromkeys(gap.length for gap in measured)
    )
    return (
        "A prompt arrives during a stream, milliseconds (left: the stream's tokens that were still to "
        f"come at the newcomer's first text):\n\n{table(header, rows)}"
    )
