"""Chat templates as models' files have them.

`chat_templates/` holds one of each family that models' templates belong to: written for these tests, in the
marks, roles and notations of tools that the family's models were trained with, and with the demands that
they make (turns that alternate, calls one by one, ids of nine characters). Real models' own templates each
have their model's licence, so they are not carried; those that lie in `shared/templates` beside the
checkout are used too. After a change here, record what transformers makes of them anew:
`python scripts/record_templates.py tests/support/chat_templates tests/engine/recorded_families.json.gz`.
"""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path

from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.prompt.template_process import TemplateProcess

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


@cache
def _process(watches: bool) -> TemplateProcess:
    process = TemplateProcess()
    atexit.register(process.close)
    return process


def shared_renderer(
    template: str | None, bos: str = "<s>", eos: str = "</s>", *, watches: bool = False
) -> TemplateRenderer:
    """Return a renderer whose process is that of all others from here, and need not be closed.

    watches: whether it distinguishes special tokens. Those of the last call of `watch` hold for all.
    """
    renderer = TemplateRenderer(None, bos, eos)
    renderer._template, renderer._process = template, _process(watches)
    return renderer
