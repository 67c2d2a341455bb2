"""A recorded editing session replayed against /infill, beside llama-server as llama.vim recommends it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.api.asking import COLD, GREEDY
from benchmarks.api.recorded import KINDS, WARM_UP, Step, session
from benchmarks.api.shared import SHIPPED, Bench, Models, Section, number, percentile
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict, table
from benchmarks.measuring.runs import BenchError
from benchmarks.servers.daemon import Daemon
from benchmarks.servers.llama_server import Running

NAME = "editor"
P50_LIMIT, P95_LIMIT, READ_LIMIT = 0.9, 1.0, 1.0  # of llama-server's
CONTEXT, SHIPPED_CONTEXT = 4096, 1024
# Nats between two tokens of which either may be the likelier: passes of other widths round otherwise, and
# eight-bit weights move a logit by up to a tenth.
NEAR_TIE = 0.2


@dataclass(frozen=True, slots=True)
class Key:
    """One request answered. first_ms: until its first text, or its end where it has none.

    read, moved: tokens of the prompt that were read, and those that were moved in the cache. exact: nothing
    of what was in the cache had been moved, now or earlier.
    """

    step: int
    kind: str
    first_ms: float
    read: int
    moved: int
    exact: bool
    text: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """One server's keys. refused: why it would not answer the others; warm: tokens read in warm-ups."""

    keys: Sequence[Key]
    refused: Sequence[str]
    warm: int

    def of(self, kind: str | None = None) -> list[Key]:
        """Return the keys of a kind, or all that somebody waits for."""
        return [
            key for key in self.keys if key.kind == kind or (kind is None and key.kind in KINDS)
        ]

    def first_ms(self, share: float, kind: str | None = None) -> float:
        return percentile([key.first_ms for key in self.of(kind)], share)

    def read(self, share: float, kind: str | None = None) -> float:
        return percentile([key.read for key in self.of(kind)], share)

    @property
    def mean_read(self) -> float:
        return sum(key.read for key in self.of()) / len(self.of())


@dataclass(frozen=True, slots=True)
class Same:
    """How many answers were asked for again with nothing cached, and how many were equal then.

    exact_near: parted where two tokens were as likely, up to NEAR_TIE.
    """

    exact: int = 0
    exact_equal: int = 0
    exact_near: int = 0
    moved: int = 0
    moved_equal: int = 0
    moved_near: int = 0


def parting(tokens: Sequence[Mapping[str, Any]], text: str) -> float:
    """Nats between the two likeliest tokens where an answer leaves `text`; infinite where that is not told.

    tokens: the answer's `completion_probabilities`, with two candidates each.
    """
    written_text = ""
    for token in tokens:
        written_text += token["token"]
        best = [float(one["logprob"]) for one in token["top_logprobs"]]
        ends = token is tokens[-1] and written_text != text
        if (ends or not text.startswith(written_text)) and len(best) > 1:
            return best[0] - best[1]
    return math.inf


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        NAME, "It types with the shipped pair, or --model, or with --on-size the synthetic one."
    ).add_argument
    add("--on-size", action="store_true", help="type with the synthetic pair of --size")
    add("--keystrokes", type=positive, default=400, help="recorded and replayed (400)")
    add("--ring", type=int, default=4, help="chunks of context beside the file (4)")
    add("--no-warm-ups", action="store_true", help="rings change without llama.vim's warm-up")
    add("--predict", type=positive, default=8, help="tokens of each suggestion (8)")
    add("--context", type=positive, metavar="TOKENS",
        help=f"({CONTEXT}; {SHIPPED_CONTEXT} with the shipped pair)")  # fmt: skip
    add("--batch", type=positive, default=512, help="llama-server's -b and -ub (512)")
    add("--cold", type=int, default=10, metavar="N",
        help="ask for every Nth again with nothing cached; 0: for none (10)")  # fmt: skip


def measure(bench: Bench) -> Section:
    options = bench.options
    models = models_of(bench)
    shipped = models.target.parent == SHIPPED
    context = options.context or (SHIPPED_CONTEXT if shipped else CONTEXT)
    # Without -n chunks of context fill its prompt up to its last token, and it refuses that.
    flags = [*server_flags(options), "-n", str(max(options.predict, 8))]
    depth = 3 if models.draft is not None else 0
    rng = bench.rng(NAME)
    steps = session(options.keystrokes, options.ring, rng, not options.no_warm_ups)
    with ExitStack() as stack:
        server = stack.enter_context(bench.server(models, context, depth, 2, flags))
        daemon = stack.enter_context(bench.daemon(models, context, 2))
        replay = Replay(options.predict, daemon, server)
        for at, step in enumerate(steps):
            for mine in rng.sample([True, False], 2):
                replay.ask(at, step, mine)
            if at % 25 == 0:
                say(f"key {at} of {len(steps)}")
        same = replay.again(steps, options.cold)
    ours, theirs = replay.ours, replay.theirs
    facts = {
        "target": str(models.target),
        "ours": asdict(ours),
        "llama_server": asdict(theirs) if theirs else None,
        "same": asdict(same),
    }
    return Section(
        _report(models.target, ours, theirs, same), verdicts(ours, theirs, same), 0, facts
    )


def server_flags(options: argparse.Namespace) -> list[str]:
    """Of llama-server, as llama.vim recommends them."""
    return ["--cache-reuse", "256", "-b", str(options.batch), "-ub", str(options.batch)]


def models_of(bench: Bench) -> Models:
    """Return the models with which it types."""
    options = bench.options
    if options.model is not None or options.on_size:
        return bench.models(options.acceptance[0])
    return bench.shipped()


