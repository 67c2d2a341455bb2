"""The names of the commands and the options of `ask`, for click and for the fast path without it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


# The core's commands by what they are for, as the help lists them: name → (function, summary). EXTRAS stands
# where the group's commands of extras come. A command is imported when it is run or asked for help.
EXTRAS = "*"
CORE_COMMANDS = {
    "Ask": {
        "ask": ("ask:ask_command", "Ask one question."),
        "chat": ("ask:chat_command", "Chat in the terminal."),
        "run": ("ask:run_command", "Chat with a pair, or ask it a question."),
        EXTRAS: ("", ""),
    },
    "Models": {
        "list": ("list:list_command", "List installed pairs."),
        "use": ("use:command", "Show or choose the pair that answers by default."),
        "catalogue": ("list:catalogue_command", "List pairs available to pull."),
        "pull": ("pull:pull_command", "Download a pair."),
        "pulls": ("pull:pulls_command", "Show or cancel pulls."),
        "show": ("show:command", "Show details of a pair."),
        "add": ("add:command", "Create a pair from your own files."),
        "import": (
            "import_:import_command",
            "Find models on this disk and create pairs from them.",
        ),
        "drafts": ("import_:drafts_command", "Find draft models for a target on this disk."),
        "verify": ("verify:command", "Verify the checksums of a pair's files."),
        "rm": ("rm:rm_command", "Remove pairs."),
        "gc": ("rm:gc_command", "Delete files that no pair needs."),
    },
    "Daemon": {
        "start": ("start:start_command", "Start the daemon."),
        "stop": ("start:stop_command", "Stop the daemon."),
        "restart": ("start:restart_command", "Stop the daemon and start it again."),
        "status": ("status:command", "Show the daemon's status."),
        "load": ("load:load_command", "Load a pair before it is asked something."),
        "unload": ("load:unload_command", "Unload the pair and free its memory."),
        "logs": ("logs:command", "Show the daemon's log."),
        "uninstall": ("uninstall:command", "Undo what localspec installed; show what it stored."),
        EXTRAS: ("", ""),
    },
    "Data": {
        "history": ("history:command", "List, show, search and remove conversations."),
        "templates": ("templates:command", "List, show, edit and remove saved prompts."),
        EXTRAS: ("", ""),
        "config": ("config:command", "Show and change the configuration."),
    },
    "Integrate": {
        EXTRAS: ("", ""),
        "token": ("token:command", "Print the token for TCP clients."),
        "completion": ("completion:command", "Print the completion script for bash, zsh or fish."),
        "help": ("help:command", "Show help for a command, or a page of the documentation."),
    },
}

CORE_NAMES = frozenset(name for commands in CORE_COMMANDS.values() for name in commands)

# Additional names of commands.
ALIASES = {"ps": "status", "models": "list"}

UNLIMITED = (1 << 31) - 1  # upper limit of numbers that have no other one


class Option:
    """An option of `ask`.

    `kind` is bool for a flag, otherwise the type of the value. A number must be from `low` to `high`. An
    option with `many` may be repeated, and its value is a list.
    """

    def __init__(
        self,
        name: str,
        flags: str,
        kind: type[bool] | type[str] | type[int] | type[float],
        help: str,
        metavar: str = "",
        low: float = 0,
        high: float = UNLIMITED,
        *,
        many: bool = False,
    ) -> None:
        self.name, self.flags, self.kind, self.help = name, flags.split(), kind, help
        self.metavar, self.low, self.high, self.many = metavar, low, high, many

    @property
    def limits(self) -> str:
        """The limits in words, as in "from 0 to 100"."""
        return f"from {self.low} to {self.high}"


def _flag(name: str, flags: str, help: str) -> Option:
    return Option(name, flags, bool, help)


def _many(name: str, flags: str, help: str, metavar: str) -> Option:
    return Option(name, flags, str, help, metavar, many=True)


_TEMPERATURE = "Sampling temperature; 0 always picks the most likely token."
_TOP_P = "Nucleus sampling: the smallest set of tokens with total probability P."
_MIN_P = "Drop tokens less than P times as likely as the most likely one."
_REPEAT = "Penalize repetition; 1 disables it."
_PRESENCE = "Penalize tokens already used."
_FREQUENCY = "Penalize tokens in proportion to how often they were used."
_EXTRACT = "Print only the first code block; without a question, of the last answer."
_CONTINUE = "Continue the last conversation"
_CUT_OFF = f"{_CONTINUE}; without a question, its answer that was cut off."
_DRAFT = "Draft exactly N tokens; 0 disables drafting."
_INT64 = (-(1 << 63), (1 << 63) - 1)
# These have the name and the limits of a field of the request (protocol/requests.py).
SAMPLING = (
    Option("temperature", "--temperature --temp", float, _TEMPERATURE, "T", high=100),
    Option("top_p", "--top-p", float, _TOP_P, "P", high=1),
    Option("top_k", "--top-k", int, "Sample from the K most likely tokens.", "K", low=-1),
    Option("min_p", "--min-p", float, _MIN_P, "P", high=1),
    Option("repeat_penalty", "--repeat-penalty", float, _REPEAT, "R", 0.001, 100),
    Option("presence_penalty", "--presence-penalty", float, _PRESENCE, "P", -2, 2),
    Option("frequency_penalty", "--frequency-penalty", float, _FREQUENCY, "P", -2, 2),
    Option("seed", "--seed", int, "Random seed, for repeatable answers.", "SEED", *_INT64),
)

ASK = (
    Option("model", "-m --model", str, "Use this pair instead of the configured one.", "PAIR"),
    _many("query", "-q --query", "Use the pair whose name contains TEXT; repeatable.", "TEXT"),
    Option("system", "-s --system", str, "System message.", "SYSTEM"),
    Option("tokens", "-n --tokens", int, "Maximum number of tokens.", "TOKENS", low=1),
    _many("files", "-f --file", "File or quoted glob to include; repeatable; - for stdin.", "FILE"),
    _flag("last", "-c --continue", _CUT_OFF),
    Option("conversation", "--cid", str, "Continue this conversation.", "ID"),
    Option("template", "-t --template", str, "Use a saved template.", "TEMPLATE"),
    _many("values", "-p --param", "Value for $NAME in the template; repeatable.", "NAME=VALUE"),
    Option("save", "--save", str, "Save as a template instead of asking.", "NAME"),
    _flag("replace", "-y --force", "With --save: replace a template without asking."),
    _flag("extract", "-x --extract", _EXTRACT),
    _flag("extract_last", "--xl --extract-last", "Print only the last code block."),
    _flag("copy", "--copy", "Copy the answer to the clipboard; with -x the code block."),
    _flag("json", "--json", "Print the full response as one line of JSON."),
    Option("schema", "--schema", str, "Answer with JSON that matches this JSON schema.", "FILE"),
    _flag("no_stream", "--no-stream", "Print the answer only when it is complete."),
    _flag("plain", "--plain", "Do not render Markdown."),
    _flag("show_draft", "--show-draft", "Highlight tokens proposed by the draft (terminal only)."),
    _flag("hide_reasoning", "--hide-reasoning", "Hide the model's reasoning."),
    _flag("usage", "-u --usage", "Print statistics to stderr after the answer."),
    Option("draft", "--draft --draft-max", int, _DRAFT, "N", high=64),
    _flag("exact", "--exact", "Guarantee the same bytes with and without a draft."),
    _flag("no_log", "--no-log", "Do not save anything in the history."),
    _flag("no_daemon_start", "--no-daemon-start", "Fail if the daemon is not running."),
    _flag("debug", "--debug", "Show a traceback on errors."),
    *SAMPLING,
)


# Groups of options of which at most one may be given.
EXCLUSIVE = (
    ("extract", "extract_last", "json"),
    ("last", "conversation", "save"),
    ("save", "template"),
)

# The options that `/set` changes in a chat.
SETTABLE = {
    option.name: option
    for option in ASK
    if option in SAMPLING
    or option.name in ("tokens", "draft", "exact", "plain", "show_draft", "hide_reasoning", "usage")
}
_CHAT_OPTION_NAMES = (
    *("model", "query", "system", "last", "conversation", "files", "template", "values", *SETTABLE),
    *("no_log", "no_daemon_start", "debug"),
)
CHAT = tuple(
    _flag("last", "-c --continue", f"{_CONTINUE}.") if option.name == "last" else option
    for option in ASK
    if option.name in _CHAT_OPTION_NAMES
)


def select_options(*names: str) -> tuple[Option, ...]:
    """Return some of the options of `ask`, for other commands that send a question."""
    return tuple(option for option in ASK if option.name in names)


class AskOptions:
    """The words and the values of the options of `ASK`, which other commands that ask have in part.

    A flag that was not given is False, an option that may be repeated is [], and any other is None.
    """

    words: list[str]
    model: str | None
    query: list[str]
    system: str | None
    tokens: int | None
    files: list[str]
    last: bool
    conversation: str | None
    template: str | None
    values: list[str]
    save: str | None
    replace: bool
    extract: bool
    extract_last: bool
    copy: bool
    json: bool
    schema: str | None
    no_stream: bool
    plain: bool
    show_draft: bool
    hide_reasoning: bool
    usage: bool
    draft: int | None
    exact: bool
    no_log: bool
    no_daemon_start: bool
    debug: bool
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None

    def __init__(self, **given: Any) -> None:
        """Set the options in `given` by name; a tuple becomes a list. All others have their defaults."""
        self.words = list(given.pop("words", ()))
        for option in ASK:
            default: Any = [] if option.many else False if option.kind is bool else None
            value = given.pop(option.name, default)
            setattr(self, option.name, list(value) if option.many else value)
        if given:
            raise TypeError(f"`ask` has no option {', '.join(given)}.")

    def changed(self, **changes: Any) -> AskOptions:
        """Return a copy with some options changed."""
        return AskOptions(**{**vars(self), **changes})


def expand_file_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments with `-f a.py b.py` replaced by `-f a.py -f b.py`.

    A shell turns an unquoted `-f *.py` into that. A note on stderr says which files were added.
    """
    if not {"-f", "--file"} & set(arguments):
        return arguments
    import os

    result, added_files, follows_file = list[str](), list[str](), False
    remaining = iter(arguments)
    for argument in remaining:
        follows_file = follows_file and not argument.startswith("-") and os.path.exists(argument)  # noqa: PTH110 - pathlib would be one more import
        if follows_file:
            added_files.append(argument)
            result.append("-f")
        result.append(argument)
        if argument in ("-f", "--file"):
            result += [value for value in [next(remaining, None)] if value is not None]
            follows_file = True
        elif argument == "--":
            result += remaining
    if added_files:
        from localspec.cli.terminal import render

        more = f" and {len(added_files) - 3} more" if len(added_files) > 3 else ""
        render.note(f"Also included, as files named after -f: {', '.join(added_files[:3])}{more}.")
    return result


