"""The templates that come with localspec.

The wording suits small models too. There are no examples, because small models repeat an example as their
answer, and the task comes last.
"""

from __future__ import annotations

# The prompts of `localspec cmd`, `commit` and `explain`, as the files that override them would hold them.
BUILTIN = {
    "cmd": """\
# What `localspec cmd` asks. $input: what the command is to do; $shell: bash, zsh, fish or sh;
# $system: the operating system.
system = "You write shell commands. You answer with one command in a code block and nothing else."
prompt = '''
$input

Write one $shell command for $system that does this. Use only common programs. Prefer one line. Use the
current folder unless another is named, no placeholders, and nothing that loses data unless that is wanted.'''
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
# What `localspec commit` asks. $input: the staged changes, as a diff; $recent: the last subjects, or (none)
# where an answer only repeated one of them.
system = "You write git commit messages. You answer with the message alone."
prompt = '''
Recent subject lines in this repository, for their style only:
$recent

$input

Write the commit message for the change above. The first line says in at most 72 characters what it does, in
the imperative. If the reason is not obvious, add an empty line and one short paragraph with it. Do not repeat
the diff.'''
temperature = 0
tokens = 2048
""",
    "explain": """\
# What `localspec explain` asks. $input: the failed command and its exit code, or an error message;
# $shell, $system: as in cmd.
system = "You help with failed commands and error messages on $system. Be brief and concrete."
prompt = '''
$input

Explain this failure in at most three sentences: what the error says, and what most likely caused it. Then
show one way to fix it: the exact command, or the corrected line, in a code block.'''
temperature = 0
tokens = 2048
""",
}
