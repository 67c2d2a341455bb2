"""Turn pictures into rows that a target reads in place of tokens, with llama.cpp's library mtmd."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.engine.llama.model import (
    Resource,
    States,
    forget_errors,
    format_last_error,
    load_error,
    on_log,
)
from localspec.engine.llama.pictures import PictureRows
from localspec.errors import InvalidRequest, LoadFailed

Pixels = npt.NDArray[np.uint8]
# Architectures for which llama.cpp ends the process if a row has no token.
_TEXT_ONLY = frozenset({"glm4", "glm4moe", "granite-switch"})


def _load_library() -> Any:
    """Return llama-cpp-python's binding of mtmd, or None if this build of llama.cpp has no such library."""
    try:
        return importlib.import_module("llama_cpp.mtmd_cpp")
    except (ImportError, AttributeError, FileNotFoundError, OSError, RuntimeError):
        return None


def _read_architecture(model: Any) -> str:
    buffer = ctypes.create_string_buffer(128)
    size = C.llama_model_meta_val_str(model, b"general.architecture", buffer, len(buffer))
    return "" if size < 0 else buffer.value.decode("utf-8", "replace")


def turn_pixels(pixels: Pixels, orientation: int) -> Pixels:
    """Return the pixels of a picture (height, width, 3) as its Exif orientation, from 1 to 8, says."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::rows, ::columns]


class UnreadablePicture(InvalidRequest):
    """Raised for a picture that the library cannot decode."""


class Projector(Resource):
    """A projector: a model that turns pictures into rows that a target reads in place of tokens.

    why_unusable: why its target cannot read its rows here, as a clause; "" if it can. uses_mrope: whether the
    target counts the places of a picture in two dimensions. both_ways: whether each row attends to all
    others.
    """

    def __init__(
        self, path: str, target: str, *, n_threads: int, on_gpu: bool, max_rows: int = 0
    ) -> None:
        """Load the projector at `path`, and of its target's file the vocabulary and the sizes.

        max_rows: of a picture whose rows attend to each other; 0: any number.

        Raises:
            LoadFailed: a file cannot be loaded, the two do not match, or the library is not there.
        """
        self._handle = self._model = None
        library = _load_library()
        if library is None:
            raise LoadFailed("this build of llama.cpp lacks the library for pictures (libmtmd)")
        self._library = library
        library.mtmd_helper_log_set(on_log, None)
        forget_errors()
        params = C.llama_model_default_params()
        params.no_alloc, params.load_mode, params.n_gpu_layers = True, C.LLAMA_LOAD_MODE_NONE, 0
        self._model = C.llama_model_load_from_file(os.fsencode(target), params)
        if not self._model:
            raise load_error(f"llama.cpp cannot read {target}")
        options = library.mtmd_context_params_default()
        options.use_gpu, options.n_threads = on_gpu, n_threads
        options.print_timings = options.warmup = False
        self._open(path, options)
        self.both_ways = bool(library.mtmd_decode_use_non_causal(self._handle, None))
        if self.both_ways and max_rows:
            library.mtmd_free(self._handle)
            options.image_max_tokens = max_rows
            self._open(path, options)
        self.n_embd = int(C.llama_model_n_embd_inp(self._model))
        self._marker: bytes = library.mtmd_get_marker(self._handle)
        self.uses_mrope = bool(library.mtmd_decode_use_mrope(self._handle))
        self.why_unusable = self._explain_unusable()

    def _open(self, path: str, options: Any) -> None:
        """Load the projector. Raises LoadFailed."""
        self._handle = self._library.mtmd_init_from_file(os.fsencode(path), self._model, options)
        if not self._handle:
            self.close()
            raise load_error(f"llama.cpp cannot load {path}")

    def _explain_unusable(self) -> str:
        library = self._library
        if not library.mtmd_support_vision(self._handle):
            return "it hears and does not see"
        architecture = _read_architecture(self._model)
        if architecture in _TEXT_ONLY and not self.uses_mrope:
            return f"llama.cpp reads no pictures with a target of this kind ({architecture})"
        return ""

    def decode(self, picture: bytes, orientation: int = 1) -> Any:
        """Return the bitmap of a picture file, for `encode`. Raises UnreadablePicture.

        orientation: how it is turned, as Exif counts.
        """
        library = self._library
        data = (ctypes.c_uint8 * len(picture)).from_buffer_copy(picture)
        options = library.mtmd_helper_init_opt_default()
        wrapper = library.mtmd_helper_bitmap_init_from_buf_wrapper(
            self._handle, data, len(picture), False, options
        )
        if not wrapper.bitmap:
            raise UnreadablePicture("The picture cannot be decoded: its file is damaged.")
        if orientation == 1:
            return wrapper.bitmap
        pixels = turn_pixels(self._pixels(wrapper.bitmap), orientation).copy()
        library.mtmd_bitmap_free(wrapper.bitmap)
        height, width, _ = pixels.shape
        return library.mtmd_bitmap_init(
            width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        )

    def encode(self, bitmap: Any) -> list[list[int] | PictureRows]:
        """Return what the target reads for a bitmap, in order: tokens of text, and rows from place 0.

        The bitmap is freed.

        Raises:
            UnreadablePicture: it cannot be encoded.
        """
        library = self._library
        chunks = library.mtmd_input_chunks_init()
        try:
            text = library.mtmd_input_text(self._marker, len(self._marker), False, True)
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            code = library.mtmd_tokenize(self._handle, chunks, ctypes.byref(text), bitmaps, 1)
            if code:
                raise UnreadablePicture(
                    f"The picture does not suit this model (code {code}{format_last_error()})."
                )
            count = library.mtmd_input_chunks_size(chunks)
            parts = (library.mtmd_input_chunks_get(chunks, index) for index in range(count))
            return [self._read_chunk(chunk) for chunk in parts]
        finally:
            library.mtmd_input_chunks_free(chunks)
            library.mtmd_bitmap_free(bitmap)

    def _pixels(self, bitmap: Any) -> Pixels:
        """Return a view on the pixels of a bitmap (height, width, 3)."""
        library = self._library
        shape = library.mtmd_bitmap_get_ny(bitmap), library.mtmd_bitmap_get_nx(bitmap), 3
        data = ctypes.cast(library.mtmd_bitmap_get_data(bitmap), ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(data, shape)

    def _read_chunk(self, chunk: Any) -> list[int] | PictureRows:
        library = self._library
        if library.mtmd_input_chunk_get_type(chunk) == library.MTMD_INPUT_CHUNK_TYPE_TEXT:
            size = ctypes.c_size_t()
            tokens = library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(size))
            return [int(tokens[index]) for index in range(size.value)]
        if library.mtmd_encode_chunk(self._handle, chunk):
            raise UnreadablePicture("llama.cpp cannot encode the picture.")
        count = int(library.mtmd_input_chunk_get_n_tokens(chunk))
        output = library.mtmd_get_output_embd(self._handle)
        rows: States = np.ctypeslib.as_array(output, (count, self.n_embd)).copy()
        if not np.isfinite(rows).all():
            raise UnreadablePicture(
                "The projector computes NaN or infinite values for the picture."
            )
        n_places = int(library.mtmd_input_chunk_get_n_pos(chunk))
        positions = self._read_positions(chunk, count) if self.uses_mrope else None
        return PictureRows(0, rows, n_places, positions, self.both_ways)

    def _read_positions(self, chunk: Any, count: int) -> npt.NDArray[np.int32]:
        """Return time, line and column (count, 3) of the rows, from the picture's first place.

        Raises:
            UnreadablePicture: they depend on more than that place.
        """
        library = self._library
        tokens = library.mtmd_input_chunk_get_tokens_image(chunk)

        def read(start: int) -> npt.NDArray[np.int32]:
            places = (
                library.mtmd_image_tokens_get_decoder_pos(tokens, start, index)
                for index in range(count)
            )
            return np.array([(place.t, place.y, place.x) for place in places], np.int32)

        positions = read(0)
        if not np.array_equal(read(1), positions + 1):
            raise UnreadablePicture("The positions of this model's pictures are not known here.")
        return positions

    def close(self) -> None:
        """Free the projector and the target's vocabulary."""
        if self._handle:
            self._library.mtmd_free(self._handle)
        if self._model:
            C.llama_model_free(self._model)
        self._handle = self._model = None
