# Bash does not pass the typed line to a hook, so the hook takes it from the history. The history may lack
# it: lines that begin with a blank, that repeat the previous line, or that match HISTIGNORE are left out.
# It may also have lines of other shells. So the hook remembers the newest line and its number at each
# prompt, and records a command only if exactly one line was added since then. An empty line leaves the exit
# code of the previous command. PS0 (bash 4.4 and later) distinguishes it, because bash expands PS0 only
# before it runs a command.

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
