"""Initialise llama.cpp, read its log for the causes of failures, and describe its build."""

from __future__ import annotations

import ctypes
import re
import sys
import time

import llama_cpp._ggml as ggml
import llama_cpp.llama_cpp as C

from localspec.engine.llama import waiting
from localspec.engine.llama.stop import Stop
from localspec.errors import LoadFailed

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
def _on_log(level: int, text: bytes, _user: object) -> None:
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


def beat() -> None:
    """Record a sign of life: a long operation has made progress."""
    _beat[0] = time.monotonic()


def last_beat() -> float:
    """Return the time (time.monotonic) of the last sign of life, for another thread."""
    return _beat[0]


def initialise() -> None:
    """Initialise llama.cpp, once per process. Its errors go to stderr; other messages are dropped."""
    C.llama_log_set(_on_log, ctypes.c_void_p(0))
    C.llama_backend_init()
    waiting.begin()


def expect_stop(stop: Stop | None) -> None:
    """Note that a pass begins which `stop` may end."""
    _stop[0] = stop


def forget_errors() -> None:
    """Forget earlier errors, because a load begins."""
    _last_error.clear()
    _no_memory.clear()


def failed(message: str) -> LoadFailed:
    """Return LoadFailed, or OutOfMemory if llama.cpp logged an error about memory."""
    if _no_memory:
        return OutOfMemory(f"{message} ({_no_memory[0]}).")
    return LoadFailed(f"{message}{cause()}.")


def cause() -> str:
    """Return the last logged error in parentheses, or ""."""
    return f" ({_PREFIX.sub('', _last_error[0])})" if _last_error else ""


def llama_version() -> str:
    """Return the version of llama-cpp-python, which determines that of llama.cpp."""
    import importlib.metadata

    return importlib.metadata.version("llama-cpp-python")


def system_info() -> str:
    """Return llama.cpp's line of CPU features and backends."""
    text: bytes = C.llama_print_system_info()
    return text.decode("utf-8", "replace").strip()


def wide_vectors() -> bool:
    """Return whether llama.cpp computes with 512-bit vectors on this CPU."""
    return "AVX512 = 1" in system_info()


def devices(*, gpus: bool) -> list[int]:
    """Return handles of this machine's GPUs that the build can use, or of its other devices."""
    lib = ggml.libggml
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    lib.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    handles = map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count()))
    # Type 1 is a GPU with memory of its own, 2 one that shares the machine's (ggml-backend.h).
    return [device for device in handles if (lib.ggml_backend_dev_type(device) in (1, 2)) == gpus]


def gpus() -> list[str]:
    """Return the names of this machine's GPUs, as their drivers report them."""
    describe = ggml.libggml.ggml_backend_dev_description
    describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return [describe(device).decode("utf-8", "replace") for device in devices(gpus=True)]


def backend() -> str:
    """Return what passes run on: "cuda", "metal", "vulkan", "gpu" for another GPU, or "cpu"."""
    if not devices(gpus=True):  # llama.cpp's own function also counts the GPUs of RPC servers.
        return "cpu"
    info = system_info().lower()
    return next((name for name in ("cuda", "metal", "vulkan") if name in info), "gpu")
