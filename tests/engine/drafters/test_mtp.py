"""MTP heads: greedy text as without them, drafts that follow from the text alone, and reasons where none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import pytest

from benchmarks.synthetic_heads import Architecture, write_heads
from benchmarks.synthetic_sidecar import TINY_GEMMA, write_with_sidecar
from localspec import model_traits
from localspec.engine.cache import slot as hidden
from localspec.engine.cache.slot import TAIL_STATES, HiddenStates
from localspec.engine.llama import Logits, NoKvSlot, NotFinite
from localspec.engine.llama import model as binding
from localspec.engine.pair.models import PairModels
from localspec.engine.pair.pair import NO_DRAFT
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.engine.speculation import verification
from localspec.engine.speculation.acceptance import Belief, Calibration
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.mtp import Heads, Sidecar
from localspec.errors import LoadFailed
from localspec.protocol.frames import Failed, PairFiles, Sampling, SpeculationSettings
from tests.support import architectures
from tests.support.heads import (
    Target,
    contextual_heads,
    cycle_heads,
    right_drafts,
    sidecar_logits,
    tensors,
)
from tests.support.pairs import N_VOCAB, expected, target_alone
from tests.support.rescoring import NEAR_TIE, assert_alike
from tests.support.running import GREEDY, Running, drafting, running, skip_on
from tests.support.statistics import chi_square_z

Load = Callable[..., Running]
ACCEPTANCE = 0.8
PROMPTS = [[300, 17, 402, 255, 31, 340, 18, 77], [12, 99, 7], [480, 3, 55, 210, 9], [66] * 20]


def heads_of(engine: Running) -> Heads:
    assert isinstance(engine.pair.drafter, Heads)
    return engine.pair.drafter


def mtp(depth: int | None = 3, **more: Any) -> SpeculationSettings:
    return drafting(depth, "mtp", **more)


@pytest.fixture(scope="module", params=["glm4moe", "qwen35", "gemma4"])
def cyclic(request: pytest.FixtureRequest, models: Path) -> Iterator[Running]:
    """Attention alone, a hybrid, and a sidecar: a text that is known."""
    with running(cycle_heads(models / "heads", ACCEPTANCE, request.param)) as engine:
        yield engine


@pytest.fixture(scope="module")
def contextual_files_with_heads(models: Path) -> PairFiles:
    return contextual_heads(models / "heads")


@pytest.fixture(scope="module")
def deep(contextual_files_with_heads: PairFiles) -> Iterator[Running]:
    """One whose text and drafts depend on every token before."""
    with running(contextual_files_with_heads) as engine:
        yield engine


@pytest.fixture(scope="module", params=["in the file", "sidecar"])
def either(request: pytest.FixtureRequest, deep: Running, models: Path) -> Iterator[Running]:
    """As `deep`."""
    if request.param == "in the file":
        yield deep
        return
    architecture: Target = "qwen35" if request.param == "hybrid" else "gemma4"
    with running(contextual_heads(models / "heads", architecture)) as engine:
        yield engine


def right_after(engine: Running, first: int, count: int, depth: int) -> tuple[int, int]:
    """Return how many drafts there are after a prompt of one token, and how many of them are right.

    A sidecar has none in the first round, for which the target has read nothing.
    """
    if isinstance(engine.pair.drafter, Sidecar):
        first, count = expected(first, 1)[0], count - 1
    return right_drafts(first, count, depth, ACCEPTANCE)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
def test_heads_are_as_often_right_as_they_were_written_to_be(cyclic: Running, depth: int) -> None:
    """And the text is the target's. Which drafts are right is known of each token."""
    for first in (5, 77):
        cyclic.forget()
        answer = cyclic.ask([first], 100, speculative=mtp(depth))
        assert answer.tokens == expected(first, 100)
        told = answer.done.speculation
        assert told.kind == "mtp", (told.reason, cyclic.pair.notes)
        assert (told.drafted, told.accepted) == right_after(cyclic, first, 100, depth)


def test_left_alone_they_are_used_where_it_pays(cyclic: Running) -> None:
    cyclic.forget()
    answer = cyclic.ask([5], 200, speculative=SpeculationSettings())
    assert answer.tokens == expected(5, 200)
    assert "mtp" in cyclic.pair.learned.calibrations


