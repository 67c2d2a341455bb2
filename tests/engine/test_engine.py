"""The step loop runs tiny real models, one request at a time."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from localspec.engine.sampling.sampler import Sampler, logprob
from localspec.engine.sampling.settings import Settings, resolve_settings
from localspec.engine.speculation.verification import Rows, verify_match
from localspec.errors import InvalidRequest
from localspec.protocol.frames import (
    Generate,
    PairFiles,
    Sampling,
    SpeculationSettings,
    TokenPrompt,
)
from tests.support.followers import measure_follower_z
from tests.support.gguf_files import ARRAY, F32, I32, with_key
from tests.support.pairs import (
    BOS,
    N_VOCAB,
    contextual_pair,
    cycle_pair,
    ending_cycle,
    expected,
    target_alone,
)
from tests.support.rescoring import (
    NEAR_TIE,
    assert_alike,
    assert_same_logprobs,
    first_strange,
    rows_alone,
    worst_gap,
)
from tests.support.running import GREEDY, Answer, Running, drafting, running

PROMPT = [300, 17, 402, 255, 31, 340, 18, 77]
Load = Callable[..., Running]


def ask_fresh(engine: Running, prompt: list[int], *args: object, **more: object) -> Answer:
    """Return an answer that reuses no cached prefix."""
    engine.forget()
    return engine.ask(prompt, *args, **more)


@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.75, 1.0])
def test_drafts_of_any_quality_and_depth_do_not_change_the_text(
    models: Path, load: Load, acceptance: float
) -> None:
    engine = load(cycle_pair(models / f"cycle-{acceptance}", acceptance))
    truth = expected(7, 40)
    for depth in (1, 2, 3, 4, 7, 15, 64, None):
        answer = ask_fresh(engine, [BOS, 7], 40, speculative=drafting(depth))
        assert answer.tokens == truth
        speculation = answer.done.speculation
        if depth is not None:
            assert speculation.drafted > 0
            if acceptance == 0.0:
                assert speculation.accepted == 0
            if acceptance == 1.0:
                assert speculation.accepted == speculation.drafted


@pytest.mark.parametrize("kind", ["auto", "draft", "ngram"])
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 9, 30, None])
def test_text_that_depends_on_every_token_is_the_plain_text(
    contextual: Running, kind: str, depth: int | None
) -> None:
    """A wrong cell left in the cache by a rejected draft would change what follows."""
    prompt = PROMPT * 2
    plain = ask_fresh(contextual, prompt, 64).tokens
    drafted = ask_fresh(contextual, prompt, 64, speculative=drafting(depth, kind)).tokens
    assert_alike(contextual.pair.files.target, prompt, drafted, plain)


def test_every_greedy_token_is_the_targets_argmax_when_scored_again(contextual: Running) -> None:
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(0, N_VOCAB - 5, 20).tolist()
        answer = ask_fresh(contextual, prompt, 48, speculative=drafting(4))
        assert answer.done.speculation.drafted > 0
        assert worst_gap(contextual.pair.files.target, prompt, answer.tokens) < NEAR_TIE


def test_scoring_again_finds_a_token_that_is_not_the_argmax(contextual: Running) -> None:
    """The control of the test above."""
    tokens = ask_fresh(contextual, PROMPT, 16).tokens
    tokens[7] = (tokens[7] + 1) % N_VOCAB
    assert worst_gap(contextual.pair.files.target, PROMPT, tokens[:8]) > 10 * NEAR_TIE


def test_a_draft_of_random_tokens_gives_the_same_text(models: Path, load: Load) -> None:
    files = contextual_pair(models / "contextual")
    stranger = contextual_pair(models / "stranger", seed=9)
    engine = load(PairFiles("strangers", files.target, stranger.draft))
    plain = ask_fresh(engine, PROMPT, 48).tokens
    for depth in (1, 6, 15):
        answer = ask_fresh(engine, PROMPT, 48, speculative=drafting(depth))
        assert_alike(files.target, PROMPT, answer.tokens, plain)
        assert answer.done.speculation.accepted < answer.done.speculation.drafted / 5


def test_padding_leaves_nothing_behind(contextual: Running) -> None:
    """A staircase on which width 4 is cheaper than 2 and 3, as measured on one machine."""
    plain = ask_fresh(contextual, PROMPT, 48).tokens
    lane = contextual.pair.shared
    costs = lane.costs
    table = {1: 78.0, 2: 95.0, 3: 117.0, 4: 87.0, 8: 161.0, 16: 248.0}
    try:
        lane.costs = type(costs)(table)
        lane.costs.observe = lambda width, ms: None  # type: ignore[method-assign]
        for depth in (1, 2, 4, 6):
            drafted = ask_fresh(contextual, PROMPT, 48, speculative=drafting(depth)).tokens
            assert_alike(contextual.pair.files.target, PROMPT, drafted, plain)
    finally:
        lane.costs = costs


# `near` is how far a cache type may move a log-probability from that of the rescoring cache.
@pytest.mark.parametrize(("kv_type", "near"), [("q8_0", 0.03), ("q4_0", 1.0), ("q8_0/q4_0", 1.0)])
def test_a_smaller_cache_answers_the_same_with_and_without_drafts(
    contextual_files: PairFiles, load: Load, kv_type: str, near: float
) -> None:
    keys, _, values = kv_type.partition("/")
    engine = load(contextual_files, type_kv=keys, type_v=values or "same")
    plain = ask_fresh(engine, PROMPT, 32)
    drafted = ask_fresh(engine, PROMPT, 32, speculative=drafting(3))
    assert_alike(contextual_files.target, PROMPT, drafted.tokens, plain.tokens, near=near)


def ask_exact(engine: Running, prompt: list[int], depth: int | None = 0, **more: object) -> str:
    speculative = SpeculationSettings(enabled=False) if depth == 0 else drafting(depth)
    answer = engine.ask(prompt, 40, speculative=speculative, exact=True, **more)
    assert answer.done.speculation.exact
    return answer.text


def get_logprobs(engine: Running, prompt: list[int], depth: int) -> list[float]:
    speculative = SpeculationSettings(enabled=False) if depth == 0 else drafting(depth)
    answer = engine.ask(prompt, 40, speculative=speculative, exact=True, top_logprobs=0)
    return [entry.logprob for entry in answer.logprobs]


def test_exact_mode_without_memory_is_refused_alone(
    contextual_files: PairFiles,
) -> None:
    with running(contextual_files, exact_lacks=3 << 20) as engine:
        request = engine.start(PROMPT, 4, exact=True)
        beside = engine.start(PROMPT, 4)
        engine.finish()
        assert "its own cache of 3 MiB" in str(engine.answers[request].ending)
        assert engine.answers[beside].done.completion_tokens == 4


def test_exact_mode_is_byte_identical_with_and_without_drafts(contextual: Running) -> None:
    reference = ask_exact(contextual, PROMPT)
    for depth in (1, 2, 3, 7, None):
        assert ask_exact(contextual, PROMPT, depth) == reference


def test_exact_mode_gives_the_same_bits_of_every_logprob(contextual: Running) -> None:
    plain = get_logprobs(contextual, PROMPT, 0)
    assert len(plain) > 20
    for depth in (1, 3, 7):
        assert get_logprobs(contextual, PROMPT, depth) == plain


def test_exact_mode_is_the_same_after_other_requests_and_in_another_run(
    contextual: Running, contextual_files: PairFiles, load: Load
) -> None:
    long = [(7 * at) % 500 for at in range(300)]  # more than two chunks of a prompt
    reference = ask_exact(contextual, long)
    ask_exact(contextual, [*long[:200], 5, 6, 7], 3)  # leaves a prefix of its own behind
    contextual.ask(long, 20)
    assert ask_exact(contextual, long) == reference
    assert ask_exact(contextual, long, 3) == reference
    restarted = load(contextual_files)
    restarted.ask(PROMPT, 10)
    assert ask_exact(restarted, long, 5) == reference


def test_exact_mode_reuses_whole_chunks_of_a_prompt_and_no_more(contextual: Running) -> None:
    long = [(11 * at) % 500 for at in range(300)]
    contextual.forget()
    text = ask_exact(contextual, long)
    answer = contextual.ask([*long, 3], 8, exact=True)
    assert answer.started is not None
    assert answer.started.cached_tokens == 256
    contextual.forget()
    assert ask_exact(contextual, long) == text


def test_exact_mode_has_its_chunks_where_other_passes_are_shorter(
    contextual: Running, contextual_files: PairFiles, load: Callable[..., Running]
) -> None:
    long = [(11 * at) % 500 for at in range(300)]
    assert ask_exact(load(contextual_files, n_batch=64), long) == ask_exact(contextual, long)


@pytest.mark.parametrize("depth", [0, 1, 4, 15])
def test_max_tokens_is_kept_to_the_token(cycle: Running, depth: int) -> None:
    for count in (1, 2, 3, 7, 16):
        answer = cycle.ask([BOS, 7], count, speculative=drafting(depth))
        assert answer.tokens == expected(7, count)
        assert answer.done.completion_tokens == count
        assert answer.done.finish_reason == "length"


def test_with_max_tokens_zero_the_prompt_is_read_and_kept(cycle: Running) -> None:
    cycle.forget()
    answer = cycle.ask([BOS, *range(40)], 0)
    assert (answer.text, answer.tokens, answer.done.finish_reason) == ("", [], "length")
    following = cycle.ask([BOS, *range(40), 41], 1)
    assert following.started is not None
    assert following.started.cached_tokens == 41


@pytest.mark.parametrize("depth", [0, 3, 15, 64])
def test_without_max_tokens_the_context_is_the_limit(
    contextual_files: PairFiles, load: Load, depth: int
) -> None:
    engine = load(contextual_files, n_ctx=256)
    answer = engine.ask(PROMPT, None, speculative=drafting(depth))
    assert answer.done.finish_reason == "length"
    assert len(answer.all_tokens) == engine.pair.n_ctx
    plain = ask_fresh(engine, PROMPT, None).tokens
    assert_alike(contextual_files.target, PROMPT, answer.tokens, plain)


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(cycle: Running) -> None:
    room = cycle.pair.n_ctx
    failed = cycle.ask([1] * room, 4).failed
    assert failed.code == "context_length_exceeded"
    assert str(room) in failed.message
    assert (failed.n_prompt_tokens, failed.n_ctx) == (room, room)
    assert "shorten it by 1 token or" in failed.message
    assert "shorten it by 2 tokens or" in cycle.ask([1] * (room + 1), 4).failed.message
    assert cycle.ask([1] * (room - 1), 4).done.completion_tokens == 1


@pytest.mark.parametrize("depth", [0, 2, 6, 15])
@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_eos_ends_an_answer_inside_accepted_drafts(models: Path, depth: int, length: int) -> None:
    files = cycle_pair(models / f"ending-{length}", 1.0, cycle=ending_cycle(length))
    with running(files) as engine:
        vocab = engine.pair.vocab
        answer = engine.ask([BOS, 0], 40, speculative=drafting(depth))
        assert answer.done.finish_reason == "stop"
        assert len(answer.tokens) == length + 1
        assert vocab.is_eog(answer.tokens[-1])
        assert answer.done.stop_string is None
        ignoring = Sampling(temperature=0.0, ignore_eos=True)
        longer = engine.ask([BOS, 0], 40, ignoring, drafting(depth))
        assert len(longer.tokens) == 40
        assert longer.tokens[:length] == answer.tokens[:length]
        assert not any(map(vocab.is_eog, longer.tokens))


def test_end_set_by_the_infill_sampler_overrides_ignore_eos(
    contextual: Running,
) -> None:
    """No token is likely in this text, so the infill sampler chooses an end."""
    answer = contextual.ask("a", 40, Sampling(infill=True, ignore_eos=True))
    assert answer.done.finish_reason == "stop"
    assert answer.tokens == [contextual.pair.vocab.end]


@pytest.mark.parametrize("depth", [0, 1, 5, 15])
def test_a_stop_string_across_tokens_ends_the_answer_before_it(cycle: Running, depth: int) -> None:
    full_text = cycle.ask([BOS, 7], 40).text
    for start, size in ((3, 2), (20, 9), (31, 1)):
        stop = full_text[start : start + size]
        answer = cycle.ask([BOS, 7], 40, speculative=drafting(depth), stop=["never", stop])
        assert answer.text == full_text[: full_text.index(stop)]
        assert answer.done.finish_reason == "stop"
        assert answer.done.stop_string == stop


@pytest.mark.parametrize("depth", [0, 4])
def test_after_a_stop_the_cache_goes_on_with_the_right_text(
    contextual: Running, depth: int
) -> None:
    """Tokens drafted past the end must not remain in the cache."""
    complete = ask_fresh(contextual, PROMPT, 40)
    stop = complete.text[len(complete.text) // 2 :][:2]
    stopped = ask_fresh(contextual, PROMPT, 40, speculative=drafting(depth), stop=[stop])
    follow_up = [*stopped.all_tokens, 5, 6, 7]
    tokens = contextual.ask(follow_up, 24).tokens
    anew = ask_fresh(contextual, follow_up, 24).tokens
    assert_alike(contextual.pair.files.target, follow_up, tokens, anew)


def test_partial_stop_string_is_sent_at_the_end(cycle: Running) -> None:
    full_text = cycle.ask([BOS, 7], 12).text
    answer = cycle.ask([BOS, 7], 12, stop=[full_text[-3:] + "and never more"])
    assert answer.text == full_text
    assert answer.done.stop_string is None


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**31 - 1, -(2**31)])
def test_token_ids_outside_the_vocabulary_are_refused(cycle: Running, token: int) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        cycle.ask([1, token], 4)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        cycle.ask([1], 4, Sampling(logit_bias={token: 1.0}))
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        cycle.pair.vocab.piece(token)
    assert cycle.ask([BOS, 7], 4).tokens == expected(7, 4)


def test_an_empty_prompt_is_refused(cycle: Running) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        cycle.ask([], 4)


def test_a_lone_surrogate_is_refused(cycle: Running) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        cycle.ask("a\ud800", 4)


def test_a_prompt_of_control_tokens_and_nul_is_read(cycle: Running) -> None:
    assert len(cycle.ask("\0\0<|end|>", 4).tokens) == 4


SAMPLED = Sampling(temperature=0.8, top_k=40, seed=5)
CLOSE = Sampling(temperature=0.5, top_k=4, seed=6)  # drafts are often what is drawn


def make_sampler(sampling: Sampling) -> Sampler:
    return Sampler(resolve_settings(sampling, {}))


@pytest.mark.parametrize("depth", [1, 3, 8, None])
@pytest.mark.parametrize("sampling", [SAMPLED, CLOSE])
def test_with_a_seed_drafts_give_the_tokens_of_plain_decoding(
    contextual: Running, depth: int | None, sampling: Sampling
) -> None:
    """Each answer is what the target alone draws, unless a draw is within rounding of an edge."""
    plain = ask_fresh(contextual, PROMPT, 48, sampling)
    answer = ask_fresh(contextual, PROMPT, 48, sampling, drafting(depth))
    assert answer.done.speculation.verification == "match"
    if depth is not None and sampling is CLOSE:
        assert answer.done.speculation.accepted > 5
    target, sampler = contextual.pair.files.target, make_sampler(sampling)
    assert first_strange(target, PROMPT, plain.tokens, sampler) is None
    assert first_strange(target, PROMPT, answer.tokens, sampler) is None


def keep_every_second_rejected(
    rows: Rows, drafted: Sequence[int], sampler: Sampler, place: int
) -> list[int]:
    """Accept every second draft that the target would not have drawn."""
    tokens = verify_match(rows, drafted, sampler, place)
    at = len(tokens) - 1
    return [*tokens[:-1], drafted[at]] if at < len(drafted) and place % 2 else tokens


def draw_with_noise_per_round(
    rows: Rows, drafted: Sequence[int], sampler: Sampler, place: int
) -> list[int]:
    return verify_match(rows, drafted, sampler, 0)


def draw_from_the_previous_row(
    rows: Rows, drafted: Sequence[int], sampler: Sampler, place: int
) -> list[int]:
    return verify_match(lambda i, accepted: rows(max(i - 1, 0), accepted), drafted, sampler, place)


@pytest.mark.parametrize(
    "rule", [keep_every_second_rejected, draw_with_noise_per_round, draw_from_the_previous_row]
)
def test_scoring_again_finds_a_draw_by_a_wrong_rule(
    contextual: Running, monkeypatch: pytest.MonkeyPatch, rule: Callable[..., list[int]]
) -> None:
    """The control of the test above."""
    monkeypatch.setattr("localspec.engine.speculation.verification.verify_match", rule)
    answer = ask_fresh(contextual, PROMPT, 48, CLOSE, drafting(3))
    target, sampler = contextual.pair.files.target, make_sampler(CLOSE)
    assert first_strange(target, PROMPT, answer.tokens, sampler) is not None


def test_penalties_see_the_drafts_kept_in_the_same_round(contextual: Running) -> None:
    heavy = Sampling(
        temperature=0.0,
        repeat_penalty=1.5,
        frequency_penalty=1.0,
        presence_penalty=1.0,
        dry_multiplier=2.0,
        dry_allowed_length=1,
        repeat_last_n=-1,
    )
    plain = ask_fresh(contextual, PROMPT, 64, heavy).tokens
    assert plain != ask_fresh(contextual, PROMPT, 64).tokens
    target = contextual.pair.files.target
    for depth in (2, 6):
        answer = ask_fresh(contextual, PROMPT, 64, heavy, drafting(depth))
        assert answer.done.speculation.accepted > 0
        assert_alike(target, PROMPT, answer.tokens, plain, make_sampler(heavy))


def test_two_requests_without_a_seed_differ(contextual: Running) -> None:
    hot = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0)
    texts = [contextual.ask(PROMPT, 12, hot, drafting(2)).tokens for _ in range(2)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_sampled_drafts_keep_the_targets_distribution(contextual: Running, rule: str) -> None:
    """The tokens of an answer that come from drafts follow the probabilities of plain decoding."""
    sampling = Sampling(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    sampler = Sampler(Settings(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0))
    speculative = drafting(2, verification=rule)
    bias = dict.fromkeys(ask_fresh(contextual, PROMPT, 1).tokens, 100.0)
    # The first token is fixed by a prompt that ends with it, so that one distribution is tested.
    prompt = [*PROMPT, *bias]
    answers = [contextual.ask(prompt, 3, sampling, speculative) for _ in range(500)]
    assert all(answer.done.speculation.verification == rule for answer in answers[:3])
    assert sum(answer.done.speculation.accepted for answer in answers) > 60
    assert measure_follower_z(contextual, prompt, answers, sampler, N_VOCAB) < 4.5


def test_tokens_that_the_file_suppresses_are_never_generated(
    contextual_files: PairFiles, contextual: Running, tmp_path: Path, load: Load
) -> None:
    """llama.cpp's own chain applies a bias of minus infinity before everything else."""
    suppressed = set(ask_fresh(contextual, PROMPT, 24).tokens)
    key, key_value = "tokenizer.ggml.suppress_tokens", (I32, [*suppressed, -1, N_VOCAB])
    data = with_key(Path(contextual_files.target).read_bytes(), key, ARRAY, key_value)
    path = tmp_path / "suppressing.gguf"
    path.write_bytes(data)
    engine = load(PairFiles("suppressing", str(path), contextual_files.draft))
    assert set(engine.pair.vocab.suppressed) == suppressed
    biased = Sampling(logit_bias=dict.fromkeys(suppressed, 100.0), seed=1)
    for sampling in (GREEDY, SAMPLED, biased):
        for speculative in (drafting(0), drafting(4), drafting(4, verification="rejection")):
            answer = engine.ask(PROMPT, 24, sampling, speculative)
            assert not suppressed & set(answer.tokens)
    sampler = Sampler(Settings(temperature=0.0, logit_bias=dict.fromkeys(suppressed, -math.inf)))
    tokens = engine.ask(PROMPT, 24, GREEDY, drafting(4)).tokens
    assert first_strange(contextual_files.target, PROMPT, tokens, sampler) is None


