"""The templates that come with localspec."""

from __future__ import annotations

# The prompts of `localspec cmd`, `commit` and `explain`, as the files that override them would hold them.
BUILTIN = {
    "cmd": """\
# What `localspec cmd` asks. $input: what the command is to do; $shell: bash, zsh, fish or sh;
# $system: the operating system.
system = "You write shell commands. You answer with one command in a code block and nothing else."
prompt = '''
Write one $shell command for $system that does the following. Use only common programs. Prefer one line.

$input'''
temperature = 0
tokens = 2048
""",
    "cmd-explain": """\
# What the x key of `localspec cmd` asks. $input: the command; $shell, $system: as in cmd.
system = "You explain shell commands briefly and exactly."
prompt = '''
Explain this $shell command for $system: one short list item for each part of it, in order. Then say in one
sentence what it changes, if anything.

$input'''
temperature = 0
tokens = 2048
""",
    "commit": """\
# What `localspec commit` asks. $input: the staged changes, as a diff; $recent: the last subjects.
system = "You write git commit messages. You answer with the message alone."
prompt = '''
Write the commit message for the changes at the end. The first line says in at most 72 characters what the
change does, in the imperative, as in "Add a retry to the upload". If the reason is not obvious, add an
empty line and one short paragraph with it. Do not repeat the diff.

Recent subject lines in this repository, for their style only:
$recent

$input'''
temperature = 0
tokens = 2048
""",
    "explain": """\
# What `localspec explain` asks. $input: the failed command and its exit code, or an error message;
# $shell, $system: as in cmd.
system = "You help with failed commands and error messages on $system. Be brief and concrete."
prompt = '''
Explain the most likely cause of this failure in a few sentences. Then show how to fix it, with the exact
command in a code block if a command helps.

$input'''
temperature = 0
""",
}
