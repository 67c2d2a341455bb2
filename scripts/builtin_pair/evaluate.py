"""What the two GGUF files can do, measured through llama.cpp.

Acceptance: the target's greedy output is read by the draft in one pass; where the draft's most likely
token equals the target's it would have been accepted.  Such a trace replays greedy speculation exactly.
"""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np

from .code import Hole, standard_library
from .holes import Gap, load_gap, parses

CONTEXT = 1024
ANSWER_TOKENS = 96
LINE_TOKENS = 40
DEPTH = 3
"""Drafted tokens per round in the replayed acceptance, llama-server's default."""
EVALUATION = Path(__file__).with_name("evaluation")
HONEST_MARK = "small demonstration model"


class Greedy:
    """A model with one sequence, always decoded greedily."""

    def __init__(self, path: Path) -> None:
        # One thread: for matrices this small a second one costs more than it brings.
        self._llama = llama_cpp.Llama(
            str(path),
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            verbose=False,
        )

    def special(self, text: str) -> int:
        (token,) = self._llama.tokenize(text.encode(), add_bos=False, special=True)
        return int(token)

    def encode(self, text: str) -> list[int]:
        return list(self._llama.tokenize(text.encode(), add_bos=False, special=False))

    def decode(self, tokens: list[int]) -> str:
        return self._llama.detokenize(tokens).decode("utf-8", errors="replace")

    def next_tokens(self, tokens: list[int]) -> list[int]:
        """Return the most likely successor of every position of `tokens`."""
        self._llama.reset()  # type: ignore[no-untyped-call]  # llama_cpp leaves it untyped
        self._llama.eval(tokens)
        return [int(t) for t in np.argmax(self._llama.scores[: len(tokens)], axis=1)]

    def complete(self, prompt: list[int], limit: int, stop: frozenset[int]) -> list[int]:
        """Greedy continuation, without the token that ended it."""
        self._llama.reset()  # type: ignore[no-untyped-call]  # llama_cpp leaves it untyped
        self._llama.eval(prompt)
        produced: list[int] = []
        while len(produced) < limit:
            token = int(np.argmax(self._llama.scores[self._llama.n_tokens - 1]))
            if token in stop:
                break
            produced.append(token)
            self._llama.eval([token])
        return produced

    def close(self) -> None:
        self._llama.close()


@dataclass
class Agreement:
    """Traces of where the draft agrees with the target."""

    traces: list[list[bool]] = field(default_factory=list)

    def rate(self) -> float:
        """Share of the target's tokens that the draft predicts."""
        flat = [agreed for trace in self.traces for agreed in trace]
        return sum(flat) / max(1, len(flat))

    def accepted_of_drafted(self, depth: int = DEPTH) -> float:
        """Return accepted / drafted when every round drafts `depth` tokens."""
        accepted = drafted = 0
        for trace in self.traces:
            at = 0
            while at < len(trace):
                window = trace[at : at + depth]
                run = next((i for i, agreed in enumerate(window) if not agreed), len(window))
                accepted, drafted = accepted + run, drafted + len(window)
                at += run + 1
        return accepted / max(1, drafted)


@dataclass
class Score:
    """How many of how many, and what was wrong."""

    right: int = 0
    total: int = 0
    misses: list[str] = field(default_factory=list)

    def add(self, right: bool, shown: str) -> None:
        self.total += 1
        self.right += right
        if not right:
            self.misses.append(shown)

    @property
    def share(self) -> float:
        return self.right / max(1, self.total)


@dataclass
class Report:
    questions: Score = field(default_factory=Score)
    outside: Score = field(default_factory=Score)
    trained_exact: Score = field(default_factory=Score)
    held_out_exact: Score = field(default_factory=Score)
    parse: Score = field(default_factory=Score)
    on_questions: Agreement = field(default_factory=Agreement)
    on_code: Agreement = field(default_factory=Agreement)
    missing_holes: int = 0
    seconds: float = 0.0


