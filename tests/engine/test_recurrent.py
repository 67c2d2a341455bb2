"""Models whose state cannot simply be cut: the same answers, with drafts or with the reason why not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from localspec.engine.cache.slots import Slots
from localspec.engine.speculation.cost import CostTable
from localspec.protocol.frames import Done, PairFiles
from tests.support import architectures
from tests.support.pairs import target_alone
from tests.support.recurrent import lfm2_pair, mamba_pair
from tests.support.rescoring import assert_alike
from tests.support.running import Running, drafting, running

PROMPT = [300, 17, 402, 255, 31, 340, 18, 77]


@pytest.fixture(scope="module")
def lfm2_files(models: Path) -> PairFiles:
    return lfm2_pair(models / "lfm2")


@pytest.fixture(scope="module")
def mamba_files(models: Path) -> PairFiles:
    return mamba_pair(models / "mamba")


@pytest.fixture(scope="module")
def lfm2(lfm2_files: PairFiles) -> Iterator[Running]:
    with running(lfm2_files) as engine:
        yield engine


@pytest.fixture(scope="module")
def mamba(mamba_files: PairFiles) -> Iterator[Running]:
    with running(mamba_files) as engine:
        yield engine


def fresh(engine: Running, prompt: list[int], count: int = 24) -> list[int]:
    """Plain greedy text of a prompt that no cache helps with."""
    engine.forget()
    return engine.ask(prompt, count).tokens


def test_the_models_have_the_memory_they_are_meant_to_have(lfm2: Running, mamba: Running) -> None:
    assert lfm2.pair.shared.context.model.hybrid
    assert lfm2.pair.shared.rollback is not None
    assert lfm2.pair.shared.rollback > 0
    assert mamba.pair.shared.context.model.recurrent
    assert mamba.pair.shared.rollback == 0


def test_their_text_depends_on_the_beginning_of_the_prompt(lfm2: Running, mamba: Running) -> None:
    for engine in (lfm2, mamba):
        assert fresh(engine, PROMPT) != fresh(engine, [301, *PROMPT[1:]])


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 20])
def test_a_hybrid_that_can_roll_back_drafts_and_answers_as_without(
    lfm2: Running, depth: int
) -> None:
    plain = fresh(lfm2, PROMPT, 48)
    lfm2.forget()
    drafted = lfm2.ask(PROMPT, 48, speculative=drafting(depth))
    assert_alike(lfm2.pair.files.target, PROMPT, drafted.tokens, plain)
    speculation = drafted.done.speculation
    assert 0 < speculation.accepted < speculation.drafted


def test_lookup_drafts_are_taken_back_too(lfm2: Running) -> None:
    lfm2.forget()
    answer = lfm2.ask(PROMPT, 48)
    # The first token as it will be, and then something else: all but one draft is wrong.
    first = lfm2.pair.vocab.piece(answer.tokens[0]).decode()
    prediction = f"{first} something else"
    lfm2.forget()
    misled = lfm2.ask(PROMPT, 48, speculative=drafting(6, "ngram", prediction=prediction))
    assert_alike(lfm2.pair.files.target, PROMPT, misled.tokens, answer.tokens)
    assert misled.done.speculation.drafted > misled.done.speculation.accepted


def test_without_rollback_the_reason_is_said_and_the_text_is_plain(
    mamba: Running, mamba_files: PairFiles
) -> None:
    answer = mamba.ask(PROMPT, 24, speculative=drafting(4))
    assert not answer.done.speculation.active
    assert answer.done.speculation.reason is not None
    assert "cannot roll back" in answer.done.speculation.reason
    assert "cannot roll back" in str(mamba.pair.info().speculation)
    with running(target_alone(mamba_files)) as alone:
        plain = alone.ask(PROMPT, 24).tokens
        assert_alike(mamba_files.target, PROMPT, answer.tokens, plain)


def test_lookup_does_not_draft_for_a_state_that_cannot_be_taken_back(mamba: Running) -> None:
    prompt = PROMPT * 3
    answer = mamba.ask(prompt, 24, speculative=drafting(4, "ngram"))
    assert answer.done.speculation.drafted == 0
    assert_alike(mamba.pair.files.target, prompt, answer.tokens, fresh(mamba, prompt))


@pytest.mark.parametrize("back", range(12))
@pytest.mark.parametrize("drafts", [0, 5])
def test_a_hybrid_reuses_a_prefix_only_where_its_state_is_the_prefix(
    lfm2: Running, back: int, drafts: int
) -> None:
    """The next prompt leaves the last `back` tokens out and goes on otherwise."""
    lfm2.forget()
    first = lfm2.ask(PROMPT, 21, speculative=drafting(drafts))
    text = first.all_tokens
    follow_up = [*text[: len(text) - back], 44, 45, 46]
    answer = lfm2.ask(follow_up, 16)
    anew = fresh(lfm2, follow_up, 16)
    assert_alike(lfm2.pair.files.target, follow_up, answer.tokens, anew)


@pytest.mark.parametrize("back", range(4))
def test_a_recurrent_model_reuses_a_prefix_only_where_its_state_is_the_prefix(
    mamba: Running, back: int
) -> None:
    mamba.forget()
    first = mamba.ask(PROMPT, 21)
    text = first.all_tokens
    follow_up = [*text[: len(text) - back], 44, 45, 46]
    answer = mamba.ask(follow_up, 16)
    anew = fresh(mamba, follow_up, 16)
    assert_alike(mamba.pair.files.target, follow_up, answer.tokens, anew)


def test_a_conversation_that_only_grows_is_not_read_again(lfm2: Running, mamba: Running) -> None:
    for engine in (lfm2, mamba):
        engine.forget()
        first = engine.ask(PROMPT, 20)
        second = engine.ask([*first.all_tokens, 7, 8, 9], 8)
        assert second.started is not None
        assert second.started.cached_tokens >= len(PROMPT) + 19


def test_a_recurrent_draft_beside_a_target_with_attention_is_refused_with_its_reason(
    contextual_files: PairFiles, mamba_files: PairFiles
) -> None:
    mixed = PairFiles("mixed", contextual_files.target, mamba_files.draft)
    with running(mixed) as engine, running(target_alone(contextual_files)) as alone:
        answer = engine.ask(PROMPT, 24, speculative=drafting(4))
        plain = alone.ask(PROMPT, 24).tokens
        assert_alike(contextual_files.target, PROMPT, answer.tokens, plain)
        assert "draft" in str(answer.done.speculation.reason)


def test_a_hybrid_draft_beside_a_target_with_attention_is_rolled_back(
    contextual_files: PairFiles, lfm2_files: PairFiles
) -> None:
    mixed = PairFiles("mixed", contextual_files.target, lfm2_files.draft)
    with running(mixed) as engine, running(target_alone(contextual_files)) as alone:
        for depth in (1, 4, 12):
            engine.forget()
            answer = engine.ask(PROMPT, 32, speculative=drafting(depth))
            plain = alone.ask(PROMPT, 32).tokens
            assert_alike(contextual_files.target, PROMPT, answer.tokens, plain)
            assert answer.done.speculation.drafted > 0


def test_exact_mode_is_refused_with_its_reason(mamba: Running, lfm2: Running) -> None:
    for engine in (mamba, lfm2):
        failed = engine.ask(PROMPT, 8, exact=True).failed
        assert "Exact mode is not possible" in failed.message
        assert failed.param == "exact"


def states_apart(engine: Running) -> list[tuple[list[int], list[int]]]:
    """Three texts are read, two of them go on together, and of the third its last tokens are taken back:
    (prompt, answer) of all that were asked meanwhile.
    """
    engine.forget()
    texts = [[(7 * at + 31 * first) % 500 for at in range(60)] for first in (1, 2, 3)]
    read = [engine.ask(text, 1).all_tokens for text in texts]
    together = [[*read[0], 5, 6], [*read[2], 8, 9]]
    ids = [engine.start(prompt, 12) for prompt in together]
    engine.finish()
    shorter = [*texts[1][:-3], 44]
    last = engine.ask(shorter, 12)
    assert last.done.timings.cache_n in (0, 57)
    answers = [
        (prompt, engine.answers[each].tokens) for prompt, each in zip(together, ids, strict=True)
    ]
    return [*answers, (shorter, last.tokens)]


def test_states_that_stand_side_by_side_are_kept_apart(lfm2: Running) -> None:
    for prompt, answer in states_apart(lfm2):
        assert_alike(lfm2.pair.files.target, prompt, answer, fresh(lfm2, prompt, 12))


def test_a_snapshot_that_others_have_moved_would_be_noticed(
    lfm2: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above, were a snapshot taken for one of the text whatever ran since."""

    def begin_pass(slots: Slots, rows: Mapping[int, int]) -> None:
        for slot in slots:
            if slot.id in rows:
                slot.snapshots = slot.n_past + 1

    monkeypatch.setattr(Slots, "begin_pass", begin_pass)
    prompt, answer = states_apart(lfm2)[-1]
    with pytest.raises(AssertionError):
        assert_alike(lfm2.pair.files.target, prompt, answer, fresh(lfm2, prompt, 12))


