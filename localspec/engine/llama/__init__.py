"""A thin, typed layer over llama_cpp, which no other package of the engine uses.

It checks every return code and frees every resource. llama.cpp ends the process on unexpected input, so this
layer checks what it passes to C: token ids against the vocabulary, rows against the batch, and sequence ids
against the context.
"""

from __future__ import annotations

from localspec.engine.llama.batch import Aborted as Aborted
from localspec.engine.llama.batch import BadBatch as BadBatch
from localspec.engine.llama.batch import Batch as Batch
from localspec.engine.llama.batch import DecodeError as DecodeError
from localspec.engine.llama.batch import DecodeFatal as DecodeFatal
from localspec.engine.llama.batch import NoKvSlot as NoKvSlot
from localspec.engine.llama.batch import Stop as Stop
from localspec.engine.llama.context import Context as Context
from localspec.engine.llama.context import ContextSettings as ContextSettings
from localspec.engine.llama.context import Logits as Logits
from localspec.engine.llama.context import NotFinite as NotFinite
from localspec.engine.llama.context import State as State
from localspec.engine.llama.model import LayerBatch as LayerBatch
from localspec.engine.llama.model import Model as Model
from localspec.engine.llama.model import OutOfMemory as OutOfMemory
from localspec.engine.llama.model import StateBatch as StateBatch
from localspec.engine.llama.model import States as States
from localspec.engine.llama.model import backend as backend
from localspec.engine.llama.model import devices as devices
from localspec.engine.llama.model import free_gpu_bytes as free_gpu_bytes
from localspec.engine.llama.model import gpus as gpus
from localspec.engine.llama.model import initialise as initialise
from localspec.engine.llama.model import last_heartbeat as last_heartbeat
from localspec.engine.llama.model import llama_version as llama_version
from localspec.engine.llama.model import model_files as model_files
from localspec.engine.llama.model import read_tensor_names as read_tensor_names
from localspec.engine.llama.model import record_heartbeat as record_heartbeat
from localspec.engine.llama.model import system_info as system_info
from localspec.engine.llama.model import why_no_heads as why_no_heads
from localspec.engine.llama.model import why_no_layers as why_no_layers
from localspec.engine.llama.pictures import PictureRows as PictureRows
from localspec.engine.llama.pictures import begin_of_picture as begin_of_picture
from localspec.engine.llama.pictures import is_picture as is_picture
from localspec.engine.llama.pictures import picture_tokens as picture_tokens
from localspec.engine.llama.pictures import split_pictures as split_pictures
from localspec.engine.llama.projector import Projector as Projector
from localspec.engine.llama.projector import UnreadablePicture as UnreadablePicture
from localspec.engine.llama.rpc import connect as connect
from localspec.engine.llama.rpc import enable_keepalive as enable_keepalive
from localspec.engine.llama.samplers import NativeSampler as NativeSampler
from localspec.engine.llama.samplers import infill_rule as infill_rule
from localspec.engine.llama.vocab import FimTokens as FimTokens
from localspec.engine.llama.vocab import MarkedToken as MarkedToken
from localspec.engine.llama.vocab import Vocab as Vocab
from localspec.engine.llama.vocab import check_tokens as check_tokens
