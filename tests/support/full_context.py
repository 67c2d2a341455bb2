"""Fill a context to its last cell in a process of its own, and compare the planned memory with that used.

`python full_context.py TARGET KV_TYPE [TOKENS]` prints three sizes in bytes: the planned cache and buffers,
and the growth of this process until the load was over and until the context was full.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from localspec.daemon.worker.plan import LoadPlanner
from localspec.engine.llama import Batch, Context
from localspec.engine.llama.model import initialise
from localspec.engine.pair.load import load_pair
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.registry.header.fit import FreeMemory


def used_memory() -> int:
    """Return the bytes of this process that belong to no file."""
    match = re.search(r"^RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) << 10


def prefill(context: Context, batch: Batch, sequence: int, first: int, count: int) -> None:
    """Decode `count` more tokens, in passes of the planned width."""
    for start in range(first, first + count, batch.capacity):
        batch.clear()
        for at in range(start, min(start + batch.capacity, first + count)):
            batch.add(at % 97, at, sequence, at - start < 64)
        context.decode(batch)
    context.synchronize()


def main(target: str, kv_type: str, tokens: int) -> None:
    settings = EngineSettings(n_ctx=tokens, parallel=5, type_kv=kv_type)  # type: ignore[arg-type] # any of them
    planned = LoadPlanner(PairFiles("p", target), settings, "cpu").plan(FreeMemory(1 << 40))
    assert planned.plan is not None
    initialise()
    memory_before = used_memory()
    pair = load_pair(planned.pair, planned.settings, lambda *_: None)
    loaded = used_memory() - memory_before
    context, batch = pair.shared.context, Batch(settings.n_batch)
    # The state of one sequence is copied to the others, since prefilling all of them would take minutes.
    tokens_per_sequence = (context.n_ctx - batch.capacity) // settings.parallel
    prefill(context, batch, 0, 0, tokens_per_sequence)
    state = context.save(0)
    for sequence in range(1, settings.parallel):
        context.restore(sequence, state)
    prefill(
        context,
        batch,
        0,
        tokens_per_sequence,
        context.n_ctx - settings.parallel * tokens_per_sequence,
    )
    need = planned.plan.target
    print(need.cache + need.compute, loaded, used_memory() - memory_before)
    pair.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
