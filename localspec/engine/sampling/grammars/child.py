"""Compile grammars in processes of their own: `python -m …grammars.child SECONDS`.

A grammar of a few hundred bytes can take minutes to compile, and llguidance offers no way to stop that. This
process forks another one for each job, which has a limit on its CPU time and memory. Forking is safe, because
this process has one thread and opens no device. A fork takes milliseconds.

SECONDS is the CPU time limit of one job. The first message of the parent is the vocabulary. Each job then
comes with a connection of its own, passed as a file descriptor.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time

import msgspec
from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from localspec.children import (
    become_helper,
    drop_core_dumps,
    limit_memory,
    receive_message,
    send_message,
)
from localspec.engine.sampling.grammars.sources import (
    GrammarJob,
    GrammarSources,
    GrammarTokens,
    build_sources,
)
from localspec.errors import GrammarRejected

CPU_LIMIT_S = 3.0  # CPU time of one job. 1 MiB of tool schemas takes a fifth of it.
# Bytes of address space of one job, in addition to those at start-up.
MEMORY_LIMIT_BYTES = 1024 * 1024 * 1024


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a job: its sources, or an error with the request field `param` that caused it.

    seconds: CPU time that compiling took.
    """

    sources: GrammarSources | None = None
    error: str = ""
    param: str | None = None
    seconds: float = 0.0


class _Tokens:
    """A vocabulary of single bytes, with special tokens at the ids that they have in the model.

    It can stand in for the real vocabulary, because whether a grammar compiles does not depend on how text
    is tokenized.
    """

    eos_token_id: int
    bos_token_id = None

    def __init__(self, vocabulary: GrammarTokens) -> None:
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
        """Return one token per byte of `text`."""
        data = text if isinstance(text, bytes) else text.encode()
        return [self._bytes[byte] for byte in data]


def _serve_job(
    connection: socket.socket, special: GrammarTokens, tokenizer: LLTokenizer, cpu_limit_s: float
) -> None:
    """Build the grammars of one job, within limits at which the system ends this process."""
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
    limit_memory(MEMORY_LIMIT_BYTES)
    drop_core_dumps()
    connection.sendall(struct.pack("<I", os.getpid()))
    job = msgspec.msgpack.decode(receive_message(connection), type=GrammarJob)
    try:
        outcome = Outcome(build_sources(job, special, tokenizer))
    except GrammarRejected as error:
        outcome = Outcome(error=error.message, param=error.param)
    except RecursionError:
        outcome = Outcome(error="The grammar is nested too deeply.", param=job.param)
    outcome = msgspec.structs.replace(outcome, seconds=time.process_time())
    send_message(connection, msgspec.msgpack.encode(outcome))


def main(cpu_limit_s: float) -> None:
    """Serve the parent until it closes the connection. cpu_limit_s: CPU seconds for one job."""
    control = become_helper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the forked processes.
    special = msgspec.msgpack.decode(receive_message(control), type=GrammarTokens)
    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(special)), eos_token=special.ends or None)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            status = 1
            try:
                control.close()
                _serve_job(connection, special, tokenizer, cpu_limit_s)
                status = 0
            finally:
                os._exit(status)
        connection.close()


if __name__ == "__main__":
    main(float(sys.argv[1]))
