"""Fill-in-the-middle prompts, compared with the layout of llama-server's /infill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from localspec.engine.llama import FimTokens
from localspec.engine.prompt.infill import infill_tokens
from localspec.errors import InvalidRequest
from localspec.protocol.frames import InfillPrompt

PREFIX, SUFFIX, MIDDLE, REPO, FILE, BOS = 1001, 1002, 1003, 1004, 1005, 1000
NAMES = {PREFIX: "<P>", SUFFIX: "<S>", MIDDLE: "<M>", REPO: "<R>", FILE: "<F>", BOS: "<B>"}


@dataclass
class Vocab:
    """One token per character, and the markers."""

    fim: Any
    bos: int = BOS
    add_bos: bool = False
    asked: list[str] = field(default_factory=list)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        assert not parse_special  # a file that contains "<fim>" is text like any other
        return [ord(char) for char in text]


def markers(**changed: int) -> Any:
    known = dict.fromkeys(FimTokens.__dataclass_fields__, -1)
    known |= {"prefix": PREFIX, "suffix": SUFFIX, "middle": MIDDLE, "repo": REPO, "separator": FILE}
    return FimTokens(**{**known, **changed})


def shown(prompt: InfillPrompt, n_ctx: int = 4096, add_bos: bool = False, **changed: int) -> str:
    vocab = Vocab(markers(**changed), add_bos=add_bos)
    tokens = infill_tokens(cast(Any, vocab), prompt, n_ctx)
    assert len(tokens) <= n_ctx
    return "".join(NAMES.get(token) or chr(token) for token in tokens)


def test_the_repository_comes_first_and_the_line_follows_the_prefix() -> None:
    prompt = InfillPrompt("above\n", "\nbelow", [("a.py", "x = 1\n")], "lin")
    assert shown(prompt) == (
        "<R>myproject\n<F>a.py\nx = 1\n<F>filename\n<P>above\nlin<S>\nbelow<M>"
    )


def test_without_markers_for_files_they_are_snippets() -> None:
    prompt = InfillPrompt("above", "below", [("a.py", "x = 1")])
    text = shown(prompt, repo=-1, separator=-1, add_bos=True)
    assert text == "\n\n--- snippet ---\n\nx = 1<B><P>above<S>below<M>"


def test_a_model_without_markers_is_named_as_the_reason() -> None:
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle tokens"):
        shown(InfillPrompt("a", "b"), middle=-1)


def test_what_does_not_fit_is_cut_far_from_the_cursor() -> None:
    prompt = InfillPrompt("a" * 5000 + "near", "next" + "b" * 5000, [("f", "c" * 5000)], "line")
    text = shown(prompt, n_ctx=600)
    assert "nearline<S>next" in text
    assert text.endswith("b<M>")
    assert text.count("a") > 2 * text.count("b")


def test_a_small_hole_leaves_room_for_the_end_of_the_repository() -> None:
    text = shown(InfillPrompt("p", "s", [("f", "c" * 5000 + "end")]), n_ctx=600)
    assert text.endswith("cend<F>filename\n<P>p<S>s<M>")
    assert text.count("c") > 300
