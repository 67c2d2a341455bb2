"""Models with a recurrent state give the same answers, with drafts or with a reason for none."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from localspec.engine.cache.slots import Slots
from localspec.engine.speculation.cost import CostTable
from localspec.protocol.frames import Done, PairFiles
from tests.support import architectures
from tests.support.pairs import target_alone
from tests.support.recurrent import lfm2_pair, mamba_pair
from tests.support.rescoring import assert_alike
from tests.support.running import Load, Running, drafting, running

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


def ask_fresh(engine: Running, prompt: list[int], count: int = 24) -> list[int]:
    """Return the plain greedy text of a prompt without any cache."""
    engine.forget()
    return engine.ask(prompt, count).tokens


def test_models_have_the_intended_kinds_of_memory(lfm2: Running, mamba: Running) -> None:
    assert lfm2.pair.shared.context.model.hybrid
    assert lfm2.pair.shared.rollback is not None
    assert lfm2.pair.shared.rollback > 0
    assert mamba.pair.shared.context.model.recurrent
    assert mamba.pair.shared.rollback == 0


def test_their_text_depends_on_the_beginning_of_the_prompt(lfm2: Running, mamba: Running) -> None:
    for engine in (lfm2, mamba):
        assert ask_fresh(engine, PROMPT) != ask_fresh(engine, [301, *PROMPT[1:]])


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 20])
def test_hybrid_with_rollback_gives_the_plain_text_with_drafts(lfm2: Running, depth: int) -> None:
    plain = ask_fresh(lfm2, PROMPT, 48)
    lfm2.forget()
    drafted = lfm2.ask(PROMPT, 48, speculative=drafting(depth))
    assert_alike(lfm2.pair.files.target, PROMPT, drafted.tokens, plain)
    speculation = drafted.done.speculation
    assert 0 < speculation.accepted < speculation.drafted


def test_lookup_drafts_are_rolled_back_too(lfm2: Running) -> None:
    lfm2.forget()
    answer = lfm2.ask(PROMPT, 48)
    # The prediction has the right first token and then another text, so all drafts but one are wrong.
    first_piece = lfm2.pair.vocab.piece(answer.tokens[0]).decode()
    prediction = f"{first_piece} something else"
    lfm2.forget()
    misled = lfm2.ask(PROMPT, 48, speculative=drafting(6, "ngram", prediction=prediction))
    assert_alike(lfm2.pair.files.target, PROMPT, misled.tokens, answer.tokens)
    assert misled.done.speculation.drafted > misled.done.speculation.accepted


def test_without_rollback_the_text_is_plain(mamba: Running, mamba_files: PairFiles) -> None:
    answer = mamba.ask(PROMPT, 24, speculative=drafting(4))
    assert not answer.done.speculation.active
    assert "cannot roll back" in str(answer.done.speculation.reason)
    assert "cannot roll back" in str(mamba.pair.info().speculation)
    with running(target_alone(mamba_files)) as alone:
        plain = alone.ask(PROMPT, 24).tokens
        assert_alike(mamba_files.target, PROMPT, answer.tokens, plain)
    prompt = PROMPT * 3  # a lookup does not draft either
    answer = mamba.ask(prompt, 24, speculative=drafting(4, "ngram"))
    assert answer.done.speculation.drafted == 0
    assert_alike(mamba.pair.files.target, prompt, answer.tokens, ask_fresh(mamba, prompt))


@pytest.mark.parametrize(
    ("kind", "drafts", "back"),
    [
        *((kind, 0, back) for kind, count in (("lfm2", 12), ("mamba", 4)) for back in range(count)),
        *(("lfm2", 5, back) for back in range(12)),
    ],
)
def test_a_prefix_is_reused_only_with_its_exact_state(
    kind: str, drafts: int, back: int, request: pytest.FixtureRequest
) -> None:
    """The next prompt leaves out the last `back` tokens and continues differently."""
    engine: Running = request.getfixturevalue(kind)
    engine.forget()
    text = engine.ask(PROMPT, 21, speculative=drafting(drafts)).all_tokens
    follow_up = [*text[: len(text) - back], 44, 45, 46]
    answer = engine.ask(follow_up, 16)
    anew = ask_fresh(engine, follow_up, 16)
    assert_alike(engine.pair.files.target, follow_up, answer.tokens, anew)


def test_a_conversation_that_only_grows_is_not_read_again(lfm2: Running, mamba: Running) -> None:
    for engine in (lfm2, mamba):
        engine.forget()
        first = engine.ask(PROMPT, 20)
        second = engine.ask([*first.all_tokens, 7, 8, 9], 8)
        assert second.started is not None
        assert second.started.cached_tokens >= len(PROMPT) + 19


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_only_a_hybrid_draft_of_an_attention_target_is_rolled_back(
    kind: str, contextual_files: PairFiles, request: pytest.FixtureRequest
) -> None:
    draft = request.getfixturevalue(f"{kind}_files").draft
    mixed = PairFiles("mixed", contextual_files.target, draft)
    with running(mixed) as engine, running(target_alone(contextual_files)) as alone:
        plain = alone.ask(PROMPT, 32).tokens
        for depth in (1, 4, 12):
            engine.forget()
            answer = engine.ask(PROMPT, 32, speculative=drafting(depth))
            assert_alike(contextual_files.target, PROMPT, answer.tokens, plain)
            speculation = answer.done.speculation
            assert (speculation.drafted > 0) == (kind == "lfm2")
            assert kind == "lfm2" or "draft" in str(speculation.reason)


def test_exact_mode_is_refused_with_its_reason(mamba: Running, lfm2: Running) -> None:
    for engine in (mamba, lfm2):
        failed = engine.ask(PROMPT, 8, exact=True).failed
        assert "Exact mode is not possible" in failed.message
        assert failed.param == "exact"


def continue_interleaved_texts(engine: Running) -> list[tuple[list[int], list[int]]]:
    """Read three texts, continue two of them together, and cut back the last tokens of the third.

    Return (prompt, answer) of the three continuations.
    """
    engine.forget()
    texts = [[(7 * at + 31 * number) % 500 for at in range(60)] for number in (1, 2, 3)]
    opened = [engine.ask(text, 1).all_tokens for text in texts]
    together = [[*opened[0], 5, 6], [*opened[2], 8, 9]]
    ids = [engine.start(prompt, 12) for prompt in together]
    engine.finish()
    shorter = [*texts[1][:-3], 44]
    third = engine.ask(shorter, 12)
    assert third.done.timings.cache_n in (0, 57)
    answers = [engine.answers[request].tokens for request in ids]
    return [*zip(together, answers, strict=True), (shorter, third.tokens)]


def test_states_of_parallel_texts_are_kept_apart(lfm2: Running) -> None:
    for prompt, answer in continue_interleaved_texts(lfm2):
        assert_alike(lfm2.pair.files.target, prompt, answer, ask_fresh(lfm2, prompt, 12))


def test_an_outdated_snapshot_is_detected(lfm2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: snapshots are trusted whatever ran since."""

    def begin_pass(slots: Slots, rows: Mapping[int, int]) -> None:
        for slot in slots:
            if slot.id in rows:
                slot.snapshots = slot.n_past + 1

    monkeypatch.setattr(Slots, "begin_pass", begin_pass)
    prompt, answer = continue_interleaved_texts(lfm2)[-1]
    with pytest.raises(AssertionError):
        assert_alike(lfm2.pair.files.target, prompt, answer, ask_fresh(lfm2, prompt, 12))


