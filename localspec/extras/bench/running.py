"""Run a bench: every prompt alternately plain and with drafts, so that drift affects both alike."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from localspec.errors import InvalidRequest, LocalspecError, NoDaemon
from localspec.extras.bench.asking import (
    DaemonServer,
    OtherServer,
    RequestOptions,
    ServerGone,
    TimedAnswer,
)
from localspec.extras.bench.prompts import Prompt, Work
from localspec.extras.bench.report import Mode, Run, Sampling
from localspec.extras.bench.theory import MAX_REPLAY_DEPTH
from localspec.machine.host import EnergyMeter, OtherProcesses

_MODES: tuple[Mode, Mode] = ("plain", "speculative")
PROBES = (MAX_REPLAY_DEPTH, 1)  # fixed depths of the answers on which the replay is based
_WARM_UP_TOKENS = 16  # of an answer that is discarded
_MAX_TEMPLATE_TOKENS = 96  # that a chat template adds to a question
_DEFAULT_CONTEXT_TOKENS = 4096  # if the server does not report its context
_MIN_QUESTION_TOKENS = 128  # even if the context has no room for them
_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
# A second signal aborts only after this time, since a terminal may send several at once.
_SECOND_SIGNAL_S = 1.0


class StopSignals:
    """A handler of Ctrl-C, SIGTERM and SIGHUP, which end the bench in an orderly way.

    No further prompt is sent. What was measured is reported, and what the pair has learned is
    reset. A second Ctrl-C skips that.
    """

    def __init__(self) -> None:
        self.when: float | None = None
        self.number = 0  # the first signal
        self._waits = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals meanwhile, except those that the parent process made this one ignore."""
        handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._stop) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Allow a signal to interrupt the wait for a server.

        Raises:
            KeyboardInterrupt: the bench was or is being stopped.
        """
        self._waits = True
        try:
            if self.when is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._waits = False

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        is_second = self.when is not None and time.monotonic() - self.when > _SECOND_SIGNAL_S
        self.when, self.number = self.when or time.monotonic(), self.number or number
        if self._waits or is_second:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class BenchPlan:
    """The prompts of a bench and how often to send them.

    seconds: time limit; nothing is begun that would end later. own: measure the pair's own sampling as well.
    probe: also get answers that draft as deep as possible, and one token at a time, for the replay. drafts:
    field `speculative` of the requests with drafts. against: another server that gets the same prompts, as it
    is set up. apply: the pair keeps what it learns from these answers. stopping: what ends the bench early.
    """

    works: Sequence[Work]
    tokens: int
    repetitions: int
    seconds: float | None = None
    own: bool = False
    probe: bool = True
    drafts: dict[str, Any] = field(default_factory=lambda: {"enabled": True})
    against: OtherServer | None = None
    apply: bool = False
    stopping: StopSignals = field(default_factory=StopSignals)


@dataclass
class BenchAnswers:
    """The answers of a bench.

    probes: answers at a fixed depth, by that depth. texts: of the first answer at temperature 0, by work,
    prompt and mode. failed: why a kind of work failed, by its name. ended: why no further prompt could be
    sent. theirs, their_failed, their_end: the same of the other server.
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
class Trial:
    """A prompt, once in each mode, or once with a fixed number of drafts per pass (`probe`)."""

    work: Work
    prompt: int
    repetition: int
    sampling: Sampling
    probe: int = 0


@dataclass(frozen=True)
class BenchProgress:
    """The progress of a bench. who: the server or mode of the current answer. left_s: estimated."""

    done: int
    total: int
    turn: Trial
    who: str
    left_s: float | None


Watch = Callable[[BenchProgress, BenchAnswers], None]


