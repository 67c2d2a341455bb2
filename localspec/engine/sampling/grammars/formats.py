"""Regular expressions for the string formats that are enforced, with texts of bounded length.

llguidance's own expressions allow a fraction of a second, the numbers of a duration or an address to be of
any length, and small models never end them. Formats that are not listed here are not enforced. The JSON
Schema standard treats a format as an annotation.
"""

from __future__ import annotations

# Formats for which llguidance's own expressions are used. Their texts are bounded, or as open as any string.
_NATIVE = frozenset({"date", "uuid", "ipv4", "ipv6", "uri", "hostname"})
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-9])))"
)
_FRACTION = r"(\.[0-9]{1,9})?"
_ZONE = "([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60){_FRACTION}{_ZONE})"
# Times without zone or seconds, which a `pattern` beside the format may require.
_ANY_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9](:([0-5][0-9]|60){_FRACTION})?{_ZONE}?)"
_DIGITS = "[0-9]{1,9}"
_SECONDS = rf"{_DIGITS}(\.{_DIGITS})?S"
_CLOCK = f"(T({_DIGITS}H({_DIGITS}M({_SECONDS})?)?|{_DIGITS}M({_SECONDS})?|{_SECONDS}))"
_DATE_DURATION = (
    f"({_DIGITS}W|({_DIGITS}Y({_DIGITS}M({_DIGITS}D)?)?|{_DIGITS}M({_DIGITS}D)?|{_DIGITS}D)"
)
_DURATION = f"(P{_DATE_DURATION}{_CLOCK}?|{_CLOCK}))"
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
    """Return the expression of a format, or None if llguidance's own is used.

    beside_a_pattern: whether the schema has a `pattern` as well, which may need a wider format.
    """
    pattern = _BOUNDED.get(name)
    if beside_a_pattern:
        pattern = _BESIDE_A_PATTERN.get(name, pattern)
    return None if pattern is None else f"^{pattern}$"
