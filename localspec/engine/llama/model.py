"""Load a GGUF model and read its properties."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec import model_traits
from localspec.engine.llama import waiting
from localspec.engine.llama.batch import Batch, DecodeFatal, Stop
from localspec.engine.llama.ggml import declare
from localspec.engine.llama.vocab import Vocab
from localspec.errors import LoadFailed
from localspec.model_traits import (
    HEAD_SUFFIX,
    SidecarKind,
    emits_layers,
    explain_unusable_heads,
    match_experts,
    order_experts,
    reads_target_cache,
    sidecar_kind,
)

# llama.cpp's messages about GPU memory ("cudaMalloc failed: out of memory") and main memory.
_NO_MEMORY = re.compile(
    r"out of (?:device )?memory|failed to (?:re)?alloc|unable to alloc|OutOfDeviceMemory|bad_alloc"
)
# The message that follows the cause of a failed load, and the prefix of the cause.
_FOLLOW_UP = re.compile(r"failed to load model($| from )")
_PREFIX = re.compile(r"^llama_model_load: error loading model: (error loading model \w+: )?")


class OutOfMemory(LoadFailed):
    """Raised when the memory of a GPU or of the machine does not hold a model or a context."""


_last_error: list[str] = []
_beat = [0.0]
_stop: list[Stop | None] = [None]  # The flag that may stop the current pass.
_no_memory: list[str] = []  # The first error about memory since a load began.


@C.llama_log_callback  # type: ignore[untyped-decorator] # the binding has no types
def on_log(level: int, text: bytes, _user: object) -> None:
    # Level 3 is warning, 4 error, 5 the continuation of the previous line (ggml.h). Errors of a pass that was
    # stopped on purpose are ignored.
    if level == 4 and not _stop[0]:
        line = text.decode("utf-8", "replace").strip()
        if not _last_error or not _FOLLOW_UP.search(line):
            _last_error[:] = [line]
        if not _no_memory and _NO_MEMORY.search(line):
            _no_memory.append(line)
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def record_heartbeat() -> None:
    """Record a sign of life: a long operation has made progress."""
    _beat[0] = time.monotonic()


def last_heartbeat() -> float:
    """Return the time (time.monotonic) of the last sign of life, for another thread."""
    return _beat[0]


def initialise() -> None:
    """Initialise llama.cpp, once per process. Its errors go to stderr; other messages are dropped."""
    C.llama_log_set(on_log, ctypes.c_void_p(0))
    C.llama_backend_init()
    waiting.start_control()


def expect_stop(stop: Stop | None) -> None:
    """Note that a pass begins which `stop` may end."""
    _stop[0] = stop


def forget_errors() -> None:
    """Forget earlier errors, because a load begins."""
    _last_error.clear()
    _no_memory.clear()


def load_error(message: str) -> LoadFailed:
    """Return LoadFailed, or OutOfMemory if llama.cpp logged an error about memory."""
    if _no_memory:
        return OutOfMemory(f"{message} ({_no_memory[0]}).")
    return LoadFailed(f"{message}{format_last_error()}.")


def format_last_error() -> str:
    """Return the last logged error in parentheses, or ""."""
    return f" ({_PREFIX.sub('', _last_error[0])})" if _last_error else ""


@cache
def llama_version() -> str:
    """Return the version of llama-cpp-python, which determines that of llama.cpp."""
    import importlib.metadata

    return importlib.metadata.version("llama-cpp-python")


def system_info() -> str:
    """Return llama.cpp's line of CPU features and backends."""
    text: bytes = C.llama_print_system_info()
    return text.decode("utf-8", "replace").strip()