def test_several_sequences_draft_in_parallel(lfm2: Running) -> None:
    """Drafts have any depth while requests arrive, read, decode, are cancelled and end.

    No token is read twice.
    """
    rng = random.Random(7)
    prompts = [[at, *PROMPT * (at % 3 + 1)] for at in range(12)]
    truth = [ask_fresh(lfm2, prompt, 40) for prompt in prompts]
    lfm2.forget()
    ids, cancelled, together = list[int](), set[int](), 0
    while len(ids) < len(prompts) or lfm2.engine.active:
        if len(ids) < len(prompts) and rng.random() < 0.5:
            depth, kind = rng.choice([0, 1, 2, 3, 4, 8]), rng.choice(["draft", "auto", "ngram"])
            prompt, count = prompts[len(ids)], rng.randrange(20, 41)
            ids.append(lfm2.start(prompt, count, speculative=drafting(depth, kind)))
            if rng.random() < 0.2:
                cancelled.add(ids[-1])
        if cancelled and rng.random() < 0.2:
            lfm2.engine.cancel(cancelled.pop())
        lfm2.engine.step()
        active = lfm2.pair.shared.active
        assert not any(sequence.generated and sequence.prefilling for sequence in active)
        together += sum(len(sequence.step.drafts.tokens) > 0 for sequence in active) > 1
    assert together > 10
    for request, prompt, tokens in zip(ids, prompts, truth, strict=True):
        answer = lfm2.answers[request]
        tokens_so_far = answer.tokens if isinstance(answer.ending, Done) else []
        assert_alike(lfm2.pair.files.target, prompt, tokens_so_far, tokens[: len(tokens_so_far)])


def test_hybrid_passes_have_the_best_width(lfm2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence with three rows is padded to four, and two with three each to eight."""
    lane = lfm2.pair.shared
    ms = {1: 10.0, 2: 20, 3: 30, 4: 11, 6: 60, 8: 12, 9: 90, 16: 200, 32: 5}
    decode, widths = lane.decode, set[tuple[int, int]]()

    def recording_decode(timed: bool, sequences: int = 1, *, scored: bool = False) -> float:
        lane.costs = CostTable(ms, max_rows_each=lane.context.n_rollback + 1)
        widths.add((sequences, lane.batch.rows))
        return decode(timed, sequences)

    prompts = [[1, *PROMPT], [2, *PROMPT]]
    truth = [ask_fresh(lfm2, prompt, 24) for prompt in prompts]
    lfm2.forget()
    monkeypatch.setattr(lane, "costs", CostTable(ms, max_rows_each=lane.context.n_rollback + 1))
    monkeypatch.setattr(lane, "decode", recording_decode)
    alone = lfm2.ask(prompts[0], 24, speculative=drafting(2))
    assert_alike(lfm2.pair.files.target, prompts[0], alone.tokens, truth[0])
    assert (1, 4) in widths
    assert not {(1, 2), (1, 3)} & widths
    lfm2.forget()
    ids = [lfm2.start(prompt, 24, speculative=drafting(2)) for prompt in prompts]
    lfm2.finish()
    assert (2, 8) in widths
    assert (2, 6) not in widths
    for request, prompt, tokens in zip(ids, prompts, truth, strict=True):
        assert_alike(lfm2.pair.files.target, prompt, lfm2.answers[request].tokens, tokens)


def test_model_with_a_single_state_has_one_slot(load: Load, models: Path) -> None:
    files = PairFiles("plamo2", str(architectures.write("plamo2", models)))
    assert load(files, parallel=3).pair.info().parallel == 1
