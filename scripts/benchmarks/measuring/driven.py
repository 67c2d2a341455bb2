"""An engine stepped by hand, in this process: requests in, steps, answers out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localspec.engine.engine import Engine
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import resolve_settings
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation.drafters.ngram import NgramIndex
from localspec.protocol.frames import (
    Delta,
    Done,
    Failed,
    Frame,
    Generate,
    Reading,
    Sampling,
    SpeculationSettings,
    Started,
    TokenLogprob,
    TokenPrompt,
)

_MOST_STEPS = 20_000  # more than any text takes


@dataclass
class Answer:
    """Everything one request was sent. stamps: when each delta came, in seconds."""

    deltas: list[Delta] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    started: Started | None = None
    ending: Done | Failed | None = None
    _tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> Done:
        assert isinstance(self.ending, Done), self.ending
        return self.ending

    @property
    def failed(self) -> Failed:
        assert isinstance(self.ending, Failed), self.ending
        return self.ending

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[int]:
        """Tokens generated, those whose text was never shown among them."""
        return self._tokens[self.done.prompt_tokens :]

    @property
    def all_tokens(self) -> list[int]:
        return list(self._tokens)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]


class Driven:
    """One loaded pair and its engine; what each request was sent, by its id."""

    def __init__(self, pair: LoadedPair, clock: Callable[[], float] = time.perf_counter) -> None:
        self.pair = pair
        self.engine = Engine(pair, self._receive, clock)
        self.answers: dict[int, Answer] = {}
        self._clock = clock

    def submit(self, tokenized: TokenizedRequest) -> Answer:
        """Queue a request; its answer grows with the steps."""
        answer = self.answers[tokenized.request.id] = Answer()
        self.engine.submit(tokenized)
        return answer

    def write_greedily(
        self,
        number: int,
        prompt: list[int],
        tokens: int,
        speculative: SpeculationSettings,
        lookup: NgramIndex | None = None,
    ) -> Answer:
        """Queue a request for so many greedy tokens after those of a prompt."""
        request = Generate(
            number,
            TokenPrompt(prompt),
            Sampling(temperature=0.0),
            tokens,
            speculative=speculative,
        )
        sampler = Sampler(resolve_settings(request.sampling, {}))
        return self.submit(
            TokenizedRequest(request, prompt, sampler, lookup=lookup or NgramIndex())
        )

    def _receive(self, frame: Frame) -> None:
        assert isinstance(frame, Started | Reading | Delta | Done | Failed)
        answer = self.answers[frame.id]
        assert answer.ending is None, f"{frame} after the end"
        match frame:
            case Started():
                answer.started = frame
                # The list itself: it grows with the answer, and the slot leaves it behind at the end.
                answer._tokens = self.sequence(frame.id).slot.tokens
            case Reading():
                answer.readings.append(frame)
            case Delta():
                answer.stamps.append(self._clock())
                answer.deltas.append(frame)
            case _:
                answer.ending = frame

    def sequence(self, request: int) -> Sequence:
        """Return what runs for a request."""
        return next(
            sequence
            for lane in self.pair.lanes
            for sequence in lane.active
            if sequence.id == request
        )

    def finish(self) -> None:
        """Step until nothing is left to do."""
        steps = 0
        while self.engine.active:
            self.engine.step()
            steps += 1
            assert steps < _MOST_STEPS, "the engine does not come to an end"

    def close(self) -> None:
        self.pair.close()
