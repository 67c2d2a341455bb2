"""Tests that are coroutines, and tables of pairs with scripted engines for them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec

from localspec.config import Config
from localspec.daemon.worker.table import PairTable
from localspec.paths import Paths
from tests.support.daemons import FAKE_WORKER
from tests.support.patience import PATIENCE

Arguments = ParamSpec("Arguments")


def asynchronous(
    test: Callable[Arguments, Coroutine[Any, Any, None]],
) -> Callable[Arguments, None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), PATIENCE))

    return run


@contextlib.asynccontextmanager
async def pair_table(
    folder: Path, config: Config | None = None, *options: str
) -> AsyncIterator[PairTable]:
    """Yield a table whose engines are scripted and started with these options, and check that it closes."""
    command = (sys.executable, str(FAKE_WORKER), *options)
    table = PairTable(config or Config(), Paths(*[folder] * 5), worker_command=command)
    try:
        yield table
    finally:
        await table.close()
    assert {pair.status().state for pair in table.all} <= {"unloaded"}
