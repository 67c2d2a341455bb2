"""Statistics of saved answers as they are sent over HTTP: /localspec/statistics. Times in seconds."""

from __future__ import annotations

from msgspec import Struct


class Group(Struct):
    """Statistics of some answers together.

    - `name`: a day ("2026-11-22"), the name of a pair, or a kind of work.
    - `seconds`: from each answer's first token to its last, summed up.
    - `tokens_per_second`: over those seconds; null if there are none.
    - `acceptance`: accepted drafted tokens as a fraction of all drafted tokens, 0…1; null if
      nothing was drafted.
    - `measured_seconds`: time taken by the answers whose speed-up was measured.
    - `speed_up`: over plain decoding, of those answers; null if it was never measured.
    - `saved_seconds`: time that those answers saved; null if it was never measured.
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
    """Statistics of the `days` days that end today, in the daemon's time zone.

    - `by_day`: the newest day last. From the first day with an answer on, days without answers are
      included.
    - `unfinished`: answers that were interrupted or failed. Their figures are not known, so they
      are counted nowhere else.
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
