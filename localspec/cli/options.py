"""The commands' names, and the options of `ask`: for click and for the short way without it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


# Commands by what they are for, as the help lists them: name → (module, what it does). A command is
# imported when it is run or asked for help.
_GROUPED = {
    "Ask": {
        "ask": ("ask", "Ask one question."),
        "chat": ("chat", "Chat in the terminal."),
        "run": ("run", "Chat with a pair, or ask it a question."),
        "cmd": ("shell.cmd", "Propose a shell command."),
        "commit": ("shell.commit", "Write a commit message."),
        "explain": ("shell.explain", "Explain a failed command or an error."),
        "complete": ("editors.complete", "Complete code at a position in a file."),
    },
    "Models": {
        "list": ("models.list", "List installed pairs."),
        "use": ("models.use", "Show or choose the pair that answers by default."),
        "catalogue": ("models.catalogue", "List pairs available to pull."),
        "pull": ("models.pull", "Download a pair."),
        "pulls": ("models.pulls", "Show or cancel pulls."),
        "show": ("models.show", "Show details of a pair."),
        "add": ("models.add", "Create a pair from your own files."),
        "import": ("models.import_", "Find models on this disk and create pairs from them."),
        "drafts": ("models.drafts", "Find draft models for a target on this disk."),
        "verify": ("models.verify", "Verify the checksums of a pair's files."),
        "rm": ("models.rm", "Remove pairs."),
        "gc": ("models.gc", "Delete files that no pair needs."),
    },
    "Daemon": {
        "start": ("daemon.start", "Start the daemon."),
        "stop": ("daemon.stop", "Stop the daemon."),
        "restart": ("daemon.restart", "Stop the daemon and start it again."),
        "status": ("daemon.status", "Show the daemon's status."),
        "load": ("daemon.load", "Load a pair before it is asked something."),
        "unload": ("daemon.unload", "Unload the pair and free its memory."),
        "logs": ("daemon.logs", "Show the daemon's log."),
        "service": ("daemon.service", "Run the daemon as a user service."),
        "doctor": ("daemon.doctor", "Diagnose problems."),
    },
    "Data": {
        "history": ("history", "List, show, search and remove conversations."),
        "templates": ("templates", "List, show, edit and remove saved prompts."),
        "stats": ("figures.stats", "Show tokens, speed and time saved over days."),
        "bench": ("figures.bench", "Measure whether speculation pays, and for what."),
        "config": ("config", "Show and change the configuration."),
    },
    "Integrate": {
        "editor": ("editors.editor", "Set up Vim, Neovim or another editor."),
        "lsp": ("editors.lsp", "Run a language server for an editor."),
        "acp": ("editors.acp", "Run a chat for an editor's agent panel."),
        "embed": ("embed", "Turn texts into embeddings."),
        "export": ("export", "Generate a launch script for vLLM, SGLang or llama-server."),
        "rpc-worker": (
            "daemon.rpc_worker",
            "Lend this machine's memory to localspec on another machine.",
        ),
        "token": ("daemon.token", "Print the token for TCP clients."),
        "completion": ("completion", "Print the completion script for bash, zsh or fish."),
        "help": ("help", "Show help for a command, or a page of the documentation."),
    },
}
GROUPS = {title: tuple(commands) for title, commands in _GROUPED.items()}
COMMANDS = {
    name: (f"localspec.cli.commands.{module}", summary)
    for commands in _GROUPED.values()
    for name, (module, summary) in commands.items()
}

# Names that work beside the commands' own.
ALIASES = {"ps": "status", "models": "list"}

UNLIMITED = (1 << 31) - 1  # of what has no other limit


class Option:
    """`kind` is bool for a flag, else what the value is read as; a number may be `low` to `high`.

    With `many` it may be given again, and its value is a list.
    """

    __slots__ = ("flags", "help", "high", "kind", "low", "many", "metavar", "name")

    def __init__(
        self,
        name: str,
        flags: tuple[str, ...],
        kind: type[bool] | type[str] | type[int] | type[float],
        help: str,
        metavar: str = "",
        low: float = 0,
        high: float = UNLIMITED,
        *,
        many: bool = False,
    ) -> None:
        self.name = name
        self.flags = flags
        self.kind = kind
        self.help = help
        self.metavar = metavar
        self.low = low
        self.high = high
        self.many = many

    @property
    def limits(self) -> str:
        """As in "from 0 to 100"."""
        return f"from {self.low} to {self.high}"


# Each is the field of the request of that name, with the limits it has there (protocol/sampling.py).
SAMPLING = (
    Option(
        "temperature",
        ("--temperature", "--temp"),
        float,
        "Sampling temperature; 0 always picks the most likely token.",
        "T",
        high=100,
    ),
    Option(
        "top_p",
        ("--top-p",),
        float,
        "Nucleus sampling: the smallest set of tokens with total probability P.",
        "P",
        high=1,
    ),
    Option("top_k", ("--top-k",), int, "Sample from the K most likely tokens.", "K", low=-1),
    Option(
        "min_p",
        ("--min-p",),
        float,
        "Drop tokens less than P times as likely as the most likely one.",
        "P",
        high=1,
    ),
    Option(
        "repeat_penalty",
        ("--repeat-penalty",),
        float,
        "Penalize repetition; 1 disables it.",
        "R",
        low=0.001,
        high=100,
    ),
    Option(
        "presence_penalty",
        ("--presence-penalty",),
        float,
        "Penalize tokens already used.",
        "P",
        low=-2,
        high=2,
    ),
    Option(
        "frequency_penalty",
        ("--frequency-penalty",),
        float,
        "Penalize tokens in proportion to how often they were used.",
        "P",
        low=-2,
        high=2,
    ),
    Option(
        "seed",
        ("--seed",),
        int,
        "Random seed, for repeatable answers.",
        "SEED",
        low=-(1 << 63),
        high=(1 << 63) - 1,
    ),
)

ASK = (
    Option("model", ("-m", "--model"), str, "Use this pair instead of the configured one.", "PAIR"),
    Option(
        "query",
        ("-q", "--query"),
        str,
        "Use the pair whose name contains TEXT; repeatable.",
        "TEXT",
        many=True,
    ),
    Option("system", ("-s", "--system"), str, "System message.", "SYSTEM"),
    Option("tokens", ("-n", "--tokens"), int, "Maximum number of tokens.", "TOKENS", low=1),
    Option(
        "files",
        ("-f", "--file"),
        str,
        "File or quoted glob to include; repeatable; - for stdin.",
        "FILE",
        many=True,
    ),
    Option(
        "last",
        ("-c", "--continue"),
        bool,
        "Continue the last conversation; without a question, its answer that was cut off.",
    ),
    Option("conversation", ("--cid",), str, "Continue this conversation.", "ID"),
    Option("template", ("-t", "--template"), str, "Use a saved template.", "TEMPLATE"),
    Option(
        "values",
        ("-p", "--param"),
        str,
        "Value for $NAME in the template; repeatable.",
        "NAME=VALUE",
        many=True,
    ),
    Option("save", ("--save",), str, "Save as a template instead of asking.", "NAME"),
    Option("replace", ("-y", "--force"), bool, "With --save: replace a template without asking."),
    Option(
        "extract",
        ("-x", "--extract"),
        bool,
        "Print only the first code block; without a question, of the last answer.",
    ),
    Option("extract_last", ("--xl", "--extract-last"), bool, "Print only the last code block."),
    Option("copy", ("--copy",), bool, "Copy the answer to the clipboard; with -x the code block."),
    Option("json", ("--json",), bool, "Print the full response as one line of JSON."),
    Option("schema", ("--schema",), str, "Answer with JSON that matches this JSON schema.", "FILE"),
    Option("no_stream", ("--no-stream",), bool, "Print the answer only when it is complete."),
    Option("plain", ("--plain",), bool, "Do not render Markdown."),
    Option(
        "show_draft",
        ("--show-draft",),
        bool,
        "Highlight tokens proposed by the draft (terminal only).",
    ),
    Option("hide_reasoning", ("--hide-reasoning",), bool, "Hide the model's reasoning."),
    Option("usage", ("-u", "--usage"), bool, "Print statistics to stderr after the answer."),
    Option(
        "draft",
        ("--draft", "--draft-max"),
        int,
        "Draft exactly N tokens; 0 disables drafting.",
        "N",
        high=64,
    ),
    Option("exact", ("--exact",), bool, "Guarantee the same bytes with and without a draft."),
    Option("no_log", ("--no-log",), bool, "Do not save anything in the history."),
    Option("no_daemon_start", ("--no-daemon-start",), bool, "Fail if the daemon is not running."),
    Option("debug", ("--debug",), bool, "Show a traceback on errors."),
    *SAMPLING,
)


# Of each group one at most.
EXCLUSIVE = (
    ("extract", "extract_last", "json"),
    ("last", "conversation", "save"),
    ("save", "template"),
)

# Those that `/set` changes in a chat.
SETTABLE = {
    option.name: option
    for option in ASK
    if option in SAMPLING
    or option.name in ("tokens", "draft", "exact", "plain", "show_draft", "hide_reasoning", "usage")
}
_IN_CHAT = (
    *("model", "query", "system", "last", "conversation", "files", "template", "values", *SETTABLE),
    *("no_log", "no_daemon_start", "debug"),
)
_CONTINUE = Option("last", ("-c", "--continue"), bool, "Continue the last conversation.")
CHAT = tuple(
    _CONTINUE if option.name == "last" else option for option in ASK if option.name in _IN_CHAT
)


def named(*names: str) -> tuple[Option, ...]:
    """Some of the options of `ask`, for commands that ask something of their own."""
    return tuple(option for option in ASK if option.name in names)


def fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that were given as options, by the same name or, for --tokens, OpenAI's."""
    named = {"max_tokens": "tokens", **{each.name: each.name for each in SAMPLING}}
    return {field: values[name] for field, name in named.items() if values.get(name) is not None}


