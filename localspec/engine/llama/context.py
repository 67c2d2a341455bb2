"""A llama.cpp context: run passes, read logits, and manage the KV cache."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.engine.llama import model as library
from localspec.engine.llama import waiting
from localspec.engine.llama.batch import (
    Aborted,
    BadBatch,
    Batch,
    DecodeFatal,
    NoKvSlot,
    Stop,
    detach,
)
from localspec.engine.llama.model import Model, Resource, States
from localspec.errors import LocalspecError
from localspec.protocol.settings import Pooling

Logits = npt.NDArray[np.float32]
State = npt.NDArray[np.uint8]  # The state of one sequence, as llama.cpp writes it.
_Bytes = ctypes.POINTER(ctypes.c_uint8)


class NotFinite(LocalspecError):
    """Raised for logits that are not finite, because of bad weights or an overflow in a pass."""


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """The settings of a llama_context.

    n_ctx: KV cells, shared by all sequences. n_outputs: rows of a pass that may have logits.
    n_batch: rows of a pass. n_ubatch: rows that llama.cpp computes at once; 0 means all.
    n_rollback: requested snapshots of a recurrent state (`Context.n_rollback` has the granted number).
    choose_on_device: whether greedy tokens may be chosen on the device (`Context.choose_on_device`).
    heads: run a model's MTP heads, or a sidecar, which read hidden states of the target.
    target: for a sidecar that uses the cache or the weights of its target, the target's context.
    pooling: passes compute one embedding or score per sequence (`pooled`).
    """

    n_ctx: int
    n_batch: int
    n_seq: int
    n_outputs: int
    n_threads: int
    kv_types: tuple[str, str] = ("f16", "f16")
    n_rollback: int = 0
    flash_attention: str = "auto"
    choose_on_device: bool = False
    heads: bool = False
    target: Context | None = None
    pooling: Pooling | None = None
    n_ubatch: int = 0


_FLASH = {
    "auto": C.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": C.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": C.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
# Saved of a sequence's state: all of it, or only what cannot be cut (a recurrent state).
_STATE_FLAGS = (C.LLAMA_STATE_SEQ_FLAGS_NONE, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
# llama.cpp rounds the number of cells up to this, but limits a pass to the requested number, and ends the
# process for a wider pass. A measuring pass would be wider than a context of a few tokens.
MIN_CELLS = 256


class Context(Resource):
    """The KV cache and compute buffers of one model, for up to `n_seq` sequences (unified cache).

    heads: whether it runs MTP heads. n_state: the width of hidden states, 0 if passes emit none. borrows:
    whether it uses the cells of another context, which alone changes them. That context is created first and
    must be empty at that time.
    """

    heads = borrows = False
    n_state = 0
    has_states = True  # whether the last pass emitted them, if passes do
    states_need_logits = False  # whether passes emit them only if every row has logits

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        """Create the context.

        Raises OutOfMemory if memory does not hold it. Raises LoadFailed if the model does not support a
        setting.
        """
        self.handle: Any = None
        self._choosers: dict[int, Any] = {}  # Sampler chains by sequence, to be freed.
        self.stop: Stop | None = None  # The flag that stops a running pass.
        self._current_stop: Stop | None = None  # The flag that llama.cpp checks.
        self._shifted = False  # Positions were changed; the next pass will rotate the keys.
        params = _parameters(settings)
        if settings.heads and not model.target_layers:
            params.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP
        self.n_outputs = int(params.n_outputs_max)
        library.forget_errors()
        self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            size = f"{settings.n_ctx} tokens"
            raise library.load_error(f"llama.cpp cannot make a context of {size} for {model.path}")
        waiting.expect_threads(settings.n_threads)
        self.model = model
        self.n_ctx = int(C.llama_n_ctx(self.handle))
        self.n_seq = settings.n_seq
        self.n_ubatch = int(C.llama_n_ubatch(self.handle))  # rows that may attend to all others
        self.n_vocab = model.vocab.size
        self._row = ctypes.c_float * self.n_vocab
        self.n_rollback = int(C.llama_n_rs_seq(self.handle))
        self._memory = C.llama_get_memory(self.handle)  # None if the model has no cache.
        self.n_pooled = 1 if settings.pooling == "rank" else model.n_state
        self.heads = settings.heads
        # Whether the cache can be cut to fewer tokens; the cache of heads always can.
        self.cuttable = settings.heads or model.cuttable
        if model.block_size:
            C.llama_set_causal_attn(self.handle, model.has_causal_blocks)
        self.borrows = settings.target is not None and model.reads_target_cache
        self._layers: tuple[int, ...] = ()
        self._encoder: library.LayerEncoder | None = None
        if settings.heads:
            self.emit_states()
        if model.sidecar == "eagle3" and model.target_layers:
            n_inputs = len(model.target_layers) * model.target_width
            self._encoder = library.LayerEncoder(
                self.handle, self.n_seq - 1, n_inputs, self.n_state
            )

    def emit_states(self, layers: Sequence[int] = ()) -> None:
        """Make passes emit hidden states from now on: the last ones, or else the inputs of `layers`."""
        self._layers = tuple(layers)
        if layers:
            self.n_state = len(layers) * self.model.n_embd
            self.states_need_logits = not self.model.emits_layers
            library.emit_layers(self.handle, layers, self.model)
        else:
            self.n_state = self.model.n_state
            library.emit_states(self.handle, self.model, self.heads)

    def encode(self, inputs: States) -> States:
        """Return the states (rows, n_state) that a sidecar makes of inputs of its target's layers.

        inputs: as `states` of the target's context. The logits of the last pass are lost.

        Raises DecodeFatal if llama.cpp refuses the pass.
        """
        assert self._encoder is not None
        return self._encoder.encode(inputs)

    def decode(self, batch: Batch) -> None:
        """Run a pass over the rows of `batch`. Its logits are readable until the next pass.

        Raises:
            DecodeError: NoKvSlot, Aborted, BadBatch or DecodeFatal, by llama_decode's return code.
        """
        if not batch.rows:
            raise BadBatch("An empty batch cannot be decoded.")
        batch.finish()
        # A pass that rotates keys must not be stopped, because half rotated keys are useless.
        stop = None if self._shifted else self.stop
        library.expect_stop(stop)
        if stop is not self._current_stop:
            self._current_stop = stop
            (stop.attach if stop is not None else detach)(self.handle)
        if stop:
            raise Aborted("The pass was stopped before it began.")
        waiting.check_load()
        library.record_heartbeat()
        if batch.both_ways:
            C.llama_set_causal_attn(self.handle, False)
        if self.states_need_logits:
            self.has_states = batch.all_have_logits
            C.llama_set_embeddings(self.handle, self.has_states)
        try:
            code = int(C.llama_decode(self.handle, batch.struct))
        finally:
            if batch.both_ways:
                C.llama_set_causal_attn(self.handle, True)
        library.record_heartbeat()
        self._shifted = False
        if code == 0:
            return
        if code == 1:
            raise NoKvSlot(f"No room in the KV cache for {batch.rows} tokens.")
        if code == 2:
            raise Aborted("The pass was stopped.")
        if code == -1:
            raise BadBatch(
                f"llama.cpp refused a batch of {batch.rows} rows{library.format_last_error()}."
            )
        raise DecodeFatal(f"llama_decode failed with code {code}{library.format_last_error()}.")

    def logits(self, row: int) -> Logits:
        """Return a view (n_vocab,) of the logits of a row of the last pass, valid until the next pass.

        Raises BadBatch if the row has no logits.
        """
        pointer = C.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise BadBatch(f"Row {row} has no logits{library.format_last_error()}.")
        address = ctypes.addressof(pointer.contents)
        # frombuffer accepts any buffer, although its type stubs do not say so.
        view: Logits = np.frombuffer(self._row.from_address(address), np.float32)  # type: ignore[call-overload]
        return view

    def finite_logits(self, row: int) -> Logits:
        """Return the logits of a row. Raises BadBatch, or NotFinite if the highest is not finite."""
        logits = self.logits(row)
        self.find_highest(logits)
        return logits

    def argmax_token(self, row: int) -> int:
        """Return the token with the highest logit of a row. Raises as `finite_logits`."""
        return self.find_highest(self.logits(row))

    def find_highest(self, logits: Logits) -> int:
        """Return the index of the highest of some logits. Raises NotFinite if that is not finite."""
        token = int(logits.argmax())  # The index of a NaN, if there is one.
        if not math.isfinite(logits[token]):
            raise _not_finite(self.model)
        return token

    def states(self, row: int, count: int = 1) -> States:
        """Return hidden states (count, n_state) of the last pass, valid until the next pass.

        Raises BadBatch if the row has no hidden state.
        """
        if self._layers:
            return library.layer_inputs(self.handle, self._layers, self.model, row, count)
        view = library.states(self.handle, row, count, self.n_state) if self.n_state else None
        if view is None:
            raise BadBatch(f"Row {row} has no hidden state{library.format_last_error()}.")
        return view

    def finite_states(self, row: int) -> States:
        """Return the hidden state (n_state,) of a row. Raises BadBatch, or NotFinite if one is not finite."""
        state: States = self.states(row)[0]
        if not np.isfinite(state).all():
            raise _not_finite(self.model)
        return state

    def pooled(self, sequence: int) -> States:
        """Return a view (n_pooled,) of a sequence's embedding or score, valid until the next pass.

        Raises BadBatch if the sequence has none. Raises NotFinite if it has values that are not finite.
        """
        pointer = C.llama_get_embeddings_seq(self.handle, sequence)
        if not pointer:
            raise BadBatch(f"Sequence {sequence} has no embedding{library.format_last_error()}.")
        view: States = np.ctypeslib.as_array(pointer, (self.n_pooled,))
        if not np.isfinite(view).all():
            raise _not_finite(self.model)
        return view

    def choose_on_device(self, sequence: int, on: bool) -> bool:
        """Switch the choice of a sequence's greedy tokens on the device, and return whether it is on now.

        While it is on, `sampled_token` returns the token and `logits` has nothing, so that no row of a large
        vocabulary is copied from a GPU. The call costs nothing if it changes nothing.
        """
        self._check_sequence(sequence)
        if on == (sequence in self._choosers):
            return on
        if not on:
            C.llama_set_sampler(self.handle, sequence, None)
            C.llama_sampler_free(self._choosers.pop(sequence))
            return False
        chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
        if not C.llama_set_sampler(self.handle, sequence, chain):
            C.llama_sampler_free(chain)
            return False
        self._choosers[sequence] = chain
        return True

    def sampled_token(self, row: int) -> int:
        """Return the greedy token of a row of the last pass, whose sequence has `choose_on_device` on.

        Raises BadBatch if the row has no logits, or its sequence has `choose_on_device` off.
        """
        token = int(C.llama_get_sampled_token_ith(self.handle, row))
        if token < 0:
            raise BadBatch(f"No token was chosen for row {row}{library.format_last_error()}.")
        return token

    def synchronize(self) -> None:
        """Wait until the pass has ended. On a GPU, llama_decode returns before that."""
        C.llama_synchronize(self.handle)

    def remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Remove positions [start, end) of a sequence; -1 is its end. Return False if the model cannot."""
        self._check_sequence(sequence)
        return self.borrows or bool(C.llama_memory_seq_rm(self._memory, sequence, start, end))

    def copy(self, source: int, target: int, end: int, *, start: int = 0) -> None:
        """Add positions [start, end) of `source` to `target`, which then shares their cells."""
        self._check_sequence(source)
        self._check_sequence(target)
        C.llama_memory_seq_cp(self._memory, source, target, start, end)

    @property
    def can_shift(self) -> bool:
        """Whether positions can be changed. llama.cpp ends the process on `shift` if they cannot."""
        return bool(C.llama_memory_can_shift(self._memory))

    def shift(self, sequence: int, start: int, end: int, by: int) -> None:
        """Move positions [start, end) of a sequence, and those of sequences that share its cells."""
        self._check_sequence(sequence)
        C.llama_memory_seq_add(self._memory, sequence, start, end, by)
        self._shifted = True

    def length(self, sequence: int) -> int:
        """Return the number of tokens in the cache for a sequence (its highest position + 1)."""
        self._check_sequence(sequence)
        return int(C.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def first_position(self, sequence: int) -> int:
        """Return the lowest position from which the cache holds a sequence without a gap, or -1 if empty.

        With a sliding window, llama.cpp may reuse cells that no later token can see, and omits them from a
        saved state. For a recurrent state, the result is the last position.
        """
        self._check_sequence(sequence)
        return int(C.llama_memory_seq_pos_min(self._memory, sequence))

    def save(self, sequence: int, *, partial: bool = False) -> State:
        """Return the state of one sequence, for `restore`.

        partial: save only what cannot be cut (a recurrent state); later positions are removed by `remove`.
        """
        size = self.state_size(sequence, partial=partial)
        state: State = np.empty(size, np.uint8)
        data, flags = state.ctypes.data_as(_Bytes), _STATE_FLAGS[partial]
        written = C.llama_state_seq_get_data_ext(self.handle, data, size, sequence, flags)
        return state[: int(written)]

    def state_size(self, sequence: int, *, partial: bool = False) -> int:
        """Return the number of bytes that `save` would return."""
        self._check_sequence(sequence)
        flags = _STATE_FLAGS[partial]
        return int(C.llama_state_seq_get_size_ext(self.handle, sequence, flags))

    def restore(self, sequence: int, state: State, *, partial: bool = False) -> bool:
        """Replace a sequence by a saved state. Return False if llama.cpp rejects the state."""
        self._check_sequence(sequence)
        data, size, flags = state.ctypes.data_as(_Bytes), state.nbytes, _STATE_FLAGS[partial]
        n_read = C.llama_state_seq_set_data_ext(self.handle, data, size, sequence, flags)
        return int(n_read) == size

    def clear(self) -> None:
        """Empty the cache, unless it belongs to another context."""
        if not self.borrows:
            C.llama_memory_clear(self._memory, True)

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.n_seq:
            raise BadBatch(f"Sequence {sequence} is outside 0…{self.n_seq - 1}.")

    def close(self) -> None:
        if self.handle:
            C.llama_free(self.handle)
            self.handle = None
            for chain in self._choosers.values():
                C.llama_sampler_free(chain)
            self._choosers.clear()


def _not_finite(model: Model) -> NotFinite:
    return NotFinite(
        f"The model {model.path} produces NaN or infinite values for this text: its file is damaged or was "
        "converted incorrectly. Download it again, or choose another."
    )


def _parameters(settings: ContextSettings) -> Any:
    """Return the settings as llama.cpp's llama_context_params."""
    params = C.llama_context_default_params()
    params.n_ctx = max(settings.n_ctx, MIN_CELLS)
    # llama.cpp ends the process if there are fewer rows of logits than sequences.
    n_batch = max(settings.n_batch, settings.n_seq)
    params.n_batch = n_batch
    params.n_ubatch = max(min(settings.n_ubatch or n_batch, n_batch), settings.n_seq)
    params.n_seq_max = settings.n_seq
    params.n_outputs_max = max(min(settings.n_outputs, n_batch), settings.n_seq)
    params.n_threads = params.n_threads_batch = settings.n_threads
    params.n_rs_seq = settings.n_rollback
    types = (getattr(C, f"GGML_TYPE_{name.upper()}") for name in settings.kv_types)
    params.type_k, params.type_v = types
    params.kv_unified = True  # One sequence may use all cells, and one pass hold all sequences.
    # With a full-size cache, cells outside the sliding window stay until others need them. An edit further up
    # then needs no second prefill, and there is room beside shared cells, which llama.cpp never reuses. A
    # small cache would need a window for each sequence and the widest pass, which is more than half of this
    # one at the usual context. `first_position` returns what is still there.
    params.swa_full = True
    params.no_perf = True
    params.flash_attn_type = _FLASH[settings.flash_attention]
    if settings.choose_on_device:  # By default, only one row of a sequence may be chosen there.
        params.n_outputs_max_per_seq = params.n_outputs_max
    if settings.pooling is not None:
        params.embeddings = True
        params.pooling_type = getattr(C, f"LLAMA_POOLING_TYPE_{settings.pooling.upper()}")
    if settings.target is not None:
        params.ctx_other = settings.target.handle
    return params
