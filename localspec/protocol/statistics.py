"""What goes over the socket about kept answers together: /localspec/statistics. Times in seconds."""

from __future__ import annotations

from msgspec import Struct


class Group(Struct):
    """Some answers together; `name` is a day ("2026-11-22"), a pair or a kind of work.

    `seconds`: from each answer's first token to its last; `tokens_per_second` is over those, None of none.
    `acceptance`: of the drafted tokens those that were accepted, 0…1, None where nothing was drafted.
    `speed_up` over plain decoding and `saved_seconds` are of the answers where it was measured, which
    took `measured_seconds`; both are None where it never was.
    """

    name: str
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    drafted: int = 0
    accepted: int = 0
    acceptance: float | None = None
    measured_seconds: float = 0.0
    speed_up: float | None = None
    saved_seconds: float | None = None


class Statistics(Struct):
    """Of the `days` that end today, in the daemon's time zone, the newest last in `by_day`.

    Days without an answer are there too, from the first one with an answer on. `unfinished` answers were
    interrupted or failed; their figures are not known, and they are counted nowhere else.
    """

    days: int
    since: str
    until: str
    pair: str
    total: Group
    by_day: list[Group]
    by_pair: list[Group]
    by_kind: list[Group]
    unfinished: int
