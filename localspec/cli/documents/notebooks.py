"""Extract the text of Jupyter notebooks."""

from __future__ import annotations

import json
import re
from typing import Any

from localspec.errors import UsageError

_MAX_OUTPUT_CHARACTERS = 2000  # of a cell's output


def text(name: str, data: str) -> str:
    """Return the cells of a Jupyter notebook in order, with the output of code cells.

    Raises:
        UsageError: `data` is not a notebook of format 4.
    """
    try:
        notebook = json.loads(data)
        cells, metadata = notebook["cells"], notebook.get("metadata") or {}
        language = _join_lines((metadata.get("language_info") or {}).get("name"))
        return "\n\n".join(filter(None, (_format_cell(cell, language) for cell in cells)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{name} is not a Jupyter notebook of format 4; to ask about it as it is: "
            f"localspec ask … < {name}"
        ) from error


def _format_cell(cell: dict[str, Any], language: str) -> str:
    source = _join_lines(cell.get("source")).strip("\n")
    if cell["cell_type"] != "code":
        return source
    parts = [f"```{language}\n{source}\n```"] if source else []
    for output in cell.get("outputs") or []:
        data = output.get("data") or {}
        failure = f"{output.get('ename')}: {output.get('evalue')}" if "ename" in output else ""
        printed = _join_lines(output.get("text")) or _join_lines(data.get("text/plain")) or failure
        printed = re.sub(r"\x1b\[[0-9;]*m", "", printed).strip("\n")
        if printed:
            ellipsis = "…" if len(printed) > _MAX_OUTPUT_CHARACTERS else ""
            parts.append(f"Output:\n```\n{printed[:_MAX_OUTPUT_CHARACTERS]}{ellipsis}\n```")
    return "\n".join(parts)


def _join_lines(value: object) -> str:
    """Return a text, which notebooks may also store as a list of lines."""
    if isinstance(value, list):
        return "".join(line for line in value if isinstance(line, str))
    return value if isinstance(value, str) else ""
