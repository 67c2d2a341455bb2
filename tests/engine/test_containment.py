"""Whatever goes wrong within one request ends that one, and the others' answers do not change."""

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


def prompts(rng: random.Random) -> Prompts:
    return [[rng.randrange(N_VOCAB - 5) for _ in range(rng.randint(1, 60))] for _ in range(4)]


class Fuse:
    """Raises at the n-th time it is passed; `blown` says whether that has come."""

    def __init__(self, after: int, error: Exception) -> None:
        self.left, self.error, self.blown = after, error, False

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.blown = True
            raise self.error

    def into(self, owner: Any, name: str, after: bool = False) -> None:
        """Put it before what `owner` does under this name, or after."""
        act = getattr(owner, name)

        def lit(*args: Any, **more: Any) -> Any:
            if not after:
                self.burn()
            found = act(*args, **more)
            if after:
                self.burn()
            return found

        setattr(owner, name, lit)


def _decode(engine: Running, sequence: Sequence, fuse: Fuse) -> None:
    """llama.cpp refuses each batch that has this sequence in it."""
    lane, decode = engine.pair.shared, engine.pair.shared.decode

    def picky(timed: bool, sequences: int = 1, *, scored: bool = False) -> float:
        ours = {lane.batch._seq[row] for row in range(lane.batch.rows)}
        if sequence in lane.active and sequence.slot.id in ours:
            fuse.burn()
        return decode(timed, sequences)

    lane.decode = picky  # type: ignore[method-assign]


def _drafter(sequence: Sequence, kind: str) -> Drafter:
    return next(each for each in sequence.drafting.drafters if each.kind == kind)


def _ngram(sequence: Sequence) -> NgramDrafter:
    drafter = _drafter(sequence, "ngram")
    assert isinstance(drafter, NgramDrafter)
    return drafter


STAGES: dict[str, Callable[[Running, Sequence, Fuse], None]] = {
    "lookup": lambda e, g, f: f.into(_ngram(g).index, "propose"),
    "pass": _decode,
    "adjust": lambda e, g, f: f.into(g.verifier.sampler, "adjusted"),
    "sample": lambda e, g, f: f.into(g.verifier.sampler, "sample", after=True),
    "mask": lambda e, g, f: f.into(g.verifier.matcher, "mask"),
    "forced": lambda e, g, f: f.into(g.verifier.matcher, "forced_tokens"),
    "valid": lambda e, g, f: f.into(g.verifier.matcher, "count_valid"),
    "consume": lambda e, g, f: f.into(g.verifier.matcher, "consume"),
    "text": lambda e, g, f: f.into(g._stream, "push", after=True),
    "lines": lambda e, g, f: f.into(g, "_within_lines"),
    "belief": lambda e, g, f: f.into(_drafter(g, "draft").belief, "observe"),
    "append": lambda e, g, f: f.into(g, "append", after=True),
    "last text": lambda e, g, f: f.into(g, "flush_text"),
    "statistics": lambda e, g, f: f.into(g, "make_done"),
}


def assert_own_text(
    engine: Running, prompt: list[int], tokens: list[int], truth: list[int]
) -> None:
    if tokens != truth:  # another only where the target had a near-tie
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


SAMPLER = ("adjust", "sample")  # which a greedy row that nobody else looks at never meets
GRAMMAR = ("mask", "forced", "valid", "consume")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_at_any_stage_ends_that_request_and_no_other(
    shared: Running, stage: str, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, rng = shared, random.Random(f"{stage}{seed}")
    asked = prompts(rng)
    engine.forget()
    truth = [engine.ask(prompt, 24).tokens for prompt in asked]
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
        for number, prompt in enumerate(asked)
    ]
    engine.admit()
    STAGES[stage](engine, engine.sequence(ids[at]), fuse)
    engine.finish()
    engine.pair.shared.decode = decode  # type: ignore[method-assign]
    for number, prompt in enumerate(asked):
        answer = engine.answers[ids[number]]
        if number != at:
            assert_own_text(engine, prompt, answer.tokens, truth[number])
        elif fuse.blown and not (stage == "belief" and isinstance(answer.ending, Done)):
            # (what a look at drafts taught a belief costs the drafts only)
            assert answer.failed.code == "internal_error"
            assert "Traceback" in capfd.readouterr().err
        else:
            assert answer.done.finish_reason
    assert not any(slot.busy for slot in engine.pair.shared.slots)
    for prompt, tokens in zip(asked, truth, strict=True):  # what is left in the slots is right
        assert_own_text(engine, prompt, engine.ask(prompt, 24).tokens, tokens)


LATE = ("last text", "statistics")