def test_several_draft_beside_each_other(lfm2: Running) -> None:
    """Of any depth, while others come, read their prompts, write plainly, are cancelled and end; and
    nothing is read twice.
    """
    rng = random.Random(7)
    prompts = [[at, *PROMPT * (at % 3 + 1)] for at in range(12)]
    truth = [fresh(lfm2, prompt, 40) for prompt in prompts]
    lfm2.forget()
    ids, cancelled, together = list[int](), set[int](), 0
    while len(ids) < len(prompts) or lfm2.engine.active:
        if len(ids) < len(prompts) and rng.random() < 0.5:
            asked = drafting(rng.choice([0, 1, 2, 3, 4, 8]), rng.choice(["draft", "auto", "ngram"]))
            ids.append(lfm2.start(prompts[len(ids)], rng.randrange(20, 41), speculative=asked))
            if rng.random() < 0.2:
                cancelled.add(ids[-1])
        if cancelled and rng.random() < 0.2:
            lfm2.engine.cancel(cancelled.pop())
        lfm2.engine.step()
        active = lfm2.pair.shared.active
        assert not any(each.generated and each.prefilling for each in active)
        together += sum(len(each.step.drafts.tokens) > 0 for each in active) > 1
    assert together > 10
    for each, prompt, tokens in zip(ids, prompts, truth, strict=True):
        answer = lfm2.answers[each]
        written = answer.tokens if isinstance(answer.ending, Done) else []
        assert_alike(lfm2.pair.files.target, prompt, written, tokens[: len(written)])