def test_exact_mode_has_the_same_drafts(cyclic: Running) -> None:
    if not cyclic.pair.models.target.cuttable:
        refused = cyclic.ask([77], 60, speculative=mtp(3), exact=True)
        assert not refused.deltas
        assert isinstance(refused.ending, Failed)
        assert refused.ending.param == "exact"
        assert "cannot be padded and rolled back" in refused.ending.message
        return
    answer = cyclic.ask([77], 60, speculative=mtp(3), exact=True)
    told = answer.done.speculation
    assert answer.tokens == expected(77, 60)
    assert (told.drafted, told.accepted) == right_after(cyclic, 77, 60, 3)
    assert cyclic.pair.busy_s() > 0


def test_what_asks_for_a_draft_model_is_told_that_there_is_none(cyclic: Running) -> None:
    told = cyclic.ask([5], 10, speculative=drafting(2)).done.speculation
    assert not told.active
    assert "no draft model" in str(told.reason)


def test_what_asks_for_heads_is_told_of_heads(cycle: Running, load: Load) -> None:
    """Of a pair with a draft model, and of a target alone."""
    told = cycle.ask([5], 10, speculative=mtp(2)).done.speculation
    assert told.reason == "this pair has a draft model, and MTP heads are not used beside one"
    alone = load(target_alone(cycle.pair.files))
    told = alone.ask([5], 10, speculative=mtp(2)).done.speculation
    assert told.reason == "this model has no MTP heads"
    assert alone.ask([5], 10, speculative=drafting(2)).done.speculation.reason == NO_DRAFT


@pytest.mark.parametrize("error", [NotFinite("NaN"), NoKvSlot("full")])
def test_heads_that_fail_are_called_heads(
    cyclic: Running, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_row: int) -> None:
        raise error

    cyclic.forget()
    monkeypatch.setattr(heads_of(cyclic), "_proposals", fail)
    answer = cyclic.ask([5], 30, speculative=mtp(2))
    assert answer.tokens == expected(5, 30)
    assert "the MTP heads" in str(answer.done.speculation.reason)


# ------------------------------------------------------------------------------- drafts of one text


class Proposal(NamedTuple):
    """What was drafted after a text; gaps: how much the runner-up of each draft was behind, in nats."""

    text: tuple[int, ...]
    drafts: tuple[int, ...]
    gaps: tuple[float, ...]

    def alike(self, other: Proposal) -> bool:
        """The same drafts of the same text, as far as other sums in another order can tell."""
        for mine, its, gap in zip(self.drafts, other.drafts, self.gaps, strict=True):
            if mine != its:
                return gap < NEAR_TIE
        return self.text == other.text


