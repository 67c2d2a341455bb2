"""`scripts/bench tasks`: what people ask a model that writes code, on a real model.

Twelve tasks: files copied with a change, names replaced, JSON, summaries, free answers. Plain decoding
and `auto` take turns on each, with --llama-server also llama-server with each kind of n-gram drafts.

`scripts/bench tasks record FOLDER` records answers, `history FOLDER` makes some of the commits and pages of
this repository, and `replay FOLDER` writes them once more without the model, each with nothing learned,
its passes costing what they cost on one machine. With --learn it says what is learned from all of them:
the content of localspec/engine/speculation/drafters/ngram.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import add_shared, positive, say
from benchmarks.load import load_report
from localspec.engine import environment
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from benchmarks.texts.tasks import Task
    from localspec.protocol.frames import EngineSettings


def main(arguments: list[str]) -> int:
    """Run it. 0: done; 1: a failure; 2: usage."""
    environment.prepare()  # as in the worker, and before llama_cpp is imported
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.target is None and options.what != "replay":
        parser.error("--target: which model?")
    try:
        return _PARTS[options.what](options)
    except (LocalspecError, OSError, ValueError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scripts/bench tasks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="?", choices=[*_PARTS], default="measure")
    add("folder", nargs="?", type=Path, help="of recorded answers")
    add("--target", type=Path, metavar="GGUF", help="the model")
    add("--only", nargs="+", metavar="TASK", help="beginnings of tasks' names")
    add("--edits", type=positive, default=12, help="with history: how many commits (12)")
    add("--learn", action="store_true", help="with replay: what is learned from the answers")
    add("--learned", action="store_true", help="the tasks that are learned from, not the twelve")
    add("--tokens", type=positive, default=512, help="of each answer at most (512)")
    add("--repetitions", type=positive, default=3, help="each with nothing learned before (3)")
    add("--context", type=positive, default=16384, help="tokens (16384)")
    add("--gpu-layers", type=int, default=-1, help="-1: all that fit")
    add_shared(parser)
    return parser


def _measure(options: argparse.Namespace) -> int:
    from benchmarks.texts.measure import Plan, markdown, measure

    tasks, before = _tasks(options), load_report()
    say(before)
    runs = measure(
        Plan(
            options.target,
            tasks,
            options.tokens,
            options.repetitions,
            _settings(options),
            options.llama_server.absolute() if options.llama_server else None,
            options.seed,
        ),
        say,
    )
    sys.stdout.write(f"{markdown(runs)}\nBefore: {before}\n")
    if options.json is not None:
        import msgspec

        text = json.dumps(msgspec.to_builtins(runs), indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _tasks(options: argparse.Namespace) -> list[Task]:
    from benchmarks.texts.tasks import LEARNED_FROM, TASKS

    tasks = LEARNED_FROM if options.learned else TASKS
    named = tuple(options.only or ("",))
    if matching := [task for task in tasks if task.name.startswith(named)]:
        return matching
    raise ValueError(f"no task is called {' or '.join(named)}")


def _settings(options: argparse.Namespace) -> EngineSettings:
    from localspec.engine import llama
    from localspec.engine.pair.models import physical_cores
    from localspec.protocol.frames import EngineSettings

    llama.initialise()
    return EngineSettings(
        n_ctx=options.context,
        parallel=1,
        n_threads=options.threads or physical_cores(),
        n_gpu_layers=options.gpu_layers,
    )


def _record(options: argparse.Namespace) -> int:
    from benchmarks.texts.answers import record

    if options.folder is None:
        raise ValueError("record where? Name a folder")
    arguments = _tasks(options), options.tokens, options.folder, _settings(options)
    for answered in record(options.target, *arguments, say):
        say(f"{answered.name}: {len(answered.prompt)} tokens read, {len(answered.answer)} written")
    return 0


def _history(options: argparse.Namespace) -> int:
    from benchmarks.texts.answers import Asker
    from benchmarks.texts.history import edits, pages

    if options.folder is None:
        raise ValueError("where to? Name a folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    asker = Asker(options.target, _settings(options))
    try:
        vocab = asker.pair.vocab

        def tokens(text: str) -> list[int]:
            return vocab.tokenize(text, add_special=False, parse_special=False)

        for answered in (*edits(tokens, options.edits, options.seed), *pages(tokens)):
            answered.save(options.folder)
            say(
                f"{answered.name}: {len(answered.prompt)} tokens before, {len(answered.answer)} after"
            )
    finally:
        asker.close()
    return 0


def _replay(options: argparse.Namespace) -> int:
    from benchmarks.texts.answers import saved
    from benchmarks.texts.replay import Replay, calibration, markdown

    if options.folder is None or not (answers := saved(options.folder)):
        raise ValueError("replay what? Name a folder with recorded answers")
    if options.learn:
        sys.stdout.write(calibration(answers, options.seed))
        return 0
    written = [(answered, Replay().write(answered)) for answered in answers]
    sys.stdout.write(markdown(written))
    return 0


_PARTS = {"measure": _measure, "record": _record, "history": _history, "replay": _replay}
