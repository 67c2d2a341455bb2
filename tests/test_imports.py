"""Rules about imports, each with its reason. To change one is a deliberate decision.

The rules are tables; tests/support/imports.py checks them against the code. The second half of this file
breaks each line of each table on purpose, since a rule that nothing can break is useless.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.extras import needs
from tests.support.imports import (
    Import,
    beyond_part,
    beyond_room,
    circles,
    early,
    foreign,
    imports_in,
    is_in,
    misplaced,
    part_of,
)

PACKAGE = Path(__file__).parents[1] / "localspec"
IMPORTS = imports_in(PACKAGE)


def is_ours(place: str) -> bool:
    """Return whether a place is a folder or a file of this package."""
    return (PACKAGE / place).is_dir() or (PACKAGE / f"{place}.py").is_file()


# Our own parts.

LEAVES = {"config", "ended", "errors", "files", "installation", "literals", "paths"}

# What each part may import of ours beside itself, and why no more. A new part needs a line here.
PARTS: dict[str, tuple[set[str], str]] = {
    "__init__": (set(), "every other file imports it"),
    "__main__": ({"cli"}, "it is the command line under another name"),
    "errors": (set(), "everything may raise them, so they must drag nothing along"),
    "files": (
        set(),
        "whatever keeps a file writes it so, and both daemon and engine use its sockets",
    ),
    "ended": ({"files", "paths"}, "a daemon writes it, and a client that finds none reads it"),
    "literals": (set(), "whatever writes a file for another program writes its texts so"),
    "installation": (set(), "daemon and client print it, and neither may depend on the other"),
    "relay": (set(), "a worker and a tunnel both have one, and neither knows the other"),
    "children": (
        {"errors"},
        "daemon and engine both start processes, and neither knows the other",
    ),
    "priority": (set(), "long work gives way in the engine, and in what the daemon starts"),
    "attached_files": (
        set(),
        "the client, the daemon and the engine's process recognize what is attached",
    ),
    "compatibility": (set(), "registry and engine judge by it, and neither knows the other"),
    "model_traits": ({"protocol"}, "as compatibility; a model's purpose stands in frames, too"),
    "machine": (set(), "scripts/setup uses it before anything is installed"),
    "paths": ({"errors"}, "client and daemon must find each other without further machinery"),
    "config": ({"errors", "paths", "protocol"}, "a setting is data, whatever reads it"),
    "protocol": (set(), "both ends share it; a wire format must not depend on either end"),
    "chat": (
        {"errors", "protocol"},
        "engine, daemon and upstream replies read answers by it, so it must run in each of them",
    ),
    "client": (
        {"errors", "paths"},
        "it is on the way to the first word, and an editor's plugin may use it alone",
    ),
    "cli": (
        {"attached_files", "children", "client", "machine", "relay", *LEAVES},
        "it speaks to a daemon that may be of another process, user session or version, "
        "so it starts `python -m localspec.daemon` and never imports it",
    ),
    "registry": (
        {
            "children",
            "compatibility",
            "errors",
            "files",
            "installation",
            "literals",
            "model_traits",
            "paths",
            "protocol",
        },
        "it must be testable without a daemon; what it returns goes over the socket as it is",
    ),
    "daemon": (
        {
            "attached_files",
            "chat",
            "children",
            "machine",
            "priority",
            "protocol",
            "registry",
            *LEAVES,
        },
        "the engine may die of llama.cpp, so it is started by name in a process of its own",
    ),
    "engine": (
        {
            "chat",
            "children",
            "compatibility",
            "protocol",
            "errors",
            "files",
            "model_traits",
            "paths",
            "attached_files",
            "priority",
            "relay",
        },
        "it must be testable, and replaceable, without a daemon",
    ),
    "extras": (
        {
            "chat",
            "children",
            "cli",
            "client",
            "compatibility",
            "daemon",
            "engine",
            "machine",
            "model_traits",
            "priority",
            "protocol",
            "registry",
            "relay",
            *LEAVES,
        },
        "they add to every part; the table below says which of them may be in one process",
    ),
}
# These may read the table of extras, which imports none of them.
READ_EXTRAS = {"cli", "daemon", "engine", "registry"}
# An extra's files each run in one of these processes: what the parts of one import, no other has.
PROCESSES = {
    "the client": {"cli", "client"},
    "the daemon": {"daemon", "registry"},
    "a worker": {"engine"},
}
# A file of one of these parts that others may import as well: it parses bytes and keeps nothing.
PURE_FILES = {"registry/header/gguf"}


def test_every_part_has_its_rule() -> None:
    parts = {part_of(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert {part.removesuffix(".py") for part in parts} == PARTS.keys(), (
        "say in PARTS what a part may import, and of none that is not there"
    )
    allowed = {place for places, _ in PARTS.values() for place in places}
    assert not {place for place in allowed if not is_ours(place)}


def allowed_to(part: str) -> set[str]:
    """Return the places that a part may import beside itself."""
    return PARTS[part][0]


def test_a_part_imports_only_what_it_may() -> None:
    wrong = {
        f"{part} may import {sorted(allowed_to(part)) or 'nothing'} of ours: {reason}": faults
        for part, (_, reason) in PARTS.items()
        if (
            faults := [
                str(fault) for fault in beyond_part(part, allowed_to(part), IMPORTS_BUT_TABLE)
            ]
        )
    }
    assert not wrong


# Extras.

EXTRAS = sorted(
    path.name for path in (PACKAGE / "extras").iterdir() if path.is_dir() and path.name[0] != "_"
)
TABLE = "extras"


def is_table(imported: Import) -> bool:
    """Return whether a part that may read the table of extras imports only that."""
    return imported.ours == TABLE and part_of(imported.place) in READ_EXTRAS


IMPORTS_BUT_TABLE = [imported for imported in IMPORTS if not is_table(imported)]


def find_extra_imports(imports: Iterable[Import]) -> list[Import]:
    """Return the imports of an extra outside of its folder: by the core, or by another extra."""
    return [
        imported
        for imported in imports
        if imported.ours
        and (
            extra := next((name for name in EXTRAS if is_in(imported.ours, f"extras/{name}")), None)
        )
        and not is_in(imported.place, f"extras/{extra}")
    ]


def find_mixed_files(imports: Iterable[Import]) -> list[str]:
    """Return the files of extras that need the parts of two processes, also by files of their folder."""
    reached: dict[str, set[str]] = {}
    for imported in imports:
        if is_in(imported.place, "extras") and imported.ours:
            reached.setdefault(imported.place, set()).add(imported.ours)
    wrong = []
    for place in reached:
        todo, visited = [place], set[str]()
        while todo:
            for imported_place in reached.get(todo.pop(), ()):
                if imported_place not in visited:
                    visited.add(imported_place)
                    todo.append(imported_place)
        parts = {part_of(imported_place) for imported_place in visited - PURE_FILES}
        if sum(bool(parts & process) for process in PROCESSES.values()) > 1:
            wrong.append(place)
    return wrong


@needs("stats")
def test_nothing_imports_an_extra_from_outside() -> None:
    """A folder of extras can then be deleted: the core reads a table of names, and checks which exist."""
    assert EXTRAS
    assert [str(imported) for imported in find_extra_imports(IMPORTS)] == []


def test_each_file_of_an_extra_runs_in_one_process() -> None:
    assert find_mixed_files(IMPORTS) == []


@needs("stats")
@pytest.mark.parametrize("place", ["cli", "daemon/handlers", "engine/worker", "extras/stats/page"])
def test_an_import_of_an_extra_is_noticed(place: str) -> None:
    wrong = invent_import(place, "localspec.extras.bench.report", at_start=False)
    assert find_extra_imports([*IMPORTS, wrong]) == [wrong]
    assert (
        find_extra_imports([invent_import("extras/bench", "localspec.extras.bench.report")]) == []
    )


@needs("stats")
def test_a_file_of_two_processes_is_noticed() -> None:
    wrong = [invent_import("extras/stats/page", "localspec.daemon.state")]
    assert "extras/stats/page" in find_mixed_files([*IMPORTS, *wrong])


# Rooms: the folders of a part.

# What each room may import of its part's other rooms, and why no more: `*` is all of them. A folder is a
# room; so is a file beside the rooms that has a line here; the other files beside them are the part's own
# room. A new folder needs a line.
ROOMS: dict[str, tuple[set[str], str]] = {
    "daemon": ({"*"}, "start, routes and watch join the rooms, and nothing imports them"),
    "daemon/state": (
        {
            "daemon/completion",
            "daemon/history",
            "daemon/http",
            "daemon/logs",
            "daemon/pairs",
            "daemon/worker",
        },
        "it holds what handlers share, and must not know handlers",
    ),
    "daemon/handlers": (
        {
            "daemon/completion",
            "daemon/history",
            "daemon/http",
            "daemon/pairs",
            "daemon/state",
            "daemon/worker",
        },
        "they parse, call and answer, so they reach every room and no room reaches them",
    ),
    "daemon/history": (
        {"daemon/completion", "daemon/logs"},
        "a turn is a completion that is kept; a store of conversations needs no HTTP",
    ),
    "daemon/completion": (
        {"daemon/http", "daemon/logs", "daemon/worker"},
        "from a request to its answer, whether or not it is kept; files are converted in threads",
    ),
    "daemon/pairs": ({"daemon/http", "daemon/worker"}, "what there is to load, and no use of it"),
    "daemon/http": ({"daemon/logs"}, "it carries bytes, whatever they say"),
    "daemon/worker": ({"daemon/logs"}, "it carries frames, whoever asked"),
    "daemon/logs": (set(), "everything may log"),
    "protocol": (set(), "what both ends of ours have, and frames"),
    "chat": ({"*"}, "an answer is read in any family's notation"),
    "chat/families": ({"chat/notations"}, "a family knows no other text than its calls"),
    "chat/notations": (set(), "readers and rules, whichever family has them"),
    "engine": ({"*"}, "the step and the worker's loop join the rooms"),
    "engine/sequence": (
        {
            "engine/cache",
            "engine/llama",
            "engine/sampling",
            "engine/speculation",
            "engine/speculation/drafters",
            "engine/statistics",
            "engine/text_stream",
        },
        "it is one request with what each room keeps for it",
    ),
    "engine/statistics": ({"engine/speculation"}, "it counts steps, whoever took them"),
    "engine/prompt": (
        {
            "engine/cache",
            "engine/llama",
            "engine/pair",
            "engine/sampling",
            "engine/sampling/grammars",
            "engine/sequence",
            "engine/speculation/drafters",
        },
        "a request becomes tokens before there is a step",
    ),
    "engine/pair": (
        {
            "engine/cache",
            "engine/llama",
            "engine/sampling",
            "engine/sequence",
            "engine/speculation/acceptance",
            "engine/speculation/cost",
            "engine/speculation/depth",
            "engine/speculation/drafters",
            "engine/speculation/warm_start",
        },
        "loading makes what a pair consists of, and its lanes run sequences",
    ),
    "engine/speculation": (
        {
            "engine/cache",
            "engine/llama",
            "engine/sampling",
            "engine/speculation/acceptance",
            "engine/speculation/budget",
            "engine/speculation/cost",
            "engine/speculation/depth",
            "engine/speculation/drafters",
        },
        "what to draft and what to accept, of any drafter",
    ),
    "engine/speculation/warm_start": (
        {"engine/llama", "engine/speculation/acceptance", "engine/speculation/drafters"},
        "both models' passes, before there is a pair",
    ),
    "engine/speculation/drafters": (
        {
            "engine/cache",
            "engine/llama",
            "engine/sampling",
            "engine/speculation/acceptance",
            "engine/speculation/budget",
            "engine/speculation/cost",
            "engine/speculation/depth",
            "engine/speculation/windows",
        },
        "a kind of draft knows no other kind, and no rule of verification",
    ),
    "engine/speculation/depth": (
        {"engine/speculation/acceptance", "engine/speculation/cost"},
        "arithmetic over costs and beliefs, whatever they are of",
    ),
    "engine/speculation/cost": (set(), "arithmetic over times"),
    "engine/speculation/acceptance": (
        {"engine/speculation/budget", "engine/speculation/windows"},
        "arithmetic over what was accepted, with what is saved for probes of it and what they see",
    ),
    "engine/speculation/windows": ({"engine/cache"}, "arithmetic over what was predicted"),
    "engine/speculation/budget": (set(), "arithmetic over what drafts cost and gain"),
    "engine/cache": ({"engine/llama"}, "it alone writes how far a model has read"),
    "engine/text_stream": (set(), "tokens to text"),
    "engine/sampling": (
        {"engine/llama"},
        "arithmetic over logits, of one vocabulary",
    ),
    "engine/sampling/grammars": (
        {"engine/llama", "engine/sampling"},
        "languages over tokens, whoever samples them",
    ),
    "engine/llama": (
        {"engine/environment", "engine/rpc_entrance"},
        "the binding, and none of our ideas",
    ),
    "engine/rpc_entrance": (set(), "it is there before llama.cpp is loaded"),
    "engine/environment": (set(), "it is there before llama.cpp is loaded"),
    "registry": (set(), "the catalogue is data"),
    "registry/header": (set(), "a header is bytes, wherever they come from"),
    "registry/store": ({"registry", "registry/header"}, "it is used offline"),
    "registry/hub": (
        {"registry", "registry/header", "registry/store"},
        "the one way to the network",
    ),
    "registry/disk": (
        {"registry", "registry/header", "registry/store"},
        "what lies on this machine, ours or not, and no network",
    ),
    "registry/pulls": (
        {"registry", "registry/disk", "registry/header", "registry/hub", "registry/store"},
        "a pull joins them all",
    ),
    "registry/registry": ({"*"}, "what the daemon calls joins the rooms, and no room calls it"),
    "cli": ({"cli/terminal"}, "commands are imported by name, each when it is called"),
    "cli/terminal": (set(), "how things look, and not what they are"),
    "cli/chat": ({"cli", "cli/terminal"}, "only `chat` pays for its imports"),
    "cli/commands": ({"cli", "cli/chat", "cli/terminal"}, "no command knows another"),
}
ALLOWED_ROOMS = {room: named for room, (named, _) in ROOMS.items()}


def rooms_missing(folders: set[str]) -> set[str]:
    """Return the folders without a line in ROOMS, of parts that have rooms."""
    return {
        folder
        for folder in folders
        if "/" in folder and folder not in ROOMS and not is_in(folder, "extras")
    }


def folders() -> set[str]:
    return {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}


def test_every_folder_is_a_room_with_a_rule() -> None:
    assert rooms_missing(folders()) == set(), "say in ROOMS what a room may import, and why no more"
    assert [room for room in ROOMS if not is_ours(room)] == []
    imported_rooms = {
        room_name for room_names in ALLOWED_ROOMS.values() for room_name in room_names
    } - {"*"}
    assert imported_rooms <= ROOMS.keys()


def test_a_room_imports_only_what_it_may() -> None:
    wrong = {
        f"{room} may import {sorted(ALLOWED_ROOMS[room]) or 'no room'}: {reason}": faults
        for room, (_, reason) in ROOMS.items()
        if (faults := [str(fault) for fault in beyond_room(room, ALLOWED_ROOMS, IMPORTS)])
    }
    assert not wrong


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert circles(ALLOWED_ROOMS) == []


# Packages of others.

# Where a package may be imported, and why only there. Tests are not meant: they may use them all.
PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "llama_cpp": (("engine/llama",), "one place checks each return code and frees what it made"),
    "numpy": (
        ("engine", "extras/embeddings", "extras/tune"),
        "only logits need it, and an idle daemon should stay small",
    ),
    "llguidance": (("engine",), "grammars work on the target's logits"),
    "jinja2": (("engine",), "a template from a model file may hang: only the worker may"),
    "starlette": (
        ("daemon", "extras"),
        "the client speaks HTTP with the standard library, in 50 ms",
    ),
    "uvicorn": (("daemon",), "as starlette"),
    "watchfiles": (("daemon",), "only the daemon lives long enough to see a file change"),
    "huggingface_hub": (("registry",), "one place speaks to the network, and only when asked"),
    "httpx2": (
        ("registry", "extras/upstream"),
        "as huggingface_hub; and to servers that a person named",
    ),
    "pygments": (("cli/terminal/markdown",), "colours of code on a terminal, and of nothing else"),
    "prompt_toolkit": (("cli", "extras/shell"), "it reads what is typed in a chat"),
    "tomlkit": (("cli/settings",), "only `config set` changes a file and keeps its comments"),
    "click": (("cli", "extras"), "commands are the command line's"),
    "pygls": (
        ("extras/editors",),
        "a language server needs it, and is an extra that most need not have",
    ),
    "lsprotocol": (("extras/editors",), "as pygls"),
    "acp": (("extras/editors",), "as pygls"),
    "PIL": (
        ("daemon/completion/conversion_child",),
        "it reads files from anywhere, so only a process with limits may, and is an extra",
    ),
    "pypdfium2": (("daemon/completion/conversion_child",), "as PIL"),
    # Nowhere.
    "gguf": ((), "our own reader is strict, and ggml converts the values of tensors"),
    "benchmarks": ((), "it measures the others, and is not in the wheel"),
    "tests": ((), "as benchmarks"),
    "torch": (
        ("extras/tune/network", "extras/tune/eagle", "extras/tune/steps"),
        "2 GB, and an extra that most need not have",
    ),
    "httpx": ((), "184 ms against 49 ms until the first word"),
    "requests": ((), "as httpx"),
    "openai": ((), "tests use it to show that we speak its protocol; 687 ms"),
    "anthropic": ((), "as openai"),
    "pickle": ((), "reading one is running a program; state is msgpack"),
    "diskcache": ((), "it unpickles"),
    "fastapi": ((), "507 ms and 44 MB against starlette's 216 ms and 28 MB"),
}


def test_a_package_is_imported_only_where_it_belongs() -> None:
    wrong = {
        f"{package} belongs to {places or 'no part'}: {reason}": faults
        for package, (places, reason) in PACKAGES.items()
        if (faults := [str(fault) for fault in misplaced(package, places, IMPORTS)])
    }
    assert not wrong
    for package, (places, _) in PACKAGES.items():
        for place in places:  # an unused rule would seem to protect something
            if is_ours(place) and not place.startswith("extras"):  # an extra may be missing
                assert any(
                    is_in(statement.place, place)
                    for statement in IMPORTS
                    if statement.package == package
                ), place


LAZY = {
    "pygments": "50 ms, and only code on a terminal needs it",
    "prompt_toolkit": "0.26 s, and only `chat` needs it",
    "huggingface_hub": "only a pull needs it, and a daemon mostly sits idle",
    "httpx2": "as huggingface_hub",
    "tomlkit": "10 ms, and only a change of config.toml needs it",
    "PIL": "the daemon imports the module that uses it, and it may not be there",
    "pypdfium2": "as PIL",
}


@pytest.mark.parametrize("package", LAZY)
def test_a_slow_package_is_imported_when_it_is_needed(package: str) -> None:
    assert any(statement.package == package for statement in IMPORTS), "nobody imports it"
    wrong = [str(statement) for statement in early(package, IMPORTS)]
    assert not wrong, f"import {package} inside the function that needs it: {LAZY[package]}"


# scripts/setup imports these with a Python that has nothing installed.
BARE_PLACES = ("__init__", "machine")


@pytest.mark.parametrize("place", BARE_PLACES)
def test_setup_needs_the_standard_library_alone(place: str) -> None:
    assert not [str(statement) for statement in foreign(place, IMPORTS)]


# Modules that a process must not have loaded after it imported a module. Rules about statements miss
# indirect imports.
UNLOADED = {
    # What `localspec ask` imports before its first word.
    "localspec.cli.ask": [
        *("asyncio", "numpy", "pygments", "starlette", "httpx2", "llama_cpp"),
        *("pathlib", "typing", "tempfile", "platformdirs", "urllib.parse", "http", "threading"),
    ],
    # What it imports after an answer that was cut off, which short ones often are.
    "localspec.cli.terminal.hints": ["pathlib", "typing", "platformdirs", "shlex", "threading"],
    # The child starts with the worker, and a load waits for what it renders.
    "localspec.engine.prompt.template_child": ["numpy", "llama_cpp", "msgspec"],
    # What the daemon starts to describe a pair that is not loaded.
    "localspec.engine.prompt.dialect": ["numpy", "llama_cpp", "jinja2"],
    "localspec.daemon.lifecycle": [
        "numpy",
        "llama_cpp",
        "huggingface_hub",
        "importlib.metadata",
        "localspec.engine",
        "localspec.machine",
    ],
}


def list_loaded(module: str, absent: list[str], setup: str = "") -> str:
    """Return those of `absent` that a process has loaded after it imported a module."""
    program = f"import sys\n{setup}\nimport {module}\n"
    program += f"print([name for name in {absent!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("module", UNLOADED)
def test_a_process_loads_no_forbidden_module(module: str) -> None:
    assert list_loaded(module, UNLOADED[module]) == "[]"


# Each rule broken on purpose.


def invent_import(place: str, module: str, *, at_start: bool = True) -> Import:
    """Return an import that does not exist, in a new file of a folder or in the file of a place."""
    folder = (PACKAGE / place).is_dir()
    return Import(f"{place}/made_up.py" if folder else f"{place}.py", 1, module, at_start)


def module_of(place: str) -> str:
    return ".".join(["localspec", *place.split("/")])


def test_a_part_that_imports_another_is_noticed() -> None:
    for part, (allowed, _) in PARTS.items():
        for imported_part in PARTS.keys() - allowed - {part, "__init__"}:
            for wrong in (
                invent_import(part, module_of(imported_part)),
                invent_import(part, f"{module_of(imported_part)}.inner", at_start=False),
            ):
                assert beyond_part(part, allowed, [wrong]) == [wrong]
        for imported_part in allowed | {part}:
            assert (
                beyond_part(
                    part, allowed, [invent_import(part, f"{module_of(imported_part)}.inner")]
                )
                == []
            )


def test_a_part_or_a_room_without_a_rule_is_noticed() -> None:
    assert part_of("attic/old") not in PARTS
    assert rooms_missing(folders() | {"daemon/attic"}) == {"daemon/attic"}
    assert rooms_missing(folders() | {"machine/attic"}) == {"machine/attic"}


def test_a_room_that_imports_another_is_noticed() -> None:
    for room, imported_room in itertools.product(ROOMS, ROOMS):
        allowed = ALLOWED_ROOMS[room]
        if part_of(imported_room) != part_of(room) or imported_room == room:
            continue
        # A part's own room is the files beside its rooms.
        file = f"{imported_room}/made_up" if (PACKAGE / imported_room).is_dir() else imported_room
        wrong = invent_import(room, module_of(file))
        expected = [] if {"*", imported_room} & allowed else [wrong]
        assert beyond_room(room, ALLOWED_ROOMS, [wrong]) == expected


def test_a_circle_of_rooms_is_noticed() -> None:
    """An import in the opposite direction of any allowed one makes a circle."""
    for room in ROOMS:
        candidates = [
            candidate
            for candidate in ROOMS
            if part_of(candidate) == part_of(room) and candidate != room
        ]
        for target_room in candidates if "*" in ALLOWED_ROOMS[room] else ALLOWED_ROOMS[room]:
            back = {**ALLOWED_ROOMS, target_room: {*ALLOWED_ROOMS[target_room], room}}
            assert any({room, target_room} <= set(circle) for circle in circles(back)), (
                room,
                target_room,
            )


def test_a_package_where_it_does_not_belong_is_noticed() -> None:
    for (package, (places, _)), place in itertools.product(PACKAGES.items(), {*PARTS, *ROOMS}):
        wrong = invent_import(place, f"{package}.inner")
        at_home = any(is_in(wrong.place, home) for home in places)
        assert misplaced(package, places, [wrong]) == ([] if at_home else [wrong])


@pytest.mark.parametrize("package", LAZY)
def test_a_slow_package_at_the_top_of_a_file_is_noticed(package: str) -> None:
    wrong, right = (invent_import("cli", f"{package}.inner", at_start=top) for top in (True, False))
    assert early(package, [*IMPORTS, wrong, right]) == [wrong]


@pytest.mark.parametrize("place", BARE_PLACES)
@pytest.mark.parametrize("module", ["msgspec", "localspec.errors", "localspec.paths"])
def test_a_package_that_setup_lacks_is_noticed(place: str, module: str) -> None:
    wrong = invent_import(place, module)
    assert foreign(place, [*IMPORTS, wrong, invent_import(place, "json.decoder")]) == [wrong]


@pytest.mark.parametrize("module", UNLOADED)
def test_an_indirect_import_is_noticed(module: str) -> None:
    setup = "import " + ", ".join(UNLOADED[module])
    assert list_loaded(module, UNLOADED[module], setup) == str(UNLOADED[module])


def test_an_import_in_any_form_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "localspec" / "inner"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("")
    (tmp_path / "localspec" / "paths.py").write_text("")
    (inner / "some.py").write_text(
        """
import typing
from typing import TYPE_CHECKING
import os.path, localspec.paths as p
from localspec import paths, __version__
from localspec.inner import other
from localspec.paths import home, other
from . import other
from .. import paths
from ..paths import home
try:
    import one
except ImportError:
    import two
if TYPE_CHECKING:
    import three
else:
    import four
if typing.TYPE_CHECKING:
    import five
class C:
    import six
    def method(self):
        with self:
            from seven.inner import some
async def f():
    import eight
"""
    )
    (inner / "other.py").write_text("")
    modules = [
        (statement.module, statement.at_start) for statement in imports_in(tmp_path / "localspec")
    ]
    assert modules == [
        ("typing", True),
        ("typing", True),
        ("os.path", True),
        ("localspec.paths", True),
        ("localspec.paths", True),
        ("localspec", True),
        ("localspec.inner.other", True),
        ("localspec.paths", True),
        ("localspec.inner.other", True),
        ("localspec.paths", True),
        ("localspec.paths", True),
        ("one", True),
        ("two", True),
        ("three", False),
        ("four", True),
        ("five", False),
        ("six", True),
        ("seven.inner", False),
        ("eight", False),
    ]
    assert {statement.place for statement in imports_in(tmp_path / "localspec")} == {"inner/some"}
