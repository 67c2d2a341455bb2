"""Formats of strings that are enforced, as expressions under which every text ends.

The grammar library's own expressions let a fraction of a second, a duration's numbers or an address go on
for ever, and a small model does. What is not named here is not enforced: by JSON Schema's standard a
format is an annotation.
"""

from __future__ import annotations

# The library's own: each text has an end, or is as open as any other text.
_NATIVE = frozenset({"date", "uuid", "ipv4", "ipv6", "uri", "hostname"})
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-9])))"
)
_FRACTION = r"(\.[0-9]{1,9})?"
_ZONE = "([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60){_FRACTION}{_ZONE})"
# As a pattern beside the format may have it: local, or without seconds.
_ANY_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9](:([0-5][0-9]|60){_FRACTION})?{_ZONE}?)"
_N = "[0-9]{1,9}"
_SECONDS = rf"{_N}(\.{_N})?S"
_CLOCK = f"(T({_N}H({_N}M({_SECONDS})?)?|{_N}M({_SECONDS})?|{_SECONDS}))"
_DURATION = f"(P({_N}W|({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D){_CLOCK}?|{_CLOCK}))"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_EMAIL = rf"({_ATOM}(\.{_ATOM}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,4}})"

_BOUNDED = {
    "time": _TIME,
    "date-time": f"({_DATE}[tT]{_TIME})",
    "duration": _DURATION,
    "email": _EMAIL,
}
_BESIDE_A_PATTERN = {"time": _ANY_TIME, "date-time": f"({_DATE}[tT ]{_ANY_TIME})"}

FORMATS = _NATIVE | _BOUNDED.keys()


def format_pattern(name: str, *, beside_a_pattern: bool) -> str | None:
    """Return the expression of a format; None where the library's own is enforced."""
    pattern = _BOUNDED.get(name)
    if beside_a_pattern:
        pattern = _BESIDE_A_PATTERN.get(name, pattern)
    return None if pattern is None else f"^{pattern}$"
