"""The changes that git has staged, shortened for a prompt. git always runs without a shell."""

from __future__ import annotations

import math
import re
import subprocess
from typing import NamedTuple

from localspec.errors import LocalspecError
from localspec.extras.shell import proposal
from localspec.extras.shell.asking import Cut

_PATCH_HEADER = b"diff --git "
# These make the output independent of a person's configuration, and run none of their programs.
_PLAIN_CONFIG = ("-c", "core.quotePath=false", "-c", "diff.relative=false")
_DIFF_OPTIONS = (
    *("--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short", "-M"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
# References that exist during an operation for which git has already written a message.
_OPERATIONS = {"MERGE_HEAD": "merge", "CHERRY_PICK_HEAD": "cherry-pick", "REVERT_HEAD": "revert"}


class Patch(NamedTuple):
    """The changes of one file with their header. `name` is written as git writes it."""

    name: str
    text: str


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run git, wait for it and capture its output. Raises LocalspecError if there is no git."""
    try:
        return subprocess.run(
            ["git", *words], capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise LocalspecError("git is not installed, or not in PATH.") from None


def _read_output(*words: str) -> str:
    process = git(*words)
    return process.stdout.decode(errors="replace").strip("\n") if process.returncode == 0 else ""


def patches(*, everything: bool = False) -> list[Patch]:
    """Return the staged changes, one patch per file.

    With `everything` they are the changes that `git commit -a` would commit. Raises LocalspecError if nothing
    is staged, this is no repository, or git already has a message.
    """
    process = git(*_PLAIN_CONFIG, "diff", "HEAD" if everything else "--cached", *_DIFF_OPTIONS)
    if process.returncode:
        first_line = process.stderr.decode(errors="replace").strip().split("\n")[0]
        if not _read_output("rev-parse", "--git-dir"):
            raise LocalspecError("Not a git repository.")
        reason = first_line.removeprefix("fatal: ")
        raise LocalspecError(f"git cannot show what is staged: {reason}")
    parts = (b"\n" + process.stdout).split(b"\n" + _PATCH_HEADER)[1:]
    if not parts and not _read_output("status", "--porcelain"):
        raise LocalspecError("Nothing to commit, working tree clean.")
    if not parts and everything:
        raise LocalspecError("No tracked file has changed. Add new files first: git add FILE …")
    if not parts:
        cure = "git add FILE …, or git add -u"
        raise LocalspecError(f"Nothing is staged. Stage changes first: {cure}")
    found = []
    for part in parts:
        text = part.decode(errors="replace").rstrip("\n")
        # The header ends with "a/NAME b/NAME", where the second one is the new name of a renamed file.
        header = text.partition("\n")[0]
        name = header.partition(" b/")[2] or header
        found.append(Patch(name, f"{_PATCH_HEADER.decode()}{text}"))
    return found


def operation_in_progress() -> str:
    """Return the operation that git is about to conclude (merge, cherry-pick, revert), or an empty string."""
    for reference, operation in _OPERATIONS.items():
        if _read_output("rev-parse", "--verify", "--quiet", reference):
            return operation
    return ""


def subjects(count: int) -> str:
    """Return the first lines of the newest commits."""
    return _read_output("log", f"-{count}", "--no-merges", "--format=- %s")


def editor() -> str:
    """Return the command of the editor that git would start, or an empty string if it has none."""
    return _read_output("var", "GIT_EDITOR")


def cleanup() -> str:
    """Return how git cleans messages, or an empty string for its default.

    That is an option of the `git commit` whose hook this is, or else configured.
    """
    commits = (process for process in proposal.ancestors() if process.name == "git")
    arguments = next(map(proposal.read_arguments, commits), "")
    option = re.search(r"\s--cl[eanup]*[=\s](\w+)", arguments)
    return option[1] if option else _read_output("config", "--get", "commit.cleanup")


def comment_sign(text: str = "") -> str:
    """Return the sign with which git's comments begin in a message, which is `text`."""
    settings = _read_output("config", "--get-regexp", r"^core\.comment(char|string)$")
    sign = settings.rpartition("\n")[2].partition(" ")[2] or "#"
    if sign != "auto":
        return sign
    # git takes the first sign that no line begins with, and its status has an empty comment.
    used = [sign for sign in _AUTO_SIGNS if f"\n{sign}" in f"\n{text}"]
    latest = max(used, key=lambda sign: text.rfind(f"\n{sign}\n"), default="#")
    if f"\n{latest}\n" in text:
        return latest
    return next(sign for sign in _AUTO_SIGNS if sign not in used)


_AUTO_SIGNS = "#;@!$%^&|:"


# Names of generated files: lock files, minified, bundled and vendored files.
_GENERATED_NAME = re.compile(
    r"""(?ix)
    (?: ^|/ ) (?:
      [^/]*[.-]lock (?: file )? (?: \.[a-z]+ )? | [^/]*-lock\.[a-z]+ | npm-shrinkwrap\.json
      | go\.(?:work\.)?sum | packages\.lock\.json | lockfile
      | [^/]*[.-]min\.[a-z]+ | [^/]*\.(?:bundle|chunk)\.[a-z]+
      | [^/]*\.(?: map | snap | pb\.go | pb\.[a-z]+ | g\.dart | designer\.cs ) | [^/]*_pb2(?:_grpc)?\.pyi?
      | [^/]*[._-]generated\.[a-z]+ | bun\.lockb
    ) "?$
    | (?: ^|/ ) (?: node_modules | vendor | vendored | third_party | dist | __snapshots__ | __generated__
      | \.yarn | Pods | bower_components ) /
    """
)
_GENERATED_MARK = re.compile(
    r"@generated\b|\bDO NOT EDIT\b|\bcode generated by\b|\bautomatically generated by\b", re.I
)
_MARK_SEARCH_LINES = 20  # generators put their mark into the first lines of a file
_MAX_PROSE_LINE_CHARS = 500  # only prose has longer lines that people wrote
# Encoded data has at least so many different characters; a ruled line has one or two.
_MIN_DISTINCT_CHARS = 10
_ENCODED = re.compile(r"[A-Za-z0-9+/_=\\-]{56,}[,\"']*")  # base64 and hexadecimal digits, in lines


def is_generated(patch: Patch) -> bool:
    """Return whether a program wrote the file, judged by its name and its changed lines.

    Binary files do not count, because git only shows one line for each.
    """
    if _GENERATED_NAME.search(patch.name):
        return True
    lines = [line[1:] for line in patch.text.split("\n") if line[:1] in "+-" and line]
    lines = [line for line in lines if not line.startswith(("++ ", "-- "))]
    if any(map(_GENERATED_MARK.search, lines[:_MARK_SEARCH_LINES])):
        return True
    n_data_chars = sum(len(line) for line in lines if _is_data(line))
    return 2 * n_data_chars > sum(map(len, lines))


def _is_data(line: str) -> bool:
    """Return whether a line is encoded or minified data: long, and with fewer blanks than prose."""
    bare = line.strip()
    if len(set(bare)) < _MIN_DISTINCT_CHARS:
        return False
    if _ENCODED.fullmatch(bare):
        return True
    n_non_ascii = sum(not char.isascii() for char in bare)  # some scripts have no blanks
    is_prose = 9 * bare.count(" ") >= len(bare) or 3 * n_non_ascii >= len(bare)
    return len(bare) > _MAX_PROSE_LINE_CHARS and not is_prose


def shorten_patches(patches: list[Patch], max_chars: int) -> Cut:
    """Return the patches shortened to `max_chars` characters, and a description of what was left out.

    Generated files are left out first, unless there are no other ones. Of the others the longest are cut to a
    common length.
    """
    if sum(len(patch.text) + 1 for patch in patches) <= max_chars:
        return Cut("\n".join(patch.text for patch in patches))
    generated = [patch for patch in patches if is_generated(patch)]
    if len(generated) == len(patches):
        generated = []
    others = [patch for patch in patches if patch not in generated]
    texts, omissions = _shorten_patches(others, max_chars)
    for patch in generated[:_MAX_NAMED_FILES]:
        changed = patch.text.partition("\n@@")[2].split("\n")
        count = sum(line.startswith(("+", "-")) for line in changed)
        texts.append(f"[… {patch.name}: a generated file, {count} changed lines left out …]")
    if len(generated) > _MAX_NAMED_FILES:
        texts.append(f"[… {len(generated) - _MAX_NAMED_FILES} more generated files left out …]")
    omissions = [f"{patch.name} (generated)" for patch in generated] + omissions
    if (more := len(omissions) - _MAX_NAMED_FILES + 1) > 1:
        omissions = [*omissions[: _MAX_NAMED_FILES - 1], f"parts of {more} more"]
    return Cut("\n".join(texts), f"{', '.join(omissions)}.")


def _shorten_patches(patches: list[Patch], max_chars: int) -> tuple[list[str], list[str]]:
    """Return the texts of the patches within `max_chars`, and descriptions of what was left out."""
    # The largest length to which longer texts can be cut so that all fit.
    lengths = sorted(len(patch.text) + 1 for patch in patches)
    while lengths and lengths[0] * len(lengths) <= max_chars:
        max_chars -= lengths.pop(0)
    max_length = max_chars // max(1, len(lengths)) if lengths else math.inf
    texts, omissions, n_dropped = [], [], 0
    for patch in patches:
        if len(patch.text) < max_length:
            texts.append(patch.text)
            continue
        beginning = patch.text[: int(max_length)].rpartition("\n")[0]
        n_newlines = patch.text.count("\n")
        n_left_out = n_newlines - beginning.count("\n")
        if beginning:
            texts.append(f"{beginning}\n[… {n_left_out} more lines of {patch.name} left out …]")
            omissions.append(f"{n_left_out} of {n_newlines + 1} lines of {patch.name}")
        else:
            n_dropped += 1
    if n_dropped:
        texts.append(f"[… {n_dropped} more files left out …]")
        omissions.append(f"{n_dropped} files")
    return texts, omissions


_MAX_NAMED_FILES = 5  # files that a message names; more are only counted
