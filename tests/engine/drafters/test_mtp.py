"""MTP heads leave greedy text unchanged, draft from the text alone, and report why they are unusable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import gguf
import numpy as np
import pytest

from benchmarks.synthetic_heads import TINY_HEADS, Architecture, write_heads, write_heads_apart
from benchmarks.synthetic_sidecar import TINY_GEMMA, write_with_sidecar
from localspec import model_traits
from localspec.engine.cache.slot import TAIL_STATES, HiddenStates
from localspec.engine.llama import NoKvSlot, NotFinite
from localspec.engine.llama import model as binding
from localspec.engine.pair.models import PairModels
from localspec.engine.pair.pair import NO_DRAFT
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.engine.speculation.acceptance import Belief, Calibration
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.mtp import Heads, Sidecar
from localspec.engine.speculation.windows import COMPARED_TOKENS
from localspec.errors import LoadFailed
from localspec.protocol.frames import Failed, PairFiles, Sampling, SpeculationSettings
from tests.support import architectures
from tests.support.followers import draw_rejected_from_draft, measure_follower_z
from tests.support.heads import (
    Target,
    contextual_heads,
    cycle_heads,
    right_drafts,
    sidecar_logits,
    tensors,
)
from tests.support.pairs import N_VOCAB, expected, target_alone
from tests.support.proposals import PROMPTS, Proposals
from tests.support.rescoring import assert_alike
from tests.support.running import Running, drafting, running, skip_on

Load = Callable[..., Running]
ACCEPTANCE = 0.8


def get_heads(engine: Running) -> Heads:
    assert isinstance(engine.pair.drafter, Heads)
    return engine.pair.drafter


def mtp(depth: int | None = 3, **more: Any) -> SpeculationSettings:
    return drafting(depth, "mtp", **more)


@pytest.fixture(
    scope="module", params=["glm4moe", "qwen35", "gemma4", "glm4moe apart", "qwen35 apart"]
)
def cyclic(request: pytest.FixtureRequest, models: Path) -> Iterator[Running]:
    """Load heads that draft a known text: attention only, hybrid, and sidecars."""
    with running(cycle_heads(models / "heads", ACCEPTANCE, request.param)) as engine:
        yield engine


@pytest.fixture(scope="module")
def contextual_files_with_heads(models: Path) -> PairFiles:
    return contextual_heads(models / "heads")


@pytest.fixture(scope="module")
def contextual_engine(contextual_files_with_heads: PairFiles) -> Iterator[Running]:
    """Load heads whose text and drafts depend on every token before."""
    with running(contextual_files_with_heads) as engine:
        yield engine


@pytest.fixture(scope="module", params=["glm4moe", "gemma4", "glm4moe apart"])
def drafting_engine(
    request: pytest.FixtureRequest, contextual_engine: Running, models: Path
) -> Iterator[Running]:
    """Load contextual heads in the target's file, or in a sidecar."""
    if request.param == "glm4moe":
        yield contextual_engine
        return
    with running(contextual_heads(models / "heads", request.param)) as engine:
        yield engine


def count_right_drafts(
    engine: Running, first_token: int, count: int, depth: int
) -> tuple[int, int]:
    """Return how many drafts follow a prompt of one token, and how many of them are right.

    A sidecar has no draft in the first round because the target has not read anything yet.
    """
    if isinstance(engine.pair.drafter, Sidecar):
        first_token, count = expected(first_token, 1)[0], count - 1
    return right_drafts(first_token, count, depth, ACCEPTANCE)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
def test_heads_have_the_acceptance_rate_they_were_written_with(cyclic: Running, depth: int) -> None:
    """The text is the target's, and it is known of each token which drafts are right."""
    cyclic.forget()
    answer = cyclic.ask([77], 100, speculative=mtp(depth))
    assert answer.tokens == expected(77, 100)
    speculation = answer.done.speculation
    assert speculation.kind == "mtp", (speculation.reason, cyclic.pair.notes)
    counts = speculation.drafted, speculation.accepted
    assert counts == count_right_drafts(cyclic, 77, 100, depth)


