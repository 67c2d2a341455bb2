"""Functions fit on a screen. Files and folders have no limit: they follow their subject."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "localspec"
MAX_FUNCTION_LINES = 50
FILES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_a_function_fits_on_a_screen() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines"
