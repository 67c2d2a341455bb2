"""Text to tokens and back, and the tokens that mean something."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C

from localspec.compatibility import Tokenizer
from localspec.engine.llama.words import CHARACTER, LOOPS, Cutter, Result, cut
from localspec.errors import InvalidRequest

if TYPE_CHECKING:
    from localspec.engine.llama.model import Model

# llama_tokenize's own type: vocabulary, text, bytes, tokens, capacity, add_special, parse_special
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

FEW = 4096  # characters that are read before they are weighed
FORCED = 512  # bytes of what a grammar forces that are cut into tokens: no draft is as long
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
    """A token that is found in a text as it is spelled. user_defined: also where control tokens are not
    looked for. It may swallow the white space before it (`strips_left`) and behind it."""

    id: int
    text: str
    user_defined: bool
    strips_left: bool
    strips_right: bool


class Vocab:
    """Text ↔ tokens of one model. Pieces are bytes: a token may hold half a UTF-8 character."""

    def __init__(self, model: Model) -> None:
        self._model = model  # keeps the C model alive as long as its vocabulary is used
        self._handle = C.llama_model_get_vocab(model.handle)
        self.size = int(C.llama_vocab_n_tokens(self._handle))
        self.kind = int(C.llama_vocab_type(self._handle))
        self.bos = int(C.llama_vocab_bos(self._handle))
        self.eos = int(C.llama_vocab_eos(self._handle))
        turn = int(C.llama_vocab_eot(self._handle))
        self.end = turn if turn >= 0 else self.eos  # of a turn, or else of the text
        self.add_bos = bool(C.llama_vocab_get_add_bos(self._handle))
        self.add_eos = bool(C.llama_vocab_get_add_eos(self._handle))
        self.sep = int(C.llama_vocab_sep(self._handle))  # between two texts; -1 where there is none
        self.add_sep = bool(C.llama_vocab_get_add_sep(self._handle))
        self.fim = FimTokens(
            prefix=int(C.llama_vocab_fim_pre(self._handle)),
            suffix=int(C.llama_vocab_fim_suf(self._handle)),
            middle=int(C.llama_vocab_fim_mid(self._handle)),
            repo=int(C.llama_vocab_fim_rep(self._handle)),
            separator=int(C.llama_vocab_fim_sep(self._handle)),
        )
        # only vocabularies of this kind are cut by expressions, and of them only some
        pre_tokenizer = model.metadata("tokenizer.ggml.pre") or ""
        by_expressions = self.kind == C.LLAMA_VOCAB_TYPE_BPE and pre_tokenizer not in LOOPS
        self._cutter = Cutter(pre_tokenizer, self._specials) if by_expressions else None
        self._callback: Any = None  # llguidance's way to `tokenize`
        self._pieces: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}
        self._control: dict[int, bool] = {}

    @property
    def handle(self) -> Any:
        return self._handle

    def check(self, token: int, param: str | None = None) -> int:
        """`token` if the vocabulary has it; `param`: the field of a request that names it.

        Raises:
            InvalidRequest: out of range (llama.cpp would abort the process).
        """
        if not 0 <= token < self.size:
            raise InvalidRequest(
                f"Token id {token} is outside the vocabulary (0…{self.size - 1}).", param=param
            )
        return token

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokens of `text`; BOS and EOS only with `add_special` and the model's own flags.

        Raises:
            InvalidRequest: a lone surrogate, more text than llama.cpp can count, or a run of
                characters that its expressions cannot read.
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
        if count < 0:  # the buffer was too small; -count is what it takes
            buffer = (C.llama_token * -count)()
            count = self._cut(text, fill)
            if count < 0:
                raise InvalidRequest("The text could not be tokenized.")
        return buffer[:count]

    def _cut(self, text: str, work: Callable[[], Result]) -> Result:
        """`work`, which cuts `text` into words. Raises InvalidRequest where that cannot be done."""
        return cut(text, work) if self._cutter is None else self._cutter.run(text, work)

    def seconds(self, text: str, cuts: int = 0) -> float:
        """What tokenizing `text` may take; `cuts`: special tokens beside those in it."""
        apart = 0.0 if self._cutter is None else self._cutter.seconds(text, cuts)
        return len(text) * CHARACTER + apart

    @cached_property
    def reads_all(self) -> bool:
        """Has it tokens for any text? llama.cpp ends the process where SentencePiece's has neither a
        character nor its bytes; those that have bytes have them among the first tokens.
        """
        if self.kind != C.LLAMA_VOCAB_TYPE_SPM:
            return True
        return any(self.text(token) == "<0x0A>" for token in range(self.size))

    def tokenize_piece(self, raw: bytes) -> list[int]:
        """Tokens of at most some hundred bytes, which may begin or end within a character."""
        buffer = (C.llama_token * (len(raw) + 8))()
        count = C.llama_tokenize(self._handle, raw, len(raw), buffer, len(buffer), False, False)
        return buffer[: max(count, 0)]

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has, known without reading it; 0 for a short one.

        No token stands for more bytes than the longest one, where every byte stands in some token.
        """
        if len(text) < FEW or not self._longest:
            return 0
        return len(text.encode("utf-8", "replace")) // self._longest

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token; 0 where a text's bytes may be lost between its tokens."""
        strips = C.LLAMA_TOKEN_ATTR_LSTRIP | C.LLAMA_TOKEN_ATTR_RSTRIP
        attributes = (int(C.llama_vocab_get_attr(self._handle, t)) for t in range(self.size))
        if self.kind not in _LOSSLESS or any(each & strips for each in attributes):
            return 0
        pieces = [self.piece(token, special=True) for token in range(self.size)]
        single = {piece for piece in pieces if len(piece) == 1}
        lossless = self.kind == C.LLAMA_VOCAB_TYPE_SPM or len(single) == 256
        return max(map(len, pieces)) if lossless else 0

    def _specials(self) -> list[str]:
        """The texts that are one token each, whatever stands around them."""
        cutting = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_USER_DEFINED
        return [self.text(token) for token, each in self._attributes() if each & cutting]

    def _attributes(self) -> Iterator[tuple[int, int]]:
        attributes = map(partial(C.llama_vocab_get_attr, self._handle), range(self.size))
        yield from ((token, int(each)) for token, each in enumerate(attributes))

    def marked_tokens(self) -> list[MarkedToken]:
        """Return the tokens that llama.cpp looks for before it cuts a text into words: control tokens,
        user-defined ones and those for what is unknown."""
        found = []
        for token, each in self._attributes():
            defined = bool(each & C.LLAMA_TOKEN_ATTR_USER_DEFINED)
            if defined or each & (C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN):
                left = bool(each & C.LLAMA_TOKEN_ATTR_LSTRIP)
                right = bool(each & C.LLAMA_TOKEN_ATTR_RSTRIP)
                found.append(MarkedToken(token, self.text(token), defined, left, right))
        return found

    @property
    def adds_space(self) -> bool:
        """Whether its kind may put a space before what a text begins with (SentencePiece)."""
        return bool(self.kind == C.LLAMA_VOCAB_TYPE_SPM)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Raw bytes of one token; control tokens are empty unless `special`."""
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
        """Does this token end a generation?"""
        known = self._eog.get(token)
        if known is None:
            known = bool(C.llama_vocab_is_eog(self._handle, self.check(token)))
            self._eog[token] = known
        return known

    def is_control(self, token: int) -> bool:
        """Does it stand for no text, but say what the text around it is?"""
        known = self._control.get(token)
        if known is None:
            attributes = int(C.llama_vocab_get_attr(self._handle, self.check(token)))
            known = bool(attributes & C.LLAMA_TOKEN_ATTR_CONTROL)
            self._control[token] = known
        return known

    @cached_property
    def words(self) -> list[bytes]:
        """Each token as it reads alone at the start of a text; control tokens too.

        About 2 µs per token, once. Unlike its piece, a word has no space that a tokenizer added.
        """
        buffer = ctypes.create_string_buffer(256)
        words = []
        for token in range(self.size):
            one = C.llama_token(token)
            count = int(C.llama_detokenize(self._handle, one, 1, buffer, len(buffer), False, True))
            if count < 0:
                buffer = ctypes.create_string_buffer(-count)
                count = int(C.llama_detokenize(self._handle, one, 1, buffer, -count, False, True))
            words.append(buffer.raw[: max(count, 0)])
        return words

    @cached_property
    def suppressed(self) -> list[int]:
        """Tokens that the model's file says are never to be generated (`suppress_tokens`)."""
        count = ctypes.c_int32()
        found = C.llama_vocab_get_suppress_tokens(self._handle, ctypes.byref(count))
        return list(found[: count.value]) if found and count.value else []

    @cached_property
    def ends(self) -> list[int]:
        """Every token that ends a generation."""
        return [token for token in range(self.size) if self.is_eog(token)]

    @cached_property
    def special_tokens(self) -> list[int]:
        """Tokens that no text of an answer matches: control tokens, and user-defined ones like <this>."""
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
        """Tokens whose text is in angle brackets, and that this text becomes wherever it stands."""
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
        """Tokens that stand for no text, not even that of a marker."""
        return frozenset(
            token
            for token in range(self.size)
            if self.piece(token, special=True)[:1] in (b"", b"\0")
        )

    def guidance_tokenizer(self) -> Any:
        """llguidance's view of this vocabulary (an LLTokenizer). About 10 µs per token, once.

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
        """llama_tokenize for llguidance, which asks at every token of an answer for all that must follow.

        That may be as long as a grammar, so only its beginning is cut, up to the end of a character.
        """
        if size > FORCED:
            size, begun = FORCED, ctypes.string_at(raw, FORCED + 1)
            while size > FORCED - 3 and begun[size] & 0xC0 == 0x80:
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
        """The token as written in the vocabulary, for templates (`<|im_end|>`); "" if none."""
        return self._text(token).decode("utf-8", "replace") if 0 <= token < self.size else ""

    def _text(self, token: int) -> bytes:
        return C.llama_vocab_get_text(self._handle, token) or b""

    def tokenizer(self) -> Tokenizer:
        """What decides whether this vocabulary fits another one's. About 0.5 µs per token."""
        return Tokenizer(
            kind=_KINDS.get(self.kind, str(self.kind)),
            texts=[self._text(token) for token in range(self.size)],
            bos=self.bos,
            eos=self.eos,
            add_bos=self.add_bos,
            add_eos=self.add_eos,
        )


def check_tokens(vocab: Vocab, tokens: Sequence[int], param: str) -> None:
    """Refuse the first id outside the vocabulary (InvalidRequest)."""
    for token in tokens:
        vocab.check(token, param)
