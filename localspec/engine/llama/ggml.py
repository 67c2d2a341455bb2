"""Declare functions of ggml, which the Python binding leaves undeclared."""

from __future__ import annotations

from typing import Any

import llama_cpp._ggml as ggml


def declare(name: str, result: Any, *parameters: Any) -> Any:
    """Return a function of ggml with these C types. Raises AttributeError if the build lacks it."""
    function = getattr(ggml.libggml, name)
    function.restype, function.argtypes = result, parameters
    return function