def test_invalid_sampling_defaults_of_a_file_are_ignored(
    contextual_files: PairFiles, tmp_path: Path, load: Load
) -> None:
    """A repeat penalty of 0 divides logits by zero, and no token would remain."""
    data = Path(contextual_files.target).read_bytes()
    data = with_key(data, "general.sampling.penalty_repeat", F32, 0.0)
    data = with_key(data, "general.sampling.temp", F32, -1e30)
    data = with_key(data, "general.sampling.top_k", I32, 7)
    path = tmp_path / "sampling.gguf"
    path.write_bytes(data)
    engine = load(PairFiles("sampling", str(path), contextual_files.draft))
    assert engine.pair.defaults == {"top_k": 7}
    # An end may be drawn like any other token, so it is ignored.
    assert len(engine.ask(PROMPT, 12, Sampling(ignore_eos=True)).tokens) == 12


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, CLOSE])
def test_logprobs_are_the_same_with_and_without_drafts(
    contextual: Running, sampling: Sampling
) -> None:
    plain = ask_fresh(contextual, PROMPT, 40, sampling, top_logprobs=3)
    drafted = ask_fresh(contextual, PROMPT, 40, sampling, drafting(4), top_logprobs=3)
    target, sampler = contextual.pair.files.target, make_sampler(sampling)
    for answer in (plain, drafted):
        assert first_strange(target, PROMPT, answer.tokens, sampler) is None
        recomputed = []
        for row, token in zip(
            rows_alone(target, PROMPT, answer.tokens), answer.tokens, strict=True
        ):
            recomputed.append(logprob(row, token, 3, contextual.pair.vocab.piece))
        assert_same_logprobs(answer.logprobs, recomputed)


