"""Chat templates as models' files have them.

`chat_templates/` holds one of each family that models' templates belong to: written for these tests, in the
marks, roles and notations of tools that the family's models were trained with, and with the demands that
they make (turns that alternate, calls one by one, ids of nine characters). Real models' own templates each
have their model's licence, so they are not carried; those that lie in `shared/templates` beside the
checkout are used too. After a change here, record what transformers makes of them anew:
`python scripts/record_templates.py tests/support/chat_templates tests/engine/recorded_families.json.gz`.
"""

from __future__ import annotations

from pathlib import Path

FAMILIES = Path(__file__).with_name("chat_templates")
REAL = Path(__file__).resolve().parents[3] / "shared" / "templates"


def files() -> dict[str, Path]:
    """Return every available template by name."""
    return {
        file.stem: file for folder in (FAMILIES, REAL) for file in sorted(folder.glob("*.jinja"))
    }


def template(name: str) -> str:
    """Return the text of a template."""
    return files()[name].read_text(encoding="utf-8")
