"""The imports of the package's files, and violations of rules about them, for tests/test_imports.py.

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
        """Return the place of the file: `daemon/http/sse`."""
        return self.file.removesuffix(".py").removesuffix("/__init__")

    @property
    def package(self) -> str:
        """Return the name of the package that is imported: `rich` of `rich.console`."""
        return self.module.split(".")[0]

    @property
    def ours(self) -> str | None:
        """Return our place that it imports; "" for the package itself, None for a foreign module."""
        return "/".join(self.module.split(".")[1:]) if self.package == OURS else None


def imports_in(package: Path) -> list[Import]:
    """Return every import statement in a package's files, in whatever form and however deep."""
    return [
        statement for path in sorted(package.rglob("*.py")) for statement in _imports(path, package)
    ]


def _imports(path: Path, package: Path) -> Iterator[Import]:
    file = path.relative_to(package).as_posix()

    def names(node: ast.ImportFrom) -> Iterator[str]:
        """Yield the modules of `from a import b`: `a.b` if that is a module of ours, else `a`."""
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
                case ast.expr():  # no expression holds an import, and most nodes are in expressions
                    pass
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from visit(child, at_start=False)
                case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                    for statement in child.body:
                        yield from visit(ast.Module([statement], []), at_start=False)
                    yield from visit(ast.Module(child.orelse, []), at_start)
                case _:
                    yield from visit(child, at_start)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), at_start=True)


def is_in(place: str, folder: str) -> bool:
    """Return whether a place is that folder, or lies in it."""
    return f"{place}/".startswith(f"{folder}/")


def part_of(place: str) -> str:
    """Return the folder or file right under the package that a place belongs to."""
    return place.split("/")[0]


def room_of(place: str, rooms: Collection[str]) -> str | None:
    """Return the innermost room that a place belongs to."""
    return max((room for room in rooms if is_in(place, room)), key=len, default=None)


def beyond_part(part: str, allowed: Collection[str], imports: Iterable[Import]) -> list[Import]:
    """Return a part's imports of ours outside itself and outside `allowed`."""
    return [
        statement
        for statement in imports
        # `from localspec import __version__` is the package itself, which imports nothing.
        if part_of(statement.place) == part and statement.ours
        if not any(is_in(statement.ours, folder) for folder in (*allowed, part))
    ]


def beyond_room(
    room: str, rooms: Mapping[str, Collection[str]], imports: Iterable[Import]
) -> list[Import]:
    """Return a room's imports of other rooms of its part that its line does not name.

    In a line, `*` is every room of the part.
    """
    violations = []
    for statement in imports:
        if room_of(statement.place, rooms) != room or not statement.ours:
            continue
        target_room = room_of(statement.ours, rooms)
        if target_room is None or target_room == room or part_of(target_room) != part_of(room):
            continue
        if target_room not in rooms[room] and "*" not in rooms[room]:
            violations.append(statement)
    return violations


def circles(rooms: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the rooms that may import each other in a circle, as lists; `*` is every other room."""

    def imported_rooms(room: str) -> list[str]:
        candidates = (
            candidate
            for candidate in rooms
            if part_of(candidate) == part_of(room) and candidate != room
        )
        return [
            candidate for candidate in candidates if candidate in rooms[room] or "*" in rooms[room]
        ]

    cycles: list[list[str]] = []
    finished: set[str] = set()

    def follow(room: str, way: list[str]) -> None:
        if room in way:
            cycles.append([*way[way.index(room) :], room])
        elif room not in finished:
            for next_room in imported_rooms(room):
                follow(next_room, [*way, room])
            finished.add(room)

    for room in rooms:
        follow(room, [])
    return cycles


def misplaced(package: str, places: Collection[str], imports: Iterable[Import]) -> list[Import]:
    """Return the imports of a foreign package outside the places it belongs to."""
    wrong = (statement for statement in imports if statement.package == package)
    return [
        statement
        for statement in wrong
        if not any(is_in(statement.place, place) for place in places)
    ]


def early(package: str, imports: Iterable[Import]) -> list[Import]:
    """Return the imports of a slow package that run when their file is imported."""
    return [
        statement for statement in imports if statement.package == package and statement.at_start
    ]


def foreign(place: str, imports: Iterable[Import]) -> list[Import]:
    """Return what a place imports beside itself and the standard library."""
    return [
        statement
        for statement in imports
        if is_in(statement.place, place)
        if not (statement.ours is not None and is_in(statement.ours, place))
        if statement.package not in sys.stdlib_module_names
    ]