def test_default_settings_use_heads_where_they_pay(cyclic: Running) -> None:
    cyclic.forget()
    answer = cyclic.ask([5], 200, speculative=SpeculationSettings())
    assert answer.tokens == expected(5, 200)
    assert "mtp" in cyclic.pair.learned.calibrations.answers


def test_exact_mode_has_the_same_drafts(cyclic: Running) -> None:
    if not cyclic.pair.models.target.cuttable:
        refused = cyclic.ask([77], 60, speculative=mtp(3), exact=True)
        assert not refused.deltas
        assert isinstance(refused.ending, Failed)
        assert refused.ending.param == "exact"
        assert "cannot be padded and rolled back" in refused.ending.message
        return
    answer = cyclic.ask([77], 60, speculative=mtp(3), exact=True)
    speculation = answer.done.speculation
    assert answer.tokens == expected(77, 60)
    assert (speculation.drafted, speculation.accepted) == count_right_drafts(cyclic, 77, 60, 3)
    assert cyclic.pair.busy_s() > 0


def test_request_for_a_draft_model_reports_that_there_is_none(cyclic: Running) -> None:
    speculation = cyclic.ask([5], 10, speculative=drafting(2)).done.speculation
    assert not speculation.active
    assert "no draft model" in str(speculation.reason)


def test_request_for_heads_reports_why_there_are_none(cycle: Running, load: Load) -> None:
    """The reason differs between a pair with a draft model and a target alone."""
    speculation = cycle.ask([5], 10, speculative=mtp(2)).done.speculation
    assert (
        speculation.reason == "this pair has another draft, and MTP heads are not used beside one"
    )
    alone = load(target_alone(cycle.pair.files))
    speculation = alone.ask([5], 10, speculative=mtp(2)).done.speculation
    assert speculation.reason == "this model has no MTP heads"
    assert alone.ask([5], 10, speculative=drafting(2)).done.speculation.reason == NO_DRAFT


