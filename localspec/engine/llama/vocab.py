"""A model's vocabulary: convert text to tokens and back, and find special tokens."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import llama_cpp.llama_cpp as C

from localspec.compatibility import Tokenizer
from localspec.errors import InvalidRequest
from localspec.priority import lower_priority

if TYPE_CHECKING:
    from localspec.engine.llama.model import Model


# Split texts into words safely, which llama.cpp does before it looks for tokens.
#
# Most pre-tokenizers are loops, whose cost is linear in the length of the text. The others use `std::regex`
# (src/unicode.cpp, unicode_regex_split_stl), whose matcher recurses for every character of a word. With GCC
# on x86-64 it takes 335 bytes of stack per character, so that 25 000 dashes overflow a stack of 8 MiB and end
# the process. Such texts are processed in a thread with a large enough stack, and texts too long for any
# stack are rejected.

Result = TypeVar("Result")

STACK_BYTES_PER_CHAR = 768  # twice the measured value to allow for other compilers
MAX_STACK = 512 << 20  # Bytes. Only the used part is allocated, and it is freed afterwards.
MAX_RUN = MAX_STACK // STACK_BYTES_PER_CHAR
# Splitting a longer text makes a concurrent pass noticeably slower.
MIN_THREAD_CHARS = 16_384
MAX_SHALLOW_CHARS = 1000  # Characters of a word that fit on every thread's stack.
# Estimated seconds on a slow core: per character; per special token, after each of which the expressions are
# compiled again; and per squared length of a run, for expressions that scan from each character of a run to
# its end.
CHARACTER_S, SPECIAL_S, _SQUARE_S = 3e-6, 4e-3, 1.5e-7
MAX_EXTRA_S = 20.0  # Seconds that a text may take in addition to those for its length.
# Names of `tokenizer.ggml.pre` that llama.cpp 0.3.36 implements as loops (llm_tokenizer_bpe and
# unicode_regex_split_custom). Any other may use expressions.
LOOP_PRE_TOKENIZERS = frozenset(
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


class WordSplitter:
    """A splitter of texts for one vocabulary that splits by expressions.

    name: of its pre-tokenizer, in the model's file. find_specials: returns the texts of tokens that split a
    text.
    """

    def __init__(self, name: str, find_specials: Callable[[], Iterable[str]]) -> None:
        self._name, self._find_specials = name, find_specials

    @cached_property
    def _specials(self) -> list[str]:
        return [text for text in self._find_specials() if text]

    def run(self, text: str, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, which splits `text`, on a large enough stack.

        Raises InvalidRequest if there is no such stack, or splitting would take minutes.
        """
        depth = len(text)  # An upper bound for the number of characters in a word.
        if depth > MAX_SHALLOW_CHARS:
            words = _LINES if self._name in _WHOLE_LINES else _WORDS
            depth = max(_longest(words, text) + _longest(_BREAKS, text), _longest(_SPACES, text))
        if depth <= MAX_SHALLOW_CHARS:
            return cut(text, work)
        if depth > MAX_RUN:
            problem = f"can read at most {MAX_RUN}"
        elif self.estimate_s(text, exact=True) > MAX_EXTRA_S:
            problem = "would need minutes to read them"
        else:
            n_bytes = depth * STACK_BYTES_PER_CHAR
            try:
                return _run_in_thread(work, n_bytes)
            except (RuntimeError, MemoryError):
                n_mib = (n_bytes >> 20) + 1
                problem = f"needs {n_mib} MiB of memory for them, which is not available"
        raise InvalidRequest(
            f"The text contains an unbroken run of {depth} characters, and this model's "
            f"tokenizer {problem}; add spaces or line breaks, or leave it out.",
            param="prompt",
        )

    def estimate_s(self, text: str, *, exact: bool = False) -> float:
        """Estimate the seconds for `text` beyond those for its length.

        exact: count special tokens exactly; otherwise every character that may begin one counts.
        """
        cuts = sum(map(text.count, {special[0] for special in self._specials}))
        if exact and cuts * SPECIAL_S > MAX_EXTRA_S:
            cuts = sum(map(text.count, self._specials))
        pattern = _SQUARES.get(self._name)
        squares = sum(len(run) ** 2 for run in pattern.findall(text)) if pattern else 0
        return cuts * SPECIAL_S + squares * _SQUARE_S


