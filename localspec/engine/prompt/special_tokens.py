"""Tokenize rendered prompts so that only the template can write special tokens.

A special token marks structure: where a turn begins and who speaks, where thoughts, calls and their results
begin and end. If the text of a message spells a special token, it is tokenized as plain text, by the rules of
llama.cpp's own tokenizer (src/llama-vocab.cpp, tokenizer_st_partition).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from localspec.engine.llama import MarkedToken, Vocab
from localspec.engine.prompt.spellings import pattern_of

_SPACE = " \t\n\v\f\r"  # The characters of C's isspace.
# A private-use character, which merges with no other. SentencePiece adds a space at the beginning of a text,
# so with this character in front it adds none before the text itself.
_GUARD = "\ue000"
# User-defined tokens are texts that the makers of a vocabulary did not want to be split. Some mark structure,
# such as `<tool_call>`. Others are runs of spaces, letters or HTML elements, which are ordinary text.
_BRACKETED = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
_SYMBOL = re.compile(r"[^\w\s]")
_HTML = re.compile(
    "</?(?:a|b|blockquote|body|br|caption|code|dd|div|dl|dt|em|h[1-6]|head|hr|html|i|img|li|ol|p|pre|s|"
    "span|strong|sub|sup|table|tbody|td|tfoot|th|thead|title|tr|u|ul)/?>",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a prompt.

    special: the spans (start, end) of the special tokens that the template wrote. None means that every
    special token in the text is the template's, because no message spells any.
    """

    text: str
    special: list[tuple[int, int]] | None = None

    def part(self, start: int, end: int | None = None) -> RenderedPrompt:
        """Return the prompt between two characters, neither of which may be within a special token."""
        end = len(self.text) if end is None else end
        if self.special is None:
            return RenderedPrompt(self.text[start:end])
        spans = [(a - start, b - start) for a, b in self.special if a >= start and b <= end]
        return RenderedPrompt(self.text[start:end], spans)

    def split(self, mark: str) -> list[RenderedPrompt]:
        """Return the parts of the prompt between the places where `mark` stands."""
        ends = [match.start() for match in re.finditer(re.escape(mark), self.text)] if mark else []
        starts = [0, *(end + len(mark) for end in ends)]
        return [self.part(*span) for span in zip(starts, [*ends, None], strict=True)]


class SpecialTokens:
    """The special tokens of a vocabulary, for prompts that one chat template writes."""

    def __init__(self, vocab: Vocab, template: str | None) -> None:
        self._vocab = vocab
        self._tokens: dict[str, MarkedToken] = {}
        for token in vocab.marked_tokens():
            text = token.text
            # In Phi-3's file, `</s>` is user-defined, although it looks like an HTML element.
            always = not token.user_defined or token.id == vocab.bos or vocab.is_eog(token.id)
            if text and (always or is_structure(text, template or "")):
                self._tokens.setdefault(text, token)
        self._ids = {token.id for token in self._tokens.values()}
        self.spellings = [*self._tokens]

    def __contains__(self, text: str) -> bool:
        return text in self._tokens

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self._tokens)

    def spans_in(self, text: str) -> list[tuple[int, int]]:
        """Return the spans in `text` that spell special tokens."""
        return [match.span() for match in self._pattern.finditer(text)]

    def tokenize_parts(self, parts: Sequence[RenderedPrompt]) -> list[list[int]]:
        """Return the tokens of the parts of a prompt, with BOS and EOS around them if the model adds them.

        Raises:
            InvalidRequest: the text cannot be tokenized.
        """
        if len(parts) == 1:
            return [self.tokenize(parts[0])]
        vocab = self._vocab
        first, *others = (self.tokenize(part, add_special=False) for part in parts)
        others[-1] += [vocab.eos] if vocab.add_eos else []
        return [[vocab.bos, *first] if vocab.add_bos else first, *others]

    def tokenize(self, prompt: RenderedPrompt, *, add_special: bool = True) -> list[int]:
        """Return the tokens of a prompt, with BOS and EOS if `add_special` is set and the model adds them.

        Raises:
            InvalidRequest: the text cannot be tokenized.
        """
        vocab, text = self._vocab, prompt.text
        if prompt.special is None:
            return vocab.tokenize(text, add_special=add_special, parse_special=True)
        tokens = [vocab.bos] if vocab.add_bos and add_special else []
        position, previous = 0, None
        for start, end in [*prompt.special, (len(text), len(text))]:
            special = self._tokens.get(text[start:end])
            run = text[position:start]
            run = run.lstrip(_SPACE) if previous and previous.strips_right else run
            run = run.rstrip(_SPACE) if special and special.strips_left else run
            tokens += self.tokenize_text(run)
            tokens += [special.id] if special else []
            position, previous = end, special
        return tokens + ([vocab.eos] if vocab.add_eos and add_special else [])

    def tokenize_text(self, text: str) -> list[int]:
        """Return the tokens of text after a special token, none of which is special.

        Raises:
            InvalidRequest: the text cannot be tokenized.
        """
        if not text:
            return []
        tokens = self._vocab.tokenize(text, add_special=False, parse_special=False)
        if len(text) == 1 or self._ids.isdisjoint(tokens):
            return tokens
        # llama.cpp finds user-defined tokens in any text, and SentencePiece may merge characters into any
        # token. Cutting the text within each special token avoids that.
        cuts = [start + 1 for start, end in self.spans_in(text) if end - start > 1]
        cuts = cuts or [*range(1, len(text))]
        head, *tail = (text[a:b] for a, b in pairwise([0, *cuts, len(text)]))
        tokens = self.tokenize_text(head)
        return tokens + [token for piece in tail for token in self._tokenize_continuation(piece)]

    def _tokenize_continuation(self, text: str) -> list[int]:
        """Return the tokens of text that continues other text."""
        if not self._vocab.adds_space or not self._vocab.covers_all_text:
            return self.tokenize_text(text)
        tokenize = partial(self._vocab.tokenize, add_special=False, parse_special=False)
        tokens = (tokenize if len(text) == 1 else self.tokenize_text)(_GUARD + text)
        return tokens[len(tokenize(_GUARD)) :]


def is_structure(text: str, template: str) -> bool:
    """Return whether a user-defined token marks structure, in a model with this template."""
    if len(text) < 2 or not _SYMBOL.search(text):
        return False
    if text in template:
        return True
    return bool(_BRACKETED.fullmatch(text.strip())) and not _HTML.fullmatch(text)
