"""Special tokens in a rendered prompt: which there are, and that only the template writes them.

A special token says what the text around it is: where a turn begins and who speaks, where thoughts, calls
and their results begin and end. Text of a message that spells one is read as the letters it is made of, by
the rules of llama.cpp's own tokenizer (src/llama-vocab.cpp, tokenizer_st_partition).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from localspec.engine.llama import MarkedToken, Vocab
from localspec.engine.prompt.spellings import pattern_of

_SPACE = " \t\n\v\f\r"  # what C's isspace knows
# A private-use character, which merges with nothing: SentencePiece puts a space before what a text begins
# with, and so before this and not before what follows.
_NOT_THE_BEGINNING = "\ue000"
# User-defined tokens are whatever a vocabulary's makers did not want to be cut: markers of structure such
# as `<tool_call>`, but also runs of spaces, letters and HTML's elements, which are text like any other.
_BRACKETED = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
_SYMBOL = re.compile(r"[^\w\s]")
_HTML = re.compile(
    "</?(?:a|b|blockquote|body|br|caption|code|dd|div|dl|dt|em|h[1-6]|head|hr|html|i|img|li|ol|p|pre|s|"
    "span|strong|sub|sup|table|tbody|td|tfoot|th|thead|title|tr|u|ul)/?>",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text. `special`: where the special tokens stand that the template wrote, as pairs of
    beginning and end; None: wherever one is spelled, for no message spells any."""

    text: str
    special: list[tuple[int, int]] | None = None

    def since(self, start: int) -> RenderedPrompt:
        """Return the prompt from character `start` on, where no special token is cut in two."""
        if self.special is None:
            return RenderedPrompt(self.text[start:])
        places = [(a - start, b - start) for a, b in self.special if a >= start]
        return RenderedPrompt(self.text[start:], places)

    def until(self, end: int) -> RenderedPrompt:
        """Return the prompt before character `end`."""
        if self.special is None:
            return RenderedPrompt(self.text[:end])
        return RenderedPrompt(self.text[:end], [span for span in self.special if span[1] <= end])


class SpecialTokens:
    """The special tokens of a vocabulary, for prompts that one chat template writes."""

    def __init__(self, vocab: Vocab, template: str | None) -> None:
        self._vocab = vocab
        self._tokens: dict[str, MarkedToken] = {}
        for token in vocab.marked_tokens():
            text = token.text
            # Phi-3's file calls `</s>` user-defined, which would be HTML elsewhere.
            always = not token.user_defined or token.id == vocab.bos or vocab.is_eog(token.id)
            if text and (always or is_structure(text, template or "")):
                self._tokens.setdefault(text, token)
        self._ids = {token.id for token in self._tokens.values()}

        self.spellings = [*self._tokens]

    def __contains__(self, text: str) -> bool:
        return text in self._tokens

    def spans_in(self, text: str) -> list[tuple[int, int]]:
        """Return where special tokens are spelled in `text`."""
        return [match.span() for match in self._pattern.finditer(text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self._tokens)

    def tokenize(self, prompt: RenderedPrompt) -> list[int]:
        """Return the tokens of a prompt, BOS and EOS among them by the model's own flags.

        Raises:
            InvalidRequest: the text cannot be tokenized.
        """
        vocab, text = self._vocab, prompt.text
        if prompt.special is None:
            return vocab.tokenize(text, add_special=True, parse_special=True)
        tokens = [vocab.bos] if vocab.add_bos else []
        at, before = 0, None
        for start, end in [*prompt.special, (len(text), len(text))]:
            after = self._tokens.get(text[start:end])
            run = text[at:start]
            run = run.lstrip(_SPACE) if before and before.strips_right else run
            run = run.rstrip(_SPACE) if after and after.strips_left else run
            tokens += self.tokenize_text(run)
            tokens += [after.id] if after else []
            at, before = end, after
        return tokens + ([vocab.eos] if vocab.add_eos else [])

    def tokenize_text(self, text: str) -> list[int]:
        """Return the tokens of text in which nothing is special, as it reads behind a special token.

        Raises:
            InvalidRequest: the text cannot be tokenized.
        """
        if not text:
            return []
        tokens = self._vocab.tokenize(text, add_special=False, parse_special=False)
        if len(text) == 1 or self._ids.isdisjoint(tokens):
            return tokens
        # llama.cpp finds user-defined tokens in any text, and SentencePiece may merge letters to any token.
        head, *tail = self._cut(text)
        tokens = self.tokenize_text(head) if tail else tokens
        return tokens + [token for piece in tail for token in self._tokenize_later(piece)]

    def _cut(self, text: str) -> list[str]:
        """Return `text` in pieces, so that every special token that is spelled in it is cut in two."""
        places = [start + 1 for start, end in self.spans_in(text) if end - start > 1]
        if not places:
            places = [*range(1, len(text))]
        return [text[a:b] for a, b in pairwise([0, *places, len(text)])]

    def _tokenize_later(self, text: str) -> list[int]:
        """Return the tokens of text that goes on with other text."""
        if not self._vocab.adds_space or not self._vocab.reads_all:
            return self.tokenize_text(text)
        before = self._vocab.tokenize(_NOT_THE_BEGINNING, add_special=False, parse_special=False)
        text = _NOT_THE_BEGINNING + text
        if len(text) == 2:
            tokens = self._vocab.tokenize(text, add_special=False, parse_special=False)
        else:
            tokens = self.tokenize_text(text)
        return tokens[len(before) :]


def is_structure(text: str, template: str) -> bool:
    """Return whether a user-defined token marks structure in the prompts of a model with this template."""
    if len(text) < 2 or not _SYMBOL.search(text):
        return False
    if text in template:
        return True
    return bool(_BRACKETED.fullmatch(text.strip())) and not _HTML.fullmatch(text)


def pairs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return a flat list of beginnings and ends as pairs."""
    return [*zip(places[::2], places[1::2], strict=True)]