def test_logprobs_are_those_of_the_target_before_penalties(contextual: Running) -> None:
    pushed = Sampling(temperature=0.0, logit_bias={9: 100.0})
    entry = ask_fresh(contextual, PROMPT, 1, pushed, top_logprobs=N_VOCAB).logprobs[0]
    assert entry.id == 9
    assert entry.logprob < -0.5
    assert sum(math.exp(p) for _, _, p in entry.top) == pytest.approx(1.0, abs=1e-4)
    assert entry.top[0][2] > entry.logprob


def test_each_shown_token_has_its_logprob_and_its_bytes(cycle: Running) -> None:
    answer = cycle.ask([BOS, 7], 24, speculative=drafting(5), top_logprobs=1)
    assert [entry.id for entry in answer.logprobs] == answer.tokens
    raw = b"".join(entry.piece for entry in answer.logprobs)
    assert raw.decode("utf-8", "replace") == answer.text


def test_an_answer_says_what_speculation_did(cycle: Running) -> None:
    answer = cycle.ask([BOS, 9], 40, speculative=drafting(3), reveal_draft=True)
    speculation = answer.done.speculation
    assert speculation.active
    assert speculation.kind == "draft"
    assert speculation.reason is None
    assert 0 < speculation.accepted < speculation.drafted
    assert answer.done.timings.draft_n == speculation.drafted
    assert answer.done.timings.draft_n_accepted == speculation.accepted
    assert speculation.rounds < 40
    assert speculation.mean_tokens_per_pass > 1
    assert speculation.plain_tokens_per_second is not None
    assert any(delta.drafted for delta in answer.deltas)


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        (SpeculationSettings(enabled=False), "disabled"),
        (SpeculationSettings(depth=0), "depth 0"),
    ],
)
def test_an_answer_without_drafts_says_why(
    cycle: Running, speculative: SpeculationSettings, words: str
) -> None:
    speculation = cycle.ask([BOS, 9], 10, speculative=speculative).done.speculation
    assert not speculation.active
    assert speculation.drafted == 0
    assert words in str(speculation.reason)


