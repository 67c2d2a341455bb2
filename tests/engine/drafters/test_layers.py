"""Sidecars that read layers of their target: EAGLE-3, DFlash, DFlash 2 and DSpark.

They leave the text as it is, draft from the text alone, and are refused where they do not fit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import pytest

from benchmarks.synthetic import TINY_TARGET, Shape, follow, target_cycle
from benchmarks.synthetic_block import write_block
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_targets import (
    LayerReader,
    TargetArchitecture,
    write_layer_reader,
    write_target,
)
from localspec.engine.cache.slot import ALL_TOKENS, TAIL_STATES, Slot
from localspec.engine.llama import Context, NoKvSlot, States
from localspec.engine.llama import model as binding
from localspec.engine.speculation.depth import RoundCosts
from localspec.engine.speculation.drafters.block import BlockDraft
from localspec.engine.speculation.drafters.draft_model import (
    UNREAD_TAIL_TOKENS,
    DraftModel,
    ModelDrafter,
)
from localspec.engine.speculation.windows import COMPARED_TOKENS, WindowTable
from localspec.errors import LoadFailed, NotMatched, UnsafeModel
from localspec.protocol.frames import PairFiles, Sampling, SpeculationSettings
from localspec.protocol.settings import CPU_PASS_ROWS, SHORT_CONTEXT_TOKENS
from localspec.registry.header.model import read_local_model
from localspec.registry.header.pairing import check_pair
from localspec.registry.header.weights import check_weights
from tests.engine.test_not_finite import write_spoiled_copy
from tests.support import architectures
from tests.support.followers import draw_rejected_from_draft, measure_sampled_z
from tests.support.heads import right_drafts
from tests.support.pairs import CONTEXT_SHAPE, N_VOCAB, contextual_pair, expected
from tests.support.proposals import PROMPTS, Proposals
from tests.support.running import GREEDY, Answer, Running, drafting, running, skip_on

Load = Callable[..., Running]
ACCEPTANCE = 0.8


KINDS: tuple[LayerReader, ...] = get_args(LayerReader)
# Wide enough for blocks of eight drafts.
SHAPE = replace(TINY_TARGET, n_embd=128)


def ask_for(engine: Running, depth: int | None = 3, **more: Any) -> SpeculationSettings:
    """Return settings that name the engine's kind of drafts."""
    assert engine.pair.drafter is not None, engine.pair.no_draft
    kind = cast(Literal["eagle3", "dflash"], engine.pair.drafter.kind)
    return drafting(depth, kind, **more)


def write_sidecar(
    path: Path, kind: LayerReader, shape: Shape, acceptance: float = ACCEPTANCE, **options: Any
) -> Path:
    return write_layer_reader(path, kind, shape, target_cycle(shape.n_vocab), acceptance, **options)


def write_pair(
    folder: Path,
    kind: LayerReader = "eagle3",
    *,
    shape: Shape = SHAPE,
    architecture: TargetArchitecture = "llama",
    **options: Any,
) -> PairFiles:
    """Return a target that follows `expected`, with a sidecar."""
    folder.mkdir(parents=True, exist_ok=True)
    target, sidecar = folder / "target.gguf", folder / f"{kind}-target.gguf"
    write_target(target, shape, target_cycle(N_VOCAB), architecture)
    write_sidecar(sidecar, kind, shape, architecture=architecture, **options)
    return PairFiles(folder.name, str(target), str(sidecar))


def contextual_files(folder: Path, kind: LayerReader) -> PairFiles:
    """Return a target whose text depends on all of it, with a sidecar that listens to its layers."""
    files = contextual_pair(folder)
    sidecar = write_sidecar(folder / f"{kind}-target.gguf", kind, CONTEXT_SHAPE, listens=1.5)
    return PairFiles(f"contextual {kind}", files.target, str(sidecar))