def test_each_stage_is_reached(shared: Running) -> None:
    """The stages above are places that a request really passes."""
    for stage in STAGES:
        shared.forget()
        rng = random.Random(stage)
        fuse = Fuse(0, ValueError(stage))
        decode = shared.pair.shared.decode
        request = start_victim(shared, prompts(rng)[0], rng, stage)
        shared.admit()
        STAGES[stage](shared, shared.sequence(request), fuse)
        shared.finish()
        shared.pair.shared.decode = decode  # type: ignore[method-assign]
        if stage not in ("forced", "valid", "belief"):  # those hang on what pays on this machine
            assert fuse.blown, stage


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["acquire", "uses_rejection", "create"])
def test_a_request_that_cannot_be_started_fails_alone_and_leaves_its_slot(
    contextual_files: PairFiles, load: Load, place: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rng = load(contextual_files), random.Random(place)
    asked = prompts(rng)
    truth = [engine.ask(prompt, 12).tokens for prompt in asked]
    owners: dict[str, Any] = {
        "acquire": engine.pair.shared.slots,
        "uses_rejection": scheduler,
        "create": Drafting,
    }
    owner = owners[place]
    act, fuse = getattr(owner, place), Fuse(1, ValueError("a bug"))

    def failing(*args: Any, **more: Any) -> Any:
        found = act(*args, **more) if when == "after" else None
        if not fuse.blown:
            fuse.burn()
        return found if when == "after" else act(*args, **more)

    monkeypatch.setattr(owner, place, failing)
    ids = [engine.start(prompt, 12) for prompt in asked]
    engine.finish()
    endings = [engine.answers[request].ending for request in ids]
    assert [isinstance(ending, Done) for ending in endings].count(False) == 1
    for prompt, request, tokens in zip(asked, ids, truth, strict=True):
        if isinstance(engine.answers[request].ending, Done):
            assert_own_text(engine, prompt, engine.answers[request].tokens, tokens)
        assert_own_text(engine, prompt, engine.ask(prompt, 12).tokens, tokens)
    assert not any(slot.busy for slot in engine.pair.shared.slots)


@pytest.mark.parametrize("error", [ValueError, BadBatch, NoKvSlot])
@pytest.mark.parametrize("place", ["propose", "_append_draft", "_prefill"])
def test_where_drafting_fails_the_answers_go_on_without(
    contextual_files: PairFiles, load: Load, place: str, error: type[Exception]
) -> None:
    engine, rng = load(contextual_files), random.Random(place)
    asked = prompts(rng)
    truth = [engine.ask(prompt, 24).tokens for prompt in asked]
    assert engine.pair.drafter is not None
    Fuse(3, error("a bug")).into(engine.pair.drafter, place)
    ids = [engine.start(prompt, 24, GREEDY, drafting(2)) for prompt in asked]
    engine.finish()
    for prompt, request, tokens in zip(asked, ids, truth, strict=True):
        assert_own_text(engine, prompt, engine.answers[request].tokens, tokens)
    del engine.pair.drafter.__dict__[place]
    again = engine.ask(asked[0], 24, GREEDY, drafting(2))
    assert again.done.speculation.active
    assert_own_text(engine, asked[0], again.tokens, truth[0])


def test_a_look_at_drafts_that_fails_costs_the_drafts_only(
    contextual_files: PairFiles, load: Load
) -> None:
    engine = load(contextual_files)
    truth = engine.ask([7, 8, 9], 100).tokens
    assert engine.pair.drafter is not None
    Fuse(0, np.linalg.LinAlgError()).into(engine.pair.drafter, "probe")
    answer = engine.ask([7, 8, 9], 100, GREEDY, SpeculationSettings())
    assert_own_text(engine, [7, 8, 9], answer.tokens, truth)


def test_a_round_that_fails_as_a_whole_ends_those_in_it_and_no_later_one(
    contextual_files: PairFiles, load: Load, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = load(contextual_files, parallel=2)
    truth = engine.ask([7, 8, 9], 30).tokens
    scheduler = engine.engine._scheduler
    plan, fuse = scheduler.schedule, Fuse(2, ValueError("a bug"))
    fuse.into(scheduler, "schedule")
    ids = [engine.start([7, 8, first], 30) for first in (9, 10, 11)]
    engine.finish()
    codes = [each.code for each in (engine.answers[ids[0]].failed, engine.answers[ids[1]].failed)]
    assert codes == ["internal_error", "internal_error"]
    assert "a bug" in capfd.readouterr().err
    assert not any(slot.busy for slot in engine.pair.shared.slots)
    scheduler.schedule = plan  # type: ignore[method-assign]
    assert engine.answers[ids[2]].ending is not None  # it waited, and came to its end as well
    assert engine.ask([7, 8, 9], 30).tokens == truth


def test_a_pass_that_nobody_is_at_fault_for_is_made_again(shared: Running) -> None:
    """One refusal of a joint pass: nobody's request ends."""
    rng = random.Random(1)
    asked = prompts(rng)
    shared.forget()
    truth = [shared.ask(prompt, 24).tokens for prompt in asked]
    lane, fuse = shared.pair.shared, Fuse(2, BadBatch("refused"))
    decode = lane.decode

    def once(timed: bool, sequences: int = 1, *, scored: bool = False) -> float:
        if not fuse.blown:
            fuse.burn()
        return decode(timed, sequences)

    lane.decode = once  # type: ignore[method-assign]
    ids = [shared.start(prompt, 24, GREEDY, drafting(2)) for prompt in asked]
    shared.finish()
    lane.decode = decode  # type: ignore[method-assign]
    assert fuse.blown
    for prompt, request, tokens in zip(asked, ids, truth, strict=True):
        assert_own_text(shared, prompt, shared.answers[request].tokens, tokens)