def recorded(engine: Running, monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """All that is proposed from now on."""
    heads, found = heads_of(engine), list[Proposal]()
    whole, choose = heads.propose, heads._append_draft
    gaps: dict[DraftRequest, list[float]] = {}

    def chosen(request: DraftRequest, logits: Logits) -> None:
        second, first = np.partition(logits, -2)[-2:].tolist()
        gaps.setdefault(request, []).append(first - second)
        choose(request, logits)

    def propose(requests: Any) -> None:
        gaps.clear()
        whole(requests)
        for each in requests:
            known = tuple(gaps.get(each, ()))[: len(each.tokens)]
            found.append(Proposal(tuple(each.slot.tokens), tuple(each.tokens), known))

    monkeypatch.setattr(heads, "propose", propose)
    monkeypatch.setattr(heads, "_append_draft", chosen)
    return found


def anew(engine: Running, found: list[Proposal], text: tuple[int, ...], depth: int) -> Proposal:
    """What is drafted after `text` where it is read by an empty slot and nobody runs beside."""
    engine.forget()
    del found[:]
    engine.ask(list(text[:-1]), depth + 2, speculative=mtp(depth))
    assert found[0].text == text
    return found[0]


@pytest.mark.parametrize("either", ["in the file", "sidecar", "hybrid"], indirect=True)
def test_drafts_follow_from_the_text_alone_whoever_runs_beside(
    either: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at once, drafts of each depth, and after each number of them that was kept."""
    found = recorded(either, monkeypatch)
    either.forget()
    plain = [either.ask(prompt, 40).tokens for prompt in PROMPTS]
    either.forget()
    asked = [
        either.start(p, 40, speculative=mtp(d)) for p, d in zip(PROMPTS, (1, 2, 3, 4), strict=True)
    ]
    either.finish()
    for prompt, request, tokens in zip(PROMPTS, asked, plain, strict=True):
        assert_alike(either.pair.files.target, prompt, either.answers[request].tokens, tokens)
    told = [either.answers[request].done.speculation for request in asked]
    assert all(0 < each.accepted < each.drafted for each in told)
    seen = list(found)
    assert {len(each.drafts) for each in seen} >= {1, 2, 3, 4}
    for each in seen[1::7]:
        assert each.alike(anew(either, found, each.text, len(each.drafts)))


@pytest.mark.parametrize("architecture", sorted(model_traits._TESTED_HEADS))
def test_what_several_texts_read_together_is_each_ones_own(
    models: Path, load: Load, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Passes over prompts of different lengths and texts that go on; then each drafts."""
    if architecture in get_args(Architecture):
        files = contextual_heads(models / "heads", cast(Architecture, architecture))
    else:
        count = 3 if architecture in model_traits._TESTED_SEVERAL_HEADS else 1
        file = architectures.write(architecture, models, experts=True, heads=count)
        files = PairFiles(architecture, str(file), None)
    engine = load(files)
    found = recorded(engine, monkeypatch)
    for prompt in PROMPTS:
        engine.start(prompt, 12)
        engine.engine.step()
    engine.finish()
    assert not found
    for answer in list(engine.answers.values()):
        engine.ask(answer.all_tokens, 5, speculative=mtp(3))
    drafted = [each for each in found if len(each.drafts) == 3][:4]
    assert drafted
    for each in drafted:
        assert each.alike(anew(engine, found, each.text, 3))


def test_states_of_another_text_would_be_noticed(
    either: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above, were each given the state of the token before."""
    before = HiddenStates.states_before

    def shifted(states: HiddenStates, first: int, last: int) -> Any:
        return np.roll(before(states, first, last), 1, axis=1)

    found = recorded(either, monkeypatch)
    right = [
        anew(either, found, (*prompt, token), 3)
        for prompt, token in ((p, either.ask(p, 1).tokens[0]) for p in PROMPTS)
    ]
    monkeypatch.setattr(HiddenStates, "states_before", shifted)
    wrong = [
        anew(either, found, (*prompt, token), 3)
        for prompt, token in ((p, either.ask(p, 1).tokens[0]) for p in PROMPTS)
    ]
    assert not all(map(Proposal.alike, right, wrong))


@pytest.mark.parametrize("back", [1, 2, 3, 5, 9])
def test_a_text_that_is_cut_back_drafts_as_one_that_was_read(
    either: Running, monkeypatch: pytest.MonkeyPatch, back: int
) -> None:
    """The next prompt leaves the last tokens out and goes on otherwise."""
    found = recorded(either, monkeypatch)
    either.forget()
    first = either.ask(PROMPTS[0], 21, speculative=mtp(4)).all_tokens
    follow_up = [*first[: len(first) - back], 44, 45]
    del found[:]
    answer = either.ask(follow_up, 8, speculative=mtp(3))
    assert answer.started is not None
    assert answer.started.cached_tokens == len(first) - max(back, 1)
    first_drafts = found[0]
    assert first_drafts.alike(anew(either, found, first_drafts.text, 3))


def test_heads_read_a_prompt_when_they_are_used_and_not_before(
    deep: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * at) % 500 for at in range(300)]
    deep.forget()
    context = heads_of(deep).context
    read = deep.ask(prompt, 5).all_tokens
    slot = max(deep.pair.shared.slots, key=lambda each: each.n_past)
    assert context.length(slot.draft_id) == 0
    found = recorded(deep, monkeypatch)
    deep.ask(read, 6, speculative=mtp(3))
    assert context.length(slot.draft_id) > 300
    first_drafts = found[0]
    assert first_drafts.alike(anew(deep, found, first_drafts.text, 3))


def test_heads_that_begin_late_read_the_end_of_a_text(
    deep: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as there are states of."""
    monkeypatch.setattr(hidden, "MAX_BYTES", 0)
    with running(deep.pair.files) as engine:
        prompt = [(7 * at) % 500 for at in range(300)]
        answer = engine.ask(prompt, 40, speculative=mtp(2))
        context = heads_of(engine).context
        slot = max(engine.pair.shared.slots, key=lambda each: each.n_past)
        assert context.first_position(slot.draft_id) > 300 - 2 * TAIL_STATES
        assert answer.done.speculation.drafted > 0
        assert_alike(engine.pair.files.target, prompt, answer.tokens, engine.ask(prompt, 40).tokens)


# ------------------------------------------------------------------------------- a sidecar


def test_a_sidecar_drafts_where_the_targets_cache_is_full(models: Path, load: Load) -> None:
    """Idle texts give their cells up, and what is drafted after others left is drafted as ever."""
    files = contextual_heads(models / "heads", "gemma4")
    engine = load(files, n_ctx=256)
    plain = {}
    for at, prompt in enumerate(PROMPTS):
        longer = [*prompt, *range(40 * at, 40 * at + 40)]
        plain[at] = longer, engine.ask(longer, 30).tokens
    assert sum(slot.n_past for slot in engine.pair.shared.slots) > 200
    for longer, tokens in plain.values():
        answer = engine.ask([*longer, 9], 60, speculative=mtp(4))
        assert answer.done.speculation.reason is None
        assert answer.done.speculation.drafted > 0
        again = engine.ask(longer, 30, speculative=mtp(4)).tokens
        assert_alike(files.target, longer, again, tokens)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_sidecar_drafts_once_the_target_has_read_a_token(
    models: Path, load: Load, flash_attention: str, exact: bool
) -> None:
    """Before that it would attend to no cell, which without flash attention is no number."""
    files = cycle_heads(models / "heads", ACCEPTANCE, "gemma4")
    engine = load(files, flash_attention=flash_attention)
    beside = [engine.start([at, 5], 60, speculative=mtp(3), exact=exact) for at in range(2)]
    alone = engine.start([5], 60, speculative=mtp(3), exact=exact)
    engine.finish()
    for request in (*beside, alone):
        answer = engine.answers[request]
        told = answer.done.speculation
        assert answer.tokens == expected(5, 60)
        assert told.reason is None
        assert (told.kind, told.drafted > told.accepted > 0) == ("mtp", True)
    told = engine.answers[alone].done.speculation
    assert (told.drafted, told.accepted) == right_after(engine, 5, 60, 3)


@pytest.mark.parametrize("flash_attention", ["auto", "off"])
def test_a_sidecar_computes_on_every_device_what_its_files_say(
    models: Path, load: Load, monkeypatch: pytest.MonkeyPatch, flash_attention: str
) -> None:
    """Every logit and every state of its own, after each token it was asked about, in both lanes.

    No rounding of a kernel comes near the tolerance (tests/engine/test_rounding.py), so that what fails
    here was computed from other numbers, or read from another row or before it was there.
    """
    files = cycle_heads(models / "heads", ACCEPTANCE, "gemma4")
    assert files.draft is not None
    engine = load(files, flash_attention=flash_attention)
    assert not engine.pair.notes
    truth = sidecar_logits(files)
    weights = tensors(Path(files.draft))
    # The states before the matrix that gives logits are had back from them, exactly but for rounding.
    states = np.linalg.lstsq(weights["token_embd.weight"], truth.T, rcond=None)[0].T
    states = states @ weights["nextn.post_projection.weight"].T
    read: list[tuple[int, float, float]] = []
    choose = Heads._append_draft

    def chosen(heads: Heads, request: DraftRequest, logits: Logits) -> None:
        token = (request.slot.tokens + request.tokens)[-1]
        state = heads._draft_states[request]
        read.append(
            (
                token,
                float(np.abs(logits - truth[token]).max()),
                float(np.abs(state - states[token]).max()),
            )
        )
        choose(heads, request, logits)

    monkeypatch.setattr(Heads, "_append_draft", chosen)
    for exact in (False, True):
        engine.ask([5], 60, speculative=mtp(4), exact=exact)
        for prompt in PROMPTS:
            engine.start(prompt, 20, speculative=mtp(3), exact=exact)
        engine.finish()
    assert len({token for token, _, _ in read}) > 60
    assert not [each for each in read if max(each[1:]) > 0.1]


def test_a_probe_is_compared_with_what_came(cyclic: Running) -> None:
    """The first place that a probe sees tells nothing yet."""
    sidecar = heads_of(cyclic)
    if not isinstance(sidecar, Sidecar):
        return
    cyclic.forget()
    seen: list[bool] = []

    class Heard(Belief):
        def observe(self, at: int, hit: bool) -> None:
            seen.append(hit)

    belief = Heard(Calibration())
    cyclic.start([5], 40)
    for _ in range(30):
        cyclic.engine.step()
        slot = next(each for each in cyclic.pair.shared.slots if each.busy)
        if len(slot.tokens) > slot.n_past:
            sidecar.probe(slot, belief)
    cyclic.finish()
    drafted = [right_drafts(token, 2, 1, ACCEPTANCE)[1] == 1 for token in [5, *expected(5, 40)]]
    assert seen in [drafted[at : at + len(seen)] for at in range(4)]
    assert len(seen) > 20


def test_a_sidecar_of_another_target_is_refused(models: Path, load: Load, tmp_path: Path) -> None:
    files = cycle_heads(models / "heads", ACCEPTANCE, "gemma4")
    other = replace(TINY_GEMMA, n_embd=96, n_head=3)
    wider, _ = write_with_sidecar(tmp_path / "wider", other)
    narrow, _ = write_with_sidecar(tmp_path / "narrow", replace(TINY_GEMMA, n_head=4))
    llama = cycle_heads(models / "heads", ACCEPTANCE, "glm4moe").target
    for target, told in ((wider, "64 numbers"), (narrow, "lengths"), (llama, "not glm4moe")):
        with pytest.raises(LoadFailed, match=told):
            load(PairFiles("other", str(target), files.draft))
    with pytest.raises(LoadFailed, match="draft head"):
        load(PairFiles("alone", str(files.draft), None))


# ------------------------------------------------------------------------------- sampling


def z_of_drawn(engine: Running, rule: str) -> float:
    """Standard deviations between what is drawn with drafts and the target's own distribution."""
    prompt = PROMPTS[0]
    prompt = [*prompt, *engine.ask(prompt, 1).tokens]
    asked = Sampling(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    sampler = Sampler(Settings(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0))
    answers = [engine.ask(prompt, 3, asked, mtp(2, verification=rule)) for _ in range(600)]
    # So that drafts matter: some 70 of the one model and 280 of the other are.
    assert sum(answer.done.speculation.accepted for answer in answers) > 20
    by_first: dict[int, list[int]] = {}
    for answer in answers:
        by_first.setdefault(answer.tokens[0], []).append(answer.tokens[1])
    samples = []
    for first, drawn in by_first.items():
        entry = engine.ask([*prompt, first], 1, GREEDY, top_logprobs=N_VOCAB).logprobs
        row = np.full(N_VOCAB, -np.inf, dtype=np.float32)
        for token, _, value in entry[0].top:
            row[token] = value
        own = sampler.distribution(row)
        if len(drawn) > 40:
            samples.append((drawn, {int(t): own.probability_of(int(t)) for t in own.ids}))
    assert samples
    return chi_square_z(*samples)


def test_drafts_that_are_drawn_keep_the_targets_distribution(either: Running) -> None:
    assert z_of_drawn(either, "rejection") < 4.5


def test_drafts_that_are_all_kept_would_not(
    either: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        verification,
        "residual",
        lambda target, draft: draft,  # after a rejection, drawn from the heads' own
    )
    assert z_of_drawn(either, "rejection") > 4.5


# ------------------------------------------------------------------------------- kept and put back


@skip_on(
    "rpc", why="what is kept of a pair is for its machines, and each engine has another worker"
)
@pytest.mark.parametrize("architecture", ["glm4moe", "gemma4"])
def test_a_saved_text_drafts_on_after_a_restart(
    models: Path, load: Load, tmp_path: Path, architecture: Target
) -> None:
    files = contextual_heads(models / "heads", architecture)
    prompt = [(7 * at) % 500 for at in range(280)]
    settings = {"states_dir": str(tmp_path), "states_bytes": 1 << 30, "n_ctx": 1024}
    first = load(files, **settings)
    text = first.ask(prompt, 30, speculative=mtp(3), conversation="a" * 32).all_tokens
    first.close()
    again = load(files, **settings)
    answer = again.ask([*text, 4, 5], 30, speculative=mtp(3), conversation="a" * 32)
    assert answer.started is not None
    assert answer.started.cached_tokens > 280
    slot = max(again.pair.shared.slots, key=lambda each: each.n_past)
    if architecture == "glm4moe":
        assert heads_of(again).context.first_position(slot.draft_id) == 0
    again.forget()
    plain = again.ask([*text, 4, 5], 30).tokens
    assert_alike(again.pair.files.target, [*text, 4, 5], answer.tokens, plain)
    assert answer.done.speculation.accepted > 0


# ------------------------------------------------------------------------------- where there can be none


@pytest.mark.parametrize("why", ["names", "context", "architecture", "not in it"])
@pytest.mark.parametrize("written", ["glm4moe", "gemma4"])
def test_without_heads_that_work_the_reason_is_said_and_the_text_is_plain(
    models: Path,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    why: str,
    written: Target,
) -> None:
    if written == "gemma4" and why not in ("names", "context"):
        return
    if why == "names":
        monkeypatch.setattr(binding, "_ext", None)
        monkeypatch.setattr(binding, "_missing", "llama_set_embeddings_nextn")
    elif why == "architecture":
        monkeypatch.setattr(model_traits, "_TESTED_HEADS", frozenset())
    elif why == "context":
        make = PairModels.make_context

        def context(models: PairModels, *args: Any, heads: bool = False, **more: Any) -> Any:
            if heads:
                raise LoadFailed("llama.cpp cannot make a context.")
            return make(models, *args, **more)

        monkeypatch.setattr(PairModels, "make_context", context)
    files = cycle_heads(models / "heads", ACCEPTANCE, written)
    if why == "not in it":
        hollow = write_heads(tmp_path / "hollow.gguf", hollow=True)
        files = PairFiles("hollow", str(hollow), None)
    engine = load(files)
    answer = engine.ask([5], 40, speculative=mtp(3))
    assert answer.tokens == expected(5, 40)
    told = {"names": "llama_set_embeddings_nextn", "architecture": "glm4moe"}.get(why, why)
    assert told in str(answer.done.speculation.reason)
    assert told in str(engine.pair.info().speculation)


# ------------------------------------------------------------------------------- the states that are kept


def test_states_are_those_of_the_text_whatever_was_put_and_cut() -> None:
    """Against a list, in many random turns; of too many the oldest are forgotten."""
    rng = np.random.default_rng(0)
    kept, truth = HiddenStates(4), np.zeros((0, 4), np.float32)
    kept._max_rows = 100
    start = 0
    for _ in range(300):
        match rng.integers(4):
            case 0 | 1:
                rows = rng.standard_normal((rng.integers(1, 30), 4), dtype=np.float32)
                kept.put(len(truth), rows)
                truth = np.concatenate([truth, rows])
            case 2:
                truth = truth[: rng.integers(max(len(truth) - 20, 0), len(truth) + 1)]
                kept.cut(len(truth))
            case _:
                place = int(rng.integers(len(truth) + 1))
                kept.drop_read(place)
                assert kept.start <= max(start, place - TAIL_STATES, len(truth) - 100)
        start = kept.start
        assert kept.end == len(truth)
        assert kept.end - kept.start <= 100
        first = int(rng.integers(len(truth) + 1))
        got = kept.states_before(first, len(truth) + 1)
        for at, row in enumerate(got, start=first):
            known = kept.start < at <= kept.end
            assert np.array_equal(row, truth[at - 1] if known else np.zeros(4))
    other = HiddenStates(4)
    other.copy_from(kept, len(truth) - 5)
    assert (other.start, other.end) == (kept.start, len(truth) - 5)