def test_a_target_alone_says_so_and_answers_the_same(cycle_files: PairFiles, load: Load) -> None:
    engine = load(target_alone(cycle_files))
    answer = engine.ask([BOS, 7], 20, speculative=drafting(3))
    assert answer.tokens == expected(7, 20)
    assert "no draft model" in str(answer.done.speculation.reason)


def test_predicted_text_is_drafted_and_counted(cycle: Running) -> None:
    first_text = cycle.ask([BOS, 300], 1).text
    prediction = first_text + " and then something that will not come"
    answer = cycle.ask([BOS, 300], 40, speculative=drafting(4, "ngram", prediction=prediction))
    speculation = answer.done.speculation
    assert speculation.predicted_rejected > 0
    assert speculation.predicted_accepted + speculation.predicted_rejected == speculation.drafted
    assert answer.tokens == expected(300, 40)


def read_rss() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts pages through /proc")
def test_a_thousand_rounds_take_no_memory(cycle: Running) -> None:
    def run_rounds(count: int) -> None:
        end = cycle.engine.rounds + count
        while cycle.engine.rounds < end:
            cycle.ask([BOS, 7], 400, SAMPLED, drafting(3))
            cycle.answers.clear()
        gc.collect()

    run_rounds(300)
    rss_before = read_rss()
    run_rounds(700)
    # 700 rounds of 4 rows × 512 logits × 4 bytes would be 5.7 MB, the rounds' objects more.
    assert read_rss() - rss_before < 3_000_000


