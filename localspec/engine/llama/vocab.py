"""A model's vocabulary: convert text to tokens and back, and find special tokens."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import llama_cpp.llama_cpp as C

from localspec.compatibility import Tokenizer
from localspec.errors import InvalidRequest
from localspec.priority import lower_priority

if TYPE_CHECKING:
    from localspec.engine.llama.model import Model


# ------------------------------------------------------------------------ words
# Split texts into words safely, which llama.cpp does before it looks for tokens.
#
# Most pre-tokenizers are loops, whose cost is linear in the length of the text. The others use `std::regex`
# (src/unicode.cpp, unicode_regex_split_stl), whose matcher recurses for every character of a word. With GCC
# on
# x86-64 it takes 335 bytes of stack per character, so that 25 000 dashes overflow a stack of 8 MiB and end
# the process. Such texts are processed in a thread with a large enough stack, and texts too long for any
# stack
# are rejected.


Result = TypeVar("Result")

STACK_BYTES_PER_CHAR = (
    768  # Bytes of stack per character, twice the measured value to allow for other compilers.
)
MAX_STACK = 512 << 20  # Bytes. Only the used part is allocated, and it is freed afterwards.
MAX_RUN = MAX_STACK // STACK_BYTES_PER_CHAR
MIN_THREAD_CHARS = (
    16_384  # Characters. Splitting a longer text makes a concurrent pass noticeably slower.
)
MAX_SHALLOW_CHARS = 1000  # Characters of a word that fit on every thread's stack.
# Estimated seconds on a slow core: per character; per special token, after each of which the expressions are
# compiled again; and per squared length of a run, for expressions that scan from each character of a run to
# its end.
CHARACTER_S, _SPECIAL_S, _SQUARE_S = 3e-6, 4e-3, 1.5e-7
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
        if len(text) <= MAX_SHALLOW_CHARS:
            return len(text)
        words = _LINES if self._name in _WHOLE_LINES else _WORDS
        return max(_longest(words, text) + _longest(_BREAKS, text), _longest(_SPACES, text))

    def estimate_s(self, text: str, cuts: int = 0) -> float:
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
        if depth <= MAX_SHALLOW_CHARS:
            return cut(text, work)
        if depth > MAX_RUN:
            raise _too_long(depth, f"can read at most {MAX_RUN}")
        if self._extra(text, exact=True) > MAX_EXTRA_S:
            raise _too_long(depth, "would need minutes to read them")
        try:
            return _run_in_thread(work, depth * STACK_BYTES_PER_CHAR)
        except (RuntimeError, MemoryError):
            need = (depth * STACK_BYTES_PER_CHAR >> 20) + 1
            raise _too_long(
                depth, f"needs {need} MiB of memory for them, which is not available"
            ) from None

    def _extra(self, text: str, exact: bool) -> float:
        """Estimate the seconds beyond those for the length.

        exact: count special tokens exactly; otherwise every character that may begin one counts.
        """
        cuts = sum(map(text.count, self._special_starts))
        if exact and cuts * _SPECIAL_S > MAX_EXTRA_S:
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
    return work() if len(text) <= MIN_THREAD_CHARS else _run_in_thread(work)


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


# ------------------------------------------------------------------------ vocab


# The type of llama_tokenize: vocabulary, text, bytes, tokens, capacity, add_special, parse_special.
_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_bool,
    ctypes.c_bool,
)

MIN_ESTIMATED_CHARS = (
    4096  # Characters; a shorter text is tokenized without an estimate of its length first.
)
# Bytes of a text forced by a grammar that are tokenized. No draft is as long.
MAX_FORCED_BYTES = 512
_LOSSLESS = (C.LLAMA_VOCAB_TYPE_SPM, C.LLAMA_VOCAB_TYPE_BPE)


_KINDS = {
    C.LLAMA_VOCAB_TYPE_SPM: "spm",
    C.LLAMA_VOCAB_TYPE_BPE: "bpe",
    C.LLAMA_VOCAB_TYPE_WPM: "wpm",
    C.LLAMA_VOCAB_TYPE_UGM: "ugm",
    C.LLAMA_VOCAB_TYPE_RWKV: "rwkv",
    C.LLAMA_VOCAB_TYPE_PLAMO2: "plamo2",
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
        self._handle = C.llama_model_get_vocab(model.handle)
        self.size = int(C.llama_vocab_n_tokens(self._handle))
        self.kind = int(C.llama_vocab_type(self._handle))
        self.bos = int(C.llama_vocab_bos(self._handle))
        self.mask = int(C.llama_vocab_mask(self._handle))  # -1 if there is none
        self.eos = int(C.llama_vocab_eos(self._handle))
        turn = int(C.llama_vocab_eot(self._handle))
        # The end of a turn or, without such a token, of the text.
        self.end = turn if turn >= 0 else self.eos
        self.add_bos = bool(C.llama_vocab_get_add_bos(self._handle))
        self.add_eos = bool(C.llama_vocab_get_add_eos(self._handle))
        self.sep = int(C.llama_vocab_sep(self._handle))  # Separates two texts; -1 if there is none.
        self.add_sep = bool(C.llama_vocab_get_add_sep(self._handle))
        self.fim = FimTokens(
            prefix=int(C.llama_vocab_fim_pre(self._handle)),
            suffix=int(C.llama_vocab_fim_suf(self._handle)),
            middle=int(C.llama_vocab_fim_mid(self._handle)),
            repo=int(C.llama_vocab_fim_rep(self._handle)),
            separator=int(C.llama_vocab_fim_sep(self._handle)),
        )
        # Only some vocabularies of this kind are split by expressions.
        pre_tokenizer = model.metadata("tokenizer.ggml.pre") or ""
        by_expressions = (
            self.kind == C.LLAMA_VOCAB_TYPE_BPE and pre_tokenizer not in LOOP_PRE_TOKENIZERS
        )
        self._cutter = WordSplitter(pre_tokenizer, self._specials) if by_expressions else None
        self._callback: Any = None  # The C callback with which llguidance tokenizes.
        self._pieces: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}
        self._control: dict[int, bool] = {}

    @property
    def handle(self) -> Any:
        """The pointer to llama.cpp's vocabulary."""
        return self._handle

    def check(self, token: int, param: str | None = None) -> int:
        """Return `token` if the vocabulary has it. param: the request field that names it.

        Raises:
            InvalidRequest: the token is out of range, for which llama.cpp would end the process.
        """
        if not 0 <= token < self.size:
            raise InvalidRequest(
                f"Token id {token} is outside the vocabulary (0…{self.size - 1}).", param=param
            )
        return token

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of `text`, with BOS and EOS if `add_special` is set and the model adds them.

        Raises:
            InvalidRequest: the text has a lone surrogate, is too long for llama.cpp, or has a run of
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
            return int(
                C.llama_tokenize(
                    self._handle, raw, len(raw), buffer, len(buffer), add_special, parse_special
                )
            )

        count = self._cut(text, fill)
        if count < 0:  # The buffer was too small; -count is the necessary size.
            buffer = (C.llama_token * -count)()
            count = self._cut(text, fill)
            if count < 0:
                raise InvalidRequest("The text could not be tokenized.")
        return buffer[:count]

    def _cut(self, text: str, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, which splits `text` into words. Raises InvalidRequest."""
        return cut(text, work) if self._cutter is None else self._cutter.run(text, work)

    def estimate_s(self, text: str, cuts: int = 0) -> float:
        """Estimate the seconds that tokenizing `text` takes.

        cuts: the number of special tokens in addition to those in the text.
        """
        extra_s = 0.0 if self._cutter is None else self._cutter.estimate_s(text, cuts)
        return len(text) * CHARACTER_S + extra_s

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
        count = C.llama_tokenize(self._handle, raw, len(raw), buffer, len(buffer), False, False)
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
        strips = C.LLAMA_TOKEN_ATTR_LSTRIP | C.LLAMA_TOKEN_ATTR_RSTRIP
        attributes = (int(C.llama_vocab_get_attr(self._handle, t)) for t in range(self.size))
        if self.kind not in _LOSSLESS or any(flags & strips for flags in attributes):
            return 0
        pieces = [self.piece(token, special=True) for token in range(self.size)]
        single = {piece for piece in pieces if len(piece) == 1}
        lossless = self.kind == C.LLAMA_VOCAB_TYPE_SPM or len(single) == 256
        return max(map(len, pieces)) if lossless else 0

    def _specials(self) -> list[str]:
        """Return the texts that are always one token each, whatever the text around them."""
        splitting = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_USER_DEFINED
        return [self.text(token) for token, flags in self._attributes() if flags & splitting]

    def _attributes(self) -> Iterator[tuple[int, int]]:
        attributes = map(partial(C.llama_vocab_get_attr, self._handle), range(self.size))
        yield from ((token, int(flags)) for token, flags in enumerate(attributes))

    def marked_tokens(self) -> list[MarkedToken]:
        """Return the tokens that llama.cpp looks for before it splits a text into words.

        These are control tokens, user-defined tokens and unknown tokens.
        """
        tokens = []
        for token, flags in self._attributes():
            user_defined = bool(flags & C.LLAMA_TOKEN_ATTR_USER_DEFINED)
            if user_defined or flags & (C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN):
                strips_left = bool(flags & C.LLAMA_TOKEN_ATTR_LSTRIP)
                strips_right = bool(flags & C.LLAMA_TOKEN_ATTR_RSTRIP)
                text = self.text(token)
                tokens.append(MarkedToken(token, text, user_defined, strips_left, strips_right))
        return tokens

    @property
    def adds_space(self) -> bool:
        """Whether the tokenizer may add a space at the beginning of a text (SentencePiece)."""
        return bool(self.kind == C.LLAMA_VOCAB_TYPE_SPM)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of one token, which are empty for control tokens unless `special` is set."""
        key = token * 2 + special
        known = self._pieces.get(key)
        if known is not None:
            return known
        self.check(token)
        size = 64
        buffer = ctypes.create_string_buffer(size)
        count = int(C.llama_token_to_piece(self._handle, token, buffer, size, 0, special))
        if count < 0:
            size = -count
            buffer = ctypes.create_string_buffer(size)
            count = int(C.llama_token_to_piece(self._handle, token, buffer, size, 0, special))
        piece = buffer.raw[: max(count, 0)]
        self._pieces[key] = piece
        return piece

    def is_eog(self, token: int) -> bool:
        """Return whether a token ends a generation."""
        known = self._eog.get(token)
        if known is None:
            known = bool(C.llama_vocab_is_eog(self._handle, self.check(token)))
            self._eog[token] = known
        return known

    def is_control(self, token: int) -> bool:
        """Return whether a token is a control token, which stands for structure instead of text."""
        known = self._control.get(token)
        if known is None:
            attributes = int(C.llama_vocab_get_attr(self._handle, self.check(token)))
            known = bool(attributes & C.LLAMA_TOKEN_ATTR_CONTROL)
            self._control[token] = known
        return known

    @cached_property
    def words(self) -> list[bytes]:
        """The bytes of each token as it reads at the start of a text, including control tokens.

        Takes about 2 µs per token, once. Unlike a piece, a word has no space that the tokenizer added.
        """
        buffer = ctypes.create_string_buffer(256)
        words = []
        for token in range(self.size):
            pointer = C.llama_token(token)
            count = int(
                C.llama_detokenize(self._handle, pointer, 1, buffer, len(buffer), False, True)
            )
            if count < 0:
                buffer = ctypes.create_string_buffer(-count)
                count = int(
                    C.llama_detokenize(self._handle, pointer, 1, buffer, -count, False, True)
                )
            words.append(buffer.raw[: max(count, 0)])
        return words

    @cached_property
    def suppressed(self) -> list[int]:
        """The tokens that must never be generated, by the model's file (`suppress_tokens`)."""
        count = ctypes.c_int32()
        tokens = C.llama_vocab_get_suppress_tokens(self._handle, ctypes.byref(count))
        return list(tokens[: count.value]) if tokens and count.value else []

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a generation."""
        return [token for token in range(self.size) if self.is_eog(token)]

    @cached_property
    def special_tokens(self) -> list[int]:
        """The tokens that no text of an answer matches: control tokens, and user-defined ones in brackets."""
        special = []
        for token in range(self.size):
            attributes = int(C.llama_vocab_get_attr(self._handle, token))
            if attributes & C.LLAMA_TOKEN_ATTR_CONTROL:
                special.append(token)
            elif attributes & C.LLAMA_TOKEN_ATTR_USER_DEFINED:
                piece = self.piece(token, special=True)
                if piece[:1] + piece[-1:] == b"<>":
                    special.append(token)
        return special

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
        return frozenset(
            token
            for token in range(self.size)
            if self.piece(token, special=True)[:1] in (b"", b"\0")
        )

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
            vocab_ptr=self._handle,
            tokenize_fptr=function,
            eos_token=self.ends or self.eos,
            slices=None,
        )

    def _tokenize_for_c(
        self,
        _handle: Any,
        raw: int,
        size: int,
        tokens: int,
        capacity: int,
        add_special: bool,
        parse_special: bool,
    ) -> int:
        """Tokenize for llguidance, which does so at every token of an answer for all forced text.

        The forced text may be as long as a grammar, so only its beginning is tokenized, up to the end of a
        character.
        """
        if size > MAX_FORCED_BYTES:
            size, head = MAX_FORCED_BYTES, ctypes.string_at(raw, MAX_FORCED_BYTES + 1)
            while size > MAX_FORCED_BYTES - 3 and head[size] & 0xC0 == 0x80:
                size -= 1
        return int(
            C.llama_tokenize(
                self._handle,
                ctypes.cast(raw, ctypes.c_char_p),
                size,
                ctypes.cast(tokens, ctypes.POINTER(C.llama_token)),
                capacity,
                add_special,
                parse_special,
            )
        )

    def text(self, token: int) -> str:
        """Return a token's text in the vocabulary, for templates (`<|im_end|>`), or "" if out of range."""
        return self._text(token).decode("utf-8", "replace") if 0 <= token < self.size else ""

    def _text(self, token: int) -> bytes:
        return C.llama_vocab_get_text(self._handle, token) or b""

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


def check_tokens(vocab: Vocab, tokens: Sequence[int], param: str) -> None:
    """Raise InvalidRequest if a token is outside the vocabulary."""
    for token in tokens:
        vocab.check(token, param)
