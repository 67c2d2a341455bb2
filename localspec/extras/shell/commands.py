"""`localspec cmd`, `localspec commit` and `localspec explain`: what a pair does for a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import click

from localspec.cli import ask, inputs, options
from localspec.cli.commands.ask import click_option
from localspec.cli.terminal import render
from localspec.errors import LocalspecError, ModelNotFound, UsageError
from localspec.extras.shell import asking, failures, message_editor, proposal, staged

_COMMIT_OPTION_NAMES = (
    *("model", "system", "tokens", "files", "template", "hide_reasoning", "usage"),
    *("no_log", "no_daemon_start", "debug"),
)
_COMMIT_OPTIONS = options.select_options(*_COMMIT_OPTION_NAMES)
_OPTIONS = options.select_options(*_COMMIT_OPTION_NAMES, "plain")  # of `cmd` and `explain`


def _variables() -> dict[str, str]:
    """Return the values that every template of a shell command may name."""
    return {"shell": proposal.current_shell().language, "system": proposal.system()}


def _run_cmd(words: tuple[str, ...], shell: str | None, **values: Any) -> int:
    if not words:
        raise UsageError('Describe the command, as in: localspec cmd "count the lines in *.py"')
    ask_options = options.AskOptions(words=words, **values)
    text = ask.read_question(ask_options)
    target_shell = proposal.shell_for(shell) if shell else proposal.current_shell()
    variables = {"shell": target_shell.language, "system": proposal.system()}
    ask_options = ask_options.changed(files=[])
    answer = asking.ShellQuestion("cmd", ask_options, asking.uncut(text), variables).fetch()
    command = asking.extract_command(answer.text)
    if answer.cut_off:
        began = answer.text[:200]
        raise LocalspecError(f"The answer was cut off by the token limit; it began: {began}")
    if not command:
        raise LocalspecError(f"The answer contains no command: {answer.text.strip()}")
    proposal.require_visible(command)
    if not proposal.at_terminal():
        render.whole_text(command)
        return 0

    def explain(command: str) -> None:
        cut = asking.uncut(f"```\n{command}\n```")
        unnamed = ask_options.changed(words=[])
        asking.ShellQuestion("cmd-explain", unnamed, cut, variables).print()

    return proposal.decide(command, target_shell, explain)


cmd_command = click.Command(
    "cmd",
    callback=_run_cmd,
    params=[
        click.Argument(["words"], nargs=-1, metavar="WORDS..."),
        click.Option(
            ["--shell"],
            type=click.Choice(["bash", "zsh", "fish", "sh"]),
            help="Shell to write for; by default the one in use.",
        ),
        *map(click_option, _OPTIONS),
    ],
    help="Propose one shell command for what WORDS describe. On a terminal, Enter runs it, e edits it first, "
    "x explains it, and any other key cancels; the exit code is then the command's own. Without a "
    "terminal the command is printed and not run.",
    epilog='Examples:\n\n\b\n  localspec cmd "find files over 1 GB changed this week"\n'
    '  localspec cmd --shell fish "list all variables"\n'
    '  make -pn | localspec cmd "build only the documentation"',
)


_MAX_READING_S = 20.0  # longest time for reading the diff; a longer diff is shortened
# Editors that scripts set to accept every message. There is no person who could abort.
_ACCEPTING_EDITORS = ("", ":", "true", "/bin/true", "/usr/bin/true")
_STYLE_SUBJECTS = 8  # earlier subjects that the prompt shows for their style
_NO_SUBJECTS = "(none)"
_SCISSORS = "------------------------ >8 ------------------------\n"  # git cuts a text at this line
_HOOK_TIMEOUT_S = 60  # longest time that the hook delays a commit
_HOOK = """\
#!/bin/sh
# A prepare-commit-msg hook from `localspec commit --hook`: proposes a message when none was given.
# It never blocks a commit: it gives up without a running daemon, and after {patience} seconds.
{program} commit --no-daemon-start --prepare "$@" </dev/null || :
exit 0
"""


def _run_commit(words: tuple[str, ...], **values: Any) -> int:
    if values.pop("hook"):
        return _print_hook()
    is_prepared, only_print = values.pop("prepare"), values.pop("print_only")
    everything = values.pop("everything")
    ask_options = options.AskOptions(**values)
    if is_prepared:
        return _prepare(list(words), ask_options)
    if operation := staged.operation_in_progress():
        why = "git already has a message for it; run: git commit"
        raise LocalspecError(f"A {operation} is in progress and {why}")
    files = ask_options.files
    parts = [ask.clean(" ".join(words)), inputs.read_files(files) if files else ""]
    hint = "\n\n".join(filter(None, parts))
    try:
        message, pair = _propose_message(hint, ask_options, everything=everything)
    except ModelNotFound as error:
        if (model := ask_options.model) is None:
            raise
        # git's own -m is for the message.
        raise ModelNotFound(
            f"There is no pair '{model}'. -m names the pair here; a hint for the message goes without it: "
            f"localspec commit {shlex.quote(model)}"
        ) from error
    if only_print or not proposal.at_terminal():
        render.text(f"{message}\n")
        return 0
    return _commit(message, pair, everything=everything)


def _propose_message(
    hint: str, ask_options: options.AskOptions, *, everything: bool = False
) -> tuple[str, str]:
    """Return a message for the staged changes, and the pair that wrote it.

    With `everything` it is for all changes of tracked files. Raises LocalspecError if nothing is staged, no
    daemon is running, or the answer has no message.
    """
    patches = staged.patches(everything=everything)

    def cut(max_chars: int) -> asking.Cut:
        text, left_out = staged.shorten_patches(patches, max_chars)
        return asking.Cut(f"{hint}\n\n{text}" if hint else text, left_out)

    subjects, variables = staged.subjects(_STYLE_SUBJECTS), _variables()
    # Small models sometimes repeat an earlier subject. Then the second attempt shows none of them.
    for recent in dict.fromkeys([subjects or _NO_SUBJECTS, _NO_SUBJECTS]):
        values = {**variables, "recent": recent}
        question = asking.ShellQuestion("commit", ask_options, cut, values, _MAX_READING_S)
        answer = question.fetch()
        message = asking.extract_message(answer.text)
        if not asking.repeats_subject(message, subjects):
            break
    if not message:
        raise LocalspecError(f"The answer contains no commit message: {answer.text.strip()}")
    if answer.cut_off:
        render.note("The message was cut off by the token limit.")
    return message, answer.model


def _commit(message: str, pair: str, *, everything: bool) -> int:
    """Run git commit with the message in git's own editor, and return git's exit code."""
    environment, editor = dict(os.environ), staged.editor()
    if editor not in _ACCEPTING_EDITORS:
        environment["GIT_EDITOR"] = message_editor.command(staged.comment_sign(), pair, editor)
    with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
        file = Path(folder, "COMMIT_EDITMSG")
        file.write_text(f"{message}\n", encoding="utf-8")
        words = ["git", "commit", *["-a"] * everything, "-e", "-F", str(file)]
        # Ctrl-C is meant for the editor and git. They would inherit SIG_IGN, but not this handler.
        old_handler = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return subprocess.run(words, env=environment, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, old_handler)


def _print_hook() -> int:
    program = "localspec"
    if not shutil.which(program):
        program = f"{shlex.quote(sys.executable)} -P -m localspec"
    render.text(_HOOK.format(program=program, patience=_HOOK_TIMEOUT_S))
    hook_path = '"$(git rev-parse --git-path hooks)/prepare-commit-msg"'
    render.dim(
        f"To install it here:\n  localspec commit --hook > {hook_path} && chmod +x {hook_path}"
    )
    return 0


def _prepare(arguments: list[str], ask_options: options.AskOptions) -> int:
    """Write a message for git's prepare-commit-msg hook and return 0, whatever happens.

    `arguments` are git's: FILE [SOURCE [COMMIT]].
    """
    file, source = Path(arguments[0]), arguments[1] if len(arguments) > 1 else ""
    try:
        old_text = file.read_text(encoding="utf-8", errors="surrogateescape")
        if source not in ("", "template") or (not source and _has_message(old_text)):
            return 0
        signal.signal(signal.SIGALRM, _raise_timeout)
        signal.alarm(_HOOK_TIMEOUT_S)
        if staged.cleanup() in ("verbatim", "whitespace"):
            raise LocalspecError("git keeps comments here. Use `localspec commit`.")
        message, pair = _propose_message("", ask_options)
        signal.alarm(0)
        text = _with_proposal(old_text, message, pair)
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    except LocalspecError as error:
        render.note(f"localspec: no commit message: {error.message}")
    except OSError as error:
        render.note(f"localspec: no commit message: {error.strerror}.")
    return 0


def _with_proposal(text: str, message: str, pair: str) -> str:
    """Return git's text with a proposed message, which git removes unless a person makes it the message.

    git commits the file of an editor that was left without saving, so the proposal must not be a message
    yet. Where git cuts the text at a scissors line, the proposal follows one. Otherwise it is a comment.
    """
    sign = staged.comment_sign(text)
    author = f"localspec ({pair})"
    scissors = f"{sign} {_SCISSORS}"
    before, found, after = text.partition(scissors)
    if staged.cleanup() == "scissors" or (found and f"\n{sign}" not in f"\n{before}"):
        before = before if before.endswith("\n") else f"{before}\n"
        hint = f"{sign} Proposed by {author}. To use it, delete this line and the one above.\n"
        return f"{before}{scissors}{hint}{message}\n\n{found}{after}"
    lines = message.split("\n")
    comment = "".join(f"{sign} {line}".rstrip() + "\n" for line in lines)
    last = len(lines) + 1
    what = f"lines 2 to {last}" if len(lines) > 1 else "line 2"
    hint = f"Proposed by {author}. To use it, uncomment {what} (in Vim, :2,{last}s/{sign} \\=//)."
    return f"\n{comment}{sign} {hint}\n{text}"


def _raise_timeout(*_: object) -> NoReturn:
    raise LocalspecError(f"no answer within {_HOOK_TIMEOUT_S} seconds.")


def _has_message(text: str) -> bool:
    """Return whether the text has more than blank lines, git's comments and what git cuts off."""
    sign = staged.comment_sign(text)
    lines = text.partition(f"{sign} {_SCISSORS}")[0].split("\n")
    return any(line.strip() and not line.startswith(sign) for line in lines)


