"""How families of models write tool calls: each file of this folder has a `Family`, or several."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Collection
from importlib import import_module
from typing import Any

from localspec.chat.families.qwen_coder import TAGS
from localspec.chat.notations.call_readers import CallReader
from localspec.chat.notations.family import CallsAsText, Family
from localspec.chat.notations.grammar import CallGrammar
from localspec.protocol.calls import (
    CALL_ID_PLACEHOLDER,
    EXPLAINED,
    LITERAL_KINDS,
    UNKNOWN_FORMAT,
    CallFormat,
)

_MODULES = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
# In the order in which their patterns are tried on a template.
FAMILIES = sorted(
    {value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)},
    key=lambda family: (family.rank, family.name),
)
_OF_FORMAT = {family.format: family for family in FAMILIES}
_OF_KIND = {family.format.kind: family for family in FAMILIES}
_LITERAL = Family("", UNKNOWN_FORMAT, "")

# A template's code, and the string literals in it, which contain no variables.
_TEMPLATE_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_STRING_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"\btools\b")


def read_family(template: str) -> CallFormat:
    """Return the format that a chat template names literally."""
    if not any(
        _TOOLS_VARIABLE.search(_STRING_LITERAL.sub("", code))
        for code in _TEMPLATE_CODE.findall(template)
    ):
        return EXPLAINED
    matching = (family.format for family in FAMILIES if re.search(family.pattern, template))
    return next(matching, UNKNOWN_FORMAT)


def family_name(form: CallFormat) -> str:
    """Return the name of a format's family; "" if it is of none."""
    return _OF_FORMAT[form].name if form in _OF_FORMAT else ""


def _family_of(form: CallFormat) -> Family:
    """Return the family whose reader and grammar a format has. Many share a kind that is literal."""
    if form.kind in LITERAL_KINDS:
        return _OF_FORMAT.get(form, _LITERAL)
    return _OF_KIND[form.kind]


def reader_for(
    form: CallFormat, tools: dict[str, Any], names: Collection[str] | None
) -> CallReader:
    """Return the reader for a format's calls; it accepts only `names`, if they are given."""
    return _family_of(form).reader(form, tools, names)


def inner_format(form: CallFormat) -> CallFormat | None:
    """Return the format of calls that are known without their first marker, by what stands before the name.

    Models leave the marker out now and then. Those of Hermes' format may write the tags of Qwen Coder.
    """
    form = TAGS if form.kind == "hermes" else form
    is_marked = form.lead.strip().startswith(("<", "]<]")) and CALL_ID_PLACEHOLDER not in form.lead
    return form if form.kind in LITERAL_KINDS and is_marked else None


def calls_as_text(form: CallFormat) -> CallsAsText | None:
    """Return what writes calls of earlier answers as text, if templates of the family expect that."""
    return _family_of(form).as_text


def grammar_of(form: CallFormat) -> type[CallGrammar]:
    """Return what writes the grammar of a format's calls."""
    return _family_of(form).grammar
