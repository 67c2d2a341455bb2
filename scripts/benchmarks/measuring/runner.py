"""Runs one setting of our engine on one text, in this process, and times it token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

import msgspec

from benchmarks.measuring.driven import Answer, Driven
from benchmarks.measuring.runs import AUTO, PLAIN, WARM_TOKENS, BenchError, Run, Setting
from benchmarks.measuring.workloads import Text
from localspec.engine.pair.load import load_pair
from localspec.engine.pair.profile import Calibrations, LearnedProfile
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import resolve_settings
from localspec.engine.sequence import TokenizedRequest
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.protocol.frames import (
    Done,
    EngineSettings,
    Failed,
    Generate,
    PairFiles,
    Sampling,
    SpeculationSettings,
    Timings,
    TokenLogprob,
    TokenPrompt,
)


def speed_after(stamps: Sequence[tuple[float, int]], skip: int) -> float | None:
    """Tokens per second after the first `skip`, from (seconds, tokens so far) pairs.

    Tokens come in groups, one per round: it counts from the first round that reached `skip`.
    """
    reached = next((stamp for stamp in stamps if stamp[1] >= skip), None)
    if reached is None or stamps[-1][1] == reached[1]:
        return None
    return (stamps[-1][1] - reached[1]) / (stamps[-1][0] - reached[0])


def _done(answer: Answer) -> Done:
    """How it ended. Raises BenchError."""
    match answer.ending:
        case Done() as done:
            return done
        case Failed() as failed:
            raise BenchError(failed.message)
        case _:
            raise BenchError("The engine came to rest without an answer.")


class Runner(Driven):
    """One loaded pair and the engine on it.

    Every setting runs on the same loaded models, but what `auto` learns (survival of drafts, cost of
    passes) is its own, as in real use: it starts fresh and is kept from text to text, and runs of
    other settings teach it nothing. The one thing shared is the measured cost of a draft step.
    """

    def __init__(
        self, target: Path, draft: Path | None, settings: EngineSettings, rpc: tuple[str, ...] = ()
    ) -> None:
        """Load the pair, with the target's layers on the machines of `rpc`.

        draft: None if it is in the target's file. Raises LoadFailed.
        """
        files = PairFiles("bench", str(target), str(draft) if draft else None, rpc=rpc)
        super().__init__(load_pair(files, settings, lambda _stage, _fraction: None))
        drafter = self.pair.drafter
        kind = drafter.kind if drafter is not None else "draft"
        self._kind = cast(Literal["dflash", "draft", "eagle3", "mtp"], kind)
        self._requests = 0
        self._auto = replace(self.pair.learned)

    def _throwaway(self) -> LearnedProfile:
        costs = self._auto.costs
        table = CostTable(costs.target.as_dict())
        return LearnedProfile(
            CostProfile(table, costs.draft, costs.overhead_ms),
            Calibrations({kind: Calibration() for kind in self._auto.calibrations.answers}),
        )

    def _use(self, learned: LearnedProfile) -> None:
        self.pair.learned.costs = learned.costs
        self.pair.learned.calibrations = learned.calibrations
        self.pair.shared.costs = learned.costs.target

    def warm_up(self, text: Text) -> None:
        """Short runs of the extremes, so that nothing is done for the first time in a timed one."""
        short = Text(text.prompt, text.expected[:WARM_TOKENS], text.acceptance)
        for depth in (0, 8):
            self.run(Setting(depth), short, 0, 0)

    def write(self, prompt: list[int], tokens: int) -> list[int]:
        """Plain greedy tokens after `prompt`, to the end of the answer or so many. Raises BenchError."""
        self._use(self._throwaway())
        request = msgspec.structs.replace(self._request(PLAIN, prompt, tokens), top_logprobs=0)
        return [scored.id for scored in self._answered(request, prompt).logprobs]

    def timed(self, prompt: list[int], tokens: int) -> Timings:
        """Write plain greedy tokens after a prompt that is read anew, and return what it took."""
        self._use(self._throwaway())
        return _done(self._answered(self._request(PLAIN, prompt, tokens), prompt)).timings

    def exact(self, setting: Setting, prompt: list[int], tokens: int) -> list[TokenLogprob]:
        """Greedy tokens in exact mode, each with its log-probability. Raises BenchError."""
        self._use(self._throwaway())
        request = self._request(setting, prompt, tokens)
        request = msgspec.structs.replace(request, exact=True, top_logprobs=0)
        return self._answered(request, prompt).logprobs

    def run(self, setting: Setting, text: Text, repetition: int, skip: int) -> Run:
        """Generate once, reading the prompt anew. Raises BenchError."""
        self._use(self._auto if setting == AUTO else self._throwaway())
        request = self._request(setting, text.prompt, len(text.expected))
        answer = self._started(request, text.prompt)
        wall = 0.0
        rounds, busy = self.engine.rounds, self.pair.busy_s()
        while self.engine.active:
            writing = bool(answer.deltas)
            start = time.perf_counter()
            self.engine.step()
            if writing:
                wall += time.perf_counter() - start
            else:  # what follows the first token is what is asked about
                rounds, busy = self.engine.rounds, self.pair.busy_s()
        busy, rounds = self.pair.busy_s() - busy, self.engine.rounds - rounds
        return self._result(setting, text, repetition, skip, answer, wall, busy, rounds)

    def _started(self, request: Generate, prompt: list[int]) -> Answer:
        self.answers.clear()  # a soak must not be what grows
        settings = resolve_settings(request.sampling, self.pair.defaults)
        tokenized = TokenizedRequest(
            request, prompt, Sampler(settings), exact=request.exact is True
        )
        return self.submit(tokenized)

    def _answered(self, request: Generate, prompt: list[int]) -> Answer:
        answer = self._started(request, prompt)
        self.finish()
        _done(answer)
        return answer

    def _request(self, setting: Setting, prompt: list[int], tokens: int) -> Generate:
        self._requests += 1
        return Generate(
            self._requests,
            TokenPrompt(prompt),
            Sampling(temperature=0.0),
            tokens,
            # the synthetic text never repeats; a lookup would cost nothing and gain nothing
            speculative=SpeculationSettings(setting.depth != 0, setting.depth, self._kind),
            exact=False,
            cache_prompt=False,
        )

    def _result(
        self,
        setting: Setting,
        text: Text,
        repetition: int,
        skip: int,
        answer: Answer,
        wall: float,
        busy: float,
        rounds: int,
    ) -> Run:
        done = _done(answer)
        written = [delta.tokens for delta in answer.deltas]
        stamps = list(zip(answer.stamps, written, strict=True))
        pieces = b"".join(self.pair.vocab.piece(token) for token in text.expected)
        outside = max(wall - busy, 0.0)
        return Run(
            setting.name,
            repetition,
            done.completion_tokens,
            answer.text == pieces.decode("utf-8", "replace"),
            done.timings.predicted_per_second,
            speed_after(stamps, skip) if skip else None,
            done.speculation.drafted,
            done.speculation.accepted,
            done.speculation.rounds,
            outside / wall if wall > 0 else None,
            1e3 * outside / rounds if rounds else None,
        )

    def costs(self) -> dict[str, object]:
        """Return the cost profile as `auto` has it now."""
        return self._auto.costs.as_dict()

    def close(self) -> None:
        self._use(self._auto)
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()