commit_command = click.Command(
    "commit",
    callback=_run_commit,
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
        *map(click_option, _COMMIT_OPTIONS),
    ],
    help="Write a commit message for the staged changes and open it in git's editor; an empty message aborts "
    "the commit. WORDS say what the message should mention. Without a terminal the message is printed "
    "and nothing is committed.",
    epilog="Examples:\n\n\b\n  localspec commit\n  localspec commit 'mention issue 12'\n"
    "  localspec commit --print\n  localspec commit --hook",
)


def _run_explain(words: tuple[str, ...], **values: Any) -> int:
    ask_options = options.AskOptions(words=words, **values)
    if words and all(map(os.path.isfile, words)):
        ask_options = ask_options.changed(files=[*ask_options.files, *words], words=[])
    cut = asking.middle_left_out(ask.read_question(ask_options) or _last_failure())
    options_left = ask_options.changed(files=[])
    asking.ShellQuestion("explain", options_left, cut, _variables()).print()
    return 0


def _last_failure() -> str:
    """Return the text about the command that failed last in this shell.

    Raises UsageError if no failure is recorded.
    """
    failed = failures.last()
    if failed is None:
        raise UsageError(
            "No failed command is recorded in this shell. Pipe an error in:\n"
            "  make 2>&1 | localspec explain\n"
            "or let the shell record its failed commands:\n"
            '  eval "$(localspec completion bash --hook)"'
        )
    first, *more = failed.command.split("\n")
    render.dim(f"Exit code {failed.code}: {first}{' …' if more else ''}")
    return (
        f"This command ended with exit code {failed.code}{failures.meaning(failed.code)}:\n\n"
        f"```\n{failed.command}\n```"
    )


explain_command = click.Command(
    "explain",
    callback=_run_explain,
    params=[
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        *map(click_option, _OPTIONS),
    ],
    help="Explain the last command that failed in this shell, or the error message in WORDS, in a file (-f) "
    "or on stdin. Failed commands are known where the shell records them: localspec completion --help.",
    epilog="Examples:\n\n\b\n  localspec explain\n  make 2>&1 | localspec explain\n"
    '  localspec explain "E: Unable to locate package foo"\n  localspec explain < err.txt',
)
