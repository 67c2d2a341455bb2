"""Prompts for filling in the middle of a text, of a size that an editor can wait for.

[repository] [BOS] <prefix> text before the cursor <suffix> text after it <middle>, as llama-server
lays it out. An editor asks after every key, so what matters is that the next prompt begins as this one
did: the text before the cursor begins at a line that stays the same while the cursor moves on, and the
repository has the same room beside every file, were it empty: editors warm it up with no file at all. Of a
file that begins within reach as much is taken as llama-server takes. The same request always has the same
prompt.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

from localspec.engine.llama import FimTokens, Vocab
from localspec.errors import InvalidRequest
from localspec.protocol.frames import InfillPrompt

PREFILL_S = 2.0  # of reading a whole prompt: as long as an editor may wait for its first suggestion
# Tokens around the cursor, a sixth of them after it, since a key reads those. llama-server takes as
# many as its batch has: as editors' plug-ins recommend it 512 without a GPU, 1024 with one; 2048 by default.
LEAST, USUAL, MOST = 512, 1024, 2048
DEFAULT_PREDICT = 128  # tokens kept free for the completion where the request does not say
_MARKERS = 8  # tokens of the layout, and some to spare
_WORTH = 128  # tokens: of a longer file so many at least, or it is left out
LONG_TOKEN = 16  # characters: more than the tokens of any real text have on average
_SNIPPET = "\n\n--- snippet ---\n\n"

# What is remembered as tokens: so many lines, and longer texts; characters of a line at most.
_LINES, _WHOLES, _LINE = 2048, 32, 256
Plain = Callable[[str], Sequence[int]]


def plain_text(vocab: Vocab) -> Plain:
    """How text becomes tokens, markers in it like any other. It remembers: nearly all that an editor sends
    with a key it has sent with the one before.
    """

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(vocab.tokenize(text, add_special=False, parse_special=False))

    line, whole = lru_cache(_LINES)(tokens), lru_cache(_WHOLES)(tokens)
    return lambda text: line(text) if len(text) <= _LINE else whole(text)


def prompt_budget(per_token_ms: float) -> int:
    """Tokens of a prompt that are read in PREFILL_S: a power of two, since prompts that differ in
    length share little, and a measurement differs a little each time. What is around the cursor, which an
    editor has to wait for, is half of them; up to USUAL that half alone takes no longer.
    """
    tokens = 1 << max(int(PREFILL_S * 1e3 / per_token_ms).bit_length() - 1, 0)
    return max(2 * min(max(tokens, LEAST), USUAL), tokens)


def infill_tokens(
    vocab: Vocab, prompt: InfillPrompt, n_ctx: int, budget: int, plain: Plain | None = None
) -> list[int]:
    """The prompt: `budget` tokens at most, and no more than the context has room for. plain: `plain_text` of
    the vocabulary, kept from prompt to prompt.

    Raises:
        InvalidRequest: the model has no fill-in-the-middle tokens.
    """
    fim = vocab.fim
    if min(fim.prefix, fim.suffix, fim.middle) < 0:
        raise InvalidRequest("This model has no fill-in-the-middle tokens.", param="input_prefix")
    plain = plain or plain_text(vocab)
    room = max(min(budget, n_ctx - _reserve(prompt.n_predict, n_ctx)) - _MARKERS, _MARKERS)
    # With a quarter for a line being typed that is all there is, or leaves a quarter to other files.
    most = room * 3 // 5 if prompt.extra else room * 4 // 5
    near = min(max(LEAST, min(budget // 2, MOST)), most)
    behind, typed = near // 6, near // 4
    after = _beginning(prompt.suffix, behind - _MARKERS, plain)
    line = plain(prompt.prompt)
    left = near - behind - max(len(line) - typed, 0)  # a long line leaves less for what is above it
    above = _whole(prompt.prefix, near - typed, plain) if len(line) <= typed else None
    if above is not None:  # a short file: as llama-server cuts it
        before = above
        quarter = _tokens(prompt.suffix, typed, plain)[: max(typed - 2 - len(line), 0)]
        after = max(after, quarter, key=len)
    elif left > 0:
        before = _end(prompt.prefix, left, plain)
    else:
        before, line = (), _end(prompt.prompt, near - behind + typed, plain)
    extra = _repository(vocab, prompt, plain, room - near - typed)
    bos = [vocab.bos] if vocab.add_bos and vocab.bos >= 0 else []
    return [*extra, *bos, fim.prefix, *before, *line, fim.suffix, *after, fim.middle]


def after_cursor(fim: FimTokens, prompt: list[int]) -> int | None:
    """Where the text after the cursor begins in a prompt that is laid out so; None: it is another."""
    if fim.middle < 0 or prompt[-1:] != [fim.middle] or fim.suffix not in prompt:
        return None
    return len(prompt) - 1 - prompt[::-1].index(fim.suffix)


def _reserve(n_predict: int, n_ctx: int) -> int:
    """Tokens kept free for the completion.

    Requests that only warm up predict none, and are to read what the next one needs: hence steps.
    """
    wanted = n_predict or DEFAULT_PREDICT
    steps = max(1 << (wanted - 1).bit_length(), DEFAULT_PREDICT)
    return steps if steps <= n_ctx // 4 else wanted


def _whole(text: str, limit: int, plain: Plain) -> Sequence[int] | None:
    """All of a text's tokens; None: they are more than `limit`."""
    if len(text) > limit * LONG_TOKEN:
        return None
    tokens = plain(text)
    return tokens if len(tokens) <= limit else None


