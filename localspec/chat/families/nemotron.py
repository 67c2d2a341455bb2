"""Nemotron Nano's calls: an array in JSON between tags."""

from __future__ import annotations

from localspec.chat.families import mistral
from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

NEMOTRON = CallFormat("mistral", ("<TOOLCALL>",), "</TOOLCALL>")
FAMILY = Family("Nemotron Nano", NEMOTRON, r"<TOOLCALL>\[", mistral.FAMILY.reader)
