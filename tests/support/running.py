"""An engine driven by hand: requests in, steps, answers out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.engine import sequence
from localspec.engine.engine import Engine
from localspec.engine.pair.load import load_pair
from localspec.engine.pair.pair import Pair
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.protocol.frames import (
    Constraint,
    Delta,
    Done,
    EngineSettings,
    Failed,
    Frame,
    Generate,
    PairFiles,
    Sampling,
    Speculative,
    Started,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)

GREEDY = Sampling(temperature=0.0)
PLAIN = Speculative(enabled=False)


def drafting(depth: int | None = 3, kind: Any = "draft", **more: Any) -> Speculative:
    return Speculative(depth=depth, kind=kind, **more)


@dataclass
class Answer:
    """Everything one request was sent."""

    deltas: list[Delta] = field(default_factory=list)
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


class Running:
    """One loaded pair and its engine."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.engine = Engine(pair, self._receive)
        self._renderer = TemplateRenderer(None, "", "")
        self.preparer = Preparer(pair, self._renderer)
        self.answers: dict[int, Answer] = {}
        self._next = 1

    def _receive(self, frame: Frame) -> None:
        assert isinstance(frame, Started | Delta | Done | Failed)
        answer = self.answers[frame.id]
        assert answer.ending is None, f"{frame} after the end"
        if isinstance(frame, Started):
            answer.started = frame
            # The list itself: it grows with the answer, and the slot leaves it behind at the end.
            answer._tokens = self.generation(frame.id).slot.tokens
        elif isinstance(frame, Delta):
            answer.deltas.append(frame)
        else:
            answer.ending = frame

    def generation(self, request: int) -> sequence.Sequence:
        return next(g for lane in self.pair.lanes for g in lane.active if g.id == request)

    def start(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int | None = 24,
        sampling: Sampling = GREEDY,
        speculative: Speculative = PLAIN,
        **more: Any,
    ) -> int:
        """Submit a request; returns its id."""
        request = self._next
        self._next += 1
        asked = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(list(prompt))
        self.answers[request] = Answer()
        generate = Generate(
            request,
            asked,
            sampling=sampling,
            max_tokens=max_tokens,
            speculative=speculative,
            **more,
        )
        self.engine.submit(self.preparer.prepare(generate))
        return request

    def admit(self) -> None:
        """Give slots to those that wait, before any round."""
        self.engine._scheduler.admit(self.engine._started, self.engine._endings.refused)

    def finish(self) -> None:
        """Step until nothing is left to do."""
        steps = 0
        while self.engine.active:
            self.engine.step()
            steps += 1
            assert steps < 20_000, "the engine does not come to an end"

    def ask(self, prompt: Sequence[int] | str, *args: Any, **more: Any) -> Answer:
        """One request from its beginning to its end."""
        request = self.start(prompt, *args, **more)
        self.finish()
        return self.answers[request]

    def constrained(self, kind: Any, source: str = "", **more: Any) -> Answer:
        return self.ask("a", constraint=Constraint(kind, source), **more)

    def forget(self) -> None:
        """Empty every slot, so that the next request finds no cache and no company."""
        for request, answer in self.answers.items():
            if answer.ending is None:  # a test that failed left it running
                self.engine.cancel(request)
        for lane in self.pair.lanes:
            for slot in lane.slots:
                lane.slots.clear(slot)

    def close(self) -> None:
        self._renderer.close()
        self.pair.close()


# Other settings to run every test with that loads a pair here, to see that none holds by chance of
# kernels: LOCALSPEC_TEST_ENGINE='{"n_threads": 4, "extra_buffers": false}'
_ALWAYS: dict[str, Any] = json.loads(os.environ.get("LOCALSPEC_TEST_ENGINE", "{}"))


@contextlib.contextmanager
def running(files: PairFiles, **settings: Any) -> Iterator[Running]:
    """A pair loaded on one thread, closed at the end."""
    chosen = {"n_threads": 1, "n_ctx": 512, "n_batch": 256, **settings, **_ALWAYS}
    engine = Running(load_pair(files, EngineSettings(**chosen), lambda _stage, _fraction: None))
    try:
        yield engine
    finally:
        engine.close()