def parse(arguments: list[str]) -> AskOptions | None:
    """Return the options and words of `ask`; None if the arguments need click.

    Only complete flags with valid values are parsed here. None is no error: click then parses the arguments
    again and reports what is wrong, if anything is.
    """
    options_by_flag = {flag: option for option in ASK for flag in option.flags}
    takes_value = {flag: option.kind is not bool for flag, option in options_by_flag.items()}
    options, remaining = AskOptions(), iter(arguments)
    for argument in remaining:
        if argument == "--":
            options.words.extend(remaining)
        elif is_word(argument, takes_value):
            options.words.append(argument)
        elif (option := options_by_flag.get(argument)) is None:
            return None
        elif option.kind is bool:
            setattr(options, option.name, True)
        else:
            text = next(remaining, "--")
            value = None if text.startswith("-") and text != "-" else parse_value(option, text)
            if value is None:
                return None
            setattr(
                options,
                option.name,
                [*getattr(options, option.name), value] if option.many else value,
            )
    return options


def is_word(argument: str, takes_value: Mapping[str, bool]) -> bool:
    """Return whether an argument is a word of a question and not an option.

    `takes_value` says for every known option whether it has a value. A word may begin with a dash if it is
    a number ("-5"), or quoted text: that has a blank in it and does not begin with a known option and its
    value.
    """
    if not argument.startswith("-") or argument == "-" or argument[1].isdigit():
        return True
    has_blank = any(char.isspace() for char in argument)
    if not has_blank or argument.partition("=")[0] in takes_value:
        return False
    return not takes_value.get(argument[:2])


