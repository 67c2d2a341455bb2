"""A failure within a request ends that request alone and changes no other answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from localspec.engine import scheduler
from localspec.engine.llama import BadBatch, NoKvSlot
from localspec.engine.sequence import Sequence
from localspec.engine.speculation.drafters.base import Drafter
from localspec.engine.speculation.drafters.ngram import NgramDrafter
from localspec.engine.speculation.step import Drafting
from localspec.protocol.frames import Constraint, Done, PairFiles, Sampling, SpeculationSettings
from tests.support.pairs import N_VOCAB
from tests.support.rescoring import NEAR_TIE, worst_gap
from tests.support.running import GREEDY, PLAIN, Running, drafting

Load = Callable[..., Running]
Prompts = list[list[int]]
ERRORS = [ValueError, FloatingPointError, IndexError, MemoryError, BadBatch]


@pytest.fixture(scope="module")
def shared(contextual_files: PairFiles) -> Any:
    from tests.support.running import running

    with running(contextual_files, n_ctx=1024, parallel=4) as engine:
        yield engine


def draw_prompts(rng: random.Random) -> Prompts:
    return [[rng.randrange(N_VOCAB - 5) for _ in range(rng.randint(1, 60))] for _ in range(4)]


class Fuse:
    """A fuse that raises on the n-th call; `blown` tells whether it has."""

    def __init__(self, after: int, error: Exception) -> None:
        self.left, self.error, self.blown = after, error, False

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.blown = True
            raise self.error

    def attach(self, owner: Any, name: str, after: bool = False) -> None:
        """Burn the fuse before or after each call of this method of `owner`."""
        act = getattr(owner, name)

        def wrapped(*args: Any, **more: Any) -> Any:
            if not after:
                self.burn()
            result = act(*args, **more)
            if after:
                self.burn()
            return result

        setattr(owner, name, wrapped)


def _break_decode(engine: Running, sequence: Sequence, fuse: Fuse) -> None:
    """Make llama.cpp refuse each batch that contains this sequence."""
    lane, decode = engine.pair.shared, engine.pair.shared.decode

    def failing_decode(timed: bool, n_sequences: int = 1, *, scored: bool = False) -> float:
        slot_ids = {lane.batch._seq[row] for row in range(lane.batch.rows)}
        if sequence in lane.active and sequence.slot.id in slot_ids:
            fuse.burn()
        return decode(timed, n_sequences)

    lane.decode = failing_decode  # type: ignore[method-assign]


def _find_drafter(sequence: Sequence, kind: str) -> Drafter:
    return next(drafter for drafter in sequence.drafting.drafters if drafter.kind == kind)


def _find_ngram_drafter(sequence: Sequence) -> NgramDrafter:
    drafter = _find_drafter(sequence, "ngram")
    assert isinstance(drafter, NgramDrafter)
    return drafter


STAGES: dict[str, Callable[[Running, Sequence, Fuse], None]] = {
    "lookup": lambda e, g, f: f.attach(_find_ngram_drafter(g).index, "propose"),
    "pass": _break_decode,
    "adjust": lambda e, g, f: f.attach(g.verifier.sampler, "adjusted"),
    "sample": lambda e, g, f: f.attach(g.verifier.sampler, "sample", after=True),
    "mask": lambda e, g, f: f.attach(g.verifier.matcher, "mask"),
    "forced": lambda e, g, f: f.attach(g.verifier.matcher, "forced_tokens"),
    "valid": lambda e, g, f: f.attach(g.verifier.matcher, "count_valid"),
    "consume": lambda e, g, f: f.attach(g.verifier.matcher, "consume"),
    "text": lambda e, g, f: f.attach(g._stream, "push", after=True),
    "lines": lambda e, g, f: f.attach(g, "_within_lines"),
    "belief": lambda e, g, f: f.attach(_find_drafter(g, "draft").belief, "observe"),
    "append": lambda e, g, f: f.attach(g, "append", after=True),
    "last text": lambda e, g, f: f.attach(g, "flush_text"),
    "statistics": lambda e, g, f: f.attach(g, "make_done"),
}


def assert_own_text(
    engine: Running, prompt: list[int], tokens: list[int], truth: list[int]
) -> None:
    if tokens != truth:  # only a near-tie of the target may differ
        assert worst_gap(engine.pair.files.target, prompt, tokens) < NEAR_TIE


def start_victim(engine: Running, prompt: list[int], rng: random.Random, stage: str) -> int:
    grammar = Constraint("regex", r"[a-z ]{200}") if stage in GRAMMAR else None
    return engine.start(
        prompt,
        40,
        rng.choice([GREEDY, Sampling(temperature=0.8, seed=3)]),
        SpeculationSettings() if grammar else drafting(rng.choice([2, None]), "auto"),
        constraint=grammar,
        top_logprobs=3 if stage in SAMPLER else rng.choice([None, 3]),
    )


SAMPLER = ("adjust", "sample")  # stages that a greedy row without logprobs skips
GRAMMAR = ("mask", "forced", "valid", "consume")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stage", STAGES)
def test_failure_at_any_stage_ends_that_request_alone(
    shared: Running, stage: str, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, rng = shared, random.Random(f"{stage}{seed}")
    prompts = draw_prompts(rng)
    engine.forget()
    truth = [engine.ask(prompt, 24).tokens for prompt in prompts]
    if seed % 2:
        engine.forget()
    at = rng.randrange(4)
    fuse = Fuse(rng.choice([0, 0, 1, 3]) if stage not in LATE else 0, rng.choice(ERRORS)("a bug"))
    decode = engine.pair.shared.decode
    ids = [
        start_victim(engine, prompt, rng, stage)
        if number == at
        else engine.start(
            prompt, 24, GREEDY, rng.choice([PLAIN, drafting(2), SpeculationSettings()])
        )
        for number, prompt in enumerate(prompts)
    ]
    engine.admit()
    STAGES[stage](engine, engine.sequence(ids[at]), fuse)
    engine.finish()
    engine.pair.shared.decode = decode  # type: ignore[method-assign]
    for number, prompt in enumerate(prompts):
        answer = engine.answers[ids[number]]
        if number != at:
            assert_own_text(engine, prompt, answer.tokens, truth[number])
        elif fuse.blown and not (stage == "belief" and isinstance(answer.ending, Done)):
            # A failure while observing a belief costs the drafts only.
            assert answer.failed.code == "internal_error"
            assert "Traceback" in capfd.readouterr().err
        else:
            assert answer.done.finish_reason
    assert not any(slot.busy for slot in engine.pair.shared.slots)
    for prompt, tokens in zip(prompts, truth, strict=True):  # the slots hold the right text
        assert_own_text(engine, prompt, engine.ask(prompt, 24).tokens, tokens)


LATE = ("last text", "statistics")


def test_each_stage_is_reached(shared: Running) -> None:
    """A request really passes through each of the stages above."""
    for stage in STAGES:
        shared.forget()
        rng = random.Random(stage)
        fuse = Fuse(0, ValueError(stage))
        decode = shared.pair.shared.decode
        request = start_victim(shared, draw_prompts(rng)[0], rng, stage)
        shared.admit()
        STAGES[stage](shared, shared.sequence(request), fuse)
        shared.finish()
        shared.pair.shared.decode = decode  # type: ignore[method-assign]
        if stage not in ("forced", "valid", "belief"):  # those depend on what pays on this machine
            assert fuse.blown, stage


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["acquire", "uses_rejection", "create"])
def test_request_that_cannot_start_fails_alone_and_frees_its_slot(
    contextual_files: PairFiles, load: Load, place: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rng = load(contextual_files), random.Random(place)
    prompts = draw_prompts(rng)
    truth = [engine.ask(prompt, 12).tokens for prompt in prompts]
    owners: dict[str, Any] = {
        "acquire": engine.pair.shared.slots,
        "uses_rejection": scheduler,
        "create": Drafting,
    }
    owner = owners[place]
    act, fuse = getattr(owner, place), Fuse(1, ValueError("a bug"))

    def failing(*args: Any, **more: Any) -> Any:
        result = act(*args, **more) if when == "after" else None
        if not fuse.blown:
            fuse.burn()
        return result if when == "after" else act(*args, **more)

    monkeypatch.setattr(owner, place, failing)
    ids = [engine.start(prompt, 12) for prompt in prompts]
    engine.finish()
    endings = [engine.answers[request].ending for request in ids]
    assert [isinstance(ending, Done) for ending in endings].count(False) == 1
    for prompt, request, tokens in zip(prompts, ids, truth, strict=True):
        if isinstance(engine.answers[request].ending, Done):
            assert_own_text(engine, prompt, engine.answers[request].tokens, tokens)
        assert_own_text(engine, prompt, engine.ask(prompt, 12).tokens, tokens)
    assert not any(slot.busy for slot in engine.pair.shared.slots)


@pytest.mark.parametrize("error", [ValueError, BadBatch, NoKvSlot])
@pytest.mark.parametrize("place", ["propose", "_append_draft", "_prefill"])
def test_answers_continue_without_drafts_when_drafting_fails(
    contextual_files: PairFiles, load: Load, place: str, error: type[Exception]
) -> None:
    engine, rng = load(contextual_files), random.Random(place)
    prompts = draw_prompts(rng)
    truth = [engine.ask(prompt, 24).tokens for prompt in prompts]
    assert engine.pair.drafter is not None
    Fuse(3, error("a bug")).attach(engine.pair.drafter, place)
    ids = [engine.start(prompt, 24, GREEDY, drafting(2)) for prompt in prompts]
    engine.finish()
    for prompt, request, tokens in zip(prompts, ids, truth, strict=True):
        assert_own_text(engine, prompt, engine.answers[request].tokens, tokens)
    del engine.pair.drafter.__dict__[place]
    answer = engine.ask(prompts[0], 24, GREEDY, drafting(2))
    assert answer.done.speculation.active
    assert_own_text(engine, prompts[0], answer.tokens, truth[0])


def test_failing_probe_costs_the_drafts_only(contextual_files: PairFiles, load: Load) -> None:
    engine = load(contextual_files)
    truth = engine.ask([7, 8, 9], 100).tokens
    assert engine.pair.drafter is not None
    Fuse(0, np.linalg.LinAlgError()).attach(engine.pair.drafter, "probe")
    answer = engine.ask([7, 8, 9], 100, GREEDY, SpeculationSettings())
    assert_own_text(engine, [7, 8, 9], answer.tokens, truth)


def test_failing_round_ends_its_own_requests_only(
    contextual_files: PairFiles, load: Load, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = load(contextual_files, parallel=2)
    truth = engine.ask([7, 8, 9], 30).tokens
    scheduler = engine.engine._scheduler
    plan, fuse = scheduler.schedule, Fuse(2, ValueError("a bug"))
    fuse.attach(scheduler, "schedule")
    ids = [engine.start([7, 8, token], 30) for token in (9, 10, 11)]
    engine.finish()
    codes = [engine.answers[request].failed.code for request in ids[:2]]
    assert codes == ["internal_error", "internal_error"]
    assert "a bug" in capfd.readouterr().err
    assert not any(slot.busy for slot in engine.pair.shared.slots)
    scheduler.schedule = plan  # type: ignore[method-assign]
    assert engine.answers[ids[2]].ending is not None  # it waited, and it ended as well
    assert engine.ask([7, 8, 9], 30).tokens == truth


def test_pass_that_fails_for_no_request_is_repeated(shared: Running) -> None:
    """A single refusal of a joint pass ends no request."""
    rng = random.Random(1)
    prompts = draw_prompts(rng)
    shared.forget()
    truth = [shared.ask(prompt, 24).tokens for prompt in prompts]
    lane, fuse = shared.pair.shared, Fuse(2, BadBatch("refused"))
    decode = lane.decode

    def failing_decode(timed: bool, n_sequences: int = 1, *, scored: bool = False) -> float:
        if not fuse.blown:
            fuse.burn()
        return decode(timed, n_sequences)

    lane.decode = failing_decode  # type: ignore[method-assign]
    ids = [shared.start(prompt, 24, GREEDY, drafting(2)) for prompt in prompts]
    shared.finish()
    lane.decode = decode  # type: ignore[method-assign]
    assert fuse.blown
    for prompt, request, tokens in zip(prompts, ids, truth, strict=True):
        assert_own_text(shared, prompt, shared.answers[request].tokens, tokens)
