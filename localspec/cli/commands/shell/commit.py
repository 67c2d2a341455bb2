"""`localspec commit`: a commit message for what is staged."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from localspec.cli import ask, inputs, options
from localspec.cli.commands.ask import click_option
from localspec.cli.shell import answers, asking, message_editor, proposal, shells, staged
from localspec.cli.terminal import render
from localspec.errors import LocalspecError, ModelNotFound

_OPTIONS = options.named(
    *("model", "system", "tokens", "files", "template", "hide_reasoning", "usage"),
    *("no_log", "no_daemon_start", "debug"),
)
_READING_S = 20.0  # longest time for reading the diff; more of it is left out
# Editors that accept what they get, as scripts use them: there is no person to abort.
_ACCEPTING = ("", ":", "true", "/bin/true", "/usr/bin/true")
_STYLE = 8  # subjects of earlier commits, for the style
_NONE = "(none)"
_PATIENCE = 60  # seconds that a commit waits for its message in the hook
_HOOK = """\
#!/bin/sh
# A prepare-commit-msg hook from `localspec commit --hook`: proposes a message when none was given.
# It never blocks a commit: it gives up without a running daemon, and after {patience} seconds.
{program} commit --no-daemon-start --prepare "$@" </dev/null || :
exit 0
"""


def _run(words: tuple[str, ...], **values: Any) -> int:
    if values.pop("hook"):
        return _print_hook()
    if values.pop("prepare"):
        del values["print_only"], values["everything"]
        return _prepare(list(words), values)
    only_print, everything = values.pop("print_only"), values.pop("everything")
    if what := staged.begun():
        raise LocalspecError(
            f"A {what} is in progress and git already has a message for it; run: git commit"
        )
    files = values.pop("files")
    parts = [ask.clean(" ".join(words)), inputs.files(list(files)) if files else ""]
    wish = "\n\n".join(filter(None, parts))
    try:
        message, pair = _message(wish, values, everything=everything)
    except ModelNotFound as error:
        raise _misread(error, values["model"]) from error
    if only_print or not proposal.at_terminal():
        render.text(f"{message}\n")
        return 0
    return _commit(message, pair, everything=everything)


def _misread(error: ModelNotFound, model: str | None) -> ModelNotFound:
    """Return the error; after -m, which gives git the message, with what it means here."""
    if model is None:
        return error
    return ModelNotFound(
        f"There is no pair '{model}'. -m names the pair here; a hint for the message goes without it: "
        f"localspec commit {shlex.quote(model)}"
    )


def _message(wish: str, values: dict[str, Any], *, everything: bool = False) -> tuple[str, str]:
    """Return a message for what is staged, and the pair that wrote it.

    With `everything` it is for all changes of files that git knows.

    Raises:
        LocalspecError: nothing is staged, no daemon, or no message came.
    """
    found = staged.patches(everything=everything)

    def cut(room: int) -> asking.Cut:
        text, left_out = staged.cut(found, room)
        return asking.Cut(f"{wish}\n\n{text}" if wish else text, left_out)

    subjects = staged.subjects(_STYLE)
    known = {"shell": shells.current().language, "system": shells.system()}
    for recent in dict.fromkeys([subjects or _NONE, _NONE]):
        answer = asking.whole(
            "commit", values, cut, {**known, "recent": recent}, reading_s=_READING_S
        )
        message = answers.message(answer.text)
        if not answers.repeats(message, subjects):
            break
    if not message:
        raise LocalspecError(f"The answer contains no commit message: {answer.text.strip()}")
    if answer.cut_off:
        render.note("The message was cut off by the token limit.")
    return message, answer.model


def _commit(message: str, pair: str, *, everything: bool) -> int:
    """Let git commit with its own editor and the message in it; git's exit code."""
    environment = dict(os.environ)
    editor = staged.editor()
    if editor not in _ACCEPTING:
        sign = staged.comment_sign()
        environment["GIT_EDITOR"] = message_editor.command(sign, pair, editor)
    with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
        file = Path(folder, "COMMIT_EDITMSG")
        file.write_text(f"{message}\n", encoding="utf-8")
        words = ["git", "commit", *(["-a"] if everything else []), "-e", "-F", str(file)]
        # Ctrl-C is for the editor and git, which would inherit it if it were ignored here.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return subprocess.run(words, env=environment, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------ the hook


def _print_hook() -> int:
    program = "localspec"
    if not shutil.which(program):
        program = f"{shlex.quote(sys.executable)} -P -m localspec"
    render.text(_HOOK.format(program=program, patience=_PATIENCE))
    where = '"$(git rev-parse --git-path hooks)/prepare-commit-msg"'
    render.dim(f"To install it here:\n  localspec commit --hook > {where} && chmod +x {where}")
    return 0


def _prepare(arguments: list[str], values: dict[str, Any]) -> int:
    """What the hook runs, with git's arguments: FILE [SOURCE [COMMIT]]. Whatever happens, 0."""
    file, source = Path(arguments[0]), arguments[1] if len(arguments) > 1 else ""
    try:
        written = file.read_text(encoding="utf-8", errors="surrogateescape")
        if source not in ("", "template") or (not source and _has_message(written)):
            return 0
        signal.signal(signal.SIGALRM, _too_slow)
        signal.alarm(_PATIENCE)
        message, pair = _message("", {**values, "files": ()})
        signal.alarm(0)
        message += _hook_comment(pair)
        file.write_text(f"{message}\n{written}", encoding="utf-8", errors="surrogateescape")
    except LocalspecError as error:
        render.note(f"localspec: no commit message: {error.message}")
    except OSError as error:
        render.note(f"localspec: no commit message: {error.strerror}.")
    return 0


def _hook_comment(pair: str) -> str:
    """Return a comment that says whose message it is, if git removes comments from messages."""
    if staged.cleanup() not in ("", "default", "strip"):
        return ""
    return (
        f"\n\n{staged.comment_sign()} Proposed by localspec ({pair}). To abort: delete the message."
    )


def _too_slow(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise LocalspecError(f"no answer within {_PATIENCE} seconds.")


def _has_message(written: str) -> bool:
    """Whether there is more than blank lines and git's comments."""
    sign = staged.comment_sign()
    return any(line.strip() and not line.startswith(sign) for line in written.split("\n"))


command = click.Command(
    "commit",
    callback=_run,
    params=[
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        click.Option(
            ["-a", "--all", "everything"],
            is_flag=True,
            help="Commit all changes to tracked files, as `git commit -a`.",
        ),
        click.Option(
            ["--print", "print_only"], is_flag=True, help="Print the message; do not commit."
        ),
        click.Option(
            ["--hook"],
            is_flag=True,
            help="Print a prepare-commit-msg hook, which proposes the message in any `git commit`.",
        ),
        click.Option(["--prepare"], is_flag=True, hidden=True),
        *map(click_option, _OPTIONS),
    ],
    help="Write a commit message for the staged changes and open it in git's editor; an empty message aborts "
    "the commit. WORDS say what the message should mention. Without a terminal the message is printed "
    "and nothing is committed.",
    epilog="Examples:\n\n\b\n  localspec commit\n  localspec commit 'mention issue 12'\n"
    "  localspec commit --print\n  localspec commit --hook",
)
