"""`scripts/bench next_edit`: windows of recorded editing sessions, rewritten plainly and by drafts.

The sessions are this repository's history: each commit's changes of a file, one after another. Of each, the
model is asked for the window around it as it should be. With --right its tokens are those of the commit,
whatever its logits say: the passes cost what they cost, and the answer is the right one.

`scripts/bench next_edit rule` says what the rule of localspec/chat/rewriting.py would do to more windows,
without a model.
"""

from __future__ import annotations

import argparse
import difflib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from benchmarks.command import positive, say
from localspec.engine import environment
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from benchmarks.texts.answers import Asker

ROOT = Path(__file__).resolve().parents[2]
LINES = 10  # above and below the first changed line
COMMITS = 600  # the last ones, of which some are taken
CONTEXT_LINES = 60
MAX_CHANGES = 20  # of a file in one commit
WAYS = ("plain", "window", "no rule", "prompt")
EXPLAINED = """\
window: the old window is the draft, and the rule ends the answer. no rule: the same to the window's end.
prompt: as Zed asks, without a prediction: what is drafted was looked up in the prompt.
"""


@dataclass(frozen=True, slots=True)
class Edited:
    """A window before and after a change. before: the last change of the same file and commit."""

    path: str
    above: str
    old: str
    new: str
    below: str
    edits: tuple[tuple[str, str, int], ...]


def sessions(commits: Sequence[str]) -> Iterator[Edited]:
    """Yield a window for each change of the Python files of commits."""
    for commit in commits:
        names = _git("diff-tree", "--no-commit-id", "--name-only", "--diff-filter=M", "-r", commit)
        for name in names.split():
            if name.endswith(".py"):
                texts = (_git("show", f"{at}:{name}").split("\n") for at in (f"{commit}~1", commit))
                yield from _windows(name, *texts)


def last_commits(seed: int) -> list[str]:
    commits = _git("log", "--no-merges", "--format=%H", f"-n{COMMITS}").split()
    random.Random(seed).shuffle(commits)
    return commits


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return "" if run.returncode else run.stdout


def _windows(name: str, before: list[str], after: list[str]) -> Iterator[Edited]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    edits = list[tuple[str, str, int]]()
    for index, (_, start, end, first, last) in enumerate(changes[: MAX_CHANGES + 1]):
        if len(changes) > MAX_CHANGES:
            return
        text = after[:first] + before[start:]  # what was changed above is changed already
        at, to = max(0, first - LINES), min(len(text), first + LINES + 1)
        # The changes that lie in the window as a whole are made in it.
        new, done, limit = text[at:first], start, start + to - first
        for _, old_start, old_end, new_start, new_end in changes[index:]:
            if old_end > limit or old_start >= limit:
                break
            new += before[done:old_start] + after[new_start:new_end]
            done = old_end
        if done > start or last > first:
            new += before[done:limit]
            parts = (
                text[max(0, at - CONTEXT_LINES) : at],
                text[at:to],
                new,
                text[to : to + CONTEXT_LINES],
            )
            above, old_text, new_text, below = (
                "".join(f"{line}\n" for line in part) for part in parts
            )
            if old_text.strip() and old_text != new_text:
                yield Edited(name, above, old_text, new_text, below, tuple(edits))
        lines = (
            "".join(f"{line}\n" for line in part) for part in (before[start:end], after[first:last])
        )
        edits.append((*lines, first + 1))  # type: ignore[arg-type]


def rule() -> str:
    """Return what the rule does with several numbers of lines."""
    from localspec.chat import rewriting

    windows = list(sessions(last_commits(0)[:250]))
    table = f"{len(windows)} windows\n\n| lines | ends early | leaves out | is wrong | saves |\n"
    table += "|--:|--:|--:|--:|--:|\n"
    for count in (3, 4, 5, 6, 8, 10):
        rewriting.UNCHANGED_LINES = count
        ended = late = wrong = saved = 0
        for window in windows:
            follower = rewriting.Rewriting(window.old)
            if (end := follower.push(window.new)) is None:
                continue
            rest = window.old.splitlines(keepends=True)[follower.rest :]
            result = window.new[:end] + "".join(rest)
            ended, saved = ended + 1, saved + len(window.new) - end
            if result != window.new:
                is_part = result in _partly(window)
                late, wrong = late + is_part, wrong + (not is_part)
        total, n = sum(len(window.new) for window in windows), len(windows)
        shares = (ended / n, late / n, wrong / n, saved / total)
        table += f"| {count} | {' | '.join(f'{share:.1%}' for share in shares)} |\n"
    return table


def _partly(window: Edited) -> list[str]:
    """Return the window with only its first changes."""
    old, new = (text.splitlines(keepends=True) for text in (window.old, window.new))
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes = [code for code in codes if code[0] != "equal"]
    results = []
    for count in range(1, len(changes) + 1):
        text, at = list[str](), 0
        for _, start, end, first, last in changes[:count]:
            text += old[at:start] + new[first:last]
            at = end
        results.append("".join(text + old[at:]))
    return results


