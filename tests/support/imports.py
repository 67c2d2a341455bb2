"""What the package's files import, and who breaks a rule about it: for tests/test_imports.py.

A place is a file's or folder's path under the package, without suffix: `daemon/http`, `engine/worker`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

OURS = "localspec"


@dataclass(frozen=True)
class Import:
    """One imported module, and whether it is imported as soon as its file is."""

    file: str
    line: int
    module: str
    at_start: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"

    @property
    def place(self) -> str:
        """Where the file is: `daemon/http/sse`."""
        return self.file.removesuffix(".py").removesuffix("/__init__")

    @property
    def package(self) -> str:
        """What is to be installed for it: `rich` of `rich.console`."""
        return self.module.split(".")[0]

    @property
    def ours(self) -> str | None:
        """The place of ours that it imports; "" for the package itself, None for others' modules."""
        return "/".join(self.module.split(".")[1:]) if self.package == OURS else None


def imports_in(package: Path) -> list[Import]:
    """Every import statement in a package's files, in whatever form and however deep."""
    return [found for path in sorted(package.rglob("*.py")) for found in _imports(path, package)]


def _imports(path: Path, package: Path) -> Iterator[Import]:
    file = path.relative_to(package).as_posix()

    def names(node: ast.ImportFrom) -> Iterator[str]:
        """Of `from a import b`: `a.b` where that is a module of ours, else `a`."""
        module = node.module or ""
        if node.level:
            folder = [package.name, *file.split("/")[:-1]]
            above = folder[: len(folder) + 1 - node.level]
            module = ".".join([*above, *([module] if module else [])])
        for name in node.names:
            inner = f"{module}.{name.name}"
            at = package.parent.joinpath(*inner.split("."))
            own = module.split(".")[0] == package.name
            yield inner if own and (at.is_dir() or at.with_suffix(".py").is_file()) else module

    def visit(node: ast.AST, at_start: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    for name in child.names:
                        yield Import(file, child.lineno, name.name, at_start)
                case ast.ImportFrom():
                    for module in dict.fromkeys(names(child)):
                        yield Import(file, child.lineno, module, at_start)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    yield from visit(child, at_start=False)
                case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                    for each in child.body:
                        yield from visit(ast.Module([each], []), at_start=False)
                    yield from visit(ast.Module(child.orelse, []), at_start)
                case _:
                    yield from visit(child, at_start)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), at_start=True)


def is_in(place: str, folder: str) -> bool:
    """Whether a place is that folder, or lies in it."""
    return f"{place}/".startswith(f"{folder}/")


def part_of(place: str) -> str:
    """The folder or file right under the package that a place belongs to."""
    return place.split("/")[0]


def room_of(place: str, rooms: Collection[str]) -> str | None:
    """The innermost room that a place belongs to."""
    return max((room for room in rooms if is_in(place, room)), key=len, default=None)


def beyond_part(part: str, allowed: Collection[str], imports: Iterable[Import]) -> list[Import]:
    """A part's imports of ours outside itself and what is `allowed`."""
    return [
        each
        for each in imports
        # `from localspec import __version__` is the package itself, which imports nothing.
        if part_of(each.place) == part and each.ours
        if not any(is_in(each.ours, named) for named in (*allowed, part))
    ]


def beyond_room(
    room: str, rooms: Mapping[str, Collection[str]], imports: Iterable[Import]
) -> list[Import]:
    """A room's imports of other rooms of its part that its line does not name.

    In a line, `*` is every room of the part.
    """
    found = []
    for each in imports:
        if room_of(each.place, rooms) != room or not each.ours:
            continue
        other = room_of(each.ours, rooms)
        if other is None or other == room or part_of(other) != part_of(room):
            continue
        if other not in rooms[room] and "*" not in rooms[room]:
            found.append(each)
    return found


def circles(rooms: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Rooms that may import each other in a circle, one list a circle; `*` is every other room."""

    def named(room: str) -> list[str]:
        others = (each for each in rooms if part_of(each) == part_of(room) and each != room)
        return [each for each in others if each in rooms[room] or "*" in rooms[room]]

    found: list[list[str]] = []
    done: set[str] = set()

    def follow(room: str, way: list[str]) -> None:
        if room in way:
            found.append([*way[way.index(room) :], room])
        elif room not in done:
            for other in named(room):
                follow(other, [*way, room])
            done.add(room)

    for room in rooms:
        follow(room, [])
    return found


def misplaced(package: str, places: Collection[str], imports: Iterable[Import]) -> list[Import]:
    """Imports of another's package outside the places it belongs to."""
    wrong = (each for each in imports if each.package == package)
    return [each for each in wrong if not any(is_in(each.place, place) for place in places)]


def early(package: str, imports: Iterable[Import]) -> list[Import]:
    """Imports of a slow package that run with their file."""
    return [each for each in imports if each.package == package and each.at_start]


def foreign(place: str, imports: Iterable[Import]) -> list[Import]:
    """What a place imports beside itself and the standard library."""
    return [
        each
        for each in imports
        if is_in(each.place, place)
        if not (each.ours is not None and is_in(each.ours, place))
        if each.package not in sys.stdlib_module_names
    ]