def plan_trials(plan: BenchPlan) -> Iterator[Trial]:
    """Yield the prompts in order: every kind of work once, then all again.

    So a bench that is stopped early has some answers of each kind. Short answers are repeated more
    often, because the precision of a rate depends on the measured time.
    """
    max_prompts = max(len(work.prompts) for work in plan.works)
    samplings: tuple[Sampling, ...] = ("greedy", "own") if plan.own else ("greedy",)
    for repetition in range(plan.repetitions):
        for sampling in samplings:
            for prompt in range(max_prompts):
                for work in plan.works:
                    # How often the prompt is sent in one repetition.
                    repeats = max(plan.tokens // (2 * work.tokens), 1) if work.tokens else 1
                    for index in range(repeats if prompt < len(work.prompts) else 0):
                        yield Trial(work, prompt, repetition * repeats + index, sampling)
    # These come last, because the pair also learns from them, and its own choice of depths would not have
    # taught it the same.
    for work in plan.works if plan.probe else ():
        for depth in PROBES:
            yield Trial(work, 0, 0, "greedy", probe=depth)


class Bench:
    """One measurement, which sends the prompts of a plan to a server.

    pids: processes of the server itself, which do not count as other programs.
    """

    def __init__(
        self, server: DaemonServer, plan: BenchPlan, context: int | None, pids: Sequence[int]
    ) -> None:
        self.server, self.plan, self.answers = server, plan, BenchAnswers()
        self.question_tokens = (context or _DEFAULT_CONTEXT_TOKENS) - _MAX_TEMPLATE_TOKENS
        self._pids, self._meter, self._began = pids, EnergyMeter(), time.monotonic()
        # The time after which an answer of the other server is useless.
        self._deadline = None if plan.seconds is None else self._began + plan.seconds

    def warm_up(self) -> None:
        """Load the pair and use every way of answering once. Ctrl-C ends it and sets `partial`.

        Raises:
            LocalspecError: the pair does not load or answer, or the other server does not.
        """
        prompt, tokens = Prompt(ask="Say hello."), _WARM_UP_TOKENS
        try:
            with self.plan.stopping.waiting():
                if self.plan.against:  # first, because an unreachable server is reported at once
                    how = RequestOptions(tokens, _MIN_QUESTION_TOKENS, until=self._deadline)
                    self.plan.against.ask(prompt, how)
                for mode in _MODES:
                    self.server.ask(prompt, self._options(tokens, mode, "greedy"))
        except KeyboardInterrupt:
            self.answers.partial = True

    def run(self, watch: Watch) -> BenchAnswers:
        """Run the plan, as far as there is time. Ctrl-C or the daemon's end stop it and set `partial`.

        Raises:
            LocalspecError: no answer was received at all.
        """
        try:
            self._run_plan(watch)
        except KeyboardInterrupt:
            self.answers.partial = True
        except NoDaemon as error:  # answers of a new daemon would not be comparable
            if not self.answers.runs:
                raise
            self.answers.partial, self.answers.ended = True, error.message
        return self.answers

    def _run_plan(self, watch: Watch) -> None:
        trials = [(turn, list(self._modes_of(turn))) for turn in plan_trials(self.plan)]
        total = sum(len(modes) for _, modes in trials)
        done, slowest = 0, 0.0
        for turn, modes in trials:
            start = time.monotonic() - self._began
            if self.plan.seconds is not None and done and start + slowest > self.plan.seconds:
                return
            for mode in modes:
                elapsed = time.monotonic() - self._began
                left_s = elapsed / done * (total - done) if done else None
                who = f"{turn.probe} drafts a pass" if turn.probe else mode or ""
                if mode is None and self.plan.against:
                    who = self.plan.against.name
                watch(BenchProgress(done, total, turn, who, left_s), self.answers)
                self._ask_and_record(turn, mode)
                done += 1
            slowest = max(slowest, time.monotonic() - self._began - start)

    def token_lead(self, work: Work, prompt: int, at: int, other: str) -> float | None:
        """Return the lead in log-probability of a plain token at temperature 0.

        See `DaemonServer.token_lead`.
        """
        how = self._options(self._max_tokens(work), "plain", "greedy")
        with self.plan.stopping.waiting():
            return self.server.token_lead(work.prompts[prompt], how, at, other)

    def _modes_of(self, turn: Trial) -> Iterator[Mode | None]:
        """Yield the modes of a prompt in order; None stands for the other server.

        For each kind of work, each mode comes first equally often.
        """
        if turn.probe:
            yield "speculative"
            return
        index = turn.prompt + turn.repetition
        modes: list[Mode | None] = [*(_MODES[::-1] if index % 2 else _MODES)]
        if self.plan.against and turn.sampling == "greedy":
            modes.insert(0 if (turn.prompt + turn.repetition // 2) % 2 else 2, None)
        yield from modes

    def _options(
        self, tokens: int, mode: Mode, sampling: Sampling, *, probe: int = 0
    ) -> RequestOptions:
        room = max(self.question_tokens - tokens, _MIN_QUESTION_TOKENS)
        drafts: dict[str, Any] = {"enabled": False}
        if mode == "speculative":
            drafts = self.plan.drafts | ({"depth": probe} if probe else {})
        return RequestOptions(tokens, room, drafts, sampling == "own")

    def _ask_and_record(self, turn: Trial, mode: Mode | None) -> None:
        """Send a prompt and record its answer or its failure. A kind of work that failed is skipped.

        Raises:
            NoDaemon: the daemon has stopped.
            LocalspecError: the very first prompt has no answer.
        """
        if mode is None:
            self._ask_other_server(turn)
            return
        work, failed = turn.work, self.answers.failed
        if work.name in failed:
            return
        how = self._options(self._max_tokens(work), mode, turn.sampling, probe=turn.probe)
        other_programs, joules_before = OtherProcesses(self._pids), self._meter.joules()
        try:
            with self.plan.stopping.waiting():
                answer = self.server.ask(work.prompts[turn.prompt], how)
        except NoDaemon:
            raise
        except LocalspecError as error:
            if not self.answers.runs and not isinstance(error, InvalidRequest):
                raise
            failed[work.name] = error.message
            return
        joules = self._meter.joules()
        run = _to_run(turn, mode, answer)
        run.joules = None if joules is None or joules_before is None else joules - joules_before
        run.others = other_programs.cores(self._pids)
        (self.answers.probes[turn.probe] if turn.probe else self.answers.runs).append(run)
        if turn.sampling == "greedy" and not turn.probe:
            self.answers.texts.setdefault((work.name, turn.prompt, mode), answer.text)

    def _ask_other_server(self, turn: Trial) -> None:
        """Send the same prompt to the other server, whose failures do not stop the bench."""
        results, work, server = self.answers, turn.work, self.plan.against
        if server is None or results.their_end or work.name in results.their_failed:
            return
        how = self._options(self._max_tokens(work), "plain", "greedy")
        try:
            with self.plan.stopping.waiting():
                answer = server.ask(work.prompts[turn.prompt], replace(how, until=self._deadline))
        except ServerGone as error:
            results.their_end = error.message
        except LocalspecError as error:
            results.their_failed[work.name] = error.message
        else:
            results.theirs.append(_to_run(turn, "speculative", answer))

    def _max_tokens(self, work: Work) -> int:
        return min(work.tokens or self.plan.tokens, self.plan.tokens)


def _to_run(turn: Trial, mode: Mode, answer: TimedAnswer) -> Run:
    speculation, timings = answer.speculation, answer.timings
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
        passes=int(speculation.get("rounds") or 0),
        source=speculation.get("kind"),
        reason=speculation.get("reason"),
        finish=answer.finish,
        rounds=answer.rounds,
        arrivals=answer.arrivals,
    )