def _measure(options: argparse.Namespace) -> str:
    from benchmarks.texts.answers import Asker
    from localspec.engine import llama
    from localspec.engine.pair.models import physical_cores
    from localspec.protocol.frames import EngineSettings

    llama.initialise()
    threads = options.threads or physical_cores()
    asker = Asker(options.target, EngineSettings(n_ctx=8192, parallel=1, n_threads=threads))
    rng, rows = random.Random(options.seed), list[dict[str, Any]]()
    try:
        found = sessions(last_commits(options.seed))
        for number, window in enumerate(found):
            if number % 7 or not window.edits:  # neighbours are alike
                continue
            row: dict[str, Any] = {"path": window.path}
            for way in rng.sample(WAYS, len(WAYS)):
                row[way] = _rewrite(asker, window, way, options)
            rows.append(row)
            say(f"[{len(rows)}/{options.windows}] {window.path} " + _ratios(row))
            if len(rows) == options.windows:
                break
    finally:
        asker.close()
    return _table(rows)


def _rewrite(asker: Asker, window: Edited, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens, passes and times of one answer."""
    import msgspec

    from localspec.engine.sampling.sampler import Sampler
    from localspec.engine.sampling.settings import Settings
    from localspec.extras.next_edit.routes import FORMS
    from localspec.extras.next_edit.wire import NextEditRequest
    from localspec.protocol.frames import (
        Generate,
        Rewrite,
        Sampling,
        SpeculationSettings,
        TextPrompt,
    )

    form = next(each for each in FORMS if each.name == options.form)
    edits = [{"path": window.path, "old": o, "new": n, "line": at} for o, n, at in window.edits]
    body = {"path": window.path, "above": window.above, "before": window.old, "after": ""}
    asked = msgspec.convert({**body, "below": window.below, "edits": edits[-8:]}, NextEditRequest)
    prompt = form.render(asked)
    prediction = window.old + form.end if way in ("window", "no rule") else None
    asker._asked += 1
    generate = Generate(
        asker._asked,
        TextPrompt(prompt.text + prompt.opening),
        Sampling(temperature=0.0),
        1024,
        stop=list(prompt.stops),
        speculative=SpeculationSettings(enabled=way != "plain", prediction=prediction),
        rewrite=Rewrite(window.old, [*form.marks]) if way == "window" else None,
        exact=False,
        private=True,
    )
    tokenized = asker._preparer.prepare(generate)
    if options.right:
        vocab = asker.pair.vocab
        right = [*vocab.tokenize(window.new, add_special=False, parse_special=False), vocab.eos]

        class Right(Sampler):
            """Takes the tokens of the right answer, whatever the logits say."""

            def sample(self, row: Any, position: int) -> int:
                return right[position]

        # Not greedy, so that the engine asks it for each token.
        settings: Settings = replace(tokenized.sampler.settings, temperature=1.0, seed=1)
        tokenized.sampler = Right(settings)
    spent, cpu = time.perf_counter(), time.process_time()
    answer = asker.submit(tokenized)
    asker.finish()
    done = answer.done
    return {
        "tokens": done.completion_tokens,
        "passes": done.speculation.rounds,
        "ms": done.timings.predicted_ms,
        "s": time.perf_counter() - spent,
        "cpu": time.process_time() - cpu,
    }


def _ratios(row: dict[str, Any]) -> str:
    plain = row["plain"]["ms"]
    return ", ".join(f"{way} {row[way]['ms'] / plain:.2f}" for way in WAYS[1:])


def _table(rows: Sequence[dict[str, Any]]) -> str:
    text = f"{EXPLAINED}\n| way | tokens | passes | s | of plain | worst window |\n"
    text += "|---|--:|--:|--:|--:|--:|\n"
    for way in WAYS:
        sums = [sum(row[way][key] for row in rows) for key in ("tokens", "passes", "ms")]
        ratios = [row[way]["ms"] / row["plain"]["ms"] for row in rows]
        text += f"| {way} | {sums[0]} | {sums[1]} | {sums[2] / 1e3:.1f} | {geometric_mean(ratios):.2f} | "
        text += f"{max(ratios):.2f} |\n"
    return text


def main(arguments: list[str]) -> int:
    """Run it. 0: done; 1: a failure; 2: usage."""
    environment.prepare()  # as in the worker, and before llama_cpp is imported
    parser = argparse.ArgumentParser(
        "scripts/bench next_edit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="?", choices=["measure", "rule"], default="measure")
    add("--target", type=Path, metavar="GGUF", help="the model")
    add("--form", default="sweep", help="of the prompts (sweep)")
    add("--right", action="store_true", help="the model's tokens are the right ones")
    add("--windows", type=positive, default=24, help="how many (24)")
    add("--threads", type=int, default=0, help="0: one per core")
    add("--seed", type=int, default=0, help="of commits and order")
    options = parser.parse_args(arguments)
    if options.what == "measure" and options.target is None:
        parser.error("--target: which model?")
    try:
        sys.stdout.write(rule() if options.what == "rule" else _measure(options))
    except (LocalspecError, OSError, ValueError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1
    return 0
