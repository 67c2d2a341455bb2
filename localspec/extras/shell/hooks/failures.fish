function __localspec_failed --on-event fish_postexec
    set -l code $status
    contains -- $code 0 130 148; and return
    string match -qr '^\s|^$|localspec explain' -- "$argv[1]"; and return
    set -l mask (umask)
    umask 077
    printf '%s\n' $code "$argv[1]" >FILE$fish_pid 2>/dev/null
    umask $mask
end
