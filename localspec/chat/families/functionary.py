"""Functionary's calls: a name before its arguments, between tags (3.1) or as a recipient (3.2)."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

FUNCTIONARY = CallFormat("named", ("<function=",), "</function>", middle=">")
FUNCTIONARY_3_2 = CallFormat("named", (">>>",), middle="\n", recipient="all\n")
FAMILY = Family(
    "Functionary 3.1",
    FUNCTIONARY,
    r"<function=' \+ [^+]+ \+ '>' \+ [^+]+ \+ '</function>",
)
FAMILY_3_2 = Family("Functionary 3.2", FUNCTIONARY_3_2, r">>>all\\n")
