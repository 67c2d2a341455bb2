"""Log-probabilities of a prompt are those of llama.cpp's logits, however the prompt is read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from localspec.protocol.frames import PairFiles, TokenLogprob
from tests.support.pairs import N_VOCAB
from tests.support.rescoring import NEAR_TIE, assert_same_logprobs, rows_alone
from tests.support.running import GREEDY, Answer, Running, drafting

TOP = 3


def collect_scores(answer: Answer) -> list[TokenLogprob]:
    scores: list[TokenLogprob] = []
    for reading in answer.readings:
        if reading.scores:
            assert reading.scores_from == len(scores)
            scores += reading.scores
    return scores


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, N_VOCAB) for _ in range(length)]


def assert_scores(path: str, prompt: Sequence[int], scores: Sequence[TokenLogprob]) -> None:
    """Assert that scores are those of the target that reads the prompt token by token."""
    assert [entry.id for entry in scores] == list(prompt)
    rows = rows_alone(path, prompt[:1], prompt[1:])
    for entry, row in zip(scores[1:], rows, strict=True):
        exact = row.astype(np.float64)
        logs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        assert entry.logprob == pytest.approx(logs[entry.id], abs=NEAR_TIE)
        assert [value for _, _, value in entry.top] == pytest.approx(
            sorted(logs, reverse=True)[:TOP], abs=NEAR_TIE
        )
        near = np.abs(logs - logs[entry.id]) < NEAR_TIE
        certain_rank = int((logs[~near] > logs[entry.id]).sum())
        assert certain_rank < entry.rank <= certain_rank + int(near.sum())


@pytest.mark.parametrize("length", [1, 2, 70, 300])
def test_a_prompts_scores_are_those_of_llama_cpp(
    contextual: Running, contextual_files: PairFiles, length: int
) -> None:
    prompt = random_prompt(length, length)
    for exact in (False, True):
        answer = contextual.ask(prompt, 2, GREEDY, prompt_logprobs=TOP, top_logprobs=1, exact=exact)
        assert_scores(contextual_files.target, prompt, collect_scores(answer))
        assert answer.done.finish_reason == "length"


def test_cached_prompt_is_scored_in_full(contextual: Running, contextual_files: PairFiles) -> None:
    prompt = random_prompt(5, 90)
    contextual.ask(prompt, 4)  # leaves the prompt in a slot
    for max_tokens in (0, 1):  # no token is generated, or one
        answer = contextual.ask(prompt, max_tokens, prompt_logprobs=TOP, top_logprobs=1)
        assert_scores(contextual_files.target, prompt, collect_scores(answer))
        assert answer.started is not None
        assert answer.started.cached_tokens == 0
        assert len(answer.logprobs) == max_tokens


def test_scores_do_not_depend_on_chunks_or_other_requests(
    load: Callable[..., Running], contextual_files: PairFiles
) -> None:
    prompts = [random_prompt(seed, length) for seed, length in ((1, 150), (2, 149), (3, 40))]
    scores = []
    for n_batch in (64, 200):
        engine = load(contextual_files, n_batch=n_batch, parallel=4)
        writes = engine.start(random_prompt(9, 20), 60, speculative=drafting(8))
        request_ids = [
            engine.start(prompt, 1, prompt_logprobs=TOP, top_logprobs=1) for prompt in prompts
        ]
        engine.finish()
        assert engine.answers[writes].done.completion_tokens > 0
        for prompt, request in zip(prompts, request_ids, strict=True):
            assert_scores(contextual_files.target, prompt, collect_scores(engine.answers[request]))
            scores.append(collect_scores(engine.answers[request]))
    for expected, repeated in zip(scores[:3], scores[3:], strict=True):
        assert_same_logprobs(expected, repeated)


def test_a_pass_has_no_more_rows_with_logits_than_the_context_holds(
    load: Callable[..., Running], contextual_files: PairFiles
) -> None:
    engine = load(contextual_files, n_batch=256, parallel=2)
    lane = engine.pair.shared
    rows = []
    decode = lane.context.decode

    def counting_decode(batch: object) -> None:
        rows.append(sum(lane.batch._logits[: lane.batch.rows]))
        decode(lane.batch)

    lane.context.decode = counting_decode  # type: ignore[method-assign]
    for seed in (1, 2):
        engine.start(random_prompt(seed, 200), 1, prompt_logprobs=0, top_logprobs=0)
    engine.finish()
    assert max(rows) <= lane.context.n_outputs
    assert sum(rows) >= 2 * 199


def test_scored_prompts_do_not_lengthen_passes_for_others(
    load: Callable[..., Running], contextual_files: PairFiles
) -> None:
    """The cost of scored rows limits how many a pass reads beside other requests."""
    engine = load(contextual_files, n_batch=256, parallel=2)
    lane = engine.pair.shared
    lane._gap_s = 20 * lane._row_s
    plain = lane.max_prompt_rows(1)
    assert plain >= 10
    assert lane.to_scored_rows(plain) <= 8  # not known yet
    lane.batch.clear()
    lane.batch.rows = 8
    lane.observe_scores(8, 8 * 5 * lane._row_s)
    assert lane.to_scored_rows(plain) == max(plain // 5, 1)
    assert lane.to_plain_rows(lane.to_scored_rows(plain)) <= plain
    lane.observe_scores(8, 8 * 2 * lane._row_s)  # cheaper passes are believed slowly
    assert lane.to_scored_rows(plain) < plain // 2
    lane.batch.clear()


def test_end_token_has_an_entry_beside_a_scored_prompt(
    cycle: Running,
) -> None:
    """An evaluation counts entries, including one for an end token without text."""
    ends = next(iter(cycle.pair.vocab.ends))
    biased = GREEDY.__class__(temperature=0.0, logit_bias={ends: 100.0})
    answer = cycle.ask([5, 6, 7], 4, biased, prompt_logprobs=1, top_logprobs=1)
    assert [entry.id for entry in answer.logprobs] == [ends]
    assert answer.text == ""
    assert answer.logprobs[0].offset == 0
    assert cycle.ask([5, 6, 7], 4, biased, top_logprobs=1).logprobs == []
    assert all(math.isfinite(entry.logprob) for entry in answer.logprobs)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_preempted_prompt_is_scored_to_its_end(
    load: Callable[..., Running], contextual_files: PairFiles, steps: int
) -> None:
    engine = load(contextual_files, n_batch=64, parallel=2)
    prompt = random_prompt(steps, 120)
    engine.ask(prompt, 1)  # another slot could be given its text
    request = engine.start(prompt, 2, prompt_logprobs=TOP, top_logprobs=1)
    for _ in range(steps):
        engine.engine.step()
    engine.engine._scheduler._preempt(engine.pair.shared, engine.sequence(request))
    engine.finish()
    assert_scores(contextual_files.target, prompt, collect_scores(engine.answers[request]))
    assert len(engine.answers[request].logprobs) == 2