def _tokens(text: str, count: int, plain: Plain) -> Sequence[int]:
    """The first tokens of a text, so many at most."""
    return plain(text[: count * LONG_TOKEN])[:count]


def _end(text: str, limit: int, plain: Plain) -> Sequence[int]:
    """Tokens of the end of a text, at most `limit` and mostly more than half of that.

    Of the lines that it may begin with, it is the one with the smallest checksum of itself and those
    after it. So it stays the same while text comes in at the end, until it is too far away.
    """
    tail = text[-limit * LONG_TOKEN :]
    lines = tail.splitlines(keepends=True)
    count, first, choices = 0, len(lines), []
    while first and (count := count + len(plain(lines[first - 1]))) <= limit:
        first -= 1
        if count > limit // 2:
            choices.append(first)
    if not first and len(tail) == len(text):
        return plain(text)[-limit:]
    if choices:
        start = min(choices[::-1], key=lambda at: zlib.crc32("".join(lines[at : at + 4]).encode()))
        return plain("".join(lines[start:]))[-limit:]
    tokens = plain(tail)  # a line that is longer than all there is room for
    places = range(max(len(tokens) - limit, 0), len(tokens) - limit // 2)
    start = min(places, key=lambda at: zlib.crc32(repr(tokens[at : at + 4]).encode()), default=0)
    return tokens[start:]


def _beginning(text: str, limit: int, plain: Plain) -> Sequence[int]:
    """Tokens of the beginning of a text, at most `limit`; it ends with a line where that is possible."""
    limit = max(limit, 0)
    head = text[: limit * LONG_TOKEN]
    count, kept = 0, ""
    for line in head.splitlines(keepends=True):
        if (count := count + len(plain(line))) > limit:
            break
        kept += line
    return _tokens(kept or head, limit, plain)


def _repository(vocab: Vocab, prompt: InfillPrompt, plain: Plain, room: int) -> list[int]:
    """Other files: <repo> name, then <sep> file name and text for each; plain text without such tokens.

    Where not all have room it is the last ones, which editors send as the most useful.
    """
    fim = vocab.fim
    head = [fim.repo, *plain("myproject\n")] if fim.repo >= 0 else []
    foot = [fim.separator, *plain("filename\n")] if fim.separator >= 0 else []
    room -= len(head) + len(foot)
    if room < 0:
        return []
    pieces: list[int] = []
    for name, text in reversed(prompt.extra):
        mark = [fim.separator, *plain(f"{name}\n")] if fim.separator >= 0 else plain(_SNIPPET)
        left = room - len(pieces) - len(mark)
        if left <= 0:
            break
        body = plain(text[-left * LONG_TOKEN :])
        if left < min(len(body), _WORTH):
            break
        pieces = [*mark, *body[-left:], *pieces]
    return [*head, *pieces, *foot]