class Replay:
    """Step by step the same to both."""

    def __init__(self, predict: int, daemon: Daemon, server: Running | None) -> None:
        self._predict = predict
        self._daemon = daemon
        self._server = server
        self._keys: dict[bool, list[Key]] = {True: [], False: []}
        self._warm = {True: 0, False: 0}
        self._refused: list[str] = []

    def ask(self, at: int, step: Step, ours: bool) -> None:
        """Send a step, and count what llama-server refuses. Raises BenchError if our daemon fails."""
        if not ours and self._server is None:
            return
        server = self._daemon if ours or self._server is None else self._server
        if step.kind == WARM_UP:
            timings = server.post("/infill", {**GREEDY, **step.fields})["timings"]
            self._warm[ours] += int(timings["prompt_n"])
            return
        try:
            answer = server.stream("/infill", self._body(step), empty=True)
        except BenchError as error:
            if ours:
                raise
            self._refused.append(str(error))
            return
        self._keys[ours].append(
            Key(
                at,
                step.kind,
                answer.first_s * 1e3,
                int(answer.timings["prompt_n"]),
                int(answer.timings.get("cache_shift_n", 0)),
                answer.timings.get("cache_exact_n") == answer.timings.get("cache_n"),
                answer.text,
            )
        )

    def again(self, steps: Sequence[Step], every: int) -> Same:
        """Every so-manieth of ours with nothing cached, once the session is over."""
        counts = asdict(Same())
        for key in self._keys[True][::every] if every > 0 else ():
            body = {**self._body(steps[key.step]), **COLD}
            cold = self._daemon.stream("/infill", body, empty=True)
            name = "exact" if key.exact else "moved"
            counts[name] += 1
            if cold.text == key.text:
                counts[f"{name}_equal"] += 1
            else:
                scored = self._daemon.post("/infill", {**body, "n_probs": 2})
                tokens = scored.get("completion_probabilities", [])
                # Scored, it is decoded without drafts and may go on as either does.
                gap = min(parting(tokens, text) for text in (key.text, cold.text))
                counts[f"{name}_near"] += gap <= NEAR_TIE
        return Same(**counts)

    def _body(self, step: Step) -> dict[str, Any]:
        return {**GREEDY, "n_predict": self._predict, **step.fields}

    @property
    def ours(self) -> Replayed:
        return Replayed(self._keys[True], (), self._warm[True])

    @property
    def theirs(self) -> Replayed | None:
        if self._server is None:
            return None
        return Replayed(self._keys[False], self._refused, self._warm[False])


def verdicts(ours: Replayed, theirs: Replayed | None, same: Same) -> list[Verdict]:
    """Beside llama-server's, over all keys; and whether a cache that is exact shows in no answer."""
    result = []
    if theirs is not None and theirs.of():
        answered = {key.step for key in theirs.keys}
        both = replace(ours, keys=[key for key in ours.keys if key.step in answered])
        for what, mine, other, limit in (
            ("first token p50", both.first_ms(0.5), theirs.first_ms(0.5), P50_LIMIT),
            ("first token p95", both.first_ms(0.95), theirs.first_ms(0.95), P95_LIMIT),
            ("tokens read per key", both.mean_read, theirs.mean_read, READ_LIMIT),
        ):
            what = f"{what} of an editor / llama-server's"
            result.append(Verdict(what, mine / other if other else 1.0, limit, at_least=False))
    if same.exact:
        what = "answers that differ from a cold request's by more than a near tie, cache exact"
        parted = same.exact - same.exact_equal - same.exact_near
        result.append(Verdict(what, parted, 0, at_least=False))
    return result


def _report(target: Path, ours: Replayed, theirs: Replayed | None, same: Same) -> str:
    header = ["", "keys", "first ms p50", "p95", "read p50", "p95", "mean"]
    header += [f"llama-server {title}" for title in header[1:]] if theirs is not None else []
    kinds = [None, *(kind for kind in KINDS if ours.of(kind))]
    rows = (
        [kind or "all", *_cells(ours, kind), *(_cells(theirs, kind) if theirs is not None else ())]
        for kind in kinds
    )
    lines = [f"An editor types with {target.name}, tokens read of each prompt:\n\n"]
    lines.append(table(header, rows))
    lines.append(f"\nRead in warm-ups: {ours.warm} tokens")
    lines.append(f"; llama-server {theirs.warm}" if theirs is not None else "")
    if theirs is not None and theirs.refused:
        lines.append(
            f". llama-server refused {len(theirs.refused)} requests, which count for neither in what "
            f"must hold; the first with: {theirs.refused[0]}"
        )
    lines.append(
        f". Equal to a cold request's answer: {same.exact_equal} of {same.exact} where the cache "
        f"was exact ({same.exact_near} of the others part at a near tie, of up to {NEAR_TIE} nats), "
        f"{same.moved_equal} of {same.moved} where tokens had been moved in it ({same.moved_near}).\n"
    )
    return "".join(lines)


def _cells(replayed: Replayed, kind: str | None) -> list[str]:
    keys = replayed.of(kind)
    if not keys:
        return ["0", "", "", "", "", ""]
    return [
        str(len(keys)),
        number(replayed.first_ms(0.5, kind), ".1f"),
        number(replayed.first_ms(0.95, kind), ".1f"),
        number(replayed.read(0.5, kind), ".0f"),
        number(replayed.read(0.95, kind), ".0f"),
        number(sum(key.read for key in keys) / len(keys), ".0f"),
    ]
