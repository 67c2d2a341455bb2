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
    read_metadata,
)
from localspec.engine.llama.pictures import PictureRows
from localspec.errors import InvalidRequest, LoadFailed

Pixels = npt.NDArray[np.uint8]
_BYTES = ctypes.POINTER(ctypes.c_uint8)
# Architectures for which llama.cpp ends the process if a row has no token.
_TEXT_ONLY = frozenset({"glm4", "glm4moe", "granite-switch"})


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

        Raises LoadFailed if a file cannot be loaded, the two do not match, or the library is not there.
        """
        self._handle = self._model = None
        try:
            self._library = library = importlib.import_module("llama_cpp.mtmd_cpp")
        except (ImportError, AttributeError, OSError, RuntimeError):
            lacking = "this build of llama.cpp lacks the library for pictures (libmtmd)"
            raise LoadFailed(lacking) from None
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
        self.why_unusable = ""
        architecture = read_metadata(self._model, "general.architecture")
        if not library.mtmd_support_vision(self._handle):
            self.why_unusable = "it hears and does not see"
        elif architecture in _TEXT_ONLY and not self.uses_mrope:
            kind = f"a target of this kind ({architecture})"
            self.why_unusable = f"llama.cpp reads no pictures with {kind}"

    def _open(self, path: str, options: Any) -> None:
        self._handle = self._library.mtmd_init_from_file(os.fsencode(path), self._model, options)
        if not self._handle:
            self.close()
            raise load_error(f"llama.cpp cannot load {path}")

    def decode(self, picture: bytes, orientation: int = 1) -> Any:
        """Return the bitmap of a picture file, for `encode`. Raises UnreadablePicture.

        orientation: how it is turned, as Exif counts.
        """
        library, data = self._library, (ctypes.c_uint8 * len(picture)).from_buffer_copy(picture)
        options = library.mtmd_helper_init_opt_default()
        read = library.mtmd_helper_bitmap_init_from_buf_wrapper
        bitmap = read(self._handle, data, len(picture), False, options).bitmap
        if not bitmap:
            raise UnreadablePicture("The picture cannot be decoded: its file is damaged.")
        if orientation == 1:
            return bitmap
        pixels = self._pixels(bitmap)
        if orientation >= 5:
            pixels = pixels.swapaxes(0, 1)
        row_step = -1 if orientation in (3, 4, 7, 8) else 1
        column_step = -1 if orientation in (2, 3, 6, 7) else 1
        pixels = pixels[::row_step, ::column_step].copy()
        library.mtmd_bitmap_free(bitmap)
        height, width, _ = pixels.shape
        return library.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(_BYTES))

    def encode(self, bitmap: Any) -> list[list[int] | PictureRows]:
        """Return what the target reads for a bitmap, in order: tokens of text, and rows from place 0.

        The bitmap is freed.

        Raises UnreadablePicture if it cannot be encoded.
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
        library = self._library
        shape = library.mtmd_bitmap_get_ny(bitmap), library.mtmd_bitmap_get_nx(bitmap), 3
        data = ctypes.cast(library.mtmd_bitmap_get_data(bitmap), _BYTES)
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

        Raises UnreadablePicture if they depend on more than that place.
        """
        library = self._library
        tokens = library.mtmd_input_chunk_get_tokens_image(chunk)

        get = library.mtmd_image_tokens_get_decoder_pos
        positions, shifted = (
            np.array(
                [(p.t, p.y, p.x) for p in (get(tokens, start, i) for i in range(count))], np.int32
            )
            for start in (0, 1)
        )
        if not np.array_equal(shifted, positions + 1):
            raise UnreadablePicture("The positions of this model's pictures are not known here.")
        return positions

    def close(self) -> None:
        if self._handle:
            self._library.mtmd_free(self._handle)
        if self._model:
            C.llama_model_free(self._model)
        self._handle = self._model = None