def defaults(table: tuple[Option, ...]) -> dict[str, Any]:
    return {
        option.name: [] if option.many else False if option.kind is bool else None
        for option in table
    }


def with_files(arguments: list[str]) -> list[str]:
    """`-f a.py b.py`, which a shell makes of `-f *.py`, as `-f a.py -f b.py`; said on stderr."""
    if not {"-f", "--file"} & set(arguments):
        return arguments
    import os

    result: list[str] = []
    taken: list[str] = []
    after = False  # a file
    rest = iter(arguments)
    for argument in rest:
        after = after and not argument.startswith("-") and os.path.exists(argument)  # noqa: PTH110 - pathlib is an import more
        if after:
            taken.append(argument)
            result.append("-f")
        result.append(argument)
        if argument in ("-f", "--file"):
            result += [value for value in [next(rest, None)] if value is not None]
            after = True
        elif argument == "--":
            result += rest
    if taken:
        from localspec.cli.terminal import render

        more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
        render.note(f"Also included, as files named after -f: {', '.join(taken[:3])}{more}.")
    return result


def parse(table: tuple[Option, ...], arguments: list[str]) -> dict[str, Any] | None:
    """The values by name, and `words`; None for anything but whole flags and good values.

    None is no error: click reads the arguments again, and says what is wrong where something is.
    """
    known = {flag: option for option in table for flag in option.flags}
    takes_value = {flag: option.kind is not bool for flag, option in known.items()}
    values = defaults(table)
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            words.extend(rest)
        elif is_word(argument, takes_value):
            words.append(argument)
        elif argument not in known:
            return None
        elif known[argument].kind is bool:
            values[known[argument].name] = True
        else:
            value = _read(known[argument], next(rest, "--"))
            if value is None:
                return None
            if known[argument].many:
                values[known[argument].name].append(value)
            else:
                values[known[argument].name] = value
    values["words"] = words
    return values


