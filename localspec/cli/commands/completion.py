"""`localspec completion`: the scripts by which shells complete `localspec` and `ask`."""

from __future__ import annotations

import click

from localspec import extras
from localspec.cli.app import app, flag
from localspec.cli.terminal import render
from localspec.errors import UsageError

# Corrections of click's scripts, as pairs of old and new text. In fish a description may contain a comma,
# at which click's script splits. In zsh the start-up file may register the completion before compinit runs,
# which forgets earlier registrations.
_CORRECTIONS = {
    "fish": (('string split "," $completion', 'string split -m 1 "," $completion'),),
    "zsh": (
        (
            "    compdef %(func)s localspec\n",
            "    if (( $+functions[compdef] )); then compdef %(func)s localspec; fi\n"
            "    autoload -Uz add-zsh-hook\n"
            "    %(func)s_late() {\n"
            "        add-zsh-hook -d precmd %(func)s_late\n"
            "        (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i -D }\n"
            "        compdef %(func)s localspec\n"
            "        compdef %(func)s_ask ask\n"
            "    }\n"
            "    add-zsh-hook precmd %(func)s_late\n",
        ),
    ),
}

# The program `ask` is completed as `localspec ask`: the same function gets the line with its first word
# replaced by these two. The scripts only run `localspec`, because `ask` may be a program of another package.
_ASK_SCRIPTS = {
    "bash": """
%(func)s_ask() {
    local program=localspec
    [[ $1 == */* ]] && program=${1%%/*}/localspec
    COMP_WORDS=(localspec ask "${COMP_WORDS[@]:1}")
    COMP_CWORD=$((COMP_CWORD + 1))
    %(func)s "$program"
}
complete -o nosort -F %(func)s_ask ask
""",
    "zsh": """
%(func)s_ask() {
    words=(localspec ask "${(@)words[2,-1]}")
    CURRENT=$((CURRENT + 1))
    %(func)s
}
if (( $+functions[compdef] )); then compdef %(func)s_ask ask; fi
""",
    "fish": """
function %(func)s_ask
    set -l line (string replace -r '^\\s*\\S+' 'localspec ask' -- (commandline -cp))
    set -lx COMP_WORDS "$line"
    set -l response (env _LOCALSPEC_COMPLETE=fish_complete COMP_CWORD=(commandline -t) localspec)
    for completion in $response
        set -l metadata (string split -m 1 "," $completion)
        switch $metadata[1]
            case dir
                __fish_complete_directories $metadata[2]
            case file
                __fish_complete_path $metadata[2]
            case plain
                echo $metadata[2]
        end
    end
end
complete --no-files --command ask --arguments "(%(func)s_ask)"
""",
}


@click.command(
    help="Print the completion script for a shell: of `localspec` and of the program `ask`. With --hook it "
    "also lets the shell record its last failed command, in a file that only you can read, for `localspec "
    "explain`.",
    epilog='Examples:\n\n\b\n  eval "$(localspec completion bash)"      # in ~/.bashrc\n'
    '  eval "$(localspec completion zsh)"       # in ~/.zshrc\n'
    "  localspec completion fish | source       # in config.fish\n"
    '  eval "$(localspec completion bash --hook)"',
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@flag("--hook", help="Record the last failed command as well.")
def command(shell: str, hook: bool) -> None:
    render.verbatim(_script(shell))
    if hook:
        failures = extras.load("shell", "failures")
        if failures is None:
            raise UsageError("--hook needs localspec's extra 'shell', which is not installed.")
        render.verbatim(failures.hook(shell))


def _script(shell: str) -> str:
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    completion = completion_class(app, {}, "localspec", "_LOCALSPEC_COMPLETE")
    script = completion.source()
    for old, new in _CORRECTIONS.get(shell, ()):
        names = {"func": completion.func_name}
        script = script.replace(old % names, new % names)
    return script + _ASK_SCRIPTS[shell] % {"func": completion.func_name}
