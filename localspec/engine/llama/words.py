"""What it costs llama.cpp to cut a text into words, which it does before it looks for tokens.

Most pre-tokenizers are loops and cost nothing beside the length. The others go through `std::regex`
(src/unicode.cpp, unicode_regex_split_stl), whose matcher calls itself for every character of a word:
335 bytes of stack each with GCC on x86-64, so 25 000 dashes end a thread of 8 MiB and the process with
it. Such texts get a thread with a stack that holds them, and what no stack holds is refused.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TypeVar

from localspec.engine.priority import lower_priority
from localspec.errors import InvalidRequest

Result = TypeVar("Result")

FRAME = 768  # bytes of stack per character: twice what was measured, for other compilers
MAX_STACK = 512 << 20  # bytes; touched only as deep as the text goes, and given back after it
MAX_RUN = MAX_STACK // FRAME
LONG = 16_384  # characters that are cut before a pass beside them gets noticeably slower
SHALLOW = 1000  # characters that fit on every thread's stack
# Estimates on a slow core, in seconds: of a character, of a special token (the expressions are
# compiled anew for the text after each), of a square of the characters in a row that some
# expressions look at from each of them to the last.
CHARACTER, _SPECIAL, _SQUARE = 3e-6, 4e-3, 1.5e-7
PATIENCE = 20.0  # seconds that a text may cost beside its length
# Names of `tokenizer.ggml.pre` that llama.cpp 0.3.36's own loops serve (llm_tokenizer_bpe and
# unicode_regex_split_custom); any other may be an expression.
LOOPS = frozenset(
    {
        "a.x-4.0", "chatglm-bpe", "codeshell", "command-r", "dbrx", "deepseek-r1-qwen", "exaone",
        "f2llmv2", "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "glm5", "gpt-2",
        "granite-docling", "granite-embed-multi-311m", "grok-2", "hunyuan", "jais", "jina-de",
        "jina-es", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "kimi-k2", "kormo", "laguna",
        "lfm2", "llama-bpe", "llama-v3", "llama3", "mellum", "mellum2", "midm-2.0", "minerva-7b",
        "modern-bert", "mpt", "olmo", "phi-2", "pixtral", "qwen2", "qwen35", "refact",
        "sarvam-moe", "smaug-bpe", "smollm", "solar-open", "stablelm2", "starcoder", "trillion",
    }
)  # fmt: skip
# What llama.cpp takes for white space, which is not what Python does.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORDS = re.compile(f"[^{_SPACE}]+")
_SPACES = re.compile(f"[{_SPACE}]+")
_BREAKS = re.compile(r"[\r\n/]+")  # the tail of a word of punctuation
_LINES = re.compile(r"[^\r\n]+")
_DIGITS = re.compile(r"\d+")
_SQUARES = {"deepseek-llm": _SPACES, "superbpe": _DIGITS}
_WHOLE_LINES = frozenset({"exaone-moe"})  # letters and spaces make up one word

_starting = threading.Lock()  # the size of new threads' stacks is the process's


class Cutter:
    """The cost of cutting texts for one vocabulary, by expressions."""

    def __init__(self, pre_tokenizer: str, specials: Callable[[], Iterable[str]]) -> None:
        """pre_tokenizer: the file's name for it. specials: the texts of tokens that cut a text."""
        self._name = pre_tokenizer
        self._specials = specials

    @cached_property
    def _cuts(self) -> list[str]:
        return [text for text in self._specials() if text]

    @cached_property
    def _first(self) -> frozenset[str]:
        return frozenset(text[0] for text in self._cuts)

    def depth(self, text: str) -> int:
        """How many characters one word of `text` may have, at most."""
        if len(text) <= SHALLOW:
            return len(text)
        words = _LINES if self._name in _WHOLE_LINES else _WORDS
        return max(_longest(words, text) + _longest(_BREAKS, text), _longest(_SPACES, text))

    def seconds(self, text: str, cuts: int = 0) -> float:
        """What `text` may cost beside its length; `cuts`: special tokens beside those in it."""
        return cuts * _SPECIAL + self._extra(text, exact=False)

    def run(self, text: str, work: Callable[[], Result]) -> Result:
        """`work`, which cuts `text`, on a stack that is deep enough.

        Raises:
            InvalidRequest: there is no such stack, or it would take minutes.
        """
        depth = self.depth(text)
        if depth <= SHALLOW:
            return cut(text, work)
        if depth > MAX_RUN:
            raise _too_long(depth, f"can read at most {MAX_RUN}")
        if self._extra(text, exact=True) > PATIENCE:
            raise _too_long(depth, "would need minutes to read them")
        try:
            return _apart(work, depth * FRAME)
        except (RuntimeError, MemoryError):
            need = (depth * FRAME >> 20) + 1
            raise _too_long(
                depth, f"needs {need} MiB of memory for them, which is not available"
            ) from None

    def _extra(self, text: str, exact: bool) -> float:
        """Seconds beside those for the length; not `exact`: whatever may begin a special token does."""
        cuts = sum(map(text.count, self._first))
        if exact and cuts * _SPECIAL > PATIENCE:
            cuts = sum(map(text.count, self._cuts))
        rows = _SQUARES.get(self._name)
        squares = sum(len(row) ** 2 for row in rows.findall(text)) if rows else 0
        return cuts * _SPECIAL + squares * _SQUARE


def _longest(pattern: re.Pattern[str], text: str) -> int:
    return max((found.end() - found.start() for found in pattern.finditer(text)), default=0)


def _too_long(depth: int, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The text contains an unbroken run of {depth} characters, and this model's "
        f"tokenizer {why}; add spaces or line breaks, or leave it out.",
        param="prompt",
    )


def cut(text: str, work: Callable[[], Result]) -> Result:
    """Return what `work` returns, which cuts `text`: in a thread of low priority where the text is long."""
    return work() if len(text) <= LONG else _apart(work)


def _apart(work: Callable[[], Result], stack: int = 0) -> Result:
    """Return what `work` returns, in a thread of its own and of low priority.

    stack: bytes that the thread needs, given back when it has ended.

    Raises:
        RuntimeError: the system has no room for such a thread.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def body() -> None:
        lower_priority()
        try:
            results.append(work())
        except BaseException as error:  # it belongs to the caller's thread
            failures.append(error)

    thread = threading.Thread(target=body, name="cutter", daemon=True)
    with _starting:
        # A mebibyte more for Python's own frames.
        before = threading.stack_size((stack >> 20) + 2 << 20)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
