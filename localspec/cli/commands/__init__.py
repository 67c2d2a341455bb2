"""One click command per file, each named `command`; `options.COMMANDS` lists them. No command knows another.

ask.py         `ask` as click sees it, and options for click
chat.py        `chat`
run.py         a chat with a pair or a question to it, as in ollama
help.py        help, and man pages
embed.py       texts as numbers
export.py      a pair for another engine
history.py     what was asked and answered
templates.py   saved prompts
config.py      show and change the configuration
completion.py  completion for bash, zsh and fish
figures/       stats, bench
daemon/        start, stop, status, logs, service, unload, doctor
editors/       complete, editor
shell/         cmd, commit, explain
models/        pairs, models and files
"""
