"""The last command that failed in a shell: the hook by which the shell records it, and the record.

A record is a file in the runtime folder that only its owner can read. It is named after the shell's
process, so that every terminal has its own. It has the exit code, a newline and the command line. Commands
that begin with a blank are not recorded, because shells keep them out of their history.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from typing import NamedTuple

from localspec import paths
from localspec.extras.shell import proposal

_RECORD_PREFIX = "failed-"
_MAX_RECORD_BYTES = 1 << 16  # a longer command is a file that somebody pasted

# 130 and 148 are Ctrl-C and Ctrl-Z. FILE is quoted for the shell, which adds its process number.
#
# Bash does not pass the typed line to a hook, so the hook takes it from the history. The history may lack
# it: lines that begin with a blank, that repeat the previous line, or that match HISTIGNORE are left out.
# It may also have lines of other shells. So the hook remembers the newest line and its number at each
# prompt, and records a command only if exactly one line was added since then. An empty line leaves the exit
# code of the previous command. PS0 (bash 4.4 and later) distinguishes it, because bash expands PS0 only
# before it runs a command.
_BASH = r"""
__localspec_newest() {
  local line
  number=0 text=
  line=$(HISTTIMEFORMAT= builtin history 1)
  if [[ $line =~ ^\ *([0-9]+)..(.*)$ ]]; then
    number=${BASH_REMATCH[1]} text=${BASH_REMATCH[2]}
  fi
}
__localspec_failed() {
  local code=$? ran=${__localspec_ran-} control=:${HISTCONTROL-}: verdict=unknown
  local number text record others=${PROMPT_COMMAND[*]-}
  __localspec_ran=
  case $code in 0|130|148) return $code;; esac
  [[ -n $ran && -n ${__localspec_number-} ]] || return $code
  __localspec_newest
  # What another command of the prompt does to the history is not seen here; -a does nothing to it.
  others=${others%%__localspec_failed*}${others##*__localspec_prompted}
  others=${others//history -a/}
  if [[ ! -o history || $number == 0 || $others == *history* ]]; then
    verdict=unknown
  elif (( number == __localspec_number + 1 )); then
    verdict=typed
  elif (( number == __localspec_number )) && [[ $text != "$__localspec_text" ]]; then
    # An equal line before it was erased.
    [[ $control == *:erasedups:* ]] && verdict=typed
  elif (( number == __localspec_number )); then
    verdict=same
    [[ $control == *:ignoredups:* && $control != *:ignore[sb]* && -z ${HISTIGNORE-} ]] && verdict=typed
  fi
  case $verdict:$text in
    typed:*localspec\ explain*) return $code ;;
    typed:*) (umask 077; printf '%s\n%s\n' "$code" "$text" >| FILE$$) 2>/dev/null; return $code ;;
    same:*)  # repeated, or kept out: a record of this line stays as it is
      record=$(cat FILE$$ 2>/dev/null)
      [[ ${record#*$'\n'} == "$text" ]] && return $code ;;
  esac
  [[ -e FILE$$ ]] && command rm -f FILE$$ 2>/dev/null
  return $code
}
__localspec_prompted() {
  local code=$? number text
  __localspec_newest
  __localspec_number=$number __localspec_text=$text
  if (( BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404 )); then
    __localspec_ran=1
  elif [[ ${PS0-} != *__localspec_ran* ]]; then
    PS0=${PS0-}'${__localspec_text:$((__localspec_ran=1,0)):0}'
  fi
  return $code
}
__localspec_number=
case ";${PROMPT_COMMAND[*]-};" in
  *__localspec_failed*) ;;
  *) PROMPT_COMMAND="__localspec_failed
${PROMPT_COMMAND-}"
    if [[ -n ${PROMPT_COMMAND[1]-} ]]; then
      PROMPT_COMMAND+=(__localspec_prompted)
    else
      PROMPT_COMMAND="$PROMPT_COMMAND
__localspec_prompted"
    fi ;;
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
    """A failed command and its exit code."""

    command: str
    code: int


def hook(shell: str) -> str:
    """Return the code that bash, zsh or fish evaluates at its start to record failures.

    Records of shells that have ended are removed. Raises UnsafePath if the runtime folder is not a private
    one of this user.
    """
    folder = paths.make_private_directory(paths.default_paths().runtime)
    for record in folder.glob(f"{_RECORD_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(record.name.removeprefix(_RECORD_PREFIX)), 0)
            except ProcessLookupError:
                record.unlink()
    file = str(folder / _RECORD_PREFIX)
    quoted = shlex.quote(file)
    if shell == "fish":
        quoted = "'" + file.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return _HOOKS[shell].replace("FILE", quoted)


def last() -> Failure | None:
    """Return the last failure of the nearest ancestor shell that has a record, or None."""
    folder = paths.default_paths().runtime
    for process in proposal.ancestors():
        with contextlib.suppress(OSError, ValueError):
            data = paths.read_file(folder / f"{_RECORD_PREFIX}{process.pid}", os.O_NOFOLLOW)
            text = data[:_MAX_RECORD_BYTES].decode(errors="replace")
            code, _, command = text.partition("\n")
            return Failure(command.strip("\n"), int(code))
    return None


def meaning(code: int) -> str:
    """Return the general meaning of an exit code in brackets, or an empty string."""
    if code == 126:
        return " (found, but not executable)"
    if code == 127:
        return " (command not found)"
    with contextlib.suppress(ValueError):
        return f" (ended by {signal.Signals(code - 128).name})" if code > 128 else ""
    return ""