@pytest.fixture(scope="module", params=KINDS)
def cyclic(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(write_pair(tmp_path_factory.mktemp("layers"), request.param)) as engine:
        yield engine


@pytest.fixture(scope="module", params=["eagle3", "dflash", "dflash2"])
def contextual(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(contextual_files(tmp_path_factory.mktemp("layers"), request.param)) as engine:
        yield engine


def count_right_drafts(first_token: int, count: int, depth: int) -> tuple[int, int]:
    """As `right_drafts`, without a draft in the first round: the target has not read anything yet."""
    return right_drafts(expected(first_token, 1)[0], count - 1, depth, ACCEPTANCE)


@pytest.mark.parametrize(
    ("depth", "exact"), [(1, False), (3, False), (4, False), (7, False), (1, True), (3, True)]
)
def test_drafts_have_the_acceptance_rate_they_were_written_with(
    cyclic: Running, depth: int, exact: bool
) -> None:
    cyclic.forget()
    answer = cyclic.ask([77], 100, speculative=ask_for(cyclic, depth), exact=exact)
    assert answer.tokens == expected(77, 100)
    speculation = answer.done.speculation
    assert speculation.kind == ask_for(cyclic).kind, (speculation.reason, cyclic.pair.notes)
    counts = speculation.drafted, speculation.accepted
    assert counts == count_right_drafts(77, 100, depth)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen35", "gpt-oss"])
@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_every_architecture_get_the_drafts_that_were_written(
    tmp_path: Path, load: Load, kind: LayerReader, architecture: TargetArchitecture
) -> None:
    engine = load(write_pair(tmp_path, kind, architecture=architecture))
    for depth in (1, 4):
        engine.forget()
        answer = engine.ask([5], 100, speculative=ask_for(engine, depth))
        assert answer.tokens == expected(5, 100)
        speculation = answer.done.speculation
        counts = speculation.drafted, speculation.accepted
        assert counts == count_right_drafts(5, 100, depth)
    engine.forget()
    together = [engine.start([first], 60, speculative=ask_for(engine)) for first in (5, 77)]
    engine.finish()
    for request, first in zip(together, (5, 77), strict=True):
        assert engine.answers[request].tokens == expected(first, 60)


@pytest.mark.parametrize("exact", [False, True])
def test_a_target_that_shows_no_layers_gets_drafts_from_its_last_states(
    tmp_path: Path, load: Load, exact: bool
) -> None:
    """Those of a prompt are unknown, since it has logits for its last token alone."""
    engine = load(write_pair(tmp_path, architecture="qwen2"))
    for depth in (1, 3):
        engine.forget()
        answer = engine.ask([5], 100, speculative=ask_for(engine, depth), exact=exact)
        assert answer.tokens == expected(5, 100)
        speculation = answer.done.speculation
        assert (speculation.drafted, speculation.accepted) == count_right_drafts(5, 100, depth)
    engine.forget()
    prompts = [
        [(7 * at + first) % 500 for at in range(n)] for first, n in ((1, 10), (2, 60), (3, 150))
    ]
    ids = [
        engine.start(prompt, 60, speculative=ask_for(engine, 3), exact=exact) for prompt in prompts
    ]
    engine.finish()
    for request, prompt in zip(ids, prompts, strict=True):
        answer = engine.answers[request]
        assert answer.tokens == expected(prompt[-1], 60)
        speculation = answer.done.speculation
        assert speculation.accepted > 20, speculation


def test_a_target_that_shows_no_layers_is_refused_to_sidecars_that_read_them(
    tmp_path: Path, load: Load
) -> None:
    files = write_pair(tmp_path, architecture="qwen2")
    assert files.draft is not None
    for layers in ((0, 1, 1), (2, 2, 1), (3, 3, 3)):  # it has two
        write_sidecar(Path(files.draft), "eagle3", SHAPE, layers=layers)
        with pytest.raises(LoadFailed, match="does not show the layers of the architecture qwen2"):
            load(files)


def test_a_block_has_no_more_rows_than_its_drafts(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(write_pair(tmp_path, "dflash"))
    original, blocks = BlockDraft._add_block, []

    def add_block(draft: BlockDraft, last: int, position: int, sequence: int, count: int) -> int:
        blocks.append(count)
        return original(draft, last, position, sequence, count)

    monkeypatch.setattr(BlockDraft, "_add_block", add_block)
    for depth in (1, 3):
        blocks.clear()
        engine.ask([5], 30, speculative=ask_for(engine, depth))
        assert max(blocks) == depth


@pytest.mark.parametrize("seen", ["no token", "the first candidate"])
def test_a_selector_needs_the_token_chosen_before(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    """The control of the test above: drafts behind the first are wrong where another token is seen there."""
    original, n_behind = BlockDraft._read_logits, 0

    def read_logits(draft: BlockDraft, row: int, drafted: Sequence[int]) -> Any:
        nonlocal n_behind
        n_behind += bool(drafted)
        other = [int(draft.context.states(row - 1)[0][0])] if drafted and seen != "no token" else []
        return original(draft, row, other)

    monkeypatch.setattr(BlockDraft, "_read_logits", read_logits)
    engine = load(write_pair(tmp_path, "dflash2", acceptance=1.0))
    answer = engine.ask([5], 60, speculative=ask_for(engine, 3))
    assert answer.tokens == expected(5, 60)
    speculation = answer.done.speculation
    assert n_behind
    assert speculation.accepted * 3 <= speculation.drafted + 2


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.8)])
def test_a_selector_with_nan_scores_is_not_used(
    tmp_path: Path, load: Load, sampling: Sampling
) -> None:
    files = write_pair(tmp_path, "dflash2")
    spoiled = write_spoiled_copy(
        str(files.draft), tmp_path, "selector_successor.weight", None, np.nan
    )
    engine = load(PairFiles("spoiled", files.target, spoiled))
    answer = engine.ask([5], 30, sampling, drafting(3, "dflash"))
    assert answer.done.speculation.reason == "NaN or infinite values from the block draft"
    assert len(answer.tokens) == 30


def test_passes_of_a_selector_are_measured_again(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of one sequence that is wider than a block ends the process; one of several is not."""
    engine = load(write_pair(tmp_path, "dflash2"))
    drafter, table = engine.pair.drafter, engine.pair.learned.costs.draft
    assert drafter is not None
    assert table is not None
    widest = drafter.context.model.block_size
    for width in range(2, 3 * widest):
        table.observe(width, 1.0)
    measured = list[int]()
    monkeypatch.setattr(drafter, "run_width", measured.append)
    engine.pair.measure_again(None, time.perf_counter)
    assert {1, widest} <= set(measured)
    assert max(measured) == widest


@pytest.mark.parametrize("depth", [2, 5])
def test_an_answer_with_drafts_obeys_its_grammar(cyclic: Running, depth: int) -> None:
    for settings in (GREEDY, Sampling(temperature=0.8, seed=1)):
        answer = cyclic.constrained(
            "regex",
            "[a-z ]{40}",
            max_tokens=60,
            sampling=settings,
            speculative=ask_for(cyclic, depth),
        )
        plain = cyclic.constrained("regex", "[a-z ]{40}", max_tokens=60, sampling=settings)
        assert re.fullmatch("[a-z ]{40}", answer.text)
        if settings is GREEDY:
            assert answer.text == plain.text


def test_default_settings_use_the_sidecar(cyclic: Running) -> None:
    cyclic.forget()
    answer = cyclic.ask([5], 200, speculative=SpeculationSettings())
    assert answer.tokens == expected(5, 200)
    assert ask_for(cyclic).kind in cyclic.pair.learned.calibrations.answers


def test_other_kinds_are_refused_with_a_reason(cyclic: Running, cycle: Running) -> None:
    reason = cyclic.ask([5], 10, speculative=drafting(2, "mtp")).done.speculation.reason
    assert reason == "this pair has another draft, and MTP heads are not used beside one"
    for kind, named in (("eagle3", "EAGLE-3"), ("dflash", "DFlash or DSpark")):
        reason = cycle.ask([5], 10, speculative=drafting(2, kind)).done.speculation.reason
        assert reason == f"this pair has no {named} draft"


def test_a_sidecar_with_a_vocabulary_of_its_own_proposes_no_other_tokens(
    tmp_path: Path, load: Load
) -> None:
    """With `d2t` it knows the first 300 tokens: a draft is right where the next token is one of them."""
    engine = load(write_pair(tmp_path, n_known=300))
    answer = engine.ask([5], 200, speculative=ask_for(engine, 1))
    text = expected(5, 200)
    assert answer.tokens == text
    speculation = answer.done.speculation
    known, everything = count_known_drafts(text, 300), count_known_drafts(text, N_VOCAB)
    assert speculation.accepted == known < everything


def test_positions_of_several_parts_are_as_good_as_plain_ones(tmp_path: Path, load: Load) -> None:
    """Rows without a token have four positions each where the target reads pictures (M-RoPE)."""
    engine = load(write_pair(tmp_path, "dflash", sections=True))
    assert engine.pair.models.draft is not None
    assert engine.pair.models.draft.repeats_positions
    prompt = [(7 * at) % 500 for at in range(200)]
    engine.ask(prompt, 20, speculative=ask_for(engine, 3))
    engine.forget()
    answer = engine.ask([5], 100, speculative=ask_for(engine, 3))
    assert answer.tokens == expected(5, 100)
    speculation = answer.done.speculation
    assert (speculation.drafted, speculation.accepted) == count_right_drafts(5, 100, 3)


def count_known_drafts(text: list[int], n_known: int) -> int:
    """Return how many drafts of one token are accepted, if only tokens below `n_known` are proposed."""
    at = accepted = 0
    while at < len(text) - 2:  # one token is always the target's own
        is_right = right_drafts(text[at], 2, 1, ACCEPTANCE)[1] == 1 and text[at + 1] < n_known
        accepted += is_right
        at += 1 + is_right
    return accepted


def record(engine: Running, monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return Proposals(engine, monkeypatch, lambda depth: ask_for(engine, depth))


def test_drafts_depend_on_the_text_alone(
    contextual: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(contextual, monkeypatch).check_all_depths()


def test_wrong_layer_inputs_change_the_drafts(
    contextual: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(contextual, monkeypatch).check_wrong_states(monkeypatch)


@pytest.mark.parametrize("back", [1, 2, 5])
def test_text_that_was_cut_back_drafts_like_a_fresh_one(
    contextual: Running, monkeypatch: pytest.MonkeyPatch, back: int
) -> None:
    record(contextual, monkeypatch).check_text_cut_back(back)


def test_a_long_prompt_is_read_when_it_is_drafted_from(
    contextual: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * at) % 500 for at in range(300)]
    contextual.forget()
    text = contextual.ask(prompt, 5).all_tokens
    proposals = record(contextual, monkeypatch)
    contextual.ask(text, 6, speculative=ask_for(contextual, 3))
    assert proposals.is_of_its_text(proposals[0])


@pytest.mark.parametrize(("length", "rows_read"), [(100, [64, 36]), (300, [20, 64, 44])])
def test_only_the_end_of_a_long_prompt_leaves_the_context(
    contextual: Running, monkeypatch: pytest.MonkeyPatch, length: int, rows_read: list[int]
) -> None:
    """Where no draft reads along, only the inputs of layers of the last 128 tokens are asked for."""
    with running(contextual.pair.files, n_batch=64) as engine:
        target, original, counts = engine.pair.shared.context, Context.states, []

        def read_states(context: Context, row: int, count: int = 1) -> States:
            if context is target:
                counts.append(count)
            return original(context, row, count)

        monkeypatch.setattr(Context, "states", read_states)
        answer = engine.ask([(7 * at) % 500 for at in range(length)], 1)
        assert counts == rows_read
        proposals = record(engine, monkeypatch)
        engine.ask(answer.all_tokens, 6, speculative=ask_for(engine, 3))
        assert len(proposals[0].drafts) == 3


# Of the cycle: what is read again in an answer, and what stands between.
ORDER = follow(target_cycle(N_VOCAB), 0, 480)
RECALLED, FILLER = ORDER[:100], ORDER[150:450]


def long_prompt(length: int, first: int = 0, seed: int = 0) -> list[int]:
    """Return a prompt whose beginning alone has what follows its last token."""
    rng = np.random.default_rng(seed)
    filler = rng.choice(FILLER, length - len(RECALLED) - 2).tolist()
    return [ORDER[470], *RECALLED, *filler, ORDER[first]]


def count_wrong(answer: Answer) -> int:
    speculation = answer.done.speculation
    assert speculation.drafted > 10
    return speculation.drafted - speculation.accepted


def count_read(engine: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of texts in each of the sidecar's passes."""
    drafter, counts = engine.pair.drafter, list[int]()
    assert drafter is not None
    add_text = drafter._add_text

    def add(slot: Slot, start: int, end: int, *args: Any, **options: Any) -> int:
        counts.append(end - start)
        return add_text(slot, start, end, *args, **options)

    monkeypatch.setattr(drafter, "_add_text", add)
    return counts


@pytest.mark.parametrize(
    ("architecture", "exact"),
    [("llama", False), ("llama", True), ("qwen3", False), ("qwen35", False), ("gpt-oss", False)],
)
def test_a_sidecar_sees_all_of_a_long_prompt_of_which_few_states_are_kept(
    tmp_path: Path, load: Load, architecture: TargetArchitecture, exact: bool
) -> None:
    files = write_pair(tmp_path, architecture=architecture, recalls=True)
    engine = load(files, n_batch=64, n_ctx=2048)
    prompt = long_prompt(700)
    request = engine.start(prompt, 40, speculative=ask_for(engine), exact=exact)
    kept = []
    while engine.engine.active:
        engine.engine.step()
        for lane in engine.pair.lanes:
            kept += [slot.hidden.end - slot.hidden.start for slot in lane.slots if slot.hidden]
    answer = engine.answers[request]
    assert answer.tokens == expected(prompt[-1], 40)
    assert count_wrong(answer) == 0
    assert max(kept) <= (128 if exact else 64) + 3 * TAIL_STATES
    engine.forget()
    # What was read while nothing was to be drafted is not seen.
    text = engine.ask(prompt, 2, exact=exact).all_tokens
    answer = engine.ask(text, 20, speculative=ask_for(engine), exact=exact)
    assert answer.tokens == expected(text[-1], 20)
    assert answer.done.speculation.accepted == 0


@skip_on("rpc", "cuda", why="a CPU alone attends without flash attention to a few long texts")
def test_a_sidecar_reads_a_long_prompt_without_flash_attention(tmp_path: Path, load: Load) -> None:
    """Fewer rows are then computed at once, and the states of all of them are read."""
    n_ctx = SHORT_CONTEXT_TOKENS + 256
    files = write_pair(tmp_path, shape=replace(SHAPE, n_ctx=n_ctx), recalls=True)
    engine = load(files, n_batch=512, n_ctx=n_ctx)
    assert {lane.batch.capacity for lane in engine.pair.lanes} == {CPU_PASS_ROWS}
    prompt = long_prompt(700)
    answer = engine.ask(prompt, 40, speculative=ask_for(engine))
    assert answer.tokens == expected(prompt[-1], 40)
    assert count_wrong(answer) == 0


def test_a_sidecar_reads_nothing_twice_across_turns_edits_slots_and_a_restart(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_pair(tmp_path / "pair", recalls=True)
    settings = {
        "n_batch": 64, "n_ctx": 2048, "states_dir": str(tmp_path), "states_bytes": 1 << 30
    }  # fmt: skip
    engine = load(files, **settings)
    read = count_read(engine, monkeypatch)

    def check(prompt: list[int], ids: Sequence[int] = ()) -> list[int]:
        """Ask, and compare what the sidecar has read since with what the target has."""
        ids = ids or [engine.start(prompt, 20, speculative=ask_for(engine), conversation="a" * 32)]
        engine.finish()
        n_new = 0
        for answer in map(engine.answers.__getitem__, ids):
            assert answer.started is not None
            assert answer.tokens == expected(prompt[-1], 20)
            assert count_wrong(answer) == 0
            n_new += answer.done.prompt_tokens - answer.started.cached_tokens + 20
        assert sum(read) <= 1.1 * n_new + UNREAD_TAIL_TOKENS
        read.clear()
        return engine.answers[ids[0]].all_tokens

    first = check(long_prompt(400))
    second = check([*first, *FILLER[:100], ORDER[20]])
    check([*second[:250], *FILLER[100:200], ORDER[40]])
    beside = [
        engine.start([*first, *FILLER[at : at + 50], ORDER[60]], 20, speculative=ask_for(engine))
        for at in (0, 50)
    ]
    last = check([ORDER[60]], beside)
    engine.close()
    engine = load(files, **settings)
    read = count_read(engine, monkeypatch)
    check([*first, *FILLER[:50], ORDER[30]])
    assert last[: len(first)] == first
    # A turn that is read while nobody waits is read by the sidecar, too.
    ahead = [*first[:400], *FILLER[:200]]
    engine.ask(ahead, 0, speculative=ask_for(engine), priority="ahead")
    assert 150 < sum(read) < 220
    read.clear()
    check([*ahead, ORDER[30]])


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2"])
def test_a_prompt_that_is_read_in_slices_gives_the_same_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: LayerReader
) -> None:
    files, prompt, proposals = contextual_files(tmp_path, kind), long_prompt(300), []
    for n_batch in (64, 512):
        with running(files, n_batch=n_batch) as engine:
            proposals.append(record(engine, monkeypatch))
            engine.ask(prompt, 6, speculative=ask_for(engine, 3))
    sliced, whole = (recorded[0] for recorded in proposals)
    assert len(sliced.drafts) == 3
    assert sliced.agrees_with(whole)


FLAT = RoundCosts(np.full(20, 100.0), 0.0, 0.0)  # drafts cost the target nothing
STEEP = RoundCosts(np.linspace(0.0, 1900.0, 20), 0.0, 0.0)  # and here as much as they give


@pytest.mark.parametrize(
    ("n_left", "costs", "token_ms", "n_read"),
    [
        (256, FLAT, 0.1, ALL_TOKENS),
        (256, STEEP, 0.1, 0),  # drafts do not pay
        (0, FLAT, 0.1, 0),  # nothing is to be drafted
        (3, FLAT, 1.0, 0),  # reading would cost more than an answer of three tokens gains
        (256, FLAT, 1.0, 300 + 200),  # 3 % of 10 s, and the last pass
    ],
)
def test_what_is_read_along_depends_on_what_it_gains_and_delays(
    cyclic: Running,
    monkeypatch: pytest.MonkeyPatch,
    n_left: int,
    costs: RoundCosts,
    token_ms: float,
    n_read: int,
) -> None:
    monkeypatch.setattr(DraftModel, "token_prefill_ms", property(lambda _self: token_ms))
    monkeypatch.setattr(DraftModel, "draft_ms", property(lambda _self: 0.1))
    monkeypatch.setattr(BlockDraft, "draft_ms", property(lambda _self: 0.1))
    monkeypatch.setattr(cyclic.pair.drafter, "round_ms", 0.1)
    cyclic.forget()
    request = cyclic.start([7, 8, 9], 20, speculative=SpeculationSettings())
    cyclic.admit()
    slot, drafters = cyclic.sequence(request).slot, cyclic.sequence(request).drafting.drafters
    slot.tokens += [7] * 2000
    drafter = next(each for each in drafters if isinstance(each, ModelDrafter))
    drafter.plan_reading(slot, n_left, costs, prompt_ms=10_000.0, n_free=200, fixed=False)
    assert slot.window == n_read
    # Other requests wait no longer for a pass over a prompt where the sidecar reads it, too.
    lane = cyclic.pair.shared
    row_s, slot.along_s = lane._row_s - slot.along_s, 1.0
    assert lane._row_s == pytest.approx(row_s + 1.0)
    del slot.tokens[3:]
    cyclic.finish()


def use_idle_time(engine: Running) -> None:
    while engine.engine.has_idle_work:
        engine.engine.use_idle_time()


def test_a_sidecar_sees_of_a_text_what_it_predicts_best_with(tmp_path: Path, load: Load) -> None:
    """A contradiction far away is hidden in long texts, and what helps in shorter ones is seen."""
    engine = load(write_pair(tmp_path, recalls=True), n_batch=64, n_ctx=4096)
    rng = np.random.default_rng(0)
    wrong = [ORDER[470]]  # what follows each token there is another one, twice
    for token in RECALLED:
        wrong += [token, int(rng.choice(FILLER)), token, int(rng.choice(FILLER))]
    gap, end = (rng.choice(FILLER, count).tolist() for count in (700, 50))
    contradicting = [*wrong, *gap, *RECALLED, *end, ORDER[0]]
    for round_ in range(3):
        for prompt, is_right in ((contradicting, round_ == 2), (long_prompt(900), True)):
            engine.forget()
            answer = engine.ask(prompt, 60, speculative=ask_for(engine))
            assert answer.tokens == expected(prompt[-1], 60)
            assert (count_wrong(answer) == 0) == is_right
            use_idle_time(engine)
    # The next turn sees the end alone, too.
    text = [*engine.ask(contradicting, 3, speculative=ask_for(engine)).all_tokens, ORDER[20]]
    assert count_wrong(engine.ask(text, 20, speculative=ask_for(engine))) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_compared_by_what_the_sidecar_predicts(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, kind: LayerReader
) -> None:
    engine = load(write_pair(tmp_path, kind, acceptance=1.0))
    answer = engine.ask(long_prompt(300), 60, speculative=ask_for(engine))
    assert count_wrong(answer) == 0
    drafter, table = engine.pair.drafter, WindowTable()
    assert drafter is not None
    engine.engine.interruption.request_came()  # which ends the comparison, so that it is made again
    engine.engine.use_idle_time()
    assert engine.engine.has_idle_work
    engine.engine.interruption.clear()
    use_idle_time(engine)
    known = engine.pair.learned.calibrations.answers[drafter.kind].windows
    assert known.as_list()[1] == [COMPARED_TOKENS] * 3
    slot = max(engine.pair.shared.slots, key=lambda candidate: candidate.n_past)
    slot.tokens[-20] = ORDER[470]  # what nothing predicts
    drafter.compare_windows(slot, table, None)
    compared, end, whole = table.as_list()[1]
    assert compared == COMPARED_TOKENS > end == whole

    def refuse(_: object) -> None:
        raise NoKvSlot("full")

    # No text has to make room.
    monkeypatch.setattr(drafter.context, "decode", refuse)
    monkeypatch.setattr(drafter, "_make_room", lambda: 1 / 0)
    with pytest.raises(NoKvSlot):
        drafter.compare_windows(slot, table, None)
    assert drafter.context.length(drafter._scratch) == 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen35", "gpt-oss"])
def test_other_targets_are_drafted_for(
    tmp_path: Path,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    kind: LayerReader,
) -> None:
    """Their texts depend on all of it. Each draft is that of a fresh engine, also of a hybrid target."""
    # With another seed, some of these texts end after a few tokens.
    target = architectures.write(architecture, tmp_path, experts=architecture == "gpt-oss", seed=1)
    info = read_local_model(target)
    shape = replace(CONTEXT_SHAPE, n_layer=info.layers, n_embd=info.width, n_vocab=info.vocabulary)
    sidecar = write_sidecar(tmp_path / "sidecar.gguf", kind, shape, listens=1.5)
    engine = load(PairFiles(architecture, str(target), str(sidecar)))
    record(engine, monkeypatch).check_prompts_read_together()


def measure_z(engine: Running) -> float:
    """Return how many standard deviations sampled drafts are from the target's distribution."""
    prompt = [*PROMPTS[0], *engine.ask(PROMPTS[0], 1).tokens]
    rule = ask_for(engine, 2, verification="rejection")
    return measure_sampled_z(engine, prompt, rule, N_VOCAB)


def test_sampled_drafts_keep_the_target_distribution(contextual: Running) -> None:
    assert measure_z(contextual) < 4.5


@pytest.mark.parametrize("contextual", ["eagle3"], indirect=True)
def test_wrong_residual_changes_the_distribution(
    contextual: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_rejected_from_draft(monkeypatch)
    assert measure_z(contextual) > 4.5


def test_a_sidecar_of_another_target_is_refused(tmp_path: Path, load: Load) -> None:
    """By the registry and, for files that changed since, by the engine."""
    files = write_pair(tmp_path / "right")
    wide = write_pair(tmp_path / "wide", shape=replace(SHAPE, n_embd=96, n_head=3))
    deep = write_pair(tmp_path / "deep", layers=(0, 1, 7))
    other = architectures.write("qwen2", tmp_path)
    for target, sidecar, message in (
        (wide.target, files.draft, "states of"),
        (deep.target, deep.draft, "the layers 0, 1, 7, and the target has"),
        (str(other), files.draft, "does not show the layers of the architecture qwen2"),
    ):
        assert sidecar is not None
        with pytest.raises(LoadFailed, match=message):
            load(PairFiles("other", target, sidecar))
        with pytest.raises(NotMatched, match=message):
            check_pair(
                read_local_model(Path(target)), read_local_model(Path(sidecar), as_draft=True)
            )
    with pytest.raises(LoadFailed, match="draft head"):
        load(PairFiles("alone", str(files.draft), None))


def test_damaged_sidecars_are_refused_before_llama_cpp_sees_them(tmp_path: Path) -> None:
    import gguf

    cycle = target_cycle(N_VOCAB)
    two = write_eagle(tmp_path / "two.gguf", TINY_TARGET, cycle, layers=(0, 1))  # type: ignore[arg-type]
    with pytest.raises(UnsafeModel, match="must name 3 layers"):
        read_local_model(two, as_draft=True)
    block = write_block(tmp_path / "block.gguf", SHAPE, cycle)
    header = block.read_bytes()
    for key, changed, message in (
        ("tokenizer.ggml.mask_token_id", "tokenizer.ggml.mask_token_ix", "made of"),
        ("dflash.target_layers", "dflash.target_layerz", "must name layers"),
        ("fc.weight", "xx.weight", "'fc.weight' does not make states"),
    ):
        old, new = (len(text).to_bytes(8, "little") + text.encode() for text in (key, changed))
        assert header.count(old) == 1
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(header.replace(old, new))
        with pytest.raises(UnsafeModel, match=message):
            read_local_model(broken, as_draft=True)
    strange = write_eagle(tmp_path / "d2t.gguf", TINY_TARGET, cycle, n_known=300)
    read_local_model(strange, as_draft=True)
    check_weights(strange)
    reader = gguf.GGUFReader(strange, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "d2t").data[7] = N_VOCAB
    reader.data.flush()
    with pytest.raises(UnsafeModel, match="names tokens that do not exist"):
        check_weights(strange)


def test_a_build_without_the_interface_drafts_from_the_text(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_LAYER_FUNCTIONS", (None,))
    engine = load(write_pair(tmp_path))
    answer = engine.ask([5], 40, speculative=drafting(3, "eagle3"))
    assert answer.tokens == expected(5, 40)
    assert "does not show a target's layers" in str(answer.done.speculation.reason)