def _longest(pattern: re.Pattern[str], text: str) -> int:
    return max((match.end() - match.start() for match in pattern.finditer(text)), default=0)


def cut(text: str, work: Callable[[], Result]) -> Result:
    """Return what `work` returns, which splits `text`. A long text runs in a thread of low priority."""
    return work() if len(text) <= MIN_THREAD_CHARS else _run_in_thread(work)


def _run_in_thread(work: Callable[[], Result], stack: int = 0) -> Result:
    """Return what `work` returns, in a thread of its own with low priority and `stack` bytes of stack.

    Raises RuntimeError if the system has no memory for such a thread.
    """
    future = Future[Result]()

    def body() -> None:
        lower_priority()
        try:
            future.set_result(work())
        except BaseException as error:  # It is raised again in the caller's thread.
            future.set_exception(error)

    thread = threading.Thread(target=body, name="cutter", daemon=True)
    with _starting:
        # Adds at least a mebibyte for Python's own frames.
        previous_size = threading.stack_size((stack >> 20) + 2 << 20)
        try:
            thread.start()
        finally:
            threading.stack_size(previous_size)
    thread.join()  # Its stack is freed then.
    return future.result()


# The type of llama_tokenize: vocabulary, text, bytes, tokens, capacity, add_special, parse_special.
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_TOKENIZE = ctypes.CFUNCTYPE(
    _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, ctypes.c_bool, ctypes.c_bool
)

# A shorter text is tokenized without an estimate of its length first.
MIN_ESTIMATED_CHARS = 4096
# Bytes of a text forced by a grammar that are tokenized. No draft is as long.
MAX_FORCED_BYTES = 512

