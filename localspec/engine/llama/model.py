"""One GGUF, loaded."""

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

# Of those with a recurrent state, the ones that were seen to keep several right in one pass. llama.cpp
# ends the process where PLaMo 2 has two; of the others nothing is known.
_STATES_TOGETHER = frozenset(
    """falcon-h1 granitehybrid jamba kimi-linear lfm2 lfm2moe mamba mamba2 nemotron_h nemotron_h_moe
    qwen35 qwen35moe qwen3next rwkv6 rwkv7""".split()
)
# Lengths of a head's keys and values that llama.cpp's CUDA kernels for flash attention take, and those
# they take only where so many heads share one key, or a multiple of it (ggml-cuda's fattn.cu).
_FLASH_LENGTHS = frozenset({40, 64, 72, 80, 96, 112, 128, 256})
_SHARED_FLASH_LENGTHS = {(192, 128): 8, (320, 256): 32, (512, 512): 2, (576, 512): 2}
_CHUNKED = {"llama4"}  # attention in chunks (LLAMA_SWA_TYPE_CHUNKED), of `n_swa` positions each


class Freed(ABC):
    """Something of C's that must be freed: `with` does it."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Model(Freed):
    """One GGUF, loaded. Close it after every context made from it."""

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
        """Load `path`. heads: with its MTP heads, where it has some. devices: instead of this machine's GPUs.

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
        params.load_mtp = heads
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices)  # a null ends them
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
        self._read(heads)

    def _read(self, heads: bool) -> None:
        """What the loaded file says of itself."""
        self.n_ctx_train = int(C.llama_model_n_ctx_train(self.handle))
        self.n_layer = int(C.llama_model_n_layer(self.handle))
        self.n_attention_heads = int(C.llama_model_n_head(self.handle))
        self.n_swa = int(C.llama_model_n_swa(self.handle))  # 0: attention without a window
        self.n_heads = int(C.llama_model_n_layer_nextn(self.handle)) if heads else 0  # MTP
        self.n_params = int(C.llama_model_n_params(self.handle))
        self.recurrent = bool(C.llama_model_is_recurrent(self.handle))
        self.hybrid = bool(C.llama_model_is_hybrid(self.handle))
        self.has_encoder = bool(C.llama_model_has_encoder(self.handle))
        self.architecture = self.metadata("general.architecture") or ""
        self.vocab = Vocab(self)

    @property
    def n_state(self) -> int:
        """How many numbers a hidden state has, as its MTP heads read it."""
        return int(C.llama_model_n_embd_out(self.handle))

    @property
    def cuttable(self) -> bool:
        """Can its memory be cut to fewer tokens? A recurrent state can only be gone on with whole."""
        return not (self.recurrent or self.hybrid)

    @property
    def takes_company(self) -> bool:
        """Whether one context may hold several texts."""
        return self.cuttable or self.architecture in _STATES_TOGETHER

    @property
    def turns_by_context(self) -> bool:
        """Whether what is cached of a text may hang on how long the context is (llama.cpp's LongRoPE)."""
        stretched = f"{self.architecture}.rope.scaling.original_context_length"
        return self.metadata(stretched) is not None

    def can_go_on_from(self, first: int) -> int:
        """The shortest text that can be gone on with where the cache begins at position `first`.

        The token at position p sees a window of the `n_swa` that end with it (is_masked_swa in
        llama.cpp's llama-hparams.h), or, in chunks, what shares p // n_swa with it.
        """
        if first <= 0:
            return 0
        if self.architecture in _CHUNKED:
            return -(-first // self.n_swa) * self.n_swa
        return first + self.n_swa - 1

    @property
    def description(self) -> str:
        """Architecture, size and quantization in the words of `localspec show`: "qwen2, 0.63 B parameters,
        Q4_K_M".
        """
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        # As in "qwen2 1B Q4_K - Medium". Its size is rounded to that of a well-known model.
        architecture, _, rest = buffer.value.decode("utf-8", "replace").partition(" ")
        stated = self.metadata("general.file_type") or ""
        known = quantization.name(int(stated)) if stated.isdecimal() else ""
        guessed = rest.partition(" ")[2].removeprefix("(guessed) ").partition(" - ")[0]
        count = self.n_params
        size = f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
        return ", ".join(filter(None, (architecture, f"{size} parameters", known or guessed)))

    @property
    def chat_template(self) -> str | None:
        raw = C.llama_model_chat_template(self.handle, None)
        return raw.decode("utf-8", "replace") if raw else None

    def template(self, name: str) -> str | None:
        """One of the file's other templates: "rerank" has places for a query and a document."""
        raw = C.llama_model_chat_template(self.handle, name.encode())
        return raw.decode("utf-8", "replace") if raw else None

    @property
    def head_lengths(self) -> tuple[int, int]:
        """How many numbers the key and the value of one head have."""
        each = int(C.llama_model_n_embd(self.handle)) // max(self.n_attention_heads, 1)
        return self._number("attention.key_length", each), self._number(
            "attention.value_length", each
        )

    @property
    def flash_everywhere(self) -> bool:
        """Whether flash attention of every layer runs on every backend that a worker may have."""
        keys, values = self.head_lengths
        shared = self.n_attention_heads // max(int(C.llama_model_n_head_kv(self.handle)), 1)
        windowed = (
            self._number("attention.key_length_swa", keys),
            self._number("attention.value_length_swa", values),
        )
        return all(
            (lengths[0] == lengths[1] and lengths[0] in _FLASH_LENGTHS)
            or (lengths in _SHARED_FLASH_LENGTHS and shared % _SHARED_FLASH_LENGTHS[lengths] == 0)
            for lengths in ((keys, values), windowed)
        )

    def _number(self, key: str, default: int) -> int:
        found = self.metadata(f"{self.metadata('general.architecture')}.{key}") or ""
        return int(found) if found.isdecimal() else default

    def metadata(self, key: str) -> str | None:
        """A metadata value as text, None where the file has no such key."""
        buffer = ctypes.create_string_buffer(1024)
        size = C.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if size < 0 else buffer.value.decode("utf-8", "replace")

    def close(self) -> None:
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None
