"""llama.cpp itself: its start, its log, what it was built for, and why something failed."""

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

# Beside what llama.cpp says of a GPU ("cudaMalloc failed: out of memory") its words for main memory.
_NO_MEMORY = re.compile(
    r"out of (?:device )?memory|failed to (?:re)?alloc|unable to alloc|OutOfDeviceMemory|bad_alloc"
)
# What follows on the reason of a failed load, and what stands before it.
_FOLLOWS = re.compile(r"failed to load model($| from )")
_BEFORE = re.compile(r"^llama_model_load: error loading model: (error loading model \w+: )?")


class OutOfMemory(LoadFailed):
    """The memory of a GPU or of the machine does not hold a model or a context."""


_last_error: list[str] = []
_beat = [0.0]
_stop: list[Stop | None] = [None]  # what may end the present pass
_no_memory: list[str] = []  # the first complaint about memory since a load began


@C.llama_log_callback  # type: ignore[untyped-decorator] # the binding has no types
def _on_log(level: int, text: bytes, _user: object) -> None:
    # 3 is warning, 4 error, 5 the continuation of the line before (ggml.h). Less is noise.
    if level == 4 and not _stop[0]:  # one that was to end has not failed
        line = text.decode("utf-8", "replace").strip()
        if not _last_error or not _FOLLOWS.search(line):
            _last_error[:] = [line]
        if not _no_memory and _NO_MEMORY.search(line):
            _no_memory.append(line)
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def beat() -> None:
    """A sign of life: something that takes long has come a step further."""
    _beat[0] = time.monotonic()


def last_beat() -> float:
    """When the last one was (time.monotonic), for another thread to look at."""
    return _beat[0]


def initialise() -> None:
    """Start llama.cpp once per process; its errors go to stderr, the rest nowhere."""
    C.llama_log_set(_on_log, ctypes.c_void_p(0))
    C.llama_backend_init()
    waiting.begin()


def expect_stop(stop: Stop | None) -> None:
    """A pass begins, which `stop` may end."""
    _stop[0] = stop


def forget_errors() -> None:
    """A load begins."""
    _last_error.clear()
    _no_memory.clear()


def failed(message: str) -> LoadFailed:
    """LoadFailed, or OutOfMemory where llama.cpp complained about that."""
    if _no_memory:
        return OutOfMemory(f"{message} ({_no_memory[0]}).")
    return LoadFailed(f"{message}{cause()}.")


def cause() -> str:
    """The last error in brackets, or nothing."""
    return f" ({_BEFORE.sub('', _last_error[0])})" if _last_error else ""


def llama_version() -> str:
    """Version of llama-cpp-python, which pins llama.cpp's."""
    import importlib.metadata

    return importlib.metadata.version("llama-cpp-python")


def system_info() -> str:
    """llama.cpp's own line of CPU features and backends."""
    text: bytes = C.llama_print_system_info()
    return text.decode("utf-8", "replace").strip()


def wide_vectors() -> bool:
    """Does llama.cpp compute with vectors of 512 bits on this CPU?"""
    return "AVX512 = 1" in system_info()


def devices(*, gpus: bool) -> list[int]:
    """This machine's GPUs that the build can use, or what else it has passes run on."""
    lib = ggml.libggml
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    lib.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    every = map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count()))
    # 1: a GPU with memory of its own, 2: one that shares the machine's (ggml-backend.h)
    return [each for each in every if (lib.ggml_backend_dev_type(each) in (1, 2)) == gpus]


def gpus() -> list[str]:
    """This machine's GPUs, as their drivers call them."""
    described = ggml.libggml.ggml_backend_dev_description
    described.restype, described.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return [described(each).decode("utf-8", "replace") for each in devices(gpus=True)]


def backend() -> str:
    """What passes run on: "cuda", "metal", "vulkan", "gpu" for another, or "cpu"."""
    if not devices(gpus=True):  # llama.cpp's own answer counts other machines' too
        return "cpu"
    info = system_info().lower()
    return next((name for name in ("cuda", "metal", "vulkan") if name in info), "gpu")
