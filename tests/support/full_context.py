"""A context filled to its last cell, in a process of its own: what was planned, and what it took.

`python full_context.py TARGET KV_TYPE [TOKENS]` prints three sizes in bytes: of the cache and buffers that
were planned, and by how much this process grew until the load was over and until the context was full.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from localspec.daemon.worker import eviction
from localspec.engine.llama import Batch, Context
from localspec.engine.llama.model import initialise
from localspec.engine.pair.load import load_pair
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.registry.header.fit import FreeMemory


def held() -> int:
    """Bytes of this process that are no file's."""
    found = re.search(r"^RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def read(context: Context, batch: Batch, sequence: int, first: int, count: int) -> None:
    """`count` tokens more, in passes as wide as they are planned to be."""
    for start in range(first, first + count, batch.capacity):
        batch.clear()
        for at in range(start, min(start + batch.capacity, first + count)):
            batch.add(at % 97, at, sequence, at - start < 64)
        context.decode(batch)
    context.synchronize()


def main(target: str, kv_type: str, tokens: int) -> None:
    settings = EngineSettings(n_ctx=tokens, parallel=5, type_kv=kv_type)  # type: ignore[arg-type] # any of them
    planned = eviction.plan_load(PairFiles("p", target), settings, FreeMemory(1 << 40), "cpu")
    assert planned.plan is not None
    initialise()
    before = held()
    pair = load_pair(planned.pair, planned.settings, lambda *_: None)
    loaded = held() - before
    context, batch = pair.shared.context, Batch(settings.n_batch)
    # What one sequence has read is given to the others: reading all of it would take minutes.
    each = (context.n_ctx - batch.capacity) // settings.parallel
    read(context, batch, 0, 0, each)
    state = context.save(0)
    for sequence in range(1, settings.parallel):
        context.restore(sequence, state)
    read(context, batch, 0, each, context.n_ctx - settings.parallel * each)
    need = planned.plan.target
    print(need.cache + need.compute, loaded, held() - before)
    pair.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
