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
    free_gpu_bytes,
    gpus,
    initialise,
    last_heartbeat,
    llama_version,
    model_files,
    read_tensor_names,
    record_heartbeat,
    system_info,
    why_no_heads,
    why_no_layers,
    wide_vectors,
)
from localspec.engine.llama.pictures import (
    PictureRows,
    begin_of_picture,
    is_picture,
    picture_tokens,
    split_pictures,
)
from localspec.engine.llama.projector import Projector, UnreadablePicture
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
    "PictureRows",
    "Projector",
    "State",
    "StateBatch",
    "States",
    "Stop",
    "UnreadablePicture",
    "Vocab",
    "backend",
    "begin_of_picture",
    "check_tokens",
    "connect",
    "devices",
    "enable_keepalive",
    "free_gpu_bytes",
    "gpus",
    "initialise",
    "is_picture",
    "last_heartbeat",
    "llama_version",
    "model_files",
    "picture_tokens",
    "read_tensor_names",
    "record_heartbeat",
    "split_pictures",
    "system_info",
    "why_no_heads",
    "why_no_layers",
    "wide_vectors",
]