@pytest.mark.parametrize("error", [NotFinite("NaN"), NoKvSlot("full")])
def test_failing_heads_are_named_in_the_reason(
    cyclic: Running, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    cyclic.forget()
    monkeypatch.setattr(get_heads(cyclic), "_read_logits", fail)
    answer = cyclic.ask([5], 30, speculative=mtp(2))
    assert answer.tokens == expected(5, 30)
    assert "the MTP heads" in str(answer.done.speculation.reason)


@pytest.mark.parametrize(
    "drafting_engine",
    ["glm4moe", "gemma4", "qwen35", "glm4moe apart", "qwen35 apart"],
    indirect=True,
)
def test_drafts_depend_on_the_text_alone(
    drafting_engine: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Proposals(drafting_engine, monkeypatch, mtp).check_all_depths()
    statistics = [answer.done.speculation for answer in answers]
    assert all(0 < entry.accepted < entry.drafted for entry in statistics)


# With another seed, some of these texts end after a few tokens.
_SEEDS = {"hy_v3": 1}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("architecture", sorted(model_traits._TESTED_HEADS))
def test_prompts_read_together_keep_their_own_states(
    models: Path, load: Load, monkeypatch: pytest.MonkeyPatch, architecture: str, apart: bool
) -> None:

    name, seed = architecture, _SEEDS.get(architecture, 0)
    count = 3 if architecture in model_traits._TESTED_SEVERAL_HEADS else 1
    if architecture in get_args(Architecture):
        target = cast(Target, f"{architecture} apart" if apart else architecture)
        files = contextual_heads(models / "heads", target)
    elif apart:
        two = architectures.write_apart(name, models, experts=True, heads=count, seed=seed)
        files = PairFiles(architecture, str(two[0]), str(two[1]))
    else:
        file = architectures.write(name, models, experts=True, heads=count, seed=seed)
        files = PairFiles(architecture, str(file), None)
    Proposals(load(files), monkeypatch, mtp).check_prompts_read_together()


def change_heads(file: Path, copy: Path, changed: Sequence[int]) -> PairFiles:
    """Write a copy of a step35 model in which these heads read the negative of what they were given."""
    shutil.copy(file, copy)
    first = architectures.shape("step35").layers
    names = [f"blk.{first + head}.nextn.eh_proj.weight" for head in changed]
    for entry in gguf.GGUFReader(copy, "r+").tensors:
        if entry.name in names:
            entry.data[:] = -entry.data
    return PairFiles(copy.stem, str(copy), None)


def test_the_first_of_several_heads_drafts_alone(
    models: Path, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = architectures.write("step35", models, experts=True, heads=3)
    drafts = list[tuple[int, ...]]()
    for changed in ((), (1, 2), (0,)):
        engine = load(change_heads(file, tmp_path / f"{len(drafts)}.gguf", changed))
        proposals = Proposals(engine, monkeypatch, mtp)
        engine.ask(PROMPTS[0], 5, speculative=mtp(3))
        drafts.append(proposals[0].drafts)
    assert len(drafts[0]) == 3
    assert drafts[0] == drafts[1] != drafts[2]


@pytest.mark.parametrize("architecture", ["deepseek2", "glm4moe", "hy_v3", "mimo2"])
def test_several_heads_that_were_not_tested_are_not_used(
    models: Path, load: Load, architecture: str
) -> None:
    """The graphs of some end the process."""
    file = architectures.write(architecture, models, experts=True, heads=3)
    answer = load(PairFiles(architecture, str(file), None)).ask(PROMPTS[0], 10, speculative=mtp(2))
    assert answer.tokens
    assert answer.done.speculation.reason == "3 MTP heads in one file are not supported"


@pytest.mark.parametrize("architecture", ["glm5-next", "qwen4exp"])
def test_heads_without_a_graph_are_refused_by_name(architecture: str) -> None:
    """llama.cpp loads those of the first, and raises an error where it should compute them."""
    reason = model_traits.explain_unusable_heads(architecture, 1)
    assert reason == f"MTP heads of the architecture {architecture} are not supported"


def test_heads_of_a_target_that_cannot_roll_back_are_refused(models: Path, load: Load) -> None:
    file = architectures.write("qwen3next", models, experts=True, heads=1)
    engine = load(PairFiles("qwen3next", str(file), None))
    speculation = engine.ask(PROMPTS[0], 10, speculative=mtp(2)).done.speculation
    assert "cannot roll back tokens" in str(speculation.reason)


def test_wrong_hidden_states_change_the_drafts(
    drafting_engine: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    Proposals(drafting_engine, monkeypatch, mtp).check_wrong_states(monkeypatch)


@pytest.mark.parametrize("back", [1, 2, 3, 5, 9])
def test_text_that_was_cut_back_drafts_like_a_fresh_one(
    drafting_engine: Running, monkeypatch: pytest.MonkeyPatch, back: int
) -> None:
    proposals = Proposals(drafting_engine, monkeypatch, mtp)
    length, answer = proposals.check_text_cut_back(back)
    assert answer.started is not None
    assert answer.started.cached_tokens == length - max(back, 1)


def test_heads_read_a_prompt_when_they_are_used_and_not_before(
    contextual_engine: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * at) % 500 for at in range(300)]
    contextual_engine.forget()
    context = get_heads(contextual_engine).context
    text = contextual_engine.ask(prompt, 5).all_tokens
    slot = max(contextual_engine.pair.shared.slots, key=lambda candidate: candidate.n_past)
    assert context.length(slot.draft_id) == 0
    proposals = Proposals(contextual_engine, monkeypatch, mtp)
    contextual_engine.ask(text, 6, speculative=mtp(3))
    assert context.length(slot.draft_id) > 300
    assert proposals.is_of_its_text(proposals[0])


def test_heads_that_begin_late_read_the_end_of_a_text(
    contextual_engine: Running,
) -> None:
    """They read as many tokens as there are hidden states."""
    engine = contextual_engine
    engine.forget()
    prompt = engine.ask([(7 * at) % 500 for at in range(300)], 5).all_tokens
    answer = engine.ask(prompt, 40, speculative=mtp(2))
    context = get_heads(engine).context
    slot = max(engine.pair.shared.slots, key=lambda candidate: candidate.n_past)
    assert context.first_position(slot.draft_id) >= 300 - 2 * TAIL_STATES
    assert answer.done.speculation.drafted > 0
    assert_alike(engine.pair.files.target, prompt, answer.tokens, engine.ask(prompt, 40).tokens)


def test_windows_are_compared_by_what_the_heads_predict(models: Path, load: Load) -> None:
    engine = load(cycle_heads(models / "heads", 1.0, "glm4moe"))
    prompt = [(7 * at) % 400 for at in range(300)]
    engine.ask(prompt, 60, speculative=mtp(3))
    while engine.engine.has_idle_work:
        engine.engine.use_idle_time()
    table = engine.pair.learned.calibrations.answers["mtp"].windows
    assert table.as_list()[1] == [COMPARED_TOKENS] * 3


def test_a_sidecar_drafts_where_the_targets_cache_is_full(models: Path, load: Load) -> None:
    """Idle texts give up their cells, and drafts do not change when other texts leave."""
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
        tokens_again = engine.ask(longer, 30, speculative=mtp(4)).tokens
        assert_alike(files.target, longer, tokens_again, tokens)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_sidecar_drafts_once_the_target_has_read_a_token(
    models: Path, load: Load, flash_attention: str, exact: bool
) -> None:
    """Before that it would attend to no cell, which gives NaN without flash attention."""
    files = cycle_heads(models / "heads", ACCEPTANCE, "gemma4")
    engine = load(files, flash_attention=flash_attention)
    beside = [engine.start([at, 5], 60, speculative=mtp(3), exact=exact) for at in range(2)]
    alone = engine.start([5], 60, speculative=mtp(3), exact=exact)
    engine.finish()
    for request in (*beside, alone):
        answer = engine.answers[request]
        speculation = answer.done.speculation
        assert answer.tokens == expected(5, 60)
        assert speculation.reason is None
        assert (speculation.kind, speculation.drafted > speculation.accepted > 0) == ("mtp", True)
    speculation = engine.answers[alone].done.speculation
    assert (speculation.drafted, speculation.accepted) == count_right_drafts(engine, 5, 60, 3)


@pytest.mark.parametrize("flash_attention", ["auto", "off"])
def test_sidecar_computes_the_logits_of_its_files_on_every_device(
    models: Path, load: Load, monkeypatch: pytest.MonkeyPatch, flash_attention: str
) -> None:
    """Every logit and every state of the sidecar is compared, after each token, in both lanes.

    No rounding of a kernel comes near the tolerance (tests/engine/test_rounding.py), so a failure means
    that a value was computed from wrong numbers, or read from a wrong row or before it was written.
    """
    files = cycle_heads(models / "heads", ACCEPTANCE, "gemma4")
    assert files.draft is not None
    engine = load(files, flash_attention=flash_attention)
    assert not engine.pair.notes
    truth = sidecar_logits(files)
    weights = tensors(Path(files.draft))
    # The hidden states are recovered from the logits by least squares, exact up to rounding.
    states = np.linalg.lstsq(weights["token_embd.weight"], truth.T, rcond=None)[0].T
    states = states @ weights["nextn.post_projection.weight"].T
    measured: list[tuple[int, float, float]] = []
    append_draft = Heads._append_draft

    def record_errors(heads: Heads, request: DraftRequest, row: int) -> None:
        logits = heads._read_logits(row, request.tokens)
        token = (request.slot.tokens + request.tokens)[-1]
        state = heads._draft_states[request]
        measured.append(
            (
                token,
                float(np.abs(logits - truth[token]).max()),
                float(np.abs(state - states[token]).max()),
            )
        )
        append_draft(heads, request, row)

    monkeypatch.setattr(Heads, "_append_draft", record_errors)
    for exact in (False, True):
        engine.ask([5], 60, speculative=mtp(4), exact=exact)
        for prompt in PROMPTS:
            engine.start(prompt, 20, speculative=mtp(3), exact=exact)
        engine.finish()
    assert len({token for token, _, _ in measured}) > 60
    assert not [entry for entry in measured if max(entry[1:]) > 0.1]


def test_probe_observes_whether_its_draft_was_right(cyclic: Running) -> None:
    """The first position of a probe gives no observation yet."""
    sidecar = get_heads(cyclic)
    if not isinstance(sidecar, Sidecar):
        return
    cyclic.forget()
    hits: list[bool] = []

    class RecordingBelief(Belief):
        def observe(self, at: int, hit: bool) -> None:
            hits.append(hit)

    belief = RecordingBelief(Calibration())
    cyclic.start([5], 40)
    for _ in range(30):
        cyclic.engine.step()
        slot = next(candidate for candidate in cyclic.pair.shared.slots if candidate.busy)
        if len(slot.tokens) > slot.n_past:
            sidecar.probe(slot, belief)
    cyclic.finish()
    drafted = [right_drafts(token, 2, 1, ACCEPTANCE)[1] == 1 for token in [5, *expected(5, 40)]]
    assert hits in [drafted[at : at + len(hits)] for at in range(4)]
    assert len(hits) > 20


def test_a_sidecar_of_another_target_is_refused(models: Path, load: Load, tmp_path: Path) -> None:
    files = cycle_heads(models / "heads", ACCEPTANCE, "gemma4")
    other_shape = replace(TINY_GEMMA, n_embd=96, n_head=3)
    wider, _ = write_with_sidecar(tmp_path / "wider", other_shape)
    narrow, _ = write_with_sidecar(tmp_path / "narrow", replace(TINY_GEMMA, n_head=4))
    llama = cycle_heads(models / "heads", ACCEPTANCE, "glm4moe").target
    for target, message in ((wider, "64 numbers"), (narrow, "lengths"), (llama, "not glm4moe")):
        with pytest.raises(LoadFailed, match=message):
            load(PairFiles("other", str(target), files.draft))
    with pytest.raises(LoadFailed, match="draft head"):
        load(PairFiles("alone", str(files.draft), None))


def test_heads_apart_from_another_trunk_are_refused(
    models: Path, load: Load, tmp_path: Path
) -> None:
    files = cycle_heads(models / "heads", ACCEPTANCE, "glm4moe apart")
    other = (tmp_path / "trunk.gguf", tmp_path / "mtp-trunk.gguf")
    write_heads_apart(*other, replace(TINY_HEADS, n_layer=3))
    wide = (tmp_path / "wide.gguf", tmp_path / "mtp-wide.gguf")
    write_heads_apart(*wide, replace(TINY_HEADS, n_embd=128))
    hybrid = cycle_heads(models / "heads", ACCEPTANCE, "qwen35 apart")
    for target, message in (
        (str(other[0]), "for a model of 2 layers, and the target has 3"),
        (str(wide[0]), "64 numbers, and the target's 128"),
        (hybrid.target, "need a target of glm4moe, not qwen35"),
    ):
        with pytest.raises(LoadFailed, match=message):
            load(PairFiles("other", target, files.draft))
    with pytest.raises(LoadFailed, match="holds only MTP heads"):
        load(PairFiles("alone", str(files.draft), None))


def measure_z(engine: Running, rule: str) -> float:
    """Return how many standard deviations sampled drafts are from the target's distribution."""
    prompt = PROMPTS[0]
    prompt = [*prompt, *engine.ask(prompt, 1).tokens]
    sampling = Sampling(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    sampler = Sampler(Settings(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0))
    answers = [engine.ask(prompt, 3, sampling, mtp(2, verification=rule)) for _ in range(300)]
    # Drafts must matter for this test: about 35 are accepted of one model and 140 of the other.
    assert sum(answer.done.speculation.accepted for answer in answers) > 20
    return measure_follower_z(engine, prompt, answers, sampler, N_VOCAB)


def test_sampled_drafts_keep_the_target_distribution(drafting_engine: Running) -> None:
    assert measure_z(drafting_engine, "rejection") < 4.5


def test_wrong_residual_changes_the_distribution(
    contextual_engine: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_rejected_from_draft(monkeypatch)
    assert measure_z(contextual_engine, "rejection") > 4.5


@skip_on(
    "rpc", why="what is kept of a pair is for its machines, and each engine has another worker"
)
@pytest.mark.parametrize("architecture", ["glm4moe", "gemma4", "glm4moe apart"])
def test_a_saved_text_drafts_on_after_a_restart(
    models: Path, load: Load, tmp_path: Path, architecture: Target
) -> None:
    files = contextual_heads(models / "heads", architecture)
    prompt = [(7 * at) % 500 for at in range(280)]
    settings = {"states_dir": str(tmp_path), "states_bytes": 1 << 30, "n_ctx": 1024}
    engine = load(files, **settings)
    text = engine.ask(prompt, 30, speculative=mtp(3), conversation="a" * 32).all_tokens
    engine.close()
    restarted = load(files, **settings)
    answer = restarted.ask([*text, 4, 5], 30, speculative=mtp(3), conversation="a" * 32)
    assert answer.started is not None
    assert answer.started.cached_tokens > 280
    slot = max(restarted.pair.shared.slots, key=lambda candidate: candidate.n_past)
    if architecture != "gemma4":
        assert get_heads(restarted).context.first_position(slot.draft_id) == 0
    restarted.forget()
    plain = restarted.ask([*text, 4, 5], 30).tokens
    assert_alike(restarted.pair.files.target, [*text, 4, 5], answer.tokens, plain)
    assert answer.done.speculation.accepted > 0


@pytest.mark.parametrize("why", ["names", "context", "architecture", "not in it"])
@pytest.mark.parametrize("written", ["glm4moe", "gemma4", "glm4moe apart"])
def test_unusable_heads_give_plain_text_and_a_reason(
    models: Path,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    why: str,
    written: Target,
) -> None:
    if written == "gemma4" and why not in ("names", "context"):
        return
    if written == "glm4moe apart" and why == "not in it":
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
    reason = {"names": "llama_set_embeddings_nextn", "architecture": "glm4moe"}.get(why, why)
    assert reason in str(answer.done.speculation.reason)
    assert reason in str(engine.pair.info().speculation)


def test_hidden_states_match_the_text_after_random_edits() -> None:
    """Random operations agree with a plain list; beyond the limit the oldest states are dropped."""
    rng = np.random.default_rng(0)
    states, truth = HiddenStates(4), np.zeros((0, 4), np.float32)
    start = 0
    for _ in range(300):
        match rng.integers(4):
            case 0 | 1:
                rows = rng.standard_normal((rng.integers(1, 30), 4), dtype=np.float32)
                states.put(len(truth), rows, 100)
                truth = np.concatenate([truth, rows])
            case 2:
                truth = truth[: rng.integers(max(len(truth) - 20, 0), len(truth) + 1)]
                states.cut(len(truth))
            case _:
                place = int(rng.integers(len(truth) + 1))
                states.drop_read(place)
                assert states.start <= max(start, place - TAIL_STATES, len(truth) - 100)
        start = states.start
        assert states.end == len(truth)
        assert states.end - states.start <= 100
        first_position = int(rng.integers(len(truth) + 1))
        rows_before = states.states_before(first_position, len(truth) + 1)
        for at, row in enumerate(rows_before, start=first_position):
            is_stored = states.start < at <= states.end
            assert np.array_equal(row, truth[at - 1] if is_stored else np.zeros(4))
    copy = HiddenStates(4)
    copy.copy_from(states, len(truth) - 5)
    assert (copy.start, copy.end) == (states.start, len(truth) - 5)
