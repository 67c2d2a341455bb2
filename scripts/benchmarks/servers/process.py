"""A server of the benchmark's own: `with` starts it, waits for it and ends it."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Started(ABC):
    """`_process` runs from the start; leaving the `with` ends it, and so does a start that fails."""

    _process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stop()

    @abstractmethod
    def _wait(self) -> None:
        """Until it is ready. Raises BenchError."""

    @abstractmethod
    def _tidy(self) -> None:
        """Put away what it leaves."""

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._tidy()
