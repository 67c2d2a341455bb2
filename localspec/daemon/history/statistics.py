"""Kept answers added up: by day, by pair and by kind of work."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from localspec.protocol.statistics import Group, Statistics

if TYPE_CHECKING:
    import sqlite3

# Answers whose figures alone are kept: completions, and answers to those who ask for no more.
TABLE = """
CREATE TABLE figures (
    created REAL NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, tokens INTEGER NOT NULL,
    seconds REAL NOT NULL, drafted INTEGER NOT NULL, accepted INTEGER NOT NULL, speed_up REAL
) STRICT;
"""
UNKNOWN = "unknown"  # the kind of answers that an older version kept
# Sums for each day, pair and kind, in the order of `_group`. The first token of an answer takes no part of
# its seconds.
_CELLS = f"""
SELECT date(created, 'unixepoch', 'localtime'), coalesce(model, ''), coalesce(kind, '{UNKNOWN}'),
    count(*) - count(tokens), count(tokens), sum(tokens), total(seconds), sum(drafted), sum(accepted),
    total(CASE WHEN seconds > 0 THEN tokens - 1 END),
    total(CASE WHEN speed_up > 0 THEN seconds END), total(seconds * speed_up)
FROM (
    SELECT created, model, kind, tokens, seconds, drafted, accepted, speed_up FROM messages
    WHERE role = 'assistant' AND (tokens IS NOT NULL OR finish IN ('interrupted', 'failed'))
    UNION ALL
    SELECT created, model, kind, tokens, seconds, drafted, accepted, speed_up FROM figures
)
WHERE created >= ? AND (? = '' OR model = ?)
GROUP BY 1, 2, 3
"""
_DAY, _PAIR, _KIND, _UNFINISHED, _ANSWERS = range(5)
_DAY_LONG = datetime.timedelta(days=1)


def statistics(db: sqlite3.Connection | None, days: int, pair: str) -> Statistics:
    """Of the `days` that end today, with `pair` of that pair alone; `db` None where nothing was kept."""
    today = datetime.datetime.now().astimezone().date()
    first = today - (days - 1) * _DAY_LONG
    since = datetime.datetime.combine(first, datetime.time()).timestamp()
    rows = db.execute(_CELLS, (since, pair, pair)).fetchall() if db else []
    answered = [row for row in rows if row[_ANSWERS]]
    by_day = {each.name: each for each in _groups(answered, _DAY)}
    return Statistics(
        days,
        first.isoformat(),
        today.isoformat(),
        pair,
        _group("", answered),
        [by_day.get(day) or Group(day) for day in _through(min(by_day, default=""), today)],
        _groups(answered, _PAIR),
        _groups(answered, _KIND),
        sum(row[_UNFINISHED] for row in rows),
    )


def _through(first: str, last: datetime.date) -> Iterable[str]:
    """Every day; none where there is no first one."""
    day = datetime.date.fromisoformat(first) if first else last + _DAY_LONG
    while day <= last:
        yield day.isoformat()
        day += _DAY_LONG


def _groups(rows: Sequence[Sequence[object]], key: int) -> list[Group]:
    """The rows of each value of a column together, the most tokens first."""
    names = sorted({str(row[key]) for row in rows})
    found = [_group(name, [row for row in rows if row[key] == name]) for name in names]
    return sorted(found, key=lambda each: -each.tokens)


def _group(name: str, rows: Sequence[Sequence[object]]) -> Group:
    columns = zip(*(row[_ANSWERS:] for row in rows), strict=True)
    sums = [sum(column) for column in columns] or [0] * 8
    answers, tokens, seconds, drafted, accepted, timed, taken, plain = sums
    return Group(
        name,
        answers,
        tokens,
        seconds,
        timed / seconds if seconds else None,
        drafted,
        accepted,
        accepted / drafted if drafted else None,
        taken,
        plain / taken if taken else None,
        plain - taken if taken else None,
    )
