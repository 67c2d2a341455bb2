"""The only file that touches llama_cpp: typed, thin, every return code checked, everything freed.

llama.cpp ends the process on input it does not expect, so what crosses into C is checked here:
token ids against the vocabulary, rows against the batch, sequence ids against the context.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import llama_cpp._ggml as ggml
import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.errors import InvalidRequest, LoadFailed, LocalspecError

# Beside what llama.cpp says of a GPU ("cudaMalloc failed: out of memory") its words for main memory.
_NO_MEMORY = re.compile(
    r"out of (?:device )?memory|failed to (?:re)?alloc|unable to alloc|OutOfDeviceMemory|bad_alloc"
)

Logits = npt.NDArray[np.float32]
State = npt.NDArray[np.uint8]  # of one sequence, as llama.cpp writes it


class OutOfMemory(LoadFailed):
    """The memory of a GPU or of the machine does not hold a model or a context."""


class DecodeError(LocalspecError):
    """llama_decode failed; the subclass says how."""

    code = "decode_failed"


class NoKvSlot(DecodeError):
    """Return code 1: no room in the KV cache for this batch. Nothing was changed."""


class Aborted(DecodeError):
    """Return code 2: the abort callback stopped the pass."""


class BadBatch(DecodeError):
    """Return code -1: llama.cpp refused the batch."""


class DecodeFatal(DecodeError):
    """Return code below -1: the context can no longer be trusted."""


# ------------------------------------------------------------------------------------- logging

_last_error: list[str] = []
_no_memory: list[str] = []  # the first complaint about memory since a load began


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user: object) -> None:
    # 3 is warning, 4 error, 5 the continuation of the line before (ggml.h). Less is noise.
    if level == 4:
        line = text.decode("utf-8", "replace").strip()
        _last_error[:] = [line]
        if not _no_memory and _NO_MEMORY.search(line):
            _no_memory.append(line)
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def initialise() -> None:
    """Start llama.cpp once per process; its errors go to stderr, the rest nowhere."""
    C.llama_log_set(_on_log, ctypes.c_void_p(0))
    C.llama_backend_init()


def _forget_errors() -> None:
    _last_error.clear()
    _no_memory.clear()


def _failed(message: str) -> LoadFailed:
    """LoadFailed, or OutOfMemory where llama.cpp complained about that."""
    if _no_memory:
        return OutOfMemory(f"{message} ({_no_memory[0]}).")
    return LoadFailed(f"{message}{_cause()}.")


def _cause() -> str:
    return f" ({_last_error[0]})" if _last_error else ""


def llama_version() -> str:
    """Version of llama-cpp-python, which pins llama.cpp's."""
    import importlib.metadata

    return importlib.metadata.version("llama-cpp-python")


def system_info() -> str:
    """llama.cpp's own line of CPU features and backends."""
    text: bytes = C.llama_print_system_info()
    return text.decode("utf-8", "replace").strip()


def gpus() -> list[str]:
    """The GPUs this build can use, as their drivers call them."""
    lib = ggml.libggml
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    lib.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_dev_description.restype = ctypes.c_char_p
    lib.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    devices = map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count()))
    # 1: a GPU with memory of its own, 2: one that shares the machine's (ggml-backend.h)
    return [
        lib.ggml_backend_dev_description(device).decode("utf-8", "replace")
        for device in devices
        if lib.ggml_backend_dev_type(device) in (1, 2)
    ]


def backend() -> str:
    """What passes run on: "cuda", "metal", "vulkan", "gpu" for another, or "cpu"."""
    if not C.llama_supports_gpu_offload():
        return "cpu"
    info = system_info().lower()
    return next((name for name in ("cuda", "metal", "vulkan") if name in info), "gpu")


