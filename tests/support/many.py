"""Many commands from one Python, each in a fork of it, which saves their starts: many.py JOBS [pipes].

JOBS is JSON: the words of each job and its additional environment. A marker line follows each job's output;
with `pipes` one line of JSON is printed instead, with the exit code, stdout and stderr of each job, which
reads what this program reads.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from localspec import cli
from localspec.cli.app import COMMANDS
from tests.support.patience import PATIENCE
from tests.support.terminal import terminal

Job = tuple[Sequence[str], Mapping[str, str]]
END = "⟦that was it⟧"


class Completed(NamedTuple):
    code: int
    out: str
    err: str


def in_pipes(environment: dict[str, str], jobs: Sequence[Job], stdin: str = "") -> list[Completed]:
    """Run the jobs, each with the same input, and return what each wrote and its exit code."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.support.many", json.dumps(jobs), "pipes"],
        env=environment, input=stdin.encode(), stdout=subprocess.PIPE, timeout=PATIENCE,
    )  # fmt: skip
    return [Completed(*result) for result in json.loads(completed.stdout)]


def in_a_terminal(environment: dict[str, str], jobs: Sequence[Job], columns: int) -> list[str]:
    """Run the jobs one after the other in a terminal, and return the output of each."""
    program = ["-m", "tests.support.many", json.dumps(jobs)]
    with terminal(environment, program=program, columns=columns) as session:
        session.wait(PATIENCE)
    parts = session.raw.split(END)
    assert len(parts) == len(jobs) + 1, parts[-1]
    return parts[:-1]


def _run(words: list[str], variables: dict[str, str]) -> int:
    os.environ.update(variables)
    sys.argv = ["localspec", *words]
    try:
        return cli.main(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def _fork(
    words: list[str], variables: dict[str, str], out: int = 1, err: int = 2, given: int = 0
) -> int:
    sys.stdout.flush()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.dup2(given, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    try:
        code = _run(words, variables)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(1)


def _piped(words: list[str], variables: dict[str, str], stdin: bytes) -> Completed:
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryFile() as given,
    ):
        given.write(stdin)
        given.seek(0)
        code = _fork(words, variables, out.fileno(), err.fileno(), given.fileno())
        for file in (out, err):
            file.seek(0)
        return Completed(code, out.read().decode(), err.read().decode())


def _main() -> None:
    for module, _ in COMMANDS.values():
        importlib.import_module(module.partition(":")[0])
    gc.freeze()
    jobs = json.loads(sys.argv[1])
    if sys.argv[2:]:
        stdin = sys.stdin.buffer.read()
        json.dump([_piped(words, variables, stdin) for words, variables in jobs], sys.stdout)
        return
    for job in jobs:
        _fork(*job)
        sys.stdout.write(END)
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