def test_timings_exclude_the_first_token(contextual: Running) -> None:
    """As in llama-server, they run from the first token to the last; one pass brings them all here."""
    plain = ask_fresh(contextual, PROMPT, 4)
    assert plain.done.timings.predicted_n == 4
    lane, delay_s = contextual.pair.shared, 0.05
    decode = lane.decode

    def slow_decode(timed: bool, n_sequences: int = 1, *, scored: bool = False) -> float:
        spent = decode(timed)
        time.sleep(delay_s)
        return spent

    lane.decode = slow_decode  # type: ignore[method-assign]
    try:
        vocab = contextual.pair.vocab
        text = b"".join(vocab.piece(token) for token in plain.tokens).decode("utf-8", "replace")
        speculative = drafting(3, "ngram", prediction=text)
        # Its prompt is cached, so there is a single pass.
        together = contextual.ask(PROMPT, 4, GREEDY, speculative)
        single = contextual.ask(PROMPT, 1)
        separate = contextual.ask(PROMPT, 4)
    finally:
        lane.decode = decode  # type: ignore[method-assign]
    for answer in (together, separate):
        timings = answer.done.timings
        assert timings.predicted_n == 4
        assert 0 < timings.predicted_per_second < 4.5 / delay_s
        assert timings.predicted_per_second * timings.predicted_per_token_ms == pytest.approx(1e3)
        assert timings.predicted_per_token_ms * 3 == pytest.approx(timings.predicted_ms)
    assert separate.done.timings.predicted_per_second < 1 / delay_s
    assert single.done.timings.predicted_per_second == 0  # one token gives no rate
    assert single.done.timings.prompt_ms > delay_s * 1e3


def test_an_answer_that_the_context_ends_is_truncated(contextual: Running) -> None:
    endless = Sampling(temperature=0.0, ignore_eos=True)
    room = contextual.pair.n_ctx - len(PROMPT)
    for limit, truncated in ((None, True), (room + 1, True), (room, False), (5, False), (0, False)):
        answer = contextual.ask(PROMPT, limit, endless)
        assert answer.done.finish_reason == "length"
        assert answer.done.truncated == truncated


def test_long_prediction_is_cut_and_sorted_while_preparing(
    contextual: Running,
) -> None:
    room = contextual.pair.n_ctx
    speculative = drafting(3, "ngram", prediction="a b c " * 100_000)
    text = TokenPrompt(PROMPT)
    request = Generate(1, text, sampling=GREEDY, max_tokens=5, speculative=speculative)
    prepared = contextual.preparer.prepare(request)
    assert len(prepared.lookup._prediction) == room
    assert len(prepared.lookup._prediction_grams._keys) == room - 3
    answer = contextual.ask(PROMPT, 12, GREEDY, speculative)
    plain = contextual.ask(PROMPT, 12).tokens
    assert_alike(contextual.pair.files.target, PROMPT, answer.tokens, plain)
