"""The words that people type for a command: synonyms that run, habits that get a hint, typing errors.

Nothing is imported here, because the short way of `ask` may come through.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# What users of ollama, llm, LM Studio's lms, git, gh, docker and pip type for the same thing. Each word
# runs as the arguments that it stands for. A word belongs here only if it cannot mean anything else.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "ls": ("list",),
    "installed": ("list",),
    "pairs": ("list",),
    "images": ("list",),
    "catalog": ("catalogue",),
    "available": ("catalogue",),
    "library": ("catalogue",),
    "browse": ("catalogue",),
    "search": ("catalogue",),
    "find": ("catalogue",),
    "download": ("pull",),
    "install": ("pull",),
    "get": ("pull",),
    "fetch": ("pull",),
    "info": ("show",),
    "inspect": ("show",),
    "describe": ("show",),
    "details": ("show",),
    "view": ("show",),
    "create": ("add",),
    "register": ("add",),
    "delete": ("rm",),
    "remove": ("rm",),
    "uninstall": ("rm",),
    "del": ("rm",),
    "prune": ("gc",),
    "cleanup": ("gc",),
    "fsck": ("verify",),
    "prompt": ("ask",),
    "query": ("ask",),
    "talk": ("chat",),
    "repl": ("chat",),
    "infill": ("complete",),
    "embedding": ("embed",),
    "embeddings": ("embed",),
    "conversations": ("history",),
    "sessions": ("history",),
    "chats": ("history",),
    "template": ("templates",),
    "prompts": ("templates",),
    "benchmark": ("bench",),
    "statistics": ("stats",),
    "settings": ("config",),
    "configure": ("config",),
    "configuration": ("config",),
    "set": ("config", "set"),
    "unset": ("config", "unset"),
    "default": ("use",),
    "switch": ("use",),
    "serve": ("start",),
    "up": ("start",),
    "down": ("stop",),
    "shutdown": ("stop",),
    "log": ("logs",),
    "state": ("status",),
    "diagnose": ("doctor",),
    "health": ("doctor",),
    "completions": ("completion",),
    "commands": ("help",),
    "man": ("help",),
    "version": ("--version",),
}

# Words that may have meant a command, but that are not run: what they ask for is unclear, or it is not
# quite what the command does.
HINTS: dict[str, tuple[str, ...]] = {
    "daemon": ("status",),
    "server": ("start",),
    "kill": ("stop",),
    "quit": ("stop",),
    "exit": ("stop",),
    "top": ("status", "--watch"),
    "enable": ("service", "install"),
    "systemd": ("service", "install"),
    "launchd": ("service", "install"),
    "update": ("pull",),
    "upgrade": ("pull",),
    "clone": ("pull",),
    "new": ("add",),
    "make": ("add",),
    "drop": ("rm",),
    "clean": ("gc",),
    "checksum": ("verify",),
    "check": ("doctor",),
    "question": ("ask",),
    "generate": ("ask",),
    "q": ("ask",),
    "interactive": ("chat",),
    "vector": ("embed",),
    "vectors": ("embed",),
    "fim": ("complete",),
    "fill": ("complete",),
    "vim": ("editor",),
    "nvim": ("editor",),
    "neovim": ("editor",),
    "plugin": ("editor",),
    "vscode": ("editor",),
    "zed": ("editor",),
    "command": ("cmd",),
    "shell": ("cmd",),
    "sh": ("cmd",),
    "measure": ("bench",),
    "experiment": ("bench",),
    "perf": ("bench",),
    "options": ("config",),
}

# Commands of other programs that have no counterpart here. Whatever is spelled like them does
# something else, so nothing is suggested.
WITHOUT_COUNTERPART = frozenset(
    {"push", "upload", "cp", "copy", "mv", "rename", "keys", "key", "login", "signin", "logout"}
    | {"signout", "reload", "pause", "resume", "whoami", "publish", "tag", "plugins", "aliases"}
)

# Of two opposites none is suggested to whoever may have meant the other.
OPPOSITES = (
    ("start", "stop"),
    ("load", "unload"),
    ("import", "export"),
    ("add", "rm"),
    ("install", "uninstall"),
    ("set", "unset"),
    ("set", "get"),
)


# In LM Studio's lms and in Docker the server is a group of commands: `lms server start`.
_SERVER = ("server", "daemon")
_OF_SERVER = frozenset({"start", "stop", "restart", "status", "logs"})


def expand(arguments: list[str]) -> list[str]:
    """Return the arguments with a synonym in their first place replaced by what it stands for."""
    if len(arguments) > 1 and arguments[0] in _SERVER and arguments[1] in _OF_SERVER:
        return arguments[1:]
    if arguments and arguments[0] in SYNONYMS:
        return [*SYNONYMS[arguments[0]], *arguments[1:]]
    return arguments


def closest(word: str, names: Iterable[str]) -> str:
    """Return the name that a mistyped word probably means; empty if none is near enough.

    A word of two letters or more also means the shortest name that it begins. A name is never returned
    for a word that its opposite is as near to.
    """
    known = list(names)
    begun = [name for name in known if len(word) > 1 and name.startswith(word)]
    near = sorted(begun, key=len)
    if not near:
        distances = {name: _distance(word, name) for name in known}
        possible = [name for name in known if _is_near(word, name, distances[name])]
        # Of names that are equally near, the one with the same first letter comes first: people
        # rarely mistype that one.
        near = sorted(possible, key=lambda name: (distances[name], name[:1] != word[:1]))
    return next((name for name in near if not _may_be_opposite(word, name)), "")


def _is_near(word: str, name: str, distance: int) -> bool:
    """Return whether so few typing errors lie between a word and a name that it can be meant.

    In a name of up to three letters only an extra letter or two swapped ones count: one letter less
    or another one makes it a different word.
    """
    if len(name) <= 3:
        return distance == 1 and (len(word) > len(name) or sorted(word) == sorted(name))
    return distance <= (1 if len(name) <= 5 else 2)


def _may_be_opposite(word: str, name: str) -> bool:
    """Return whether a word may just as well be a mistyped opposite of a name.

    A name that its opposite contains ("load" in "unload") needs a distance of more than two from
    that, because a letter lost or mistyped in the prefix leaves a word that is nearer to the name.
    """
    own = _distance(word, name)
    for pair in OPPOSITES:
        if name in pair:
            other = pair[1 - pair.index(name)]
            if _distance(word, other) <= (2 if name in other else own):
                return True
    return False


def _distance(first: str, second: str) -> int:
    """Return the number of letters to insert, delete, replace or swap with their neighbours between two
    words (optimal string alignment).

    difflib's ratio does not see a swap as one error, and rates "cp" and "acp" as near as "histroy"
    and "history".
    """
    before: list[int] = []
    previous = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, previous = previous, row
    return previous[-1]
