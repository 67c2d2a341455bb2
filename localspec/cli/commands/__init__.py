"""The click commands, one per file, where the command is named `command`. `options.COMMANDS` lists them.

Commands do not import each other, except for parts that two of them share.

ask.py         `ask` as click sees it, and options for click
chat.py        `chat`
run.py         a chat with a pair or a question to it, as `ollama run`
help.py        help, and man pages
embed.py       embeddings of texts
export.py      a pair for another engine
history.py     past conversations
templates.py   saved prompts
config.py      show and change the configuration
completion.py  completion for bash, zsh and fish
figures/       stats, bench
daemon/        start, stop, status, logs, service, unload, doctor
editors/       complete, editor
shell/         cmd, commit, explain
models/        pairs, models and files
"""
