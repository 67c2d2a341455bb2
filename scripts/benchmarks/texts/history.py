"""Answers that nobody was asked for: files as commits have changed them, and pages as people wrote them.

A commit's file before it and its message are the prompt, the file after it the answer: how people edit.
Of a page nothing is in the prompt: text that repeats little.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator

from benchmarks.texts.answers import Answered
from benchmarks.texts.tasks import ROOT

COMMITS = 900  # the last ones, of which some are taken
LONGEST, SHORTEST = 9_000, 1_500  # characters of a file
PART = 500  # tokens of a page
PARTS = 3  # of each page

Tokens = Callable[[str], list[int]]


def edits(tokens: Tokens, count: int, seed: int) -> Iterator[Answered]:
    """So many, each of one Python file, chosen at random."""
    rng = random.Random(seed)
    commits = _git("log", "--no-merges", "--format=%H", f"-n{COMMITS}").split()
    n_edits = 0
    for commit in rng.sample(commits, len(commits)):
        changed = _git(
            "diff-tree", "--no-commit-id", "--name-only", "--diff-filter=M", "-r", commit
        )
        files = [file for file in changed.split() if file.endswith(".py")]
        if not files:
            continue
        file = rng.choice(files)
        before, after = _git("show", f"{commit}~1:{file}"), _git("show", f"{commit}:{file}")
        if not SHORTEST < min(len(before), len(after)) <= max(len(before), len(after)) < LONGEST:
            continue
        message = _git("log", "-1", "--format=%s", commit)
        prompt = f"This is the file {file}:\n\n```\n{before}```\n\n{message}\n\n"
        yield Answered(
            f"edit {n_edits:02}", "refactoring", tokens(prompt), tokens(f"```\n{after}```")
        )
        n_edits += 1
        if n_edits == count:
            return


def pages(tokens: Tokens) -> Iterator[Answered]:
    """Parts of this repository's pages."""
    for page in (ROOT / "README.md", *sorted((ROOT / "localspec" / "docs").glob("*.md"))):
        begun = page.read_text(encoding="utf-8")[:LONGEST]
        text, prompt = tokens(begun), tokens("Tell me about it.\n\n")
        for part in range(min(PARTS, len(text) // PART)):
            written = text[part * PART : (part + 1) * PART]
            yield Answered(f"page {page.stem} {part}", "free", prompt, written)


def _git(*arguments: str) -> str:
    """Return what git prints; nothing where there is no history, or not so far back."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return "" if run.returncode else run.stdout
