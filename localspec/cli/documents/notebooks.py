"""The text of Jupyter notebooks, which are JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from localspec.errors import UsageError

_OUTPUT = 2000  # characters of what a cell printed


def text(name: str, data: str) -> str:
    """The cells of a Jupyter notebook in order; of code what it printed too.

    Raises:
        UsageError: `data` is none.
    """
    try:
        found = json.loads(data)
        cells, metadata = found["cells"], found.get("metadata") or {}
        language = _written((metadata.get("language_info") or {}).get("name"))
        return "\n\n".join(filter(None, (_cell(each, language) for each in cells)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{name} is not a Jupyter notebook of format 4; to ask about it as it is: "
            f"localspec ask … < {name}"
        ) from error


def _cell(cell: dict[str, Any], language: str) -> str:
    source = _written(cell.get("source")).strip("\n")
    if cell["cell_type"] != "code":
        return source
    parts = [f"```{language}\n{source}\n```"] if source else []
    for output in cell.get("outputs") or []:
        data = output.get("data") or {}
        failure = f"{output.get('ename')}: {output.get('evalue')}" if "ename" in output else ""
        shown = _written(output.get("text")) or _written(data.get("text/plain")) or failure
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shown).strip("\n")
        if shown:
            cut = "…" if len(shown) > _OUTPUT else ""
            parts.append(f"Output:\n```\n{shown[:_OUTPUT]}{cut}\n```")
    return "\n".join(parts)


def _written(value: object) -> str:
    """A text, which notebooks may write as a list of lines."""
    if isinstance(value, list):
        return "".join(each for each in value if isinstance(each, str))
    return value if isinstance(value, str) else ""
