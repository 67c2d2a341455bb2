"""What one sitting holds: a function of 50 lines, a file of 350 lines of code, a folder of twelve files."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "localspec"
FUNCTION, FILE, FOLDER = 50, 350, 12
FILES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
Function = ast.FunctionDef | ast.AsyncFunctionDef

parsed = cache(ast.parse)


def docstring(node: ast.AST) -> range:
    """The lines of a node's docstring, if it has one."""
    if (
        isinstance(node, ast.Module | ast.ClassDef | Function)
        and ast.get_docstring(node) is not None
    ):
        return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    return range(0)


def code_lines(text: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    told = {line for node in ast.walk(parsed(text)) for line in docstring(node)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and at not in told
        for at, line in lines
    )


def test_lines_of_code_are_counted() -> None:
    text = '"""Doc\n\nmore."""\n\n# a comment\ndef f():\n    """Doc."""\n    return 1  # one\n'
    assert code_lines(text) == 2


def test_a_function_fits_on_a_screen() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path, text in FILES.items()
        for node in ast.walk(parsed(text))
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= FUNCTION
    ]
    assert not long, f"longer than {FUNCTION} lines"


def test_a_file_is_read_in_one_sitting() -> None:
    long = [
        str(path.relative_to(PACKAGE)) for path, text in FILES.items() if code_lines(text) > FILE
    ]
    assert not long, f"more than {FILE} lines of code"


def test_a_folder_has_twelve_files_at_most() -> None:
    full = [str(each) for each, count in Counter(p.parent for p in FILES).items() if count > FOLDER]
    assert not full, f"more than {FOLDER} files"
