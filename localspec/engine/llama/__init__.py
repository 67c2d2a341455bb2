"""A thin, typed layer over llama_cpp, which no other package of the engine uses.

It checks every return code and frees every resource. llama.cpp ends the process on unexpected input, so this
layer checks what it passes to C: token ids against the vocabulary, rows against the batch, and sequence ids
against the context.
"""

from __future__ import annotations

import llama_cpp.llama_cpp as C

from localspec.engine.llama.batch import (
    Aborted,
    BadBatch,
    Batch,
    DecodeError,
    DecodeFatal,
    NoKvSlot,
    Stop,
)
from localspec.engine.llama.context import Context, ContextSettings, Logits, NotFinite, State
from localspec.engine.llama.model import (
    LayerBatch,
    Model,
    OutOfMemory,
    StateBatch,
    States,
    backend,
    devices,
    gpus,
    initialise,
    last_heartbeat,
    llama_version,
    read_tensor_names,
    record_heartbeat,
    system_info,
    why_no_heads,
    wide_vectors,
)
from localspec.engine.llama.rpc import connect, enable_keepalive
from localspec.engine.llama.vocab import FimTokens, MarkedToken, Vocab, check_tokens

__all__ = [
    "Aborted",
    "BadBatch",
    "Batch",
    "C",
    "Context",
    "ContextSettings",
    "DecodeError",
    "DecodeFatal",
    "FimTokens",
    "LayerBatch",
    "Logits",
    "MarkedToken",
    "Model",
    "NoKvSlot",
    "NotFinite",
    "OutOfMemory",
    "State",
    "StateBatch",
    "States",
    "Stop",
    "Vocab",
    "backend",
    "check_tokens",
    "connect",
    "devices",
    "enable_keepalive",
    "gpus",
    "initialise",
    "last_heartbeat",
    "llama_version",
    "read_tensor_names",
    "record_heartbeat",
    "system_info",
    "why_no_heads",
    "wide_vectors",
]
