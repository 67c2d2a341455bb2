"""The draft model's context fills up before the target's: it also holds the exact lane's text."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.protocol.frames import PairFiles, Sampling
from tests.support.rescoring import assert_alike
from tests.support.running import PLAIN, Running, drafting

Load = Callable[..., Running]


@pytest.mark.parametrize("exact_every", [2, 5])
def test_idle_texts_leave_the_drafts_context_when_it_is_full(
    contextual_files: PairFiles, load: Load, exact_every: int
) -> None:
    engine = load(contextual_files, n_ctx=256, parallel=2)
    for at in range(12):
        prompt = [10 + at * 7 + i for i in range(40)]
        exact = at % exact_every == 0
        answer = engine.ask(prompt, 180, speculative=drafting(3), exact=exact)
        assert answer.done.completion_tokens > 0
        assert answer.done.speculation.drafted > 0
    assert engine.ask([7] * 20, 8, speculative=PLAIN).done.completion_tokens == 8


def test_running_answers_that_fill_the_drafts_context_go_on_without_it(
    contextual_files: PairFiles, load: Load
) -> None:
    """The exact lane and the shared one together hold more than the draft's context."""
    endless = Sampling(temperature=0.0, ignore_eos=True)
    engine = load(contextual_files, n_ctx=256, parallel=1)
    prompts = {False: [11 + i for i in range(40)], True: [90 + i for i in range(40)]}
    requests = {
        exact: engine.start(prompt, 200, endless, drafting(3), exact=exact)
        for exact, prompt in prompts.items()
    }
    engine.finish()
    alone = load(contextual_files, n_ctx=256, parallel=1)
    for exact, request in requests.items():
        answer = engine.answers[request]
        assert answer.done.completion_tokens == 200
        truth = alone.ask(prompts[exact], 200, endless, exact=exact)
        if exact:
            assert answer.text == truth.text
        settings = Settings(temperature=0.0, logit_bias=dict.fromkeys(engine.pair.vocab.ends, -inf))
        target = contextual_files.target
        assert_alike(target, prompts[exact], answer.tokens, truth.tokens, Sampler(settings))
    drafted = [engine.answers[request].done.speculation.drafted for request in requests.values()]
    assert min(drafted) < 3 * 200 / 4 * 0.9  # one request had to stop drafting midway
