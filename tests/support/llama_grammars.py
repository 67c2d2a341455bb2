"""llama.cpp's own grammar sampler, in a process of its own, since a bad grammar ends the process.

`Reference` walks a grammar along tokens that the sampler allows, and returns what it allowed at each step.
Run as a program, this file is the other side: one job per line of standard input, one outcome per line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.engine.llama.vocab import Vocab

JOB_LIMIT_S = 8.0  # some grammars take llama.cpp exponential time
MEMORY_LIMIT = 4 * 1024**3  # bytes of address space

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """The tokens that were allowed, and the one that was chosen; None at the end of a walk."""

    allowed: Mask
    token: int | None


@dataclass(frozen=True)
class Outcome:
    """Whether llama.cpp accepts a grammar, and the walks along it."""

    accepted: bool
    walks: list[list[Step]] = field(default_factory=list)


class VocabularyFile:
    """A vocabulary without weights, with as much of a `Model` as `Vocab` needs."""

    def __init__(self, path: Path) -> None:
        params = C.llama_model_default_params()
        params.vocab_only = True
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        assert self.handle, f"llama.cpp cannot read {path}"

    def metadata(self, key: str) -> str | None:
        return "gpt-2" if key == "tokenizer.ggml.pre" else None

    def vocab(self) -> Vocab:
        model: Any = self
        return Vocab(model)


class Reference:
    """The process. If a grammar ends it, there is no outcome, and the next grammar gets a new process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop()

    def walk(
        self, grammar: str, seeds: list[int], steps: int, avoid: list[int] | None = None
    ) -> Outcome | None:
        """Walk once for each seed; never choose tokens in `avoid`. Returns None if llama.cpp dies."""
        if self._process is None:
            self._process = self._start()
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        job = {"grammar": grammar, "seeds": seeds, "steps": steps, "avoid": avoid or []}
        line = b""
        with contextlib.suppress(BrokenPipeError):
            pipes.stdin.write(json.dumps(job).encode() + b"\n")
            pipes.stdin.flush()
            line = pipes.stdout.readline()
        if not line.endswith(b"}\n"):
            self._stop()
            return None
        answer = json.loads(line)
        walks = [[Step(_unpacked(mask), token) for mask, token in walk] for walk in answer["walks"]]
        return Outcome(answer["accepted"], walks)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.llama_grammars", str(self._path)]
        root = Path(__file__).parents[2]
        return subprocess.Popen(
            command,
            cwd=root,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


# The process that runs llama.cpp.


class _Sampler:
    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._data = (C.llama_token_data * vocab.size)()
        self._view = np.ctypeslib.as_array(self._data)
        self._ends = set(vocab.ends)

    def outcome(self, job: dict[str, Any]) -> dict[str, Any]:
        source = job["grammar"].encode()
        walks = []
        for seed in job["seeds"]:
            sampler = C.llama_sampler_init_grammar(self._vocab.handle, source, b"root")
            if not sampler:
                return {"accepted": False, "walks": []}
            try:
                walks.append(self._walk(sampler, random.Random(seed), job["steps"], job["avoid"]))
            finally:
                C.llama_sampler_free(sampler)
        return {"accepted": True, "walks": walks}

    def _walk(self, sampler: Any, dice: random.Random, steps: int, avoid: list[int]) -> list[Any]:
        walk = []
        for step in range(steps + 1):
            allowed = self._allowed(sampler)
            open_ = [int(candidate) for candidate in np.flatnonzero(allowed)]
            open_ = [
                candidate
                for candidate in open_
                if candidate not in self._ends and candidate not in avoid
            ]
            token = dice.choice(open_) if open_ and step < steps else None
            walk.append((np.packbits(allowed).tobytes().hex(), token))
            if token is None:
                break
            C.llama_sampler_accept(sampler, token)
        return walk

    def _allowed(self, sampler: Any) -> Mask:
        self._view["id"] = np.arange(len(self._data))
        self._view["logit"] = 0.0
        candidates = C.llama_token_data_array(
            ctypes.cast(self._data, C.llama_token_data_p), len(self._data), -1, False
        )
        C.llama_sampler_apply(sampler, ctypes.byref(candidates))
        allowed: Mask = np.zeros(len(self._data), dtype=np.bool_)
        allowed[self._view["id"]] = np.isfinite(self._view["logit"])
        return allowed


def _unpacked(mask: str) -> Mask:
    return np.unpackbits(np.frombuffer(bytes.fromhex(mask), dtype=np.uint8)).astype(np.bool_)


def _serve(path: Path, jobs: IO[bytes], outcomes: IO[bytes]) -> None:
    sampler = _Sampler(VocabularyFile(path).vocab())
    # `{5,3}` would use up all memory.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for line in jobs:
        signal.setitimer(signal.ITIMER_REAL, JOB_LIMIT_S)  # its signal ends the process
        outcomes.write(json.dumps(sampler.outcome(json.loads(line))).encode() + b"\n")
        outcomes.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
