"""The measurement: every prompt plain and with drafts in turns, so that drift falls on both alike."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from localspec.cli.bench.asking import Answer, Gone, How, Other, Ours
from localspec.cli.bench.prompts.workloads import Prompt, Work
from localspec.cli.bench.report import Mode, Run, Sampling
from localspec.cli.bench.theory import DEEPEST
from localspec.errors import InvalidRequest, LocalspecError, NoDaemon
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
_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
_AGAIN = 1.0  # seconds after which another signal is a second wish


class Stopping:
    """Ctrl-C, SIGTERM and the end of the terminal stop the asking, and nothing of what comes after it: what
    there is is reported, and what the pair had learned is put back. Who presses Ctrl-C again gives that up.
    """

    def __init__(self) -> None:
        self.when: float | None = None
        self._waits = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Signals come here; those that whoever started this ignores are ignored."""
        heard = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, self._stop) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """For a server.

        Raises:
            KeyboardInterrupt: it shall stop, since now or before.
        """
        self._waits = True
        try:
            if self.when is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._waits = False

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        again = self.when is not None and time.monotonic() - self.when > _AGAIN
        self.when = self.when or time.monotonic()
        if self._waits or again:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Plan:
    """What to ask and how often. seconds: begin nothing that would end later; own: also with the pair's own
    sampling; probe: also answers that draft as deep as they can, and one token at a time, for the replay.

    drafts: `speculative` of the runs with drafts. against: a server that is asked the same, as it is.
    apply: the pair keeps what it learns from this. stopping: what ends it early.
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
    stopping: Stopping = field(default_factory=Stopping)


@dataclass
class Found:
    """texts: of the first answer at temperature 0, by work, prompt and mode. theirs: the other server's
    answers. failed, their_failed: by work, why. probes: answers at a fixed depth, by that. ended: why nobody
    could be asked any more; their_end: the same of the other server alone.
    """

    runs: list[Run] = field(default_factory=list)
    probes: dict[int, list[Run]] = field(default_factory=lambda: {each: [] for each in PROBES})
    theirs: list[Run] = field(default_factory=list)
    texts: dict[tuple[str, int, Mode], str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    their_failed: dict[str, str] = field(default_factory=dict)
    partial: bool = False
    ended: str = ""
    their_end: str = ""


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
    """All kinds of work first, then again; so that whoever stops early has something of each. Short answers
    more often: how exact a rate is depends on the time that was measured.
    """
    most = max(len(work.prompts) for work in plan.works)
    samplings: tuple[Sampling, ...] = ("greedy", "own") if plan.own else ("greedy",)
    for repetition in range(plan.repetitions):
        for sampling in samplings:
            for prompt in range(most):
                for work in plan.works:
                    often = _often(work, plan) if prompt < len(work.prompts) else 0
                    for again in range(often):
                        yield Turn(work, prompt, repetition * often + again, sampling)
    # Last: a pair learns from these, too, what its own choice of depths would not have taught it.
    for work in plan.works if plan.probe else ():
        for depth in PROBES:
            yield Turn(work, 0, 0, "greedy", probe=depth)


def _often(work: Work, plan: Plan) -> int:
    """How often each prompt is asked in a repetition."""
    return max(plan.tokens // (2 * work.tokens), 1) if work.tokens else 1


class Bench:
    """Asks a server what a plan says. pids: of the server's own processes, whose work is not others'."""

    def __init__(self, server: Ours, plan: Plan, context: int | None, pids: Sequence[int]) -> None:
        self.server, self.plan, self.found = server, plan, Found()
        self.room, self._pids = (context or _CONTEXT) - _TEMPLATE, pids
        self._meter, self._began = Meter(), time.monotonic()

    def warm_up(self) -> None:
        """Load the pair, and have every way of answering used once. Ctrl-C ends it: `partial` then.

        Raises:
            LocalspecError: why it does not load or answer, or the other server does not.
        """
        prompt = Prompt(ask="Say hello.")
        try:
            with self.plan.stopping.waiting():
                if self.plan.against:  # first: it is known at once where nobody is there
                    self.plan.against.ask(prompt, How(_WARM, _LEAST_ROOM, until=self._until()))
                for mode in _MODES:
                    self.server.ask(prompt, self._how(_WARM, mode, "greedy"))
        except KeyboardInterrupt:
            self.found.partial = True

    def run(self, watch: Watch) -> Found:
        """All of the plan, or what of it there was time for. Ctrl-C and the daemon's end end it: `partial`.

        Raises:
            LocalspecError: nothing could be asked at all.
        """
        try:
            self._all(watch)
        except KeyboardInterrupt:
            self.found.partial = True
        except NoDaemon as error:  # another one would have another machine's state before it
            if not self.found.runs:
                raise
            self.found.partial, self.found.ended = True, error.message
        return self.found

    def _all(self, watch: Watch) -> None:
        todo = [(turn, list(self._asked(turn))) for turn in turns(self.plan)]
        of = sum(len(asked) for _, asked in todo)
        done, slowest = 0, 0.0
        for turn, asked in todo:
            before = time.monotonic() - self._began
            if self.plan.seconds is not None and done and before + slowest > self.plan.seconds:
                return
            for mode in asked:
                spent = time.monotonic() - self._began
                left = spent / done * (of - done) if done else None
                watch(Now(done, of, turn, self._who(turn, mode), left), self.found)
                self._one(turn, mode)
                done += 1
            slowest = max(slowest, time.monotonic() - self._began - before)

    def lead(self, work: Work, prompt: int, at: int, other: str) -> float | None:
        """As the server says it of plain decoding at temperature 0."""
        how = self._how(self._tokens(work), "plain", "greedy")
        with self.plan.stopping.waiting():
            return self.server.lead(work.prompts[prompt], how, at, other)

    def _asked(self, turn: Turn) -> Iterator[Mode | None]:
        """The modes of a turn, None: the other server. Each comes first as often, for each kind of work."""
        if turn.probe:
            yield "speculative"
            return
        at = turn.prompt + turn.repetition
        asked: list[Mode | None] = [*(_MODES[::-1] if at % 2 else _MODES)]
        if self.plan.against and turn.sampling == "greedy":
            asked.insert(0 if (turn.prompt + turn.repetition // 2) % 2 else 2, None)
        yield from asked

    def _until(self) -> float | None:
        """When an answer of the other server comes too late."""
        return None if self.plan.seconds is None else self._began + self.plan.seconds

    def _who(self, turn: Turn, mode: Mode | None) -> str:
        if mode is None:
            return self.plan.against.name if self.plan.against else ""
        return f"{turn.probe} drafts a pass" if turn.probe else mode

    def _how(self, tokens: int, mode: Mode, sampling: Sampling, *, probe: int = 0) -> How:
        room = max(self.room - tokens, _LEAST_ROOM)
        drafts = {**self.plan.drafts, **({"depth": probe} if probe else {})}
        return How(tokens, room, _PLAIN if mode == "plain" else drafts, sampling == "own")

    def _one(self, turn: Turn, mode: Mode | None) -> None:
        """Ask, and note the answer or why there was none; what failed once is not asked again.

        Raises:
            NoDaemon: it has gone. LocalspecError: the first question of all has no answer.
        """
        if mode is None:
            self._theirs(turn)
            return
        work, failed = turn.work, self.found.failed
        if work.name in failed:
            return
        how = self._how(self._tokens(work), mode, turn.sampling, probe=turn.probe)
        others, before = Others(), self._meter.joules()
        try:
            with self.plan.stopping.waiting():
                answer = self.server.ask(work.prompts[turn.prompt], how)
        except NoDaemon:
            raise
        except LocalspecError as error:
            if not self.found.runs and not isinstance(error, InvalidRequest):
                raise
            failed[work.name] = error.message
            return
        after = self._meter.joules()
        run = _run(turn, mode, answer)
        run.joules = None if before is None or after is None else after - before
        run.others = others.cores(self._pids)
        (self.found.probes[turn.probe] if turn.probe else self.found.runs).append(run)
        if turn.sampling == "greedy" and not turn.probe:
            self.found.texts.setdefault((work.name, turn.prompt, mode), answer.text)

    def _theirs(self, turn: Turn) -> None:
        """Ask the other server the same, and lose nothing where it does not answer."""
        found, work, server = self.found, turn.work, self.plan.against
        if server is None or found.their_end or work.name in found.their_failed:
            return
        how = self._how(self._tokens(work), "plain", "greedy")
        try:
            with self.plan.stopping.waiting():
                answer = server.ask(work.prompts[turn.prompt], replace(how, until=self._until()))
        except Gone as error:
            found.their_end = error.message
        except LocalspecError as error:
            found.their_failed[work.name] = error.message
        else:
            found.theirs.append(_run(turn, "speculative", answer))

    def _tokens(self, work: Work) -> int:
        """Of an answer at most."""
        return min(work.tokens or self.plan.tokens, self.plan.tokens)


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
