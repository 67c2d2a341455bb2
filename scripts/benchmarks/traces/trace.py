"""A trace: what the target wrote greedily, and what the draft would have said at each place of it.

One trace replays every depth policy: greedy output does not depend on what was drafted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localspec.engine.speculation.acceptance import N_BUCKETS, find_bucket
from localspec.engine.speculation.cost import CostProfile, CostTable, parse_cost_table

if TYPE_CHECKING:
    from localspec.engine.llama import Context, Model
    from localspec.protocol.frames import EngineSettings

VERSION = 1
_ROWS = 16  # rows of the draft's passes while recording; each has a row of logits


@dataclass(frozen=True, slots=True)
class Trace:
    """A text with the draft's guesses at it.

    target[i]: the i-th token written. draft[i]: the draft's best guess at it, knowing all before it.
    buckets[i]: the bucket of that guess's confidence. costs: as from `CostProfile.as_dict`.
    """

    name: str
    target: Sequence[int]
    draft: Sequence[int]
    buckets: Sequence[int]
    costs: dict[str, Any]

    @property
    def hits(self) -> list[bool]:
        """Return whether each guess was right, by place."""
        return [a == b for a, b in zip(self.target, self.draft, strict=True)]

    @classmethod
    def draw(
        cls,
        name: str,
        rates: Sequence[float],
        buckets: Sequence[int],
        costs: dict[str, Any],
        seed: int,
    ) -> Trace:
        """Return a trace in which the draft's guess at token i is right with probability rates[i]."""
        wrong = np.random.default_rng(seed).random(len(rates)) >= rates
        tokens = list(range(len(rates)))
        guesses = [
            token + 1_000_000 * bool(miss) for token, miss in zip(tokens, wrong, strict=True)
        ]
        return cls(name, tokens, guesses, buckets, costs)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Load a saved trace.

        Raises:
            OSError: no such file; ValueError: it is not a trace.
        """
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
            raise ValueError(f"{path} is not a trace of version {VERSION}")
        try:
            trace = cls(**fields)
        except TypeError as error:
            raise ValueError(f"{path} is not a trace: {error}") from error
        same = len(trace.target) == len(trace.draft) == len(trace.buckets)
        if not same or not all(0 <= b < N_BUCKETS for b in trace.buckets):
            raise ValueError(f"{path} is damaged: its lists do not fit together")
        return trace


def cost_profile(costs: dict[str, Any]) -> CostProfile:
    """Return the profile that `CostProfile.as_dict` described.

    Raises:
        ValueError: it has no times for target or draft.
    """
    target, draft = (
        parse_cost_table(costs.get("target_ms")),
        parse_cost_table(costs.get("draft_ms")),
    )
    if target is None or draft is None:
        raise ValueError("a cost profile needs target_ms and draft_ms, each from width 1 on")
    return CostProfile(CostTable(target), CostTable(draft), float(costs.get("overhead_ms", 0.3)))


# A 1 B-parameter Q4_0 target and a 4-layer draft on 2 threads of an AVX-512/AMX machine, in
# milliseconds by width, with repacked kernels and with plain ones: two staircases to try a policy on.
_DRAFT_MS = {1: 7.6, 2: 7.8, 3: 9.3, 4: 10.8, 5: 15.6, 8: 18.1, 9: 23.8, 12: 23.6, 16: 28.3}
EXAMPLE_COSTS: dict[str, dict[str, Any]] = {
    "repacked": {
        "target_ms": {1: 78, 2: 95, 3: 117, 4: 87, 5: 135, 8: 161, 9: 199, 12: 218, 16: 248},
        "draft_ms": _DRAFT_MS,
    },
    "plain": {
        "target_ms": {1: 100, 2: 85, 3: 101, 4: 110, 5: 176, 8: 191, 9: 251, 12: 257, 16: 331},
        "draft_ms": _DRAFT_MS,
    },
}


def record(
    target: Path,
    draft: Path,
    prompt: Sequence[int] | str,
    tokens: int,
    settings: EngineSettings,
    name: str,
) -> Trace:
    """Generate greedily without drafts, then let the draft read what was written.

    Raises:
        LocalspecError: a model does not load, or the generation failed.
    """
    from benchmarks.measuring.runner import Runner

    with Runner(target, draft, settings) as runner:
        read = (
            runner.pair.vocab.tokenize(prompt, add_special=True, parse_special=True)
            if isinstance(prompt, str)
            else list(prompt)
        )
        written = runner.write(read, tokens)
        costs = runner.costs()
    guesses, buckets = _guesses(draft, read, written, settings)
    return Trace(name, written, guesses, buckets, costs)


def _guesses(
    draft: Path, prompt: Sequence[int], written: Sequence[int], settings: EngineSettings
) -> tuple[list[int], list[int]]:
    """Return the draft's best token at each place of `written`, and the bucket of its confidence."""
    from localspec.engine.llama import Context, ContextSettings, Model

    with Model(
        str(draft), n_gpu_layers=settings.n_gpu_layers, extra_buffers=settings.extra_buffers
    ) as model:
        room = ContextSettings(
            n_ctx=len(prompt) + len(written) + _ROWS,
            n_batch=_ROWS,
            n_seq=1,
            n_outputs=_ROWS,
            n_threads=settings.n_threads,
        )
        with Context(model, room) as context:
            return _read(model, context, list(prompt), list(written))


def _read(
    model: Model, context: Context, prompt: list[int], written: list[int]
) -> tuple[list[int], list[int]]:
    import numpy as np

    from localspec.engine.llama import Batch

    tokens = [*prompt, *written][:-1]  # nothing is guessed after the last one
    first = len(prompt) - 1
    batch = Batch(_ROWS)
    guesses: list[int] = []
    buckets: list[int] = []
    for start in range(0, len(tokens), _ROWS):
        batch.clear()
        for at in range(start, min(start + _ROWS, len(tokens))):
            batch.add(tokens[at], at, 0, at >= first)
        context.decode(batch)
        context.synchronize()
        for row in range(max(first - start, 0), batch.rows):
            logits = context.logits(row)
            best = int(logits.argmax())
            guesses.append(best)
            buckets.append(find_bucket(1.0 / float(np.exp(logits - logits[best]).sum())))
    return guesses, buckets
