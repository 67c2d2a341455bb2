"""Speculation is lossless on the shipped pair: real weights, and 10 prompts with 96 tokens each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import localspec
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.prompt.pictures import RequestPictures
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.protocol.frames import ChatPrompt, Message, PairFiles, Sampling, SpeculationSettings
from tests.support.rescoring import SHIPPED_NEAR_TIE, worst_gap
from tests.support.running import PLAIN, Running, drafting, running

FOLDER = Path(localspec.__file__).parent / "builtin"
LENGTH = 96
QUESTIONS = (
    "What does shutil.copytree do?",
    "Which parameters does subprocess.run take?",
    "Show an example of json.dumps.",
    "What is collections.Counter?",
    "Who was Mozart?",
)
CODE = (
    "import os\n\ndef main(argv):\n    ",
    "def read_lines(path):\n    with open(path) as file:\n",
    "import argparse\nparser = argparse.ArgumentParser(",
    "def fibonacci(n):\n    a, b = 0, 1\n",
    "async def handle(reader, writer):\n    data = await ",
)
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def shipped() -> Iterator[Running]:
    files = PairFiles("builtin", str(FOLDER / "target.gguf"), str(FOLDER / "draft.gguf"))
    with running(files) as engine:
        yield engine


def list_prompts(pair: LoadedPair) -> list[list[int]]:
    vocab = pair.vocab
    renderer = TemplateRenderer(
        pair.models.target.chat_template, vocab.text(vocab.bos), vocab.text(vocab.eos)
    )
    try:
        preparer = Preparer(pair, renderer)
        chat_prompts = [
            preparer.tokens(ChatPrompt([Message("user", text)]), RequestPictures())
            for text in QUESTIONS
        ]
    finally:
        renderer.close()
    return chat_prompts + [vocab.tokenize(t, add_special=True, parse_special=False) for t in CODE]


@pytest.mark.slow
def test_greedy_answers_with_the_draft_are_the_targets_own(shipped: Running) -> None:
    drafted = accepted = 0
    for prompt in list_prompts(shipped.pair):
        plain = shipped.ask(prompt, LENGTH, GREEDY, PLAIN)
        for speculative in (drafting(4), SpeculationSettings()):
            answer = shipped.ask(prompt, LENGTH, GREEDY, speculative)
            assert len(answer.tokens) == LENGTH
            if answer.tokens != plain.tokens:
                ends = shipped.pair.vocab.ends
                gap = worst_gap(str(FOLDER / "target.gguf"), prompt, answer.tokens, ends)
                assert gap <= SHIPPED_NEAR_TIE
            drafted += answer.done.speculation.drafted
            accepted += answer.done.speculation.accepted
    assert drafted > 0
    assert accepted > drafted / 4


@pytest.mark.slow
def test_exact_answers_are_byte_identical_with_and_without_the_draft(shipped: Running) -> None:
    for prompt in list_prompts(shipped.pair):
        plain = shipped.ask(prompt, LENGTH, GREEDY, PLAIN, exact=True)
        drafts = shipped.ask(prompt, LENGTH, GREEDY, drafting(4), exact=True)
        assert drafts.tokens == plain.tokens
        assert drafts.text == plain.text
        assert drafts.done.speculation.accepted > 0
