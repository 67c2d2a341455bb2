"""The last command that failed in a shell: the hook by which the shell records it, and the record.

A record is a file of the runtime folder, for its owner alone, named by the shell's process so that two
terminals have two: the exit code, a line end, the command line. What a shell keeps out of its own history
because it begins with a blank is not recorded.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from pathlib import Path
from typing import NamedTuple

from localspec import paths
from localspec.cli.shell import shells

_NAME = "failed-"
_LONGEST = 1 << 16  # bytes; longer commands are files that somebody pasted

# 130 and 148 are Ctrl-C and Ctrl-Z. FILE is quoted for the shell; the shell adds its process number.
_BASH = r"""
__localspec_failed() {
  local code=$? line
  case $code in 0|130|148) return $code;; esac
  # Before the first command of this shell, the newest line of its history is another shell's.
  if [[ -o history && -n ${__localspec_prompted-} ]]; then
    line=$(HISTTIMEFORMAT= builtin history 1)
    [[ $line =~ ^\ *[0-9]+..(.*)$ ]] && case ${BASH_REMATCH[1]} in
      ""|*localspec\ explain*) ;;
      *) (umask 077; printf '%s\n%s\n' "$code" "${BASH_REMATCH[1]}" >| FILE$$) 2>/dev/null ;;
    esac
  fi
  return $code
}
__localspec_prompted=
case ";${PROMPT_COMMAND-};" in
  *__localspec_failed*) ;;
  *) PROMPT_COMMAND="__localspec_failed
${PROMPT_COMMAND-}
__localspec_prompted=1" ;;
esac
"""
_ZSH = r"""
__localspec_typed() {
  __localspec_line=$1
  [[ -o histignorespace && $1 == ' '* ]] && __localspec_line=
  return 0
}
__localspec_failed() {
  local code=$?
  case $code in (0|130|148) ;;
    (*) case $__localspec_line in (''|*'localspec explain'*) ;;
      (*) (umask 077; print -rl -- $code "$__localspec_line" >| FILE$$) 2>/dev/null ;;
    esac ;;
  esac
  __localspec_line=
  return $code
}
typeset -g __localspec_line=
typeset -ga preexec_functions precmd_functions
preexec_functions=(${preexec_functions:#__localspec_typed} __localspec_typed)
precmd_functions=(__localspec_failed ${precmd_functions:#__localspec_failed})
"""
_FISH = r"""
function __localspec_failed --on-event fish_postexec
    set -l code $status
    contains -- $code 0 130 148; and return
    string match -qr '^\s|^$|localspec explain' -- "$argv[1]"; and return
    set -l mask (umask)
    umask 077
    printf '%s\n' $code "$argv[1]" >FILE$fish_pid 2>/dev/null
    umask $mask
end
"""
_HOOKS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


class Failure(NamedTuple):
    command: str
    code: int


def hook(shell: str) -> str:
    """What bash, zsh or fish evaluates at its start to record failures. Records of ended shells go.

    Raises:
        UnsafePath: there is no runtime folder of ours.
    """
    folder = paths.private_directory(paths.default_paths().runtime)
    _sweep(folder)
    file = str(folder / _NAME)
    quoted = shlex.quote(file)
    if shell == "fish":
        quoted = "'" + file.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return _HOOKS[shell].replace("FILE", quoted)


def _sweep(folder: Path) -> None:
    for record in folder.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError, ValueError):
            if not _alive(int(record.name.removeprefix(_NAME))):
                record.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def last() -> Failure | None:
    """What failed last in the nearest of our shells that has a record."""
    folder = paths.default_paths().runtime
    for each in shells.ancestors():
        with contextlib.suppress(OSError, ValueError):
            data = paths.read_file(folder / f"{_NAME}{each.pid}", os.O_NOFOLLOW)[:_LONGEST]
            code, _, command = data.decode(errors="replace").partition("\n")
            return Failure(command.strip("\n"), int(code))
    return None


def meaning(code: int) -> str:
    """What an exit code says by itself, for every program: a word in brackets, or nothing."""
    if code == 126:
        return " (found, but not executable)"
    if code == 127:
        return " (command not found)"
    with contextlib.suppress(ValueError):
        return f" (ended by {signal.Signals(code - 128).name})" if code > 128 else ""
    return ""