def test_a_hybrids_passes_are_as_wide_as_is_cheapest_and_planned(
    lfm2: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence with three rows gets four, and so do two that have three each; states are taken back."""
    lane = lfm2.pair.shared
    ms = {1: 10.0, 2: 20, 3: 30, 4: 11, 6: 60, 8: 12, 9: 90, 16: 200, 32: 5}
    decode, seen = lane.decode, set[tuple[int, int]]()

    def decoded(timed: bool, sequences: int = 1, *, scored: bool = False) -> float:
        lane.costs = CostTable(ms, max_rows_each=lane.context.n_rollback + 1)
        seen.add((sequences, lane.batch.rows))
        return decode(timed, sequences)

    prompts = [[1, *PROMPT], [2, *PROMPT]]
    truth = [fresh(lfm2, prompt, 24) for prompt in prompts]
    lfm2.forget()
    monkeypatch.setattr(lane, "costs", CostTable(ms, max_rows_each=lane.context.n_rollback + 1))
    monkeypatch.setattr(lane, "decode", decoded)
    alone = lfm2.ask(prompts[0], 24, speculative=drafting(2))
    assert_alike(lfm2.pair.files.target, prompts[0], alone.tokens, truth[0])
    assert (1, 4) in seen
    assert not {(1, 2), (1, 3)} & seen
    lfm2.forget()
    ids = [lfm2.start(prompt, 24, speculative=drafting(2)) for prompt in prompts]
    lfm2.finish()
    assert (2, 8) in seen
    assert (2, 6) not in seen
    for each, prompt, tokens in zip(ids, prompts, truth, strict=True):
        assert_alike(lfm2.pair.files.target, prompt, lfm2.answers[each].tokens, tokens)


def test_a_model_of_which_llama_cpp_holds_one_state_only_has_one_slot(
    load: Callable[..., Running], models: Path
) -> None:
    alone = PairFiles("plamo2", str(architectures.write("plamo2", models)))
    assert load(alone, parallel=3).pair.info().parallel == 1