def devices(*, gpus: bool) -> list[int]:
    """Return handles of this machine's GPUs that the build can use, or of its other devices."""
    get = declare("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = declare("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    handles = map(get, range(declare("ggml_backend_dev_count", ctypes.c_size_t)()))
    # Type 1 is a GPU with memory of its own, 2 one that shares the machine's (ggml-backend.h).
    return [device for device in handles if (kind(device) in (1, 2)) == gpus]


def gpus() -> list[str]:
    """Return the names of this machine's GPUs, as their drivers report them."""
    describe = declare("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    return [describe(device).decode("utf-8", "replace") for device in devices(gpus=True)]


def free_gpu_bytes() -> int:
    """Return the free memory of this machine's GPUs together."""
    size = ctypes.POINTER(ctypes.c_size_t)
    query = declare("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)
    free, total, sum_of_free = ctypes.c_size_t(), ctypes.c_size_t(), 0
    for device in devices(gpus=True):
        query(device, ctypes.byref(free), ctypes.byref(total))
        sum_of_free += free.value
    return sum_of_free


def backend() -> str:
    """Return what passes run on: "cuda", "metal", "vulkan", "gpu" for another GPU, or "cpu"."""
    if not devices(gpus=True):  # llama.cpp's own function also counts the GPUs of RPC servers.
        return "cpu"
    info = system_info().lower()
    return next((name for name in ("cuda", "metal", "vulkan") if name in info), "gpu")


# Read and write hidden states for MTP heads, through llama.cpp's staging interface.
#
# Builds of llama.cpp without this interface work except for MTP heads.

_ext: Any = None
_missing = ""
try:
    _ext = importlib.import_module("llama_cpp.llama_cpp_ext")
except (ImportError, AttributeError) as error:  # This build's library lacks a function.
    _missing = str(error)

_Context, _Model = C.llama_context_p_ctypes, C.llama_model_p_ctypes
_Int, _Count, _Floats = ctypes.c_int32, ctypes.c_uint32, ctypes.POINTER(ctypes.c_float)


def _bind(name: str, signature: str, result: Any, *parameters: Any) -> Any:
    """Return a function of llama.cpp's C++ interface, or None if this build does not export it.

    signature: the end of its mangled name, which states its parameters.
    """
    function = getattr(C._lib, f"_Z{len(name)}{name}{signature}", None)
    if function is not None:
        function.argtypes, function.restype = parameters, result
    return function


_set_layer_input = _bind(
    "llama_set_embeddings_layer_inp", "P13llama_contextjb", None, _Context, _Count, ctypes.c_bool
)
_get_layer_input = _bind(
    "llama_get_embeddings_layer_inp", "P13llama_contextj", _Floats, _Context, _Count
)
_target_layers = _bind(
    "llama_model_target_layer_ids", "PK11llama_model", ctypes.POINTER(_Int), _Model
)
_count_target_layers = _bind("llama_model_target_layer_ids_n", "PK11llama_model", _Count, _Model)
_selector_size = _bind("llama_model_dflash_selector_top_k", "PK11llama_model", _Int, _Model)
_LAYER_FUNCTIONS = (_set_layer_input, _get_layer_input, _target_layers, _count_target_layers)

States = npt.NDArray[np.float32]  # Hidden states of shape (rows, width).


def why_no_layers() -> str:
    """Return why the layers of a target cannot be read, as a clause; "" if they can."""
    if _ext is None:
        return f"this build of llama.cpp has no interface for hidden states ({_missing})"
    has_interface = None not in _LAYER_FUNCTIONS
    return "" if has_interface else "this build of llama.cpp does not show a target's layers"


def why_no_heads(model: Model) -> str:
    """Return why a model's heads or a sidecar cannot draft, as a clause; "" if they can."""
    if _ext is None:
        return f"this build of llama.cpp has no interface for MTP heads ({_missing})"
    if model.sidecar in ("eagle3", "dflash", "dspark"):
        return why_no_layers()
    if model.reads_target_cache:
        return ""
    if reason := explain_unusable_heads(
        model.architecture, model.n_heads, mrope=model.repeats_positions
    ):
        return reason
    has_heads = any(name.endswith(HEAD_SUFFIX) for name in read_tensor_names(model.path))
    return "" if has_heads else "the MTP heads that the target's file names are not in it"


class _BufferOverride(ctypes.Structure):
    """The struct llama_model_tensor_buft_override of llama.h. A null pattern ends a list of them."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def keep_experts_in_memory(path: str, count: int, *, spread: bool) -> ctypes.Array[_BufferOverride]:
    """Return llama.cpp's list of what stays in main memory: the first `count` tensors of `order_experts`."""
    experts = order_experts(read_tensor_names(path), spread=spread)[:count]
    in_memory = declare("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    overrides = [_BufferOverride(text.encode(), in_memory) for text in match_experts(experts)]
    return (_BufferOverride * (len(overrides) + 1))(*overrides)


class _GgufParams(ctypes.Structure):
    """The struct gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def model_files(path: str) -> list[str]:
    """Return the files of a model: `path`, with the others if it is the first of several."""
    shards = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path)
    if shards is None:
        return [path]
    return [f"{shards[1]}-{i:05}-of-{shards[2]}.gguf" for i in range(1, int(shards[2]) + 1)]


def read_tensor_names(path: str) -> set[str]:
    """Return the names of the tensors in those of a model's files that can be read."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    open_file = declare("gguf_init_from_file", pointer, ctypes.c_char_p, _GgufParams)
    count = declare("gguf_get_n_tensors", number, pointer)
    get_name = declare("gguf_get_tensor_name", ctypes.c_char_p, pointer, number)
    names: set[str] = set()
    for file in model_files(path):
        if header := open_file(os.fsencode(file), _GgufParams(True, None)):
            raw = (get_name(header, index) for index in range(count(header)))
            names.update(name.decode("utf-8", "replace") for name in raw)
            declare("gguf_free", None, pointer)(header)
    return names


# Architectures whose heads emit hidden states only for rows with logits. llama.cpp ends the process if asked
# for the states of other rows. For any other architecture, it would take the states from the first rows.
_STATES_OF_LOGITS_ROWS = frozenset({"deepseek4", "gemma4-assistant", "mimo2", "step35"})


def emit_states(handle: Any, model: Model, heads: bool) -> None:
    """Make the passes of a llama_context emit hidden states for every row.

    heads: whether it is a context of heads, some of which emit them only for rows with logits.
    """
    logits_rows_alone = heads and model.architecture in _STATES_OF_LOGITS_ROWS
    _ext.llama_set_embeddings_nextn(handle, True, logits_rows_alone)


def states(handle: Any, row: int, count: int, width: int) -> States | None:
    """Return a view (count, width) of the states of the last pass from `row` on, or None without states."""
    pointer = _ext.llama_get_embeddings_nextn_ith(handle, row)
    if not pointer:
        return None
    address = ctypes.addressof(pointer.contents)
    view: States = np.ctypeslib.as_array((ctypes.c_float * (count * width)).from_address(address))
    return view.reshape(count, width)


def emit_layers(handle: Any, layers: Sequence[int], model: Model) -> None:
    """Make the passes of a llama_context emit the inputs of these layers for every row.

    The layer `n_layer`, which does not exist, stands for the output of the last one.
    """
    for layer in layers:
        if layer < model.n_layer:
            _set_layer_input(handle, layer, True)
        elif model.emits_layers:
            _ext.llama_set_embeddings_nextn(handle, True, False)


def layer_inputs(handle: Any, layers: Sequence[int], model: Model, row: int, count: int) -> States:
    """Return the inputs of these layers in the last pass, one row (n_layers * n_embd,) for each token."""
    width = model.n_embd
    inputs: States = np.empty((count, len(layers), width), np.float32)
    for index, layer in enumerate(layers):
        if layer < model.n_layer:
            pointer = _get_layer_input(handle, layer)
        elif model.emits_layers:
            pointer = _ext.llama_get_embeddings_nextn(handle)
        else:
            pointer = C.llama_get_embeddings(handle)
        address = ctypes.addressof(pointer.contents) + row * width * inputs.itemsize
        rows = (ctypes.c_float * (count * width)).from_address(address)
        inputs[:, index] = np.ctypeslib.as_array(rows).reshape(count, width)
    return inputs.reshape(count, -1)


class LayerEncoder:
    """The encoder of a sidecar, which makes a state of what a target's layers read at one token.

    A pass reserves a row of logits for each of its rows, though it computes none, so it has few rows.
    """

    ROWS = 16

    def __init__(self, handle: Any, sequence: int, n_inputs: int, n_state: int) -> None:
        """Use a context.

        sequence: one that is empty whenever something is encoded, because llama.cpp checks the positions of a
        pass although an encoder has none. n_inputs: numbers that are read at one token. n_state: numbers in a
        state.
        """
        self._handle, self._sequence, self._n_state = handle, sequence, n_state
        self._batch = LayerBatch(self.ROWS, n_inputs)

    def encode(self, inputs: States) -> States:
        batch, encoded = self._batch, np.empty((len(inputs), self._n_state), np.float32)
        for start in range(0, len(inputs), self.ROWS):
            part = inputs[start : start + self.ROWS]
            batch.clear()
            for position in range(len(part)):
                batch.add(0, position, self._sequence, True)
            batch.inputs[: len(part)] = part
            batch.finish()
            if code := int(C.llama_encode(self._handle, batch.struct)):
                raise DecodeFatal(f"llama_encode failed with code {code}{format_last_error()}.")
            C.llama_synchronize(self._handle)
            rows = states(self._handle, 0, len(part), self._n_state)
            assert rows is not None
            encoded[start : start + len(part)] = rows
        return encoded


class LayerBatch(Batch):
    """A batch without tokens, for a sidecar that keeps what its target's layers have read."""

    def __init__(self, capacity: int, width: int, n_positions: int = 1) -> None:
        """width: numbers of a row. n_positions: how often llama.cpp expects each position."""
        super().__init__(capacity)
        self.inputs = self.attach_floats(width)
        self._repeated: Any = (C.llama_pos * (capacity * n_positions))()
        self._n_positions = n_positions
        self.struct.token = None  # type: ignore[assignment] # a null pointer
        self.struct.pos = self._repeated  # type: ignore[assignment] # a longer array

    def finish(self) -> None:
        super().finish()
        for section in range(min(self._n_positions, 3)):  # the last of four is for pictures
            start = section * self.rows
            self._repeated[start : start + self.rows] = [*self._pos[: self.rows]]


class StateBatch(Batch):
    """A batch for heads, with the hidden state of the previous token for each row in `states`."""

    def __init__(self, capacity: int, width: int) -> None:
        super().__init__(capacity)
        self.states = self.attach_floats(width)

    def add(self, token: int, position: int, sequence: int, logits: bool) -> int:
        """Append a row as in Batch, with a state of zeros, which means an unknown state."""
        row = super().add(token, position, sequence, logits)
        self.states[row] = 0.0
        return row


_BLOCK_SIZE = 16  # of block sidecars whose file does not say
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


class Resource(ABC):
    """A base of C resources that must be freed, which a `with` statement does."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def read_metadata(handle: Any, key: str) -> str | None:
    """Return a metadata value of a llama_model as text, or None if its file does not have the key."""
    buffer = ctypes.create_string_buffer(1024)
    size = C.llama_model_meta_val_str(handle, key.encode(), buffer, len(buffer))
    return None if size < 0 else buffer.value.decode("utf-8", "replace")


class Model(Resource):
    """A loaded GGUF model. It must be closed after every context created from it.

    sidecar: what the file drafts with if it is a sidecar, None if it is a model of its own.
    """

    sidecar: SidecarKind | None = None

    def __init__(
        self,
        path: str,
        *,
        n_gpu_layers: int = -1,
        cpu_experts: int = 0,
        split_mode: str = "layer",
        main_gpu: int = 0,
        extra_buffers: bool = True,
        heads: bool = False,
        devices: Sequence[int] = (),
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load the model file at `path`.

        cpu_experts: tensors of experts that stay in main memory, whatever layers are on a GPU. heads: load
        its MTP heads as well, if it has any. devices: handles of the devices to use instead of this machine's
        GPUs.

        Raises LoadFailed if the file is missing, or llama.cpp cannot read it. Raises OutOfMemory if memory
        does not hold the model.
        """
        self.handle: Any = None
        if not Path(path).is_file():
            raise LoadFailed(f"There is no model file at {path}.")
        params = C.llama_model_default_params()
        params.n_gpu_layers, params.main_gpu = n_gpu_layers, main_gpu
        params.split_mode = getattr(C, f"LLAMA_SPLIT_MODE_{split_mode.upper()}")
        params.use_extra_bufts, params.load_mtp = extra_buffers, heads
        # Terminated by a null pointer.
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices)
        params.devices = ctypes.addressof(self._devices) if devices else None
        if cpu_experts:
            n_devices = len(devices) or len(gpus()) if split_mode != "none" else 1
            self._overrides = keep_experts_in_memory(path, cpu_experts, spread=n_devices > 1)
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)

        @C.llama_progress_callback  # type: ignore[untyped-decorator] # the binding has no types
        def on_progress(fraction: float, _user: object) -> bool:
            if progress is not None:
                progress(float(fraction))
            return True

        params.progress_callback = on_progress
        forget_errors()
        self.path = path
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise load_error(f"llama.cpp cannot load {path}")
        self._read_properties(heads)

    def _read_properties(self, heads: bool) -> None:
        handle = self.handle
        self.n_ctx_train = int(C.llama_model_n_ctx_train(handle))
        # Without MTP heads. Heads in a file of their own declare as many as their target has.
        self.n_layer = int(C.llama_model_n_layer(handle))
        self.n_attention_heads = int(C.llama_model_n_head(handle))
        self.n_swa = int(C.llama_model_n_swa(handle))  # 0 without a sliding window.
        declared_heads = int(C.llama_model_n_layer_nextn(handle))
        self.n_heads = declared_heads if heads else 0  # Loaded MTP heads.
        self.n_params = int(C.llama_model_n_params(handle))
        self.n_embd = int(C.llama_model_n_embd(handle))  # The numbers of a token between layers.
        self.n_state = int(C.llama_model_n_embd_out(handle))  # Of a hidden state, for MTP heads.
        self.recurrent = bool(C.llama_model_is_recurrent(handle))
        self.hybrid = bool(C.llama_model_is_hybrid(handle))
        # The cache can be cut to fewer tokens, unless it holds a recurrent state.
        self.cuttable = not (self.recurrent or self.hybrid)
        self.has_encoder = bool(C.llama_model_has_encoder(handle))
        self.architecture = self.metadata("general.architecture") or ""
        needs_names = declared_heads or self.architecture == "dflash"
        names = read_tensor_names(self.path) if needs_names else ()
        self.sidecar = sidecar_kind(self.architecture, names)
        # Whether the file holds MTP heads that have no cache and read that of their target.
        self.reads_target_cache = reads_target_cache(self.architecture)
        # Whether passes can emit the inputs of layers for every row, whether it has logits or not.
        self.emits_layers = emits_layers(self.architecture)
        self.vocab = Vocab(self)

    @cached_property
    def target_layers(self) -> tuple[int, ...]:
        """The layers of its target that a sidecar reads, if it reads any."""
        if self.sidecar in (None, "mtp") or None in _LAYER_FUNCTIONS:
            return ()
        layers = _target_layers(self.handle)
        return tuple(int(layers[i]) for i in range(_count_target_layers(self.handle)))

    @property
    def target_width(self) -> int:
        """The numbers in a state of the target whose layers a sidecar reads; 0 if the file does not say."""
        return self.read_int("target_hidden_size", self.n_embd if self.block_size else 0)

    @cached_property
    def block_size(self) -> int:
        """The rows of a block that a block sidecar was trained on, the last token's among them; else 0."""
        return self.read_int("block_size", _BLOCK_SIZE) if self.architecture == "dflash" else 0

    @property
    def has_causal_blocks(self) -> bool:
        """Whether a token of a block attends only to the tokens before it."""
        return self.metadata("dflash.attention.causal") == "true"

    @property
    def drafts_from_anchor(self) -> bool:
        """Whether the row of the text's last token predicts the next one, as other models do."""
        return self.sidecar == "dspark" and self.metadata("dflash.sample_from_anchor") != "false"

    @cached_property
    def n_selected(self) -> int:
        """The candidates of each token that a block sidecar's selector chooses from; 0: it has none."""
        return int(_selector_size(self.handle)) if self.block_size and _selector_size else 0

    @property
    def repeats_positions(self) -> bool:
        """Whether rows without a token have four positions each (M-RoPE)."""
        return int(C.llama_model_rope_type(self.handle)) == C.LLAMA_ROPE_TYPE_MROPE

    @property
    def multi_sequence(self) -> bool:
        """Whether one context may hold several sequences."""
        return self.cuttable or self.architecture in _MULTI_SEQUENCE_RECURRENT

    @property
    def rope_depends_on_context(self) -> bool:
        """Whether cached keys may depend on the length of the context (llama.cpp's LongRoPE)."""
        original = f"{self.architecture}.rope.scaling.original_context_length"
        return self.metadata(original) is not None

    def min_continuable_length(self, first: int) -> int:
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
        known = model_traits.quantization_name(int(file_type)) if file_type.isdecimal() else ""
        guessed = details.partition(" ")[2].removeprefix("(guessed) ").partition(" - ")[0]
        count = self.n_params
        size = f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
        return ", ".join(filter(None, (architecture, f"{size} parameters", known or guessed)))

    @property
    def chat_template(self) -> str | None:
        """The file's default chat template."""
        return self.template(None)

    def template(self, name: str | None) -> str | None:
        """Return a template of the file by name; "rerank" has places for a query and a document."""
        raw = C.llama_model_chat_template(self.handle, name.encode() if name else None)
        return raw.decode("utf-8", "replace") if raw else None

    @property
    def head_lengths(self) -> tuple[int, int]:
        """The lengths of the key and the value of one attention head."""
        length = self.n_embd // max(self.n_attention_heads, 1)
        keys = self.read_int("attention.key_length", length)
        return keys, self.read_int("attention.value_length", length)

    @property
    def supports_flash_attention(self) -> bool:
        """Whether flash attention of every layer runs on every possible backend of a worker."""
        keys, values = self.head_lengths
        shared = self.n_attention_heads // max(int(C.llama_model_n_head_kv(self.handle)), 1)
        windowed_keys = self.read_int("attention.key_length_swa", keys)
        windowed_values = self.read_int("attention.value_length_swa", values)
        return all(
            (lengths[0] == lengths[1] and lengths[0] in _FLASH_LENGTHS)
            or (lengths in _SHARED_FLASH_LENGTHS and shared % _SHARED_FLASH_LENGTHS[lengths] == 0)
            for lengths in ((keys, values), (windowed_keys, windowed_values))
        )

    def read_int(self, key: str, default: int) -> int:
        """Return a number that the file has under the name of its architecture."""
        value = self.metadata(f"{self.architecture}.{key}") or ""
        return int(value) if value.isdecimal() else default

    @property
    def attends_causally(self) -> bool:
        return self.metadata(f"{self.architecture}.attention.causal") != "false"

    def metadata(self, key: str) -> str | None:
        return read_metadata(self.handle, key)

    def close(self) -> None:
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None