_CONTROL, _USER_DEFINED = C.LLAMA_TOKEN_ATTR_CONTROL, C.LLAMA_TOKEN_ATTR_USER_DEFINED
_LSTRIP, _RSTRIP = C.LLAMA_TOKEN_ATTR_LSTRIP, C.LLAMA_TOKEN_ATTR_RSTRIP
_KINDS = {
    getattr(C, f"LLAMA_VOCAB_TYPE_{kind.upper()}"): kind
    for kind in ("spm", "bpe", "wpm", "ugm", "rwkv", "plamo2")
}


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Fill-in-the-middle token ids; -1 where the model has none."""

    prefix: int
    suffix: int
    middle: int
    repo: int
    separator: int


@dataclass(frozen=True, slots=True)
class MarkedToken:
    """A token that llama.cpp finds in a text by its spelling.

    user_defined: it is also found where control tokens are not. strips_left, strips_right: it includes the
    white space before or after it.
    """

    id: int
    text: str
    user_defined: bool
    strips_left: bool
    strips_right: bool


class Vocab:
    """The vocabulary of one model. Pieces are bytes, because a token may hold part of a character."""

    def __init__(self, model: Model) -> None:
        self._model = model  # Keeps the C model alive as long as its vocabulary is used.
        self.handle = handle = C.llama_model_get_vocab(model.handle)
        self.size = int(C.llama_vocab_n_tokens(handle))
        self.kind = int(C.llama_vocab_type(handle))
        self.bos, self.eos = int(C.llama_vocab_bos(handle)), int(C.llama_vocab_eos(handle))
        self.mask = int(C.llama_vocab_mask(handle))  # -1 if there is none
        self.sep = int(C.llama_vocab_sep(handle))  # Separates two texts; -1 if there is none.
        turn = int(C.llama_vocab_eot(handle))
        # The end of a turn or, without such a token, of the text.
        self.end = turn if turn >= 0 else self.eos
        self.add_bos = bool(C.llama_vocab_get_add_bos(handle))
        self.add_eos = bool(C.llama_vocab_get_add_eos(handle))
        self.add_sep = bool(C.llama_vocab_get_add_sep(handle))
        fim = (getattr(C, f"llama_vocab_fim_{name}") for name in "pre suf mid rep sep".split())
        self.fim = FimTokens(*(int(get(handle)) for get in fim))
        # Only some vocabularies of this kind are split by expressions.
        name = model.metadata("tokenizer.ggml.pre") or ""
        by_expressions = self.kind == C.LLAMA_VOCAB_TYPE_BPE and name not in LOOP_PRE_TOKENIZERS
        self._cutter = WordSplitter(name, self._find_splitting) if by_expressions else None
        self._callback: Any = None  # The C callback with which llguidance tokenizes.
        self._pieces: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}

    def check(self, token: int, param: str | None = None) -> int:
        """Return `token` if the vocabulary has it. param: the request field that names it.

        Raises InvalidRequest if the token is out of range, for which llama.cpp would end the process.
        """
        if not 0 <= token < self.size:
            outside = f"outside the vocabulary (0…{self.size - 1})"
            raise InvalidRequest(f"Token id {token} is {outside}.", param=param)
        return token

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of `text`, with BOS and EOS if `add_special` is set and the model adds them.

        Raises InvalidRequest if the text has a lone surrogate, is too long for llama.cpp, or has a run of
        characters that its expressions cannot split.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"The text is not valid Unicode: {error.reason}.") from error
        if len(raw) > 1 << 30:
            raise InvalidRequest("The text is longer than 1 GiB.")
        buffer = (C.llama_token * (len(raw) + 8))()

        def fill() -> int:
            given = raw, len(raw), buffer, len(buffer), add_special, parse_special
            return int(C.llama_tokenize(self.handle, *given))

        count = self._cut(text, fill)
        if count < 0:  # The buffer was too small; -count is the necessary size.
            buffer = (C.llama_token * -count)()
            count = self._cut(text, fill)
            if count < 0:
                raise InvalidRequest("The text could not be tokenized.")
        return buffer[:count]

    def _cut(self, text: str, work: Callable[[], Result]) -> Result:
        return cut(text, work) if self._cutter is None else self._cutter.run(text, work)

    def estimate_s(self, text: str, cuts: int = 0) -> float:
        """Estimate the seconds that tokenizing `text` takes.

        cuts: the number of special tokens in addition to those in the text.
        """
        seconds = len(text) * CHARACTER_S
        if self._cutter is not None:
            seconds += cuts * SPECIAL_S + self._cutter.estimate_s(text)
        return seconds

    @cached_property
    def covers_all_text(self) -> bool:
        """Whether the vocabulary has tokens for any text.

        llama.cpp ends the process if a SentencePiece vocabulary has neither a character nor its bytes. A
        vocabulary with byte tokens has them among its first tokens.
        """
        if self.kind != C.LLAMA_VOCAB_TYPE_SPM:
            return True
        return any(self.text(token) == "<0x0A>" for token in range(self.size))

    def tokenize_piece(self, raw: bytes) -> list[int]:
        """Return the tokens of at most some hundred bytes, which may begin or end within a character."""
        buffer = (C.llama_token * (len(raw) + 8))()
        count = C.llama_tokenize(self.handle, raw, len(raw), buffer, len(buffer), False, False)
        return buffer[: max(count, 0)]

    def min_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens of `text`, without tokenizing it.

        The bound follows from the longest token, if every byte of a text is in some token. It is 0 for a
        short text.
        """
        if len(text) < MIN_ESTIMATED_CHARS or not self._longest:
            return 0
        return len(text.encode("utf-8", "replace")) // self._longest

    @cached_property
    def _longest(self) -> int:
        """The bytes of the longest token, or 0 if bytes of a text may be in none of its tokens."""
        if any(flags & (_LSTRIP | _RSTRIP) for flags in self._attributes):
            return 0
        pieces = [self.piece(token, special=True) for token in range(self.size)]
        has_all_bytes = len({piece for piece in pieces if len(piece) == 1}) == 256
        is_lossless = self.kind == C.LLAMA_VOCAB_TYPE_SPM or (
            self.kind == C.LLAMA_VOCAB_TYPE_BPE and has_all_bytes
        )
        return max(map(len, pieces)) if is_lossless else 0

    @cached_property
    def _attributes(self) -> list[int]:
        return [int(C.llama_vocab_get_attr(self.handle, token)) for token in range(self.size)]

    def _find_splitting(self) -> list[str]:
        """Return the texts that are always one token each, whatever the text around them."""
        return [
            self.text(token)
            for token, flags in enumerate(self._attributes)
            if flags & (_CONTROL | _USER_DEFINED)
        ]

    def marked_tokens(self) -> list[MarkedToken]:
        """Return the tokens that llama.cpp looks for before it splits a text into words.

        These are control tokens, user-defined tokens and unknown tokens.
        """
        marks = _CONTROL | _USER_DEFINED | C.LLAMA_TOKEN_ATTR_UNKNOWN
        return [
            MarkedToken(
                token,
                self.text(token),
                *(bool(flags & flag) for flag in (_USER_DEFINED, _LSTRIP, _RSTRIP)),
            )
            for token, flags in enumerate(self._attributes)
            if flags & marks
        ]

    @property
    def adds_space(self) -> bool:
        """Whether the tokenizer may add a space at the beginning of a text (SentencePiece)."""
        return bool(self.kind == C.LLAMA_VOCAB_TYPE_SPM)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of one token, which are empty for control tokens unless `special` is set."""
        key = token * 2 + special
        if (known := self._pieces.get(key)) is None:
            self.check(token)
            buffer = ctypes.create_string_buffer(64)

            def write(buffer: Any, size: int) -> int:
                return int(C.llama_token_to_piece(self.handle, token, buffer, size, 0, special))

            known = self._pieces[key] = _read_bytes(write, buffer)
        return known

    def is_eog(self, token: int) -> bool:
        """Return whether a token ends a generation."""
        if (known := self._eog.get(token)) is None:
            known = self._eog[token] = bool(C.llama_vocab_is_eog(self.handle, self.check(token)))
        return known

    def is_control(self, token: int) -> bool:
        """Return whether a token is a control token, which stands for structure instead of text."""
        return bool(self._attributes[self.check(token)] & _CONTROL)

    @cached_property
    def words(self) -> list[bytes]:
        """The bytes of each token as it reads at the start of a text, including control tokens.

        Takes about 2 µs per token, once. Unlike a piece, a word has no space that the tokenizer added.
        """
        buffer = ctypes.create_string_buffer(256)

        def read(token: Any) -> bytes:
            write = C.llama_detokenize
            return _read_bytes(
                lambda target, size: int(write(self.handle, token, 1, target, size, False, True)),
                buffer,
            )

        return [read(C.llama_token(token)) for token in range(self.size)]

    @cached_property
    def suppressed(self) -> list[int]:
        """The tokens that must never be generated, by the model's file (`suppress_tokens`)."""
        count = ctypes.c_int32()
        tokens = C.llama_vocab_get_suppress_tokens(self.handle, ctypes.byref(count))
        return list(tokens[: count.value]) if tokens and count.value else []

    @cached_property
    def ends(self) -> list[int]:
        return [token for token in range(self.size) if self.is_eog(token)]

    @cached_property
    def special_tokens(self) -> list[int]:
        """The tokens that no text of an answer matches: control tokens, and user-defined ones in brackets."""

        def in_brackets(token: int) -> bool:
            piece = self.piece(token, special=True)
            return piece[:1] + piece[-1:] == b"<>"

        return [
            token
            for token, flags in enumerate(self._attributes)
            if flags & _CONTROL or (flags & _USER_DEFINED and in_brackets(token))
        ]

    @cached_property
    def bracketed(self) -> dict[str, int]:
        """The tokens whose text is in angle brackets and is always tokenized as that token."""
        tokens: dict[str, int] = {}
        for token in range(self.size):
            piece = self.piece(token, special=True)
            if piece[:1] != b"<" or piece.find(b">") != len(piece) - 1:
                continue
            text = piece.decode("utf-8", "replace")
            if self.tokenize(text, add_special=False, parse_special=True) == [token]:
                tokens[text] = token
        return tokens

    @cached_property
    def without_text(self) -> frozenset[int]:
        """The tokens without any text, not even that of a marker."""
        pieces = (self.piece(token, special=True) for token in range(self.size))
        return frozenset(t for t, piece in enumerate(pieces) if piece[:1] in (b"", b"\0"))

    def guidance_tokenizer(self) -> Any:
        """Return llguidance's view of this vocabulary (an LLTokenizer). Takes about 10 µs per token.

        Special tokens are marked with 0xff, as llguidance expects, so that text never matches them.
        """
        from llguidance import LLTokenizer

        special = set(self.special_tokens)
        pieces = [
            (b"\xff" if token in special else b"") + self.piece(token, special=True)
            for token in range(self.size)
        ]
        self._callback = self._callback or _TOKENIZE(self._tokenize_for_c)
        function = ctypes.cast(self._callback, ctypes.c_void_p).value
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined] # its stubs lack it
            tokens=pieces,
            vocab_ptr=self.handle,
            tokenize_fptr=function,
            eos_token=self.ends or self.eos,
            slices=None,
        )

    def _tokenize_for_c(
        self, _handle: Any, raw: int, size: int, tokens: int, capacity: int, *options: bool
    ) -> int:
        """Tokenize for llguidance, which does so at every token of an answer for all forced text.

        The forced text may be as long as a grammar, so only its beginning is tokenized, up to the end of a
        character.
        """
        if size > MAX_FORCED_BYTES:
            size, head = MAX_FORCED_BYTES, ctypes.string_at(raw, MAX_FORCED_BYTES + 1)
            while size > MAX_FORCED_BYTES - 3 and head[size] & 0xC0 == 0x80:
                size -= 1
        text = ctypes.cast(raw, ctypes.c_char_p)
        buffer = ctypes.cast(tokens, ctypes.POINTER(C.llama_token))
        return int(C.llama_tokenize(self.handle, text, size, buffer, capacity, *options))

    def text(self, token: int) -> str:
        """Return a token's text in the vocabulary, for templates (`<|im_end|>`), or "" if out of range."""
        return self._text(token).decode("utf-8", "replace") if 0 <= token < self.size else ""

    def _text(self, token: int) -> bytes:
        return C.llama_vocab_get_text(self.handle, token) or b""

    def tokenizer(self) -> Tokenizer:
        """Return what decides whether two vocabularies are compatible. Takes about 0.5 µs per token."""
        return Tokenizer(
            kind=_KINDS.get(self.kind, str(self.kind)),
            texts=[self._text(token) for token in range(self.size)],
            bos=self.bos,
            eos=self.eos,
            add_bos=self.add_bos,
            add_eos=self.add_eos,
        )


def _read_bytes(write: Callable[[Any, int], int], buffer: Any) -> bytes:
    """Return what a function of llama.cpp writes: at most a buffer's size, or else it returns −size."""
    count = write(buffer, len(buffer))
    if count < 0:
        buffer = ctypes.create_string_buffer(-count)
        count = write(buffer, -count)
    return bytes(buffer.raw[: max(count, 0)])


def check_tokens(vocab: Vocab, tokens: Sequence[int], param: str) -> None:
    """Raise InvalidRequest if a token is outside the vocabulary."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        vocab.check(token, param)
