"""An engine that tests drive by hand."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import msgspec
import pytest

from benchmarks.measuring.driven import Answer as Answer
from benchmarks.measuring.driven import Driven
from localspec.engine.llama import gpus
from localspec.engine.pair import profile
from localspec.engine.pair.load import GPU_BATCH_FACTOR, load_pair
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.protocol.frames import (
    Constraint,
    EngineSettings,
    Generate,
    PairFiles,
    Sampling,
    SpeculationSettings,
    TextPrompt,
    TokenPrompt,
)
from tests.support.rpc import free_port, rpc_worker

GREEDY = Sampling(temperature=0.0)
PLAIN = SpeculationSettings(enabled=False)


def drafting(depth: int | None = 3, kind: Any = "draft", **options: Any) -> SpeculationSettings:
    return SpeculationSettings(depth=depth, kind=kind, **options)


class Running(Driven):
    """A driven engine with prompts as text too, and with what many tests need."""

    def __init__(self, pair: LoadedPair) -> None:
        super().__init__(pair)
        self._renderer = TemplateRenderer(None, "", "")
        self.preparer = Preparer(pair, self._renderer)
        self._next = 1

    def start(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int | None = 24,
        sampling: Sampling = GREEDY,
        speculative: SpeculationSettings = PLAIN,
        **options: Any,
    ) -> int:
        """Submit a request; returns its id."""
        request = self._next
        self._next += 1
        prompt_value = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(list(prompt))
        generate = Generate(
            request,
            prompt_value,
            sampling=sampling,
            max_tokens=max_tokens,
            speculative=speculative,
            **options,
        )
        self.submit(self.preparer.prepare(generate))
        return request

    def admit(self) -> None:
        """Give slots to waiting requests, before any round."""
        self.engine._scheduler.admit(self.engine._emit_started, self.engine._endings.send_failure)

    def ask(self, prompt: Sequence[int] | str, *args: Any, **options: Any) -> Answer:
        """Run one request from its beginning to its end."""
        request = self.start(prompt, *args, **options)
        self.finish()
        return self.answers[request]

    def constrained(self, kind: Any, source: str = "", begun: str = "", **options: Any) -> Answer:
        return self.ask("a" + begun, constraint=Constraint(kind, source, begun), **options)

    def forget(self) -> None:
        """Empty every slot, so that the next request finds no cache, no other request and no memory."""
        for request, answer in self.answers.items():
            if answer.ending is None:  # a test that failed left it running
                self.engine.cancel(request)
        for lane in self.pair.lanes:
            for slot in lane.slots:
                lane.slots.clear(slot)
        self.pair.memory.forget(None)

    def close(self) -> None:
        self._renderer.close()
        super().close()


Load = Callable[..., Running]  # the fixture `load`, which loads a pair with some settings


# Other settings for every test that loads a pair here, to see that none passes only with certain
# kernels: LOCALSPEC_TEST_ENGINE='{"n_threads": 4, "extra_buffers": false}'
_ALWAYS: dict[str, Any] = json.loads(os.environ.get("LOCALSPEC_TEST_ENGINE", "{}"))


Device = Literal["cpu", "rpc", "cuda"]
# The device of the targets in this run. "rpc": each is on a worker of its own, which llama.cpp treats as a
# GPU. "cuda": on this machine's GPU, which is also where a build for one puts them without being told.
DEVICE: Device = cast(
    Device, os.environ.get("LOCALSPEC_TEST_DEVICE") or ("cuda" if gpus() else "cpu")
)
ON_DEVICE = DEVICE != "cpu"


def skip_on(*devices: Device, why: str) -> pytest.MarkDecorator:
    """Mark a test that cannot hold where the targets are on one of these devices.

    tests/test_skips.py lists the reasons. A test that only rounds otherwise there gets a tolerance
    (`tests.support.rescoring.ROUNDING`) and no mark.
    """
    return pytest.mark.skipif(DEVICE in devices, reason=f"on a device: {why}")


# Ports of earlier workers. What is stored of a pair belongs to its machines, so a second engine beside the
# first, on a worker of its own, finds nothing.
_PORTS: list[int] = []


@contextlib.contextmanager
def running(files: PairFiles, **settings: Any) -> Iterator[Running]:
    """Yield a pair loaded on one thread, and close it at the end."""
    chosen = {"n_threads": 1, "n_ctx": 512, "n_batch": 256, **settings, **_ALWAYS}
    with contextlib.ExitStack() as opened:
        if ON_DEVICE and not files.rpc:
            # A pass then reads as much of a prompt as on other devices.
            chosen["n_batch"] = max(chosen["n_batch"] // GPU_BATCH_FACTOR, 64)
        if DEVICE == "rpc" and not files.rpc:
            port = _PORTS.pop() if _PORTS else free_port()
            opened.callback(_PORTS.append, port)
            endpoint, _ = opened.enter_context(rpc_worker(port))
            files = msgspec.structs.replace(files, rpc=(endpoint,))
        with pytest.MonkeyPatch.context() as patch:
            # These passes take so little time that each would be measured five times as often as one of a
            # model of any size, which is half of a load.
            patch.setattr(profile, "MAX_REPEATS", profile.MIN_REPEATS)
            pair = load_pair(files, EngineSettings(**chosen), lambda _stage, _fraction: None)
        engine = Running(pair)
        try:
            yield engine
        finally:
            engine.close()
