"""Other words for commands: synonyms that run, words that get a hint, and typing errors.

This module imports nothing, because the fast path of `ask` may use it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def _by_word(table: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the arguments that each word stands for, from words by their arguments."""
    items = table.items()
    return {word: tuple(meant.split()) for meant, words in items for word in words.split()}


# Words of ollama, llm, LM Studio's lms, git, gh, docker and pip for the same command. A word runs as the
# arguments that it stands for. A word belongs here only if it cannot mean anything else.
SYNONYMS = _by_word(
    {
        "list": "ls installed pairs images",
        "catalogue": "catalog available library browse search find",
        "pull": "download install get fetch",
        "show": "info inspect describe details view",
        "add": "create register",
        "rm": "delete remove del",
        "gc": "prune cleanup",
        "verify": "fsck",
        "ask": "prompt query",
        "chat": "talk repl",
        "complete": "infill",
        "embed": "embedding embeddings",
        "history": "conversations sessions chats",
        "templates": "template prompts",
        "bench": "benchmark",
        "stats": "statistics",
        "config": "settings configure configuration",
        "config set": "set",
        "config unset": "unset",
        "use": "default switch",
        "start": "serve up",
        "stop": "down shutdown",
        "logs": "log",
        "status": "state",
        "doctor": "diagnose health",
        "completion": "completions",
        "help": "commands man",
        "--version": "version",
    }
)

# Words that may mean a command but do not run it, because the request is unclear or not quite what the
# command does.
HINTED_WORDS = _by_word(
    {
        "status": "daemon",
        "start": "server",
        "stop": "kill quit exit",
        "status --watch": "top",
        "service install": "enable systemd launchd",
        "pull": "update upgrade clone",
        "add": "new make",
        "rm": "drop",
        "gc": "clean",
        "verify": "checksum",
        "doctor": "check",
        "ask": "question generate q",
        "chat": "interactive",
        "embed": "vector vectors",
        "complete": "fim fill",
        "editor": "vim nvim neovim plugin vscode zed",
        "cmd": "command shell sh",
        "bench": "measure experiment perf",
        "config": "options",
    }
)

# What users of other programs write after a command: (command, word) → what to write here. "*" is any word
# that is no option. {0} is the word, and {1} the one that follows it.
HABITS: dict[tuple[str, str], str] = {
    ("stop", "*"): "To unload one pair: localspec unload {0}",
    ("uninstall", "*"): "To remove a pair: localspec rm {0}",
    ("unload", "--all"): "To unload all pairs: localspec unload",
    ("chat", "*"): "To chat with a pair: localspec chat -m {0}",
    ("logs", "stream"): "To follow the log: localspec logs -f",
    ("models", "default"): "To choose the pair that answers: localspec use {1}",
    ("list", "default"): "To choose the pair that answers: localspec use {1}",
    ("ask", "-o"): "An option of sampling has its own name: --{1}",
    ("ask", "-a"): "To attach a file: -f {1}",
    ("ask", "-v"): "For statistics: -u",
    ("ask", "--verbose"): "For statistics: -u",
    ("ask", "--context"): "To set the context: localspec config set context {1}",
    **dict.fromkeys(
        [("rename", "*"), ("mv", "*"), ("cp", "*"), ("copy", "*")],
        "A pair cannot be renamed or copied. To add files under a name: localspec add NAME",
    ),
}

# Commands of other programs that have no counterpart here. A command that is spelled similarly would do
# something else, so none is suggested.
WITHOUT_COUNTERPART = frozenset(
    {"push", "upload", "cp", "copy", "mv", "rename", "keys", "key", "login", "signin", "logout"}
    | {"signout", "reload", "pause", "resume", "whoami", "publish", "tag", "plugins", "aliases"}
)

# A command is not suggested for a word that may just as well be a mistyped opposite of it.
OPPOSITES = (
    ("start", "stop"),
    ("load", "unload"),
    ("import", "export"),
    ("add", "rm"),
    ("install", "uninstall"),
    ("set", "unset"),
    ("set", "get"),
)


# LM Studio's lms and Docker have a group of commands for the server: `lms server start`.
_SERVER_GROUPS = ("server", "daemon")
_SERVER_COMMANDS = frozenset({"start", "stop", "restart", "status", "logs"})


def expand(arguments: list[str]) -> list[str]:
    """Return the arguments with a synonym in the first place replaced by what it stands for."""
    if len(arguments) > 1 and arguments[0] in _SERVER_GROUPS and arguments[1] in _SERVER_COMMANDS:
        return arguments[1:]
    if arguments and arguments[0] in SYNONYMS:
        return [*SYNONYMS[arguments[0]], *arguments[1:]]
    return arguments


def explain_habit(arguments: list[str]) -> str:
    """Return what to write instead of refused arguments that another program would take, or nothing."""
    command, *words = arguments or [""]
    for word, following in zip(words, [*words[1:], "…"], strict=False):
        hint = HABITS.get((command, word))
        if hint is None and not word.startswith("-"):
            hint = HABITS.get((command, "*"))
        if hint is not None:
            return hint.format(word, following)
    return ""


def closest(word: str, names: Iterable[str]) -> str:
    """Return the name that a mistyped word probably means; empty if none is near enough.

    A word of two letters or more also means the shortest name that begins with it. A name is never returned
    for a word that is just as close to the opposite of the name.
    """
    known = list(names)
    candidates = sorted((n for n in known if len(word) > 1 and n.startswith(word)), key=len)
    if not candidates:
        distances = {name: _distance(word, name) for name in known}
        possible = [name for name in known if _is_near(word, name, distances[name])]
        # Of equally close names the one with the same first letter wins, because people rarely mistype
        # the first letter.
        candidates = sorted(possible, key=lambda name: (distances[name], name[:1] != word[:1]))
    return next((name for name in candidates if not _may_be_opposite(word, name)), "")


def _is_near(word: str, name: str, distance: int) -> bool:
    """Return whether a word is close enough to a name to be a mistyped form of it.

    For names of up to three letters only an extra letter or two swapped ones count, because one letter less
    or a different letter makes it a different word.
    """
    if len(name) <= 3:
        return distance == 1 and (len(word) > len(name) or sorted(word) == sorted(name))
    return distance <= (1 if len(name) <= 5 else 2)


def _may_be_opposite(word: str, name: str) -> bool:
    """Return whether a word may just as well be a mistyped opposite of a name.

    If the opposite contains the name ("load" in "unload"), its distance must be more than two. A letter that
    is lost or mistyped in the prefix would otherwise leave a word that is closer to the name.
    """
    opposites = [pair[1 - pair.index(name)] for pair in OPPOSITES if name in pair]
    return any(
        _distance(word, opposite) <= (2 if name in opposite else _distance(word, name))
        for opposite in opposites
    )


def _distance(word: str, name: str) -> int:
    """Return the edit distance of two words (optimal string alignment).

    It is the number of letters to insert, delete, replace or swap with a neighbour. difflib's ratio is not
    used, because it does not count a swap as one error, and it rates "cp" and "acp" as close as "histroy"
    and "history".
    """
    row_before_last: list[int] = []
    last_row = list(range(len(name) + 1))
    for i, a in enumerate(word, 1):
        row = [i]
        for j, b in enumerate(name, 1):
            cost = min(last_row[j] + 1, row[j - 1] + 1, last_row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == name[j - 2] and word[i - 2] == b:
                cost = min(cost, row_before_last[j - 2] + 1)
            row.append(cost)
        row_before_last, last_row = last_row, row
    return last_row[-1]
