"""Load a GGUF model and read its properties."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import llama_cpp.llama_cpp as C

from localspec import quantization
from localspec.engine.llama.library import failed, forget_errors
from localspec.engine.llama.vocab import Vocab
from localspec.errors import LoadFailed

_SPLIT_MODES = {
    "none": C.LLAMA_SPLIT_MODE_NONE,
    "layer": C.LLAMA_SPLIT_MODE_LAYER,
    "row": C.LLAMA_SPLIT_MODE_ROW,
}

# Recurrent architectures for which several sequences in one pass were tested to be correct. llama.cpp ends
# the process if PLaMo 2 has two; the others were not tested.
_MULTI_SEQUENCE_RECURRENT = frozenset(
    """falcon-h1 granitehybrid jamba kimi-linear lfm2 lfm2moe mamba mamba2 nemotron_h nemotron_h_moe
    qwen35 qwen35moe qwen3next rwkv6 rwkv7""".split()
)
# Lengths of a head's keys and values that llama.cpp's CUDA kernels for flash attention support. Those in the
# second table are supported only if the number of heads per key is a multiple of the given one (ggml-cuda's
# fattn.cu).
_FLASH_LENGTHS = frozenset({40, 64, 72, 80, 96, 112, 128, 256})
_SHARED_FLASH_LENGTHS = {(192, 128): 8, (320, 256): 32, (512, 512): 2, (576, 512): 2}
_CHUNKED = {"llama4"}  # Attention in chunks of `n_swa` positions (LLAMA_SWA_TYPE_CHUNKED).


class Freed(ABC):
    """A base of C resources that must be freed, which a `with` statement does."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Model(Freed):
    """A loaded GGUF model. It must be closed after every context created from it."""

    def __init__(
        self,
        path: str,
        *,
        n_gpu_layers: int = -1,
        split_mode: str = "layer",
        main_gpu: int = 0,
        extra_buffers: bool = True,
        heads: bool = False,
        devices: Sequence[int] = (),
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load the model file at `path`.

        heads: load its MTP heads as well, if it has any. devices: handles of the devices to use instead of
        this machine's GPUs.

        Raises:
            LoadFailed: the file is missing, or llama.cpp cannot read it.
            OutOfMemory: memory does not hold the model.
        """
        self.handle: Any = None
        if not Path(path).is_file():
            raise LoadFailed(f"There is no model file at {path}.")
        params = C.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.split_mode = _SPLIT_MODES[split_mode]
        params.main_gpu = main_gpu
        params.use_extra_bufts = extra_buffers
        params.load_mtp = heads
        # Terminated by a null pointer.
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices)
        params.devices = ctypes.addressof(self._devices) if devices else None

        @C.llama_progress_callback  # type: ignore[untyped-decorator] # the binding has no types
        def on_progress(fraction: float, _user: object) -> bool:
            if progress is not None:
                progress(float(fraction))
            return True

        params.progress_callback = on_progress
        forget_errors()
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise failed(f"llama.cpp cannot load {path}")
        self.path = path
        self._read_properties(heads)

    def _read_properties(self, heads: bool) -> None:
        self.n_ctx_train = int(C.llama_model_n_ctx_train(self.handle))
        self.n_layer = int(C.llama_model_n_layer(self.handle))
        self.n_attention_heads = int(C.llama_model_n_head(self.handle))
        self.n_swa = int(C.llama_model_n_swa(self.handle))  # 0 without a sliding window.
        self.n_heads = int(C.llama_model_n_layer_nextn(self.handle)) if heads else 0  # MTP heads.
        self.n_params = int(C.llama_model_n_params(self.handle))
        self.recurrent = bool(C.llama_model_is_recurrent(self.handle))
        self.hybrid = bool(C.llama_model_is_hybrid(self.handle))
        self.has_encoder = bool(C.llama_model_has_encoder(self.handle))
        self.architecture = self.metadata("general.architecture") or ""
        self.vocab = Vocab(self)

    @property
    def n_state(self) -> int:
        """The width of a hidden state, as MTP heads read it."""
        return int(C.llama_model_n_embd_out(self.handle))

    @property
    def cuttable(self) -> bool:
        """Whether the cache can be cut to fewer tokens, which a recurrent state cannot."""
        return not (self.recurrent or self.hybrid)

    @property
    def takes_company(self) -> bool:
        """Whether one context may hold several sequences."""
        return self.cuttable or self.architecture in _MULTI_SEQUENCE_RECURRENT

    @property
    def turns_by_context(self) -> bool:
        """Whether cached keys may depend on the length of the context (llama.cpp's LongRoPE)."""
        key = f"{self.architecture}.rope.scaling.original_context_length"
        return self.metadata(key) is not None

    def can_go_on_from(self, first: int) -> int:
        """Return the length of the shortest text that can be continued if the cache begins at `first`.

        The token at position p sees the `n_swa` positions that end with it (is_masked_swa in llama.cpp's
        llama-hparams.h) or, with chunks, the positions with the same p // n_swa.
        """
        if first <= 0:
            return 0
        if self.architecture in _CHUNKED:
            return -(-first // self.n_swa) * self.n_swa
        return first + self.n_swa - 1

    @property
    def description(self) -> str:
        """Architecture, size and quantization, such as "qwen2, 0.63 B parameters, Q4_K_M"."""
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        # llama.cpp's text is such as "qwen2 1B Q4_K - Medium", with the size of a well-known model.
        architecture, _, details = buffer.value.decode("utf-8", "replace").partition(" ")
        file_type = self.metadata("general.file_type") or ""
        known = quantization.name(int(file_type)) if file_type.isdecimal() else ""
        guessed = details.partition(" ")[2].removeprefix("(guessed) ").partition(" - ")[0]
        count = self.n_params
        size = f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
        return ", ".join(filter(None, (architecture, f"{size} parameters", known or guessed)))

    @property
    def chat_template(self) -> str | None:
        """The file's default chat template."""
        raw = C.llama_model_chat_template(self.handle, None)
        return raw.decode("utf-8", "replace") if raw else None

    def template(self, name: str) -> str | None:
        """Return another template of the file by name; "rerank" has places for a query and a document."""
        raw = C.llama_model_chat_template(self.handle, name.encode())
        return raw.decode("utf-8", "replace") if raw else None

    @property
    def head_lengths(self) -> tuple[int, int]:
        """The lengths of the key and the value of one attention head."""
        default = int(C.llama_model_n_embd(self.handle)) // max(self.n_attention_heads, 1)
        return self._read_int("attention.key_length", default), self._read_int(
            "attention.value_length", default
        )

    @property
    def flash_everywhere(self) -> bool:
        """Whether flash attention of every layer runs on every possible backend of a worker."""
        keys, values = self.head_lengths
        shared = self.n_attention_heads // max(int(C.llama_model_n_head_kv(self.handle)), 1)
        windowed = (
            self._read_int("attention.key_length_swa", keys),
            self._read_int("attention.value_length_swa", values),
        )
        return all(
            (lengths[0] == lengths[1] and lengths[0] in _FLASH_LENGTHS)
            or (lengths in _SHARED_FLASH_LENGTHS and shared % _SHARED_FLASH_LENGTHS[lengths] == 0)
            for lengths in ((keys, values), windowed)
        )

    def _read_int(self, key: str, default: int) -> int:
        value = self.metadata(f"{self.metadata('general.architecture')}.{key}") or ""
        return int(value) if value.isdecimal() else default

    def metadata(self, key: str) -> str | None:
        """Return a metadata value as text, or None if the file does not have the key."""
        buffer = ctypes.create_string_buffer(1024)
        size = C.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if size < 0 else buffer.value.decode("utf-8", "replace")

    def close(self) -> None:
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None