# --------------------------------------------------------------------------------------- vocab


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Fill-in-the-middle token ids; -1 where the model has none."""

    prefix: int
    suffix: int
    middle: int
    repo: int
    separator: int


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
        self.fim = FimTokens(
            prefix=int(C.llama_vocab_fim_pre(self._handle)),
            suffix=int(C.llama_vocab_fim_suf(self._handle)),
            middle=int(C.llama_vocab_fim_mid(self._handle)),
            repo=int(C.llama_vocab_fim_rep(self._handle)),
            separator=int(C.llama_vocab_fim_sep(self._handle)),
        )
        self._pieces: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}

    @property
    def handle(self) -> Any:
        return self._handle

    def check(self, token: int) -> int:
        """`token` if the vocabulary has it.

        Raises:
            InvalidRequest: out of range (llama.cpp would abort the process).
        """
        if not 0 <= token < self.size:
            raise InvalidRequest(f"Token id {token} is outside the vocabulary (0…{self.size - 1}).")
        return token

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokens of `text`; BOS and EOS only with `add_special` and the model's own flags.

        Raises:
            InvalidRequest: a lone surrogate, or more text than llama.cpp can count.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"The text is not valid Unicode: {error.reason}.") from error
        if len(raw) > 1 << 30:
            raise InvalidRequest("The text is longer than 1 GiB.")
        capacity = len(raw) + 8
        buffer = (C.llama_token * capacity)()
        count = int(
            C.llama_tokenize(
                self._handle, raw, len(raw), buffer, capacity, add_special, parse_special
            )
        )
        if count < 0:  # the buffer was too small; -count is what it takes
            capacity = -count
            buffer = (C.llama_token * capacity)()
            count = int(
                C.llama_tokenize(
                    self._handle, raw, len(raw), buffer, capacity, add_special, parse_special
                )
            )
            if count < 0:
                raise InvalidRequest("The text could not be tokenized.")
        return buffer[:count]

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

    def guidance_tokenizer(self) -> Any:
        """llguidance's view of this vocabulary (an LLTokenizer). About 10 µs per token, once.

        Control tokens are marked with 0xff, as llguidance expects, so that text never matches them.
        """
        from llguidance import LLTokenizer

        pieces = []
        for token in range(self.size):
            piece = self.piece(token, special=True)
            attributes = int(C.llama_vocab_get_attr(self._handle, token))
            control = attributes & C.LLAMA_TOKEN_ATTR_CONTROL
            marked = (
                attributes & C.LLAMA_TOKEN_ATTR_USER_DEFINED and piece[:1] + piece[-1:] == b"<>"
            )
            pieces.append(b"\xff" + piece if control or marked else piece)
        ends = [token for token in range(self.size) if self.is_eog(token)]
        function = ctypes.cast(C._lib.llama_tokenize, ctypes.c_void_p).value
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
            tokens=pieces,
            vocab_ptr=self._handle,
            tokenize_fptr=function,
            eos_token=ends or self.eos,
            slices=None,
        )

    def text(self, token: int) -> str:
        """The token as written in the vocabulary, for templates (`<|im_end|>`); "" if none."""
        if not 0 <= token < self.size:
            return ""
        raw = C.llama_vocab_get_text(self._handle, token)
        return raw.decode("utf-8", "replace") if raw else ""


# --------------------------------------------------------------------------------------- model


class _Freed(ABC):
    """Something of C's that must be freed: `with` does it."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Model(_Freed):
    """One GGUF, loaded. Close it after every context made from it."""

    def __init__(
        self,
        path: str,
        *,
        n_gpu_layers: int = -1,
        split_mode: str = "layer",
        main_gpu: int = 0,
        extra_buffers: bool = True,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load `path`.

        Raises:
            LoadFailed: the file is missing or llama.cpp cannot read it, with its own reason.
            OutOfMemory: there is no room for so much of it.
        """
        self.handle: Any = None
        if not Path(path).is_file():
            raise LoadFailed(f"There is no model file at {path}.")
        params = C.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.split_mode = _SPLIT_MODES[split_mode]
        params.main_gpu = main_gpu
        params.use_extra_bufts = extra_buffers

        @C.llama_progress_callback  # type: ignore[untyped-decorator]
        def on_progress(fraction: float, _user: object) -> bool:
            if progress is not None:
                progress(float(fraction))
            return True

        params.progress_callback = on_progress
        _forget_errors()
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise _failed(f"llama.cpp cannot load {path}")
        self.path = path
        self.n_ctx_train = int(C.llama_model_n_ctx_train(self.handle))
        self.n_layer = int(C.llama_model_n_layer(self.handle))
        self.n_swa = int(C.llama_model_n_swa(self.handle))
        self.size = int(C.llama_model_size(self.handle))
        self.n_params = int(C.llama_model_n_params(self.handle))
        self.recurrent = bool(C.llama_model_is_recurrent(self.handle))
        self.hybrid = bool(C.llama_model_is_hybrid(self.handle))
        self.has_encoder = bool(C.llama_model_has_encoder(self.handle))
        self.vocab = Vocab(self)

    @property
    def description(self) -> str:
        """Architecture, size and quantization, as in "llama 7.6B Q4_K - Medium"."""
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        text = buffer.value.decode("utf-8", "replace")
        # llama.cpp knows the sizes of well-known models only
        size = self.n_params / 1e6
        return text.replace("?B", f"{size / 1e3:.1f}B" if size >= 1e3 else f"{size:.1f}M")

    @property
    def chat_template(self) -> str | None:
        raw = C.llama_model_chat_template(self.handle, None)
        return raw.decode("utf-8", "replace") if raw else None

    def metadata(self, key: str) -> str | None:
        """A metadata value as text, None where the file has no such key."""
        buffer = ctypes.create_string_buffer(1024)
        size = C.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if size < 0 else buffer.value.decode("utf-8", "replace")

    def close(self) -> None:
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None


# --------------------------------------------------------------------------------------- batch


class Batch:
    """The rows of one pass: (token, position, sequence, wants logits). Reused, never reallocated."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._token = (C.llama_token * capacity)()
        self._pos = (C.llama_pos * capacity)()
        self._n_seq = (ctypes.c_int32 * capacity)(*([1] * capacity))
        self._seq = (C.llama_seq_id * capacity)()
        self._logits = (ctypes.c_int8 * capacity)()
        pointer = ctypes.POINTER(C.llama_seq_id)
        step = ctypes.sizeof(C.llama_seq_id)
        base = ctypes.addressof(self._seq)
        self._seq_rows = (pointer * capacity)(
            *(ctypes.cast(base + i * step, pointer) for i in range(capacity))
        )
        self.struct = C.llama_batch(
            n_tokens=0,
            token=self._token,
            embd=None,
            pos=self._pos,
            n_seq_id=self._n_seq,
            seq_id=self._seq_rows,
            logits=self._logits,
        )
        self.rows = 0

    def clear(self) -> None:
        self.rows = 0

    def add(self, token: int, position: int, sequence: int, logits: bool) -> int:
        """Append a row; returns its index.

        Raises:
            BadBatch: more rows than the capacity.
        """
        row = self.rows
        if row >= self.capacity:
            raise BadBatch(f"A batch holds {self.capacity} rows.")
        self._token[row] = token
        self._pos[row] = position
        self._seq[row] = sequence
        self._logits[row] = logits
        self.rows = row + 1
        return row


# ------------------------------------------------------------------------------------- context


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """One llama_context. n_ctx: cells shared by all sequences; n_outputs: logits rows of a pass.

    n_rollback: recurrent snapshots asked for (read `Context.n_rollback` for what was granted).
    chooses: sequences may have their greedy tokens chosen on the device (`choose_on_device`).
    """

    n_ctx: int
    n_batch: int
    n_seq: int
    n_outputs: int
    n_threads: int
    type_kv: str = "f16"
    n_rollback: int = 0
    flash_attention: str = "auto"
    chooses: bool = False


_SPLIT_MODES = {
    "none": C.LLAMA_SPLIT_MODE_NONE,
    "layer": C.LLAMA_SPLIT_MODE_LAYER,
    "row": C.LLAMA_SPLIT_MODE_ROW,
}
_FLASH = {
    "auto": C.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": C.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": C.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_KV_TYPES = {"f16": C.GGML_TYPE_F16, "q8_0": C.GGML_TYPE_Q8_0}


class Context(_Freed):
    """KV memory and compute buffers of one model, for up to `n_seq` sequences (unified cache)."""

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        """Create it.

        Raises:
            OutOfMemory, LoadFailed: a setting this model does not take.
        """
        self.handle: Any = None
        self._choosers: dict[int, Any] = {}  # sequence → its sampler chain, which is ours to free
        params = C.llama_context_default_params()
        params.n_ctx = settings.n_ctx
        # llama.cpp ends the process where there are fewer rows of logits than sequences.
        n_batch = max(settings.n_batch, settings.n_seq)
        self.n_outputs = max(min(settings.n_outputs, n_batch), settings.n_seq)
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = settings.n_seq
        params.n_outputs_max = self.n_outputs
        params.n_threads = settings.n_threads
        params.n_threads_batch = settings.n_threads
        params.n_rs_seq = settings.n_rollback
        params.type_k = params.type_v = _KV_TYPES[settings.type_kv]
        params.kv_unified = (
            True  # one sequence may use the whole cache, and one pass holds them all
        )
        params.swa_full = True  # sliding windows otherwise cannot roll a draft back
        params.no_perf = True
        params.flash_attn_type = _FLASH[settings.flash_attention]
        if settings.chooses:  # by default one row per sequence may be chosen on the device
            params.n_outputs_max_per_seq = self.n_outputs
        _forget_errors()
        self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise _failed(
                f"llama.cpp cannot make a context of {settings.n_ctx} tokens for {model.path}"
            )
        self.model = model
        self.n_ctx = int(C.llama_n_ctx(self.handle))
        self.n_seq = settings.n_seq
        self.n_vocab = model.vocab.size
        self.n_rollback = int(C.llama_n_rs_seq(self.handle))
        self._memory = C.llama_get_memory(self.handle)

    def decode(self, batch: Batch) -> None:
        """One pass over the rows of `batch`; logits are readable until the next one.

        Raises:
            NoKvSlot, Aborted, BadBatch, DecodeFatal: by llama_decode's return code.
        """
        if not batch.rows:
            raise BadBatch("An empty batch cannot be decoded.")
        batch.struct.n_tokens = batch.rows
        code = int(C.llama_decode(self.handle, batch.struct))
        if code == 0:
            return
        if code == 1:
            raise NoKvSlot(f"No room in the KV cache for {batch.rows} tokens.")
        if code == 2:
            raise Aborted("The pass was aborted.")
        if code == -1:
            raise BadBatch(f"llama.cpp refused a batch of {batch.rows} rows{_cause()}.")
        raise DecodeFatal(f"llama_decode failed with code {code}{_cause()}.")

    def logits(self, row: int) -> Logits:
        """A view (n_vocab,) of float32 logits of one row of the last pass; valid until the next.

        Raises:
            BadBatch: that row asked for no logits.
        """
        pointer = C.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise BadBatch(f"Row {row} has no logits{_cause()}.")
        address = ctypes.addressof(pointer.contents)
        buffer = (ctypes.c_float * self.n_vocab).from_address(address)
        view: Logits = np.ctypeslib.as_array(buffer)
        return view

    def choose_on_device(self, sequence: int, on: bool) -> bool:
        """Let the greedy token of each of a sequence's rows be chosen where the logits are.

        Then `chosen` has it, and `logits` has nothing: no row of a large vocabulary crosses from a
        GPU. Gives whether it is so now. Free where nothing changes.
        """
        self._check_sequence(sequence)
        if on == (sequence in self._choosers):
            return on
        if not on:
            C.llama_set_sampler(self.handle, sequence, None)
            C.llama_sampler_free(self._choosers.pop(sequence))
            return False
        chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
        if not C.llama_set_sampler(self.handle, sequence, chain):
            C.llama_sampler_free(chain)
            return False
        self._choosers[sequence] = chain
        return True

    def chosen(self, row: int) -> int:
        """The greedy token of a row of the last pass, of a sequence with `choose_on_device`.

        Raises:
            BadBatch: that row asked for no logits, or its sequence chooses nothing.
        """
        token = int(C.llama_get_sampled_token_ith(self.handle, row))
        if token < 0:
            raise BadBatch(f"No token was chosen for row {row}{_cause()}.")
        return token

    def synchronize(self) -> None:
        """Wait for the pass: on a GPU llama_decode returns before the work is done."""
        C.llama_synchronize(self.handle)

    def remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Drop positions [start, end) of a sequence; -1 is its end. False: the model cannot."""
        self._check_sequence(sequence)
        return bool(C.llama_memory_seq_rm(self._memory, sequence, start, end))

    def copy(self, source: int, target: int, end: int) -> None:
        """Make positions [0, end) of `source` part of `target` too (cells are shared)."""
        self._check_sequence(source)
        self._check_sequence(target)
        C.llama_memory_seq_cp(self._memory, source, target, 0, end)

    def length(self, sequence: int) -> int:
        """Tokens the memory holds for a sequence (its highest position + 1)."""
        self._check_sequence(sequence)
        return int(C.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def save(self, sequence: int, *, partial: bool = False) -> State:
        """The state of one sequence, to be given to `restore`.

        partial: only what cannot be cut (a recurrent state); positions read since are cut by `remove`.
        """
        self._check_sequence(sequence)
        flags = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else C.LLAMA_STATE_SEQ_FLAGS_NONE
        size = int(C.llama_state_seq_get_size_ext(self.handle, sequence, flags))
        state: State = np.empty(size, np.uint8)
        written = int(
            C.llama_state_seq_get_data_ext(self.handle, _bytes(state), size, sequence, flags)
        )
        return state[:written]

    def state_size(self, sequence: int) -> int:
        """Bytes that `save` would give."""
        self._check_sequence(sequence)
        flags = C.LLAMA_STATE_SEQ_FLAGS_NONE
        return int(C.llama_state_seq_get_size_ext(self.handle, sequence, flags))

    def restore(self, sequence: int, state: State, *, partial: bool = False) -> bool:
        """Put a saved state in place of a sequence; False if llama.cpp refuses it."""
        self._check_sequence(sequence)
        flags = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else C.LLAMA_STATE_SEQ_FLAGS_NONE
        size = state.nbytes
        read = int(
            C.llama_state_seq_set_data_ext(self.handle, _bytes(state), size, sequence, flags)
        )
        return read == size

    def clear(self) -> None:
        C.llama_memory_clear(self._memory, True)

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.n_seq:
            raise BadBatch(f"Sequence {sequence} is outside 0…{self.n_seq - 1}.")

    def close(self) -> None:
        if self.handle:
            C.llama_free(self.handle)
            self.handle = None
            for chain in self._choosers.values():
                C.llama_sampler_free(chain)
            self._choosers.clear()


def _bytes(state: State) -> Any:
    """A state as C's functions take it, without a copy."""
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def check_tokens(vocab: Vocab, tokens: Sequence[int]) -> None:
    """Refuse the first id outside the vocabulary (InvalidRequest)."""
    for token in tokens:
        vocab.check(token)
