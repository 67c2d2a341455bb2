"""Build fill-in-the-middle prompts of a size that an editor can wait for.

The layout is that of llama-server: [repository] [BOS] <prefix> text before the cursor <suffix> text after the
cursor <middle>. An editor sends a request after every key, so consecutive prompts should begin alike, to
reuse the cache. The text before the cursor therefore begins at a line that stays the same while the cursor
moves. The files of the repository get the same number of tokens beside every open file, even an empty one,
because an editor has them read before a file is open. If the open file begins near the cursor, it is cut as
llama-server cuts it. Equal requests always give equal prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

from localspec.engine.llama import FimTokens, Vocab
from localspec.errors import InvalidRequest
from localspec.protocol.frames import InfillPrompt

PREFILL_S = 2.0  # Seconds to read a whole prompt, the longest that an editor waits for its first suggestion.
# Tokens around the cursor. A sixth of them are after it, because those are read again after every key.
# llama-server takes as many as its batch size: editors' plug-ins recommend 512 without a GPU and 1024 with
# one, and the default is 2048.
MIN_NEAR_TOKENS, USUAL_NEAR_TOKENS, MAX_NEAR_TOKENS = 512, 1024, 2048
DEFAULT_PREDICT = 128  # Tokens reserved for the completion if the request does not give a number.
_N_LAYOUT_TOKENS = 8  # Tokens of the layout, with some to spare.
_MIN_FILE_TOKENS = 128  # A longer file from the repository is left out if fewer of its tokens fit.
MAX_CHARS_PER_TOKEN = 16  # Characters; more than the average token of any real text.
_SNIPPET = "\n\n--- snippet ---\n\n"

# Cached tokenizations: a number of lines, a number of longer texts, and the longest line in characters.
_MAX_CACHED_LINES, _MAX_CACHED_TEXTS, _MAX_LINE_CHARS = 2048, 32, 256
TextTokenizer = Callable[[str], Sequence[int]]


def make_text_tokenizer(vocab: Vocab) -> TextTokenizer:
    """Return a tokenizer of plain text, in which markers are text like any other.

    It has a cache, because nearly everything in a request was in the editor's previous request as well.
    """

    def tokenize(text: str) -> tuple[int, ...]:
        return tuple(vocab.tokenize(text, add_special=False, parse_special=False))

    line = lru_cache(_MAX_CACHED_LINES)(tokenize)
    long_text = lru_cache(_MAX_CACHED_TEXTS)(tokenize)
    return lambda text: line(text) if len(text) <= _MAX_LINE_CHARS else long_text(text)


def prompt_budget(per_token_ms: float) -> int:
    """Return the number of prompt tokens to aim for, a power of two.

    per_token_ms: cost of one prompt token. Let t be the largest power of two that can be read in PREFILL_S.
    Half of the prompt lies around the cursor, and the editor waits for that half. Up to t = USUAL_NEAR_TOKENS
    the result is 2t, so only that half is read in time; for larger t it is t, and all of it is. A power of
    two hides small differences between measurements, because prompts of different lengths share little.
    """
    tokens = 1 << max(int(PREFILL_S * 1e3 / per_token_ms).bit_length() - 1, 0)
    return max(2 * min(max(tokens, MIN_NEAR_TOKENS), USUAL_NEAR_TOKENS), tokens)


def infill_tokens(
    vocab: Vocab,
    prompt: InfillPrompt,
    n_ctx: int,
    budget: int,
    tokenize: TextTokenizer | None = None,
) -> list[int]:
    """Return the prompt, of at most `budget` tokens and no more than the context has room for.

    tokenize: the result of `make_text_tokenizer`, to share its cache between prompts.

    Raises:
        InvalidRequest: the model has no fill-in-the-middle tokens.
    """
    fim = vocab.fim
    if min(fim.prefix, fim.suffix, fim.middle) < 0:
        raise InvalidRequest("This model has no fill-in-the-middle tokens.", param="input_prefix")
    tokenize = tokenize or make_text_tokenizer(vocab)
    # The tokens reserved for the completion are rounded up to a power of two. A request that only warms up
    # the cache predicts no tokens, but must read the same prompt as the next request.
    n_predict = prompt.n_predict or DEFAULT_PREDICT
    rounded = max(1 << (n_predict - 1).bit_length(), DEFAULT_PREDICT)
    n_reserved = rounded if rounded <= n_ctx // 4 else n_predict
    room = max(min(budget, n_ctx - n_reserved) - _N_LAYOUT_TOKENS, _N_LAYOUT_TOKENS)
    # The current line adds a quarter to `near`. Together they fill the room, or leave a quarter of it to the
    # other files.
    max_near = room * 3 // 5 if prompt.extra else room * 4 // 5
    near = min(max(MIN_NEAR_TOKENS, min(budget // 2, MAX_NEAR_TOKENS)), max_near)
    max_after, max_line = near // 6, near // 4
    suffix = _tokenize_beginning(prompt.suffix, max_after - _N_LAYOUT_TOKENS, tokenize)
    line = tokenize(prompt.prompt)
    # A long line leaves less room for the text above it.
    max_before = near - max_after - max(len(line) - max_line, 0)
    max_above = near - max_line
    all_above: Sequence[int] | None = None
    if len(line) <= max_line and len(prompt.prefix) <= max_above * MAX_CHARS_PER_TOKEN:
        all_above = tokenize(prompt.prefix)
    if all_above is not None and len(all_above) <= max_above:
        # The file begins near the cursor, so it is cut as in llama-server.
        prefix, quarter = all_above, _first_tokens(prompt.suffix, max_line, tokenize)
        suffix = max(suffix, quarter[: max(max_line - 2 - len(line), 0)], key=len)
    elif max_before > 0:
        prefix = _tokenize_end(prompt.prefix, max_before, tokenize)
    else:
        prefix, line = (), _tokenize_end(prompt.prompt, near - max_after + max_line, tokenize)
    extra = _tokenize_repository(vocab, prompt, tokenize, room - near - max_line)
    bos = [vocab.bos] if vocab.add_bos and vocab.bos >= 0 else []
    return [*extra, *bos, fim.prefix, *prefix, *line, fim.suffix, *suffix, fim.middle]


def find_suffix_start(fim: FimTokens, prompt: list[int]) -> int | None:
    """Return where the text after the cursor begins in a prompt, or None if the layout is another."""
    if fim.middle < 0 or prompt[-1:] != [fim.middle] or fim.suffix not in prompt:
        return None
    return len(prompt) - 1 - prompt[::-1].index(fim.suffix)


def _first_tokens(text: str, count: int, tokenize: TextTokenizer) -> Sequence[int]:
    """Return at most `count` tokens of the beginning of a text."""
    return tokenize(text[: count * MAX_CHARS_PER_TOKEN])[:count]


def _tokenize_end(text: str, limit: int, tokenize: TextTokenizer) -> Sequence[int]:
    """Return tokens of the end of a text, at most `limit` and usually more than half of that.

    Of the lines that the end may begin with, the one with the smallest checksum of itself and the lines after
    it is chosen. It stays the same while the text grows at its end, until it is too far away.
    """
    tail = text[-limit * MAX_CHARS_PER_TOKEN :]
    lines = tail.splitlines(keepends=True)
    count, first, choices = 0, len(lines), []
    while first and (count := count + len(tokenize(lines[first - 1]))) <= limit:
        first -= 1
        if count > limit // 2:
            choices.append(first)
    if not first and len(tail) == len(text):
        return tokenize(text)[-limit:]
    if choices:
        start = min(choices[::-1], key=lambda i: zlib.crc32("".join(lines[i : i + 4]).encode()))
        return tokenize("".join(lines[start:]))[-limit:]
    tokens = tokenize(tail)  # The last line is longer than the limit, so it begins at a token.
    starts = range(max(len(tokens) - limit, 0), len(tokens) - limit // 2)
    start = min(starts, key=lambda i: zlib.crc32(repr(tokens[i : i + 4]).encode()), default=0)
    return tokens[start:]


def _tokenize_beginning(text: str, limit: int, tokenize: TextTokenizer) -> Sequence[int]:
    """Return at most `limit` tokens of the beginning of a text, up to the end of a line if possible."""
    limit = max(limit, 0)
    head = text[: limit * MAX_CHARS_PER_TOKEN]
    count, lines = 0, ""
    for line in head.splitlines(keepends=True):
        if (count := count + len(tokenize(line))) > limit:
            break
        lines += line
    return _first_tokens(lines or head, limit, tokenize)


def _tokenize_repository(
    vocab: Vocab, prompt: InfillPrompt, tokenize: TextTokenizer, room: int
) -> list[int]:
    """Return the tokens of other files, at most `room`.

    The layout is <repo> name, then <sep> file name and text of each file. A model without such tokens gets
    plain text. If not all files fit, the last ones are used, because editors send the most useful ones last.
    """
    fim = vocab.fim
    head = [fim.repo, *tokenize("myproject\n")] if fim.repo >= 0 else []
    foot = [fim.separator, *tokenize("filename\n")] if fim.separator >= 0 else []
    room -= len(head) + len(foot)
    if room < 0:
        return []
    pieces: list[int] = []
    for name, text in reversed(prompt.extra):
        mark = [fim.separator, *tokenize(f"{name}\n")] if fim.separator >= 0 else tokenize(_SNIPPET)
        remaining = room - len(pieces) - len(mark)
        if remaining <= 0:
            break
        body = tokenize(text[-remaining * MAX_CHARS_PER_TOKEN :])
        if remaining < min(len(body), _MIN_FILE_TOKENS):
            break
        pieces = [*mark, *body[-remaining:], *pieces]
    return [*head, *pieces, *foot]