def separate_words(takes_value: Mapping[str, bool], arguments: list[str]) -> list[str]:
    """Return the arguments in the order: all options with their values, "--", all words.

    click needs them separated, because it takes every argument with a dash for an option.
    """
    options, words = list[str](), list[str]()
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            words.extend(remaining)
        elif is_word(argument, takes_value):
            words.append(argument)
        else:
            options.append(argument)
            if _needs_value(argument, takes_value):
                options += [value for value in [next(remaining, None)] if value is not None]
    return [*options, "--", *words]


def _needs_value(argument: str, takes_value: Mapping[str, bool]) -> bool:
    """Return whether the next argument is the value of this option.

    For joined short options such as "-xm" that depends on the last one.
    """
    if argument in takes_value or argument.startswith("--"):
        return takes_value.get(argument, False)
    for end, char in enumerate(argument[1:], 2):
        takes = takes_value.get(f"-{char}")
        if takes is not False:  # an unknown option, or one whose value follows directly
            return takes is True and end == len(argument)
    return False


def parse_value(option: Option, text: str) -> str | int | float | None:
    """Return the value of an option with this text, or None if the text is not valid for it."""
    if option.kind is str:
        return text
    try:
        value: int | float = int(text) if option.kind is int else float(text)
    except ValueError:
        return None
    return value if option.low <= value <= option.high else None
