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
