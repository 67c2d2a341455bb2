"""What git has staged, for a prompt; and git itself, which is always given its words one by one."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from localspec.cli.shell.asking import Cut
from localspec.errors import LocalspecError

_HEAD = b"diff --git "
# The same text whatever a person has configured for their own eyes, and no program of theirs is run.
_PLAIN = ("-c", "core.quotePath=false", "-c", "diff.relative=false")
_DIFF = (
    *("--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short", "-M"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
# What git says is going on, and has a message for.
_BEGUN = {
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}


class Patch(NamedTuple):
    """The changes of one file, with their header; `name` as git writes it."""

    name: str
    text: str


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run git and wait; its output is kept.

    Raises:
        LocalspecError: there is no git.
    """
    try:
        return subprocess.run(
            ["git", *words], capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise LocalspecError("git is not installed, or not in PATH.") from None


def _said(*words: str) -> str:
    """What git prints; nothing where it fails.

    Raises:
        LocalspecError: there is no git.
    """
    done = git(*words)
    return done.stdout.decode(errors="replace").strip("\n") if done.returncode == 0 else ""


def patches(*, everything: bool = False) -> list[Patch]:
    """What is staged, one file after the other; with `everything` what `git commit -a` would take.

    Raises:
        LocalspecError: nothing is staged, this is no repository, or git has a message already.
    """
    done = git(*_PLAIN, "diff", "HEAD" if everything else "--cached", *_DIFF)
    if done.returncode:
        first = done.stderr.decode(errors="replace").strip().split("\n")[0]
        if not _said("rev-parse", "--git-dir"):
            first = "this folder is not in a git repository"
        raise LocalspecError(f"git cannot show what is staged: {first.removeprefix('fatal: ')}")
    parts = (b"\n" + done.stdout).split(b"\n" + _HEAD)[1:]
    if everything and not parts:
        raise LocalspecError("No tracked file has changed. Add new files first: git add FILE …")
    if not parts:
        raise LocalspecError(
            "Nothing is staged. Stage changes first: git add FILE …, or git add -u"
        )
    return [_patch((_HEAD + part).decode(errors="replace").rstrip("\n")) for part in parts]


def _patch(text: str) -> Patch:
    header = text.partition("\n")[0].removeprefix(_HEAD.decode())
    # "a/NAME b/NAME": of a renamed file the new one.
    return Patch(header.partition(" b/")[2] or header, text)


def begun() -> str:
    """What is being concluded that git has a message for: merge, cherry-pick, revert; or nothing."""
    for name, what in _BEGUN.items():
        if _said("rev-parse", "--verify", "--quiet", name):
            return what
    return ""


def subjects(count: int) -> str:
    """The first lines of the newest commits."""
    return _said("log", f"-{count}", "--no-merges", "--format=- %s")


def comment_sign() -> str:
    """What git's comments in a message begin with."""
    sign = _said("config", "--get", "core.commentChar")
    return sign if sign and sign != "auto" else "#"


def cut(found: list[Patch], room: int) -> Cut:
    """All patches within `room` characters: the longest ones lose their ends, to a common length."""
    if sum(len(each.text) + 1 for each in found) <= room:
        return Cut("\n".join(each.text for each in found))
    share = _share([len(each.text) + 1 for each in found], room)
    texts, cuts, gone = [], [], 0
    for each in found:
        if len(each.text) < share:
            texts.append(each.text)
            continue
        kept = each.text[:share].rpartition("\n")[0]
        lines, left = each.text.count("\n") + 1, each.text.count("\n") - kept.count("\n")
        if kept:
            texts.append(f"{kept}\n[… {left} more lines of {each.name} left out …]")
            cuts.append(f"{left} of {lines} lines of {each.name}")
        else:
            gone += 1
    if gone:
        texts.append(f"[… {gone} more files left out …]")
        cuts.append(f"{gone} files")
    few = (
        cuts
        if len(cuts) <= _NAMED
        else [*cuts[: _NAMED - 1], f"parts of {len(cuts) - _NAMED + 1} more"]
    )
    return Cut("\n".join(texts), f"{', '.join(few)}.")


_NAMED = 5  # files in a message


def _share(lengths: list[int], room: int) -> int:
    """The largest length to which the longer ones can be cut so that all have room together."""
    left = sorted(lengths)
    while left and left[0] * len(left) <= room:
        room -= left.pop(0)
    return room // max(1, len(left))