def is_word(argument: str, takes_value: Mapping[str, bool]) -> bool:
    """Return whether an argument is a word of a question, and not an option.

    `takes_value` says of each known option whether it has a value. A word may begin with a dash: a number
    does ("-5"), and text that was quoted, which has a blank in it and does not begin with a known option
    and its value.
    """
    if not argument.startswith("-") or argument == "-" or argument[1].isdigit():
        return True
    blank = any(char.isspace() for char in argument)
    if not blank or argument.partition("=")[0] in takes_value:
        return False
    return not takes_value.get(argument[:2])


def divided(takes_value: Mapping[str, bool], arguments: list[str]) -> list[str]:
    """Return the arguments with all options and their values first, then "--", then all words.

    A parser that takes everything with a dash for an option needs them apart.
    """
    options: list[str] = []
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            words.extend(rest)
        elif is_word(argument, takes_value):
            words.append(argument)
        else:
            options.append(argument)
            if _needs_value(argument, takes_value):
                options += [value for value in [next(rest, None)] if value is not None]
    return [*options, "--", *words]


def _needs_value(argument: str, takes_value: Mapping[str, bool]) -> bool:
    """Return whether the value of an option, or of the last one of "-xm", is the next argument."""
    if argument in takes_value or argument.startswith("--"):
        return takes_value.get(argument, False)
    for at, char in enumerate(argument[1:], 2):
        takes = takes_value.get(f"-{char}")
        if takes is not False:  # it is unknown, or what follows it is its value
            return takes is True and at == len(argument)
    return False


def _read(option: Option, text: str) -> str | int | float | None:
    return None if text.startswith("-") and text != "-" else read(option, text)


def read(option: Option, text: str) -> str | int | float | None:
    """The value that `text` is for an option that has one; None where it is none."""
    if option.kind is str:
        return text
    try:
        value: int | float = int(text) if option.kind is int else float(text)
    except ValueError:
        return None
    return value if option.low <= value <= option.high else None
