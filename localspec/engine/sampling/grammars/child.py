"""Compiles grammars in processes of their own: `python -m …grammars.child FD SECONDS`.

A grammar of a few hundred bytes can take minutes to compile, and nothing in llguidance ends that. This
process compiles none itself: for each job it forks one that does, with a limit on its processor time and
memory. It has one thread and opens no device, so forking it is safe, and a fork takes milliseconds.

FD is a Unix socket, SECONDS the processor time of one job. On the socket comes first the vocabulary,
then one connection for each job,
passed as a descriptor. The process ends when the socket does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from localspec.engine.sampling.grammars.gbnf import TokenTable
from localspec.engine.sampling.grammars.sources import (
    GrammarJob,
    GrammarSources,
    SpecialTokens,
    build_sources,
    one_line,
)
from localspec.errors import GrammarRejected

CPU_LIMIT_S = 3.0  # for one job: 1 MiB of tools takes a fifth of it
MEMORY_LIMIT = 1024 * 1024 * 1024  # bytes of address space for one job, beyond what start-up took
NICENESS = 5  # an answer that is being written goes before a grammar that is being read

# A mask is bounded by the fuel of one step: 0.1 s where nothing but the lexer's states is computed.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, max_lexer_states=50_000, max_grammar_size=200_000
)


class Vocabulary(msgspec.Struct, frozen=True):
    """What compiling needs of a vocabulary: its size, its special tokens, and what GBNF may name.

    bracketed, unusable: as `ids` and `unusable` of a TokenTable.
    """

    size: int
    ids: dict[str, int]
    ends: list[int]
    bracketed: dict[str, int] = {}
    unusable: list[int] = []

    def special(self) -> SpecialTokens:
        """Return what writing grammars needs of it."""
        table = TokenTable(self.size, self.bracketed, frozenset(self.unusable))
        return SpecialTokens(self.ids, frozenset(self.ends), table)


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a job: its sources, or an error and the request's field that it concerns.

    seconds: processor time that compiling took.
    """

    sources: GrammarSources | None = None
    error: str = ""
    param: str | None = None
    seconds: float = 0.0


def send(connection: socket.socket, data: bytes) -> None:
    """Send one message: its length in four bytes, then itself."""
    connection.sendall(struct.pack("<I", len(data)) + data)


def receive(connection: socket.socket) -> bytes:
    """Receive one message. Raises EOFError where the other side has closed."""
    size = struct.unpack("<I", _exactly(connection, 4))[0]
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


class _Tokens:
    """A vocabulary of single bytes, with the special tokens where the model has them.

    Whether a grammar compiles does not depend on how its text is cut into tokens.
    """

    eos_token_id: int
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.ids.values())
        free = (token for token in range(vocabulary.size + 256) if token not in special)
        self._bytes = [next(free) for _ in range(256)]
        size = max(vocabulary.size, self._bytes[-1] + 1)
        self.tokens = [b""] * size
        for byte, token in enumerate(self._bytes):
            self.tokens[token] = bytes([byte])
        for text, token in vocabulary.ids.items():
            self.tokens[token] = b"\xff" + text.encode()
        self.special_token_ids = sorted(special)
        self.eos_token_id = next(iter(vocabulary.ends), 0)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self._bytes[byte] for byte in data]


def run_job(job: GrammarJob, special: SpecialTokens, tokenizer: LLTokenizer) -> Outcome:
    """Build a job's grammars and compile them."""

    def compile(source: str, name: str) -> None:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            cause = one_line(str(matcher.get_error()).strip())
            raise GrammarRejected(f"The {name} is not usable: {cause}", param=job.param)

    try:
        return Outcome(build_sources(job, special, compile))
    except GrammarRejected as error:
        return Outcome(error=error.message, param=error.param)
    except RecursionError:
        return Outcome(error="The grammar is nested too deeply.", param=job.param)


def _limit(cpu_limit_s: float) -> None:
    """Bound this process's time and memory: what exceeds them ends it."""
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
        used = int(pages) * resource.getpagesize()
    except OSError:  # not Linux, where the limit is on the whole
        used = 0
    # macOS refuses a limit on the address space. The clock holds there all the same.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, resource.RLIM_INFINITY))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve_one(
    connection: socket.socket,
    special: SpecialTokens,
    tokenizer: LLTokenizer,
    cpu_limit_s: float,
) -> None:
    _limit(cpu_limit_s)
    connection.sendall(struct.pack("<I", os.getpid()))
    job = msgspec.msgpack.decode(receive(connection), type=GrammarJob)
    outcome = run_job(job, special, tokenizer)
    outcome = msgspec.structs.replace(outcome, seconds=time.process_time())
    send(connection, msgspec.msgpack.encode(outcome))


def main(descriptor: int, cpu_limit_s: float) -> None:
    """Serve the socket `descriptor` until it closes. cpu_limit_s: seconds of processor time for one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what was forked
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    control = socket.socket(fileno=descriptor)
    vocabulary = msgspec.msgpack.decode(receive(control), type=Vocabulary)
    special = vocabulary.special()
    tokenizer = LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary)), eos_token=vocabulary.ends or None
    )
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            status = 1
            try:
                control.close()
                _serve_one(connection, special, tokenizer, cpu_limit_s)
                status = 0
            finally:
                os._exit(status)
        connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
