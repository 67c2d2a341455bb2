"""Passes: rows in, logits out, and the memory of what was read."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.engine.llama import waiting
from localspec.engine.llama.batch import Aborted, BadBatch, Batch, DecodeFatal, NoKvSlot
from localspec.engine.llama.heads import States, emit_states, states
from localspec.engine.llama.library import beat, cause, expect_stop, failed, forget_errors
from localspec.engine.llama.model import Freed, Model
from localspec.engine.llama.stop import Stop, heed_nothing
from localspec.errors import LocalspecError
from localspec.protocol.settings import Pooling

Logits = npt.NDArray[np.float32]
State = npt.NDArray[np.uint8]  # of one sequence, as llama.cpp writes it


class NotFinite(LocalspecError):
    """Logits that are not numbers: weights of the file are not, or become too large in a pass."""


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """One llama_context. n_ctx: cells shared by all sequences; n_outputs: logits rows of a pass.

    n_batch: rows of a pass; n_ubatch: of those, how many llama.cpp computes at once, 0 for all.
    n_rollback: recurrent snapshots asked for (read `Context.n_rollback` for what was granted).
    chooses: sequences may have their greedy tokens chosen on the device (`choose_on_device`).
    heads: MTP heads, which read hidden states of their target: the model's own, with a cache of their
    own, instead of the model; or, where it is a sidecar, those that read the cache of `target`.
    pooling: passes make one row of numbers of each sequence's rows (`pooled`).
    """

    n_ctx: int
    n_batch: int
    n_seq: int
    n_outputs: int
    n_threads: int
    kv_types: tuple[str, str] = ("f16", "f16")
    n_rollback: int = 0
    flash_attention: str = "auto"
    chooses: bool = False
    heads: bool = False
    target: Context | None = None
    pooling: Pooling | None = None
    n_ubatch: int = 0


_FLASH = {
    "auto": C.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": C.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": C.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_KV_TYPES = {
    "f16": C.GGML_TYPE_F16,
    "q8_0": C.GGML_TYPE_Q8_0,
    "q5_1": C.GGML_TYPE_Q5_1,
    "q4_0": C.GGML_TYPE_Q4_0,
}


_POOLINGS: dict[Pooling, int] = {
    "mean": C.LLAMA_POOLING_TYPE_MEAN,
    "cls": C.LLAMA_POOLING_TYPE_CLS,
    "last": C.LLAMA_POOLING_TYPE_LAST,
    "rank": C.LLAMA_POOLING_TYPE_RANK,
}


# llama.cpp rounds up to as many, but bounds a pass by what was asked for, and ends the process where
# a wider one comes: a measuring pass, with a context of a few tokens.
FEWEST_CELLS = 256


class Context(Freed):
    """KV memory and compute buffers of one model, for up to `n_seq` sequences (unified cache).

    heads: of MTP heads. n_state: numbers of a hidden state; 0: passes give none. borrows: its cells are
    another context's, which alone changes them; that one is made first and empty then.
    """

    heads = borrows = False
    n_state = 0

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        """Create it.

        Raises:
            OutOfMemory, LoadFailed: a setting this model does not take.
        """
        self.handle: Any = None
        self._choosers: dict[int, Any] = {}  # sequence → its sampler chain, which is ours to free
        self.stop: Stop | None = None  # what ends a pass on its way
        self._heeded: Stop | None = None
        self._shifted = False  # positions were changed, and the keys will be in the next pass
        params = _parameters(settings)
        self.n_outputs = int(params.n_outputs_max)
        forget_errors()
        self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise failed(
                f"llama.cpp cannot make a context of {settings.n_ctx} tokens for {model.path}"
            )
        waiting.expect(settings.n_threads)
        self.model = model
        self.n_ctx = int(C.llama_n_ctx(self.handle))
        self.n_seq = settings.n_seq
        self.n_vocab = model.vocab.size
        self._row = ctypes.c_float * self.n_vocab
        self.n_rollback = int(C.llama_n_rs_seq(self.handle))
        self._memory = C.llama_get_memory(self.handle)  # None: it keeps nothing of what it reads
        self.n_pooled = 1 if settings.pooling == "rank" else model.n_state
        self.heads, self.borrows = settings.heads, settings.target is not None
        if settings.heads:
            self.emit_states()

    def emit_states(self) -> None:
        """Passes give hidden states from now on."""
        self.n_state = self.model.n_state
        emit_states(self.handle, self.model, self.heads)

    @property
    def cuttable(self) -> bool:
        """Can its memory be cut to fewer tokens? That of heads always, whatever the model has."""
        return self.heads or self.model.cuttable

    def decode(self, batch: Batch) -> None:
        """One pass over the rows of `batch`; logits are readable until the next one.

        Raises:
            NoKvSlot, Aborted, BadBatch, DecodeFatal: by llama_decode's return code.
        """
        if not batch.rows:
            raise BadBatch("An empty batch cannot be decoded.")
        batch.struct.n_tokens = batch.rows
        self._heed(None if self._shifted else self.stop)  # keys that are half turned are of no use
        if self._heeded:
            raise Aborted("The pass was stopped before it began.")
        waiting.look()
        beat()
        code = int(C.llama_decode(self.handle, batch.struct))
        beat()
        self._shifted = False
        if code == 0:
            return
        if code == 1:
            raise NoKvSlot(f"No room in the KV cache for {batch.rows} tokens.")
        if code == 2:
            raise Aborted("The pass was stopped.")
        if code == -1:
            raise BadBatch(f"llama.cpp refused a batch of {batch.rows} rows{cause()}.")
        raise DecodeFatal(f"llama_decode failed with code {code}{cause()}.")

    def _heed(self, stop: Stop | None) -> None:
        expect_stop(stop)
        if stop is self._heeded:
            return
        self._heeded = stop
        if stop is None:
            heed_nothing(self.handle)
        else:
            stop.heeded_by(self.handle)

    def logits(self, row: int) -> Logits:
        """A view (n_vocab,) of float32 logits of one row of the last pass; valid until the next.

        Raises:
            BadBatch: that row asked for no logits.
        """
        pointer = C.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise BadBatch(f"Row {row} has no logits{cause()}.")
        address = ctypes.addressof(pointer.contents)
        # It takes whatever is a buffer.
        view: Logits = np.frombuffer(self._row.from_address(address), np.float32)  # type: ignore[call-overload]
        return view

    def finite(self, row: int) -> Logits:
        """As `logits`. Raises NotFinite where they do not tell a highest one."""
        logits = self.logits(row)
        self._highest(logits)
        return logits

    def likeliest(self, row: int) -> int:
        """The token of the highest logit of one row. Raises BadBatch, NotFinite, as `finite`."""
        return self._highest(self.logits(row))

    def _highest(self, logits: Logits) -> int:
        at = int(logits.argmax())  # of a NaN, if there is one
        if not math.isfinite(logits[at]):
            raise _not_finite(self.model)
        return at

    def states(self, row: int, count: int = 1) -> States:
        """A view (count, n_state) of the hidden states of `count` rows of the last pass, valid until the
        next.

        Raises:
            BadBatch: there are none.
        """
        found = states(self.handle, row, count, self.n_state) if self.n_state else None
        if found is None:
            raise BadBatch(f"Row {row} has no hidden state{cause()}.")
        return found

    def pooled(self, sequence: int) -> States:
        """The numbers (n_pooled,) of a sequence of the last pass: a view, valid until the next one.

        Raises:
            BadBatch: there are none. NotFinite: they are no numbers.
        """
        pointer = C.llama_get_embeddings_seq(self.handle, sequence)
        if not pointer:
            raise BadBatch(f"Sequence {sequence} has no embedding{cause()}.")
        found: States = np.ctypeslib.as_array(pointer, (self.n_pooled,))
        if not np.isfinite(found).all():
            raise _not_finite(self.model)
        return found

    def choose_on_device(self, sequence: int, on: bool) -> bool:
        """Let the greedy token of each of a sequence's rows be chosen where the logits are.

        Then `sampled_token` has it, and `logits` has nothing: no row of a large vocabulary crosses from a
        GPU. Gives whether it is so now. Free where nothing changes.
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
        """The greedy token of a row of the last pass, of a sequence with `choose_on_device`.

        Raises:
            BadBatch: that row asked for no logits, or its sequence chooses nothing.
        """
        token = int(C.llama_get_sampled_token_ith(self.handle, row))
        if token < 0:
            raise BadBatch(f"No token was chosen for row {row}{cause()}.")
        return token

    def synchronize(self) -> None:
        """Wait for the pass: on a GPU llama_decode returns before the work is done."""
        C.llama_synchronize(self.handle)

    def remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Drop positions [start, end) of a sequence; -1 is its end. False: the model cannot."""
        self._check_sequence(sequence)
        return self.borrows or bool(C.llama_memory_seq_rm(self._memory, sequence, start, end))

    def copy(self, source: int, target: int, end: int, *, start: int = 0) -> None:
        """Make positions [start, end) of `source` part of `target` too (cells are shared)."""
        self._check_sequence(source)
        self._check_sequence(target)
        C.llama_memory_seq_cp(self._memory, source, target, start, end)

    @property
    def can_shift(self) -> bool:
        """Whether positions can be changed. llama.cpp ends the process where they cannot."""
        return bool(C.llama_memory_can_shift(self._memory))

    def shift(self, sequence: int, start: int, end: int, by: int) -> None:
        """Move positions [start, end) of a sequence; of cells that it shares, those of the others too."""
        self._check_sequence(sequence)
        C.llama_memory_seq_add(self._memory, sequence, start, end, by)
        self._shifted = True

    def length(self, sequence: int) -> int:
        """Tokens the memory holds for a sequence (its highest position + 1)."""
        self._check_sequence(sequence)
        return int(C.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def first(self, sequence: int) -> int:
        """The lowest position from which the memory holds a sequence without a gap; -1: nothing.

        llama.cpp gives cells that no token after a text's last one can see to whoever needs them, and
        leaves them out of a saved state. Of a recurrent state it is the last position.
        """
        self._check_sequence(sequence)
        return int(C.llama_memory_seq_pos_min(self._memory, sequence))

    def save(self, sequence: int, *, partial: bool = False) -> State:
        """The state of one sequence, to be given to `restore`.

        partial: only what cannot be cut (a recurrent state); positions read since are cut by `remove`.
        """
        self._check_sequence(sequence)
        flags = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else C.LLAMA_STATE_SEQ_FLAGS_NONE
        size = int(C.llama_state_seq_get_size_ext(self.handle, sequence, flags))
        state: State = np.empty(size, np.uint8)
        written = int(
            C.llama_state_seq_get_data_ext(self.handle, _bytes(state), size, sequence, flags)
        )
        return state[:written]

    def state_size(self, sequence: int, *, partial: bool = False) -> int:
        """Bytes that `save` would give."""
        self._check_sequence(sequence)
        flags = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else C.LLAMA_STATE_SEQ_FLAGS_NONE
        return int(C.llama_state_seq_get_size_ext(self.handle, sequence, flags))

    def restore(self, sequence: int, state: State, *, partial: bool = False) -> bool:
        """Put a saved state in place of a sequence; False if llama.cpp refuses it."""
        self._check_sequence(sequence)
        flags = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else C.LLAMA_STATE_SEQ_FLAGS_NONE
        size = state.nbytes
        read = int(
            C.llama_state_seq_set_data_ext(self.handle, _bytes(state), size, sequence, flags)
        )
        return read == size

    def clear(self) -> None:
        if not self.borrows:  # llama.cpp would empty the other's
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
        f"The model {model.path} produces NaN or infinite values for this text: its "
        "file is damaged or was converted incorrectly. Download it again, or choose "
        "another."
    )


def _parameters(settings: ContextSettings) -> Any:
    """llama.cpp's."""
    params = C.llama_context_default_params()
    params.n_ctx = max(settings.n_ctx, FEWEST_CELLS)
    # llama.cpp ends the process where there are fewer rows of logits than sequences.
    n_batch = max(settings.n_batch, settings.n_seq)
    params.n_batch = n_batch
    params.n_ubatch = max(min(settings.n_ubatch or n_batch, n_batch), settings.n_seq)
    params.n_seq_max = settings.n_seq
    params.n_outputs_max = max(min(settings.n_outputs, n_batch), settings.n_seq)
    params.n_threads = settings.n_threads
    params.n_threads_batch = settings.n_threads
    params.n_rs_seq = settings.n_rollback
    params.type_k, params.type_v = (_KV_TYPES[each] for each in settings.kv_types)
    params.kv_unified = True  # one sequence may use the whole cache, and one pass holds them all
    # Cells outside the window stay until others need them, so that an edit above reads nothing
    # again, and cells that two sequences share, which llama.cpp never gives to others, leave
    # room. A small cache would need a window for each sequence and the widest pass, more than
    # half of this one at the usual context. What is there still is for `first` to say.
    params.swa_full = True
    params.no_perf = True
    params.flash_attn_type = _FLASH[settings.flash_attention]
    if settings.chooses:  # by default one row per sequence may be chosen on the device
        params.n_outputs_max_per_seq = params.n_outputs_max
    if settings.pooling is not None:
        params.embeddings, params.pooling_type = True, _POOLINGS[settings.pooling]
    if settings.heads:
        params.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP
    if settings.target is not None:
        params.ctx_other = settings.target.handle
    return params


def _bytes(state: State) -> Any:
    """A state as C's functions take it, without a copy."""
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
