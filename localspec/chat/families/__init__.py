"""How families of models write tool calls: one file a family, and here the list of all.

A new family is a file with a `Family`, and its line in `FAMILIES`, before those whose pattern its templates
would match as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from localspec.chat.families import (
    command_r,
    functionary,
    gemma,
    gpt_oss,
    granite,
    hermes,
    kimi,
    lfm2,
    llama,
    minimax,
    mistral,
    muse,
    nemotron,
    qwen_coder,
)
from localspec.chat.notations.call_readers import CallReader
from localspec.chat.notations.family import Family
from localspec.chat.notations.grammar import CallGrammar
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, EXPLAINED, UNKNOWN_FORMAT, CallFormat

# GLM and others use Hermes' markers, with a notation of their own between them.
_OTHERS = Family(
    "",
    UNKNOWN_FORMAT,
    r"<tool_call>['\"] *[+~]|<arg_key>|<function=|:tool_call>|<tool_calls>|minimax",
)
# In the order in which their patterns are tried on a template.
FAMILIES = (
    mistral.NEWER,
    mistral.FAMILY,
    gemma.FAMILY,
    granite.FAMILY,
    qwen_coder.FAMILY,
    functionary.FAMILY,
    functionary.FAMILY_3_2,
    nemotron.FAMILY,
    gpt_oss.FAMILY,
    muse.FAMILY,
    lfm2.FAMILY,
    kimi.FAMILY_K3,
    minimax.FAMILY,
    kimi.FAMILY,
    command_r.FAMILY,
    _OTHERS,
    hermes.FAMILY,
    llama.FAMILY,
)
_OF_KIND = {family.format.kind: family for family in FAMILIES}
_NAMES = {family.format: family.name for family in FAMILIES if family.name}

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
    return _NAMES.get(form, "")


def reader_for(
    form: CallFormat, tools: dict[str, Any], names: Collection[str] | None
) -> CallReader:
    """Return the reader for a format's calls; it accepts only `names`, if they are given."""
    return _OF_KIND[form.kind].reader(form, tools, names)


def inner_format(form: CallFormat) -> CallFormat | None:
    """Return the format of calls that are known without their first marker, by what stands before the name.

    Models leave the marker out now and then. Those of Hermes' format may write the tags of Qwen Coder.
    """
    form = qwen_coder.TAGS if form.kind == "hermes" else form
    is_marked = form.lead.strip().startswith(("<", "]<]")) and CALL_ID_PLACEHOLDER not in form.lead
    return form if form.kind in ("named", "found") and is_marked else None


def grammar_of(form: CallFormat) -> type[CallGrammar]:
    """Return what writes the grammar of a format's calls."""
    return _OF_KIND[form.kind].grammar
