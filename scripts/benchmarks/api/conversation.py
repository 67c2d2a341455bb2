"""A long conversation goes on: how soon its next turn begins, each server with its cache."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import synthetic
from benchmarks.api.asking import GREEDY, same_text
from benchmarks.api.shared import Bench, Section, number
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict, table
from benchmarks.measuring.workloads import Files
from benchmarks.servers.daemon import Daemon
from benchmarks.servers.llama_server import Running

NAME = "conversation"
LIMIT = 1.2  # of llama-server's time to the first token


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the same conversation by both. Milliseconds; `theirs` None without llama-server.

    prompt: tokens in all; read: those that were not cached; correct: both wrote the right text.
    """

    prompt: int
    read: int
    ours_ms: float
    engine_ms: float  # of ours, reading and the first token
    theirs_ms: float | None
    correct: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """length: tokens of the first prompt; turns: that follow; new: tokens of each; answer: written."""

    length: int = 3000
    turns: int = 9
    new: int = 40
    answer: int = 16

    @property
    def context(self) -> int:
        """Tokens that all of it takes, and some for drafts."""
        room = self.length + (self.turns + 1) * (self.new + self.answer) + 64
        return -(-room // 256) * 256


def continue_conversation(
    daemon: Daemon,
    server: Running | None,
    files: Files,
    conversation: Conversation,
    rng: random.Random,
) -> list[Turn]:
    """Time to first token of turn after turn, in an order shuffled for each."""
    opening = synthetic.follow(files.cycle, rng.randrange(len(files.cycle)), conversation.length)
    turns: list[Turn] = []
    for index in range(conversation.turns + 1):
        expected = synthetic.follow(files.cycle, opening[-1], conversation.answer)
        text = str(daemon.post("/detokenize", {"tokens": expected})["content"])
        body = {"prompt": opening, "n_predict": conversation.answer, **GREEDY}
        ours = theirs = None
        for mine in rng.sample((True, False), 2):
            if mine:
                ours = daemon.stream("/completion", body)
            elif server is not None:
                theirs = server.stream("/completion", body)
        assert ours is not None
        turn = Turn(
            len(opening),
            int(ours.timings["prompt_n"]),
            ours.first_s * 1e3,
            float(ours.timings["prompt_ms"]),
            theirs.first_s * 1e3 if theirs else None,
            ours.text == text and (theirs is None or same_text(theirs.text, text)),
        )
        other = "" if turn.theirs_ms is None else f", llama-server {turn.theirs_ms:.0f} ms"
        say(f"turn {index} of {turn.prompt} tokens: {turn.ours_ms:.0f} ms{other}")
        if index:  # the first reads everything; what is asked is what comes after it
            turns.append(turn)
        new = synthetic.follow(files.cycle, rng.randrange(len(files.cycle)), conversation.new)
        opening = [*opening, *expected, *new]
    return turns


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(NAME).add_argument
    add("--length", type=positive, default=3000, help="tokens of the first prompt (3000)")
    add("--turns", type=positive, default=9, help="that follow it (9)")


def measure(bench: Bench) -> Section:
    options = bench.options
    models = bench.synthetic(options.acceptance[0])
    assert models.files is not None
    conversation = Conversation(options.length, options.turns)
    context = conversation.context
    with bench.server(models, context) as server, bench.daemon(models, context) as daemon:
        turns = continue_conversation(daemon, server, models.files, conversation, bench.rng(NAME))
    wrong = sum(not turn.correct for turn in turns)
    return Section(_report(turns), verdicts(turns), wrong, [asdict(turn) for turn in turns])


def verdicts(turns: Sequence[Turn]) -> list[Verdict]:
    """Nothing without llama-server."""
    ratios = [turn.ours_ms / turn.theirs_ms for turn in turns if turn.theirs_ms]
    if not ratios:
        return []
    what = "first token of the next turn / llama-server's"
    return [Verdict(what, statistics.median(ratios), LIMIT, at_least=False)]


def _report(turns: Sequence[Turn]) -> str:
    header = ["turn of tokens", "read", "first token ms", "engine ms", "llama-server ms", "×"]
    rows = (
        [
            str(turn.prompt),
            str(turn.read),
            f"{turn.ours_ms:.1f}",
            f"{turn.engine_ms:.1f}",
            number(turn.theirs_ms, ".1f"),
            number(turn.theirs_ms and turn.ours_ms / turn.theirs_ms),
        ]
        for turn in turns
    )
    return f"A conversation goes on:\n\n{table(header, rows)}"
