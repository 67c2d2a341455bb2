"""Imports go one way. Each rule says why; one that no longer fits is changed here, openly."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "localspec"


@dataclass(frozen=True)
class Import:
    """One import statement's module, and whether it runs when its file is imported."""

    file: str
    line: int
    module: str
    at_start: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    file = path.relative_to(PACKAGE).as_posix()

    def visit(node: ast.AST, at_start: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    for name in child.names:
                        yield Import(file, child.lineno, name.name, at_start)
                case ast.ImportFrom(module="localspec", level=0):
                    for name in child.names:
                        yield Import(file, child.lineno, f"localspec.{name.name}", at_start)
                case ast.ImportFrom(level=0, module=str(module)):
                    yield Import(file, child.lineno, module, at_start)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from visit(child, at_start=False)
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    yield from visit(child, at_start=False)
                case _:
                    yield from visit(child, at_start)

    yield from visit(ast.parse(path.read_text()), at_start=True)


IMPORTS = [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path)]


def part_of(file: str) -> str:
    """The folder or module right under localspec/ that a file belongs to."""
    return file.split("/")[0].removesuffix(".py")


def is_ours(module: str) -> bool:
    """Whether a dotted name is a folder or a file of this package."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


# --- our own parts

LEAVES = {"errors", "files", "paths", "config"}

# What each part may import of ours beside itself, and why no more. A new part needs a line here.
PARTS: dict[str, tuple[set[str], str]] = {
    "__init__": (set(), "every other file imports it"),
    "__main__": ({"cli"}, "it is the command line under another name"),
    "errors": (set(), "everything may raise them, so they must drag nothing along"),
    "files": (set(), "whoever keeps a file writes it so"),
    "compatibility": (set(), "registry and engine judge by it, and neither knows the other"),
    "purpose": (set(), "as compatibility"),
    "machine": (set(), "scripts/setup uses it before anything is installed"),
    "paths": ({"errors"}, "client and daemon must find each other without further machinery"),
    "config": ({"errors", "paths"}, "a setting is data, whoever reads it"),
    "protocol": (set(), "both ends share it; a wire format must not depend on either end"),
    "client": (
        {"protocol", "errors", "paths"},
        "it is on the way to the first word, and an editor's plugin may use it alone",
    ),
    "cli": (
        {"client", "protocol", "machine", *LEAVES},
        "it speaks to a daemon that may be of another process, user session or version, "
        "so it starts `python -m localspec.daemon` and never imports it",
    ),
    "registry": (
        {"compatibility", "errors", "files", "paths", "purpose"},
        "it must be testable without a daemon",
    ),
    "daemon": (
        {"protocol", "registry", "machine", *LEAVES},
        "the engine may die of llama.cpp, so it is started by name in a process of its own",
    ),
    "engine": (
        {"compatibility", "protocol", "errors", "files", "paths", "purpose"},
        "it must be testable, and replaceable, without a daemon",
    ),
}


def test_every_part_has_its_rule() -> None:
    parts = {part_of(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert parts == PARTS.keys(), (
        "say in PARTS what a part may import, and of none that is not there"
    )
    allowed = {each for named, _ in PARTS.values() for each in named}
    assert not {each for each in allowed if not is_ours(f"localspec.{each}")}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    allowed, reason = PARTS[part]
    wrong = [
        str(found)
        for found in IMPORTS
        if part_of(found.file) == part
        # `from localspec import __version__` is the package itself, which imports nothing.
        if found.module.startswith("localspec.")
        if is_ours(".".join(found.module.split(".")[:2]))
        if not any(f"{found.module}.".startswith(f"localspec.{each}.") for each in allowed | {part})
    ]
    assert not wrong, f"{part} may import {sorted(allowed) or 'nothing'} of ours: {reason}"


# --- other people's packages

# Where a package may be imported, and why only there. Tests are not meant: they may use them all.
PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "llama_cpp": (("engine/llama/",), "one place checks each return code and frees what it made"),
    "numpy": (("engine/",), "only logits need it, and an idle daemon should stay small"),
    "llguidance": (("engine/",), "grammars work on the target's logits"),
    "jinja2": (("engine/",), "a template from a model file may hang: only the worker may"),
    "starlette": (("daemon/",), "the client speaks HTTP with the standard library, in 50 ms"),
    "uvicorn": (("daemon/",), "as starlette"),
    "watchfiles": (("daemon/",), "only the daemon lives long enough to see a file change"),
    "huggingface_hub": (("registry/",), "one place speaks to the network, and only when asked"),
    "httpx2": (("registry/",), "as huggingface_hub"),
    "rich": (("cli/",), "all that draws on a terminal"),
    "prompt_toolkit": (("cli/",), "as rich"),
    "click": (("cli/",), "commands are the command line's"),
    # Nowhere.
    "gguf": ((), "scripts and tests write models with it; our own strict reader reads headers"),
    "benchmarks": ((), "it measures the others, and is not in the wheel"),
    "torch": ((), "training is a script's, and 2 GB"),
    "httpx": ((), "184 ms against 49 ms until the first word"),
    "requests": ((), "as httpx"),
    "openai": ((), "tests use it to show that we speak its protocol; 687 ms"),
    "pickle": ((), "reading one is running a program; state is msgpack"),
    "diskcache": ((), "it unpickles"),
    "fastapi": ((), "507 ms and 44 MB against starlette's 216 ms and 28 MB"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    places, reason = PACKAGES[package]
    wrong = [
        str(found)
        for found in IMPORTS
        if found.module.split(".")[0] == package
        if not found.file.startswith(places)
    ]
    assert not wrong, f"{package} belongs to {places or 'no part'}: {reason}"
    for place in places:  # a rule for nothing would seem to hold something
        users = [each for each in IMPORTS if each.file.startswith(place)]
        assert any(each.module.split(".")[0] == package for each in users), place


LAZY = {
    "rich": "0.2 s, and only a terminal needs it",
    "prompt_toolkit": "0.26 s, and only `chat` needs it",
    "huggingface_hub": "only a pull needs it, and a daemon mostly sits idle",
    "httpx2": "as huggingface_hub",
}


@pytest.mark.parametrize("package", LAZY)
def test_a_slow_package_is_imported_when_it_is_needed(package: str) -> None:
    early = [
        str(found) for found in IMPORTS if found.at_start if found.module.split(".")[0] == package
    ]
    assert any(found.module.split(".")[0] == package for found in IMPORTS), "nobody imports it"
    assert not early, f"import {package} inside the function that needs it: {LAZY[package]}"


def test_machine_needs_the_standard_library_alone() -> None:
    """scripts/setup imports it with a Python that has nothing installed."""
    foreign = [
        str(found)
        for found in IMPORTS
        if found.file == "__init__.py" or found.file.startswith("machine/")
        if not found.module.startswith("localspec.machine")
        if found.module.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not foreign


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        # What `localspec ask` imports before its first word.
        ("localspec.cli.ask", ["asyncio", "numpy", "rich", "starlette", "httpx2", "llama_cpp"]),
        (
            "localspec.daemon.lifecycle",
            ["numpy", "llama_cpp", "huggingface_hub", "localspec.engine"],
        ),
    ],
)
def test_what_a_process_really_loads(module: str, absent: list[str]) -> None:
    """Rules about statements miss what comes along by way of others; a real import does not."""
    program = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
