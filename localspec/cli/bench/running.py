"""The measurement: every prompt plain and with drafts in turns, so that drift falls on both alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.cli.bench.asking import Answer, How, Other, Ours
from localspec.cli.bench.prompts.workloads import Prompt, Work
from localspec.cli.bench.report import Mode, Run, Sampling
from localspec.cli.bench.theory import DEEPEST
from localspec.errors import InvalidRequest, LocalspecError
from localspec.machine.energy import Meter
from localspec.machine.quiet import Others

_PLAIN: dict[str, Any] = {"enabled": False}
_DRAFTED: dict[str, Any] = {"enabled": True}
_MODES: tuple[Mode, Mode] = ("plain", "speculative")
PROBES = (DEEPEST, 1)  # depths of the answers that a replay goes by
_WARM = 16  # tokens of an answer that nobody looks at
_TEMPLATE = 96  # tokens that a chat template adds at most
_CONTEXT = 4096  # tokens, where the server does not say
_LEAST_ROOM = 128  # tokens of a question, whatever is left


@dataclass(frozen=True)
class Plan:
    """What to ask and how often. seconds: begin nothing that would end later; own: also with the pair's own
    sampling; probe: also answers that draft as deep as they can, and one token at a time, for the replay.

    drafts: `speculative` of the runs with drafts. against: a server that is asked the same, as it is.
    apply: the pair keeps what it learns from this.
    """

    works: Sequence[Work]
    tokens: int
    repetitions: int
    seconds: float | None = None
    own: bool = False
    probe: bool = True
    drafts: dict[str, Any] = field(default_factory=lambda: dict(_DRAFTED))
    against: Other | None = None
    apply: bool = False


@dataclass
class Found:
    """texts: of the first answer at temperature 0, by work, prompt and mode. theirs: the other server's
    answers. failed, their_failed: by work, why. probes: answers at a fixed depth, by that.
    """

    runs: list[Run] = field(default_factory=list)
    probes: dict[int, list[Run]] = field(default_factory=lambda: {each: [] for each in PROBES})
    theirs: list[Run] = field(default_factory=list)
    texts: dict[tuple[str, int, Mode], str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    their_failed: dict[str, str] = field(default_factory=dict)
    partial: bool = False


@dataclass(frozen=True)
class Turn:
    """A prompt, once in each mode; or once with so many drafts in each pass (probe)."""

    work: Work
    prompt: int
    repetition: int
    sampling: Sampling
    probe: int = 0


@dataclass(frozen=True)
class Now:
    """How far it is. left_s: as expected by what was done. who: is asked, in which mode."""

    done: int
    of: int
    turn: Turn
    who: str
    left_s: float | None


Watch = Callable[[Now, Found], None]


def turns(plan: Plan) -> Iterator[Turn]:
    """All kinds of work first, then again; so that whoever stops early has something of each."""
    most = max(len(work.prompts) for work in plan.works)
    samplings: tuple[Sampling, ...] = ("greedy", "own") if plan.own else ("greedy",)
    for repetition in range(plan.repetitions):
        for sampling in samplings:
            for prompt in range(most):
                for work in plan.works:
                    if prompt < len(work.prompts):
                        yield Turn(work, prompt, repetition, sampling)
        if plan.probe and not repetition:
            for work in plan.works:
                for depth in PROBES:
                    yield Turn(work, 0, repetition, "greedy", probe=depth)


class Bench:
    """Asks a server what a plan says. pids: of the server's own processes, whose work is not others'."""

    def __init__(self, server: Ours, plan: Plan, context: int | None, pids: Sequence[int]) -> None:
        self.server, self.plan, self.found = server, plan, Found()
        self.room, self._pids = (context or _CONTEXT) - _TEMPLATE, pids
        self._meter = Meter()

    def warm_up(self) -> None:
        """Load the pair, and have every way of answering used once.

        Raises:
            LocalspecError: why it does not load or answer.
        """
        prompt = Prompt(ask="Say hello.")
        for mode in _MODES:
            self.server.ask(prompt, self._how(_WARM, mode, "greedy"))
        if self.plan.against:
            self.plan.against.ask(prompt, How(_WARM, _LEAST_ROOM))

    def run(self, watch: Watch) -> Found:
        """All of the plan, or what of it there was time for. Ctrl-C ends it: `partial` then.

        Raises:
            LocalspecError: nothing could be asked at all.
        """
        began = time.monotonic()
        todo = [(turn, list(self._asked(turn, at))) for at, turn in enumerate(turns(self.plan))]
        of = sum(len(asked) for _, asked in todo)
        done, slowest = 0, 0.0
        try:
            for turn, asked in todo:
                before = time.monotonic() - began
                if self.plan.seconds is not None and done and before + slowest > self.plan.seconds:
                    break
                for mode in asked:
                    spent = time.monotonic() - began
                    left = spent / done * (of - done) if done else None
                    watch(Now(done, of, turn, self._who(turn, mode), left), self.found)
                    self._one(turn, mode)
                    done += 1
                slowest = max(slowest, time.monotonic() - began - before)
        except KeyboardInterrupt:
            self.found.partial = True
        return self.found

    def lead(self, work: Work, prompt: int, at: int, other: str) -> float | None:
        """As the server says it of plain decoding at temperature 0."""
        tokens = min(work.tokens or self.plan.tokens, self.plan.tokens)
        how = self._how(tokens, "plain", "greedy")
        return self.server.lead(work.prompts[prompt], how, at, other)

    def _asked(self, turn: Turn, at: int) -> Iterator[Mode | None]:
        """The modes of a turn, None: the other server; in turns, so that none always comes first."""
        if turn.probe:
            yield "speculative"
            return
        yield from _MODES if at % 2 else _MODES[::-1]
        if self.plan.against and turn.sampling == "greedy":
            yield None

    def _who(self, turn: Turn, mode: Mode | None) -> str:
        if mode is None:
            return self.plan.against.name if self.plan.against else ""
        return f"{turn.probe} drafts a pass" if turn.probe else mode

    def _how(self, tokens: int, mode: Mode, sampling: Sampling, *, probe: int = 0) -> How:
        room = max(self.room - tokens, _LEAST_ROOM)
        drafts = {**self.plan.drafts, **({"depth": probe} if probe else {})}
        return How(tokens, room, _PLAIN if mode == "plain" else drafts, sampling == "own")

    def _one(self, turn: Turn, mode: Mode | None) -> None:
        """Ask, and note the answer or why there was none; what failed once is not asked again."""
        work, tokens = turn.work, min(turn.work.tokens or self.plan.tokens, self.plan.tokens)
        failed = self.found.their_failed if mode is None else self.found.failed
        if work.name in failed:
            return
        how = self._how(tokens, mode or "plain", turn.sampling, probe=turn.probe)
        server = self.plan.against if mode is None and self.plan.against else self.server
        others, before = Others(), self._meter.joules()
        try:
            answer = server.ask(work.prompts[turn.prompt], how)
        except LocalspecError as error:
            if not self.found.runs and not isinstance(error, InvalidRequest):
                raise
            failed[work.name] = error.message
            return
        after = self._meter.joules()
        run = _run(turn, mode or "speculative", answer)
        run.joules = None if before is None or after is None else after - before
        if mode is None:
            self.found.theirs.append(run)
            return
        run.others = others.cores(self._pids)
        (self.found.probes[turn.probe] if turn.probe else self.found.runs).append(run)
        if turn.sampling == "greedy" and not turn.probe:
            self.found.texts.setdefault((work.name, turn.prompt, mode), answer.text)


def _run(turn: Turn, mode: Mode, answer: Answer) -> Run:
    said, timings = answer.speculation, answer.timings
    return Run(
        workload=turn.work.name,
        prompt=turn.prompt,
        repetition=turn.repetition,
        mode=mode,
        sampling=turn.sampling,
        tokens=answer.tokens,
        prompt_tokens=int(answer.usage.get("prompt_tokens") or timings.get("prompt_n") or 0),
        first_ms=1e3 * (answer.first_s or answer.total_s),
        total_ms=1e3 * answer.total_s,
        write_ms=1e3 * answer.write_s,
        rate=answer.rate,
        digest=answer.digest,
        drafted=int(timings.get("draft_n") or 0),
        accepted=int(timings.get("draft_n_accepted") or 0),
        passes=int(said.get("rounds") or 0),
        source=said.get("kind"),
        reason=said.get("reason"),
        finish=answer.finish,
        rounds=answer.rounds,
        arrivals=answer.arrivals,
    )
