"""Split texts into words safely, which llama.cpp does before it looks for tokens.

Most pre-tokenizers are loops, whose cost is linear in the length of the text. The others use `std::regex`
(src/unicode.cpp, unicode_regex_split_stl), whose matcher recurses for every character of a word. With GCC on
x86-64 it takes 335 bytes of stack per character, so that 25 000 dashes overflow a stack of 8 MiB and end
the process. Such texts are processed in a thread with a large enough stack, and texts too long for any stack
are rejected.
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

FRAME = 768  # Bytes of stack per character, twice the measured value to allow for other compilers.
MAX_STACK = 512 << 20  # Bytes. Only the used part is allocated, and it is freed afterwards.
MAX_RUN = MAX_STACK // FRAME
LONG = 16_384  # Characters. Splitting a longer text makes a concurrent pass noticeably slower.
SHALLOW = 1000  # Characters of a word that fit on every thread's stack.
# Estimated seconds on a slow core: per character; per special token, after each of which the expressions are
# compiled again; and per squared length of a run, for expressions that scan from each character of a run to
# its end.
CHARACTER, _SPECIAL_S, _SQUARE_S = 3e-6, 4e-3, 1.5e-7
PATIENCE = 20.0  # Seconds that a text may take in addition to those for its length.
# Names of `tokenizer.ggml.pre` that llama.cpp 0.3.36 implements as loops (llm_tokenizer_bpe and
# unicode_regex_split_custom). Any other may use expressions.
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
# llama.cpp's white space, which differs from Python's.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORDS = re.compile(f"[^{_SPACE}]+")
_SPACES = re.compile(f"[{_SPACE}]+")
_BREAKS = re.compile(r"[\r\n/]+")  # May follow a word of punctuation.
_LINES = re.compile(r"[^\r\n]+")
_DIGITS = re.compile(r"\d+")
_SQUARES = {"deepseek-llm": _SPACES, "superbpe": _DIGITS}
_WHOLE_LINES = frozenset({"exaone-moe"})  # Letters and spaces form one word.

_starting = threading.Lock()  # The stack size of new threads is a setting of the whole process.


class Cutter:
    """A splitter of texts for one vocabulary that splits by expressions."""

    def __init__(self, pre_tokenizer: str, specials: Callable[[], Iterable[str]]) -> None:
        """Prepare for a vocabulary.

        pre_tokenizer: its name in the model's file. specials: returns the texts of tokens that split a text.
        """
        self._name = pre_tokenizer
        self._specials = specials

    @cached_property
    def _special_texts(self) -> list[str]:
        return [text for text in self._specials() if text]

    @cached_property
    def _special_starts(self) -> frozenset[str]:
        return frozenset(text[0] for text in self._special_texts)

    def depth(self, text: str) -> int:
        """Return an upper bound for the number of characters in a word of `text`."""
        if len(text) <= SHALLOW:
            return len(text)
        words = _LINES if self._name in _WHOLE_LINES else _WORDS
        return max(_longest(words, text) + _longest(_BREAKS, text), _longest(_SPACES, text))

    def seconds(self, text: str, cuts: int = 0) -> float:
        """Estimate the seconds for `text` beyond those for its length.

        cuts: the number of special tokens in addition to those in the text.
        """
        return cuts * _SPECIAL_S + self._extra(text, exact=False)

    def run(self, text: str, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, which splits `text`, on a large enough stack.

        Raises:
            InvalidRequest: there is no such stack, or splitting would take minutes.
        """
        depth = self.depth(text)
        if depth <= SHALLOW:
            return cut(text, work)
        if depth > MAX_RUN:
            raise _too_long(depth, f"can read at most {MAX_RUN}")
        if self._extra(text, exact=True) > PATIENCE:
            raise _too_long(depth, "would need minutes to read them")
        try:
            return _run_in_thread(work, depth * FRAME)
        except (RuntimeError, MemoryError):
            need = (depth * FRAME >> 20) + 1
            raise _too_long(
                depth, f"needs {need} MiB of memory for them, which is not available"
            ) from None

    def _extra(self, text: str, exact: bool) -> float:
        """Estimate the seconds beyond those for the length.

        exact: count special tokens exactly; otherwise every character that may begin one counts.
        """
        cuts = sum(map(text.count, self._special_starts))
        if exact and cuts * _SPECIAL_S > PATIENCE:
            cuts = sum(map(text.count, self._special_texts))
        pattern = _SQUARES.get(self._name)
        squares = sum(len(run) ** 2 for run in pattern.findall(text)) if pattern else 0
        return cuts * _SPECIAL_S + squares * _SQUARE_S


def _longest(pattern: re.Pattern[str], text: str) -> int:
    """Return the length of the longest match."""
    return max((match.end() - match.start() for match in pattern.finditer(text)), default=0)


def _too_long(depth: int, problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"The text contains an unbroken run of {depth} characters, and this model's "
        f"tokenizer {problem}; add spaces or line breaks, or leave it out.",
        param="prompt",
    )


def cut(text: str, work: Callable[[], Result]) -> Result:
    """Return what `work` returns, which splits `text`. A long text runs in a thread of low priority."""
    return work() if len(text) <= LONG else _run_in_thread(work)


def _run_in_thread(work: Callable[[], Result], stack: int = 0) -> Result:
    """Return what `work` returns, in a thread of its own with low priority.

    stack: bytes of stack that the thread needs, which are freed when it ends.

    Raises:
        RuntimeError: the system has no memory for such a thread.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def body() -> None:
        lower_priority()
        try:
            results.append(work())
        except BaseException as error:  # It is raised again in the caller's thread.
            failures.append(error)

    thread = threading.Thread(target=body, name="cutter", daemon=True)
    with _starting:
        # Adds at least a mebibyte for Python's own frames.
        previous_size = threading.stack_size((stack >> 20) + 2 << 20)
        try:
            thread.start()
        finally:
            threading.stack_size(previous_size)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