class Pair:
    """Target and draft as a chat and as an editor would use them."""

    def __init__(self, folder: Path) -> None:
        self.target = Greedy(folder / "target.gguf")
        self.draft = Greedy(folder / "draft.gguf")
        self._end = self.target.special("<|end|>")
        self._user = self.target.special("<|user|>")
        self._assistant = self.target.special("<|assistant|>")
        self._fim = [self.target.special(f"<|fim_{part}|>") for part in ("pre", "suf", "mid")]

    def _run(self, prompt: list[int], limit: int, agreement: Agreement) -> str:
        produced = self.target.complete(prompt, limit, frozenset({self._end}))
        tokens = [*prompt, *produced, self._end]
        guesses = self.draft.next_tokens(tokens)
        first = len(prompt)
        agreement.traces.append([guesses[i - 1] == tokens[i] for i in range(first, len(tokens))])
        return self.target.decode(produced)

    def ask(self, question: str, agreement: Agreement) -> str:
        prompt = [self._user, *self.target.encode(question), self._end, self._assistant]
        return self._run(prompt, ANSWER_TOKENS, agreement)

    def fill(self, prefix: str, suffix: str, agreement: Agreement) -> str:
        """One line for the hole between `prefix` and the beginning of `suffix`; what fits is read."""
        before, after, middle = self._fim
        room = CONTEXT - LINE_TOKENS - 4  # and the token that ends the line
        following = self.target.encode(suffix)[: room // 3]
        preceding = self.target.encode(prefix)[len(following) - room :]
        prompt = [before, *preceding, after, *following, middle]
        return self._run(prompt, LINE_TOKENS, agreement).split("\n")[0]

    def close(self) -> None:
        self.target.close()
        self.draft.close()


def evaluate(folder: Path, short: bool = False, reach: float = 1.0) -> Report:
    """Every measure; `short` looks at a fifth of each list, `reach` widens the context of holes."""
    begin = time.monotonic()
    pair, report = Pair(folder), Report()
    stride = 5 if short else 1
    for item in tomllib.loads((EVALUATION / "questions.toml").read_text("utf-8"))["question"][
        ::stride
    ]:
        answer = pair.ask(item["ask"], report.on_questions)
        right = any(phrase in answer.lower() for phrase in item["expect"])
        report.questions.add(right, f"{item['ask']} -> {answer}")
    for question in tomllib.loads((EVALUATION / "outside.toml").read_text("utf-8"))["questions"][
        ::stride
    ]:
        answer = pair.ask(question, Agreement())
        report.outside.add(HONEST_MARK in answer, f"{question} -> {answer}")
    holes = tomllib.loads((EVALUATION / "holes.toml").read_text("utf-8"))
    for table, score in (("trained", report.trained_exact), ("held_out", report.held_out_exact)):
        for item in holes[table][::stride]:
            gap = Gap(**item)
            _fill_one(pair, load_gap(gap, standard_library(), reach), gap, score, report)
    pair.close()
    report.seconds = time.monotonic() - begin
    return report


def _fill_one(
    pair: Pair, loaded: tuple[list[str], Hole] | None, gap: Gap, score: Score, report: Report
) -> None:
    if loaded is None:
        report.missing_holes += 1
        return
    lines, hole = loaded
    filled = pair.fill(hole.prefix, hole.suffix, report.on_code).strip()
    where = f"{gap.file}:{gap.line}"
    score.add(filled == gap.text, f"{where}: {gap.text!r} -> {filled!r}")
    report.parse.add(parses(lines, gap.line - 1, filled), f"{where}: {filled!r}")


def print_report(report: Report, misses: int = 12) -> int:
    """Print the figures against their goals, and some of the misses; return 0 when every goal is met."""
    rows = (
        ("questions answered rightly", report.questions.share, 0.80, report.questions.total),
        ("outside questions answered honestly", report.outside.share, 0.90, report.outside.total),
        ("holes filled exactly, trained files", report.trained_exact.share, 0.15, report.trained_exact.total),
        ("holes filled exactly, held-out files", report.held_out_exact.share, 0.08, report.held_out_exact.total),
        ("filled files that parse", report.parse.share, 0.60, report.parse.total),
        ("draft agrees, questions", report.on_questions.rate(), 0.75, report.questions.total),
        ("draft agrees, code", report.on_code.rate(), 0.60, report.parse.total),
    )  # fmt: skip
    for label, share, goal, count in rows:
        mark = "ok  " if share >= goal else "low "
        print(f"{mark} {label:40} {share:6.1%}  of {count:3}  goal {goal:.0%}")
    for label, agreement in (("questions", report.on_questions), ("code", report.on_code)):
        share = agreement.accepted_of_drafted()
        print(f"     accepted / drafted at depth {DEPTH}, {label:20} {share:6.1%}")
    if report.missing_holes:
        print(f"     {report.missing_holes} holes left out: this Python has other sources")
    print(f"     {report.seconds:.0f} s")
    for score in (report.questions, report.outside, report.trained_exact):
        for miss in score.misses[:misses]:
            print("  -", miss)
    return 0 if all(share >= goal for _, share, goal, _ in rows) else 1
