"""Sum up stored answers by day, by pair and by kind of work."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localspec.protocol.conversations import Group, Statistics

if TYPE_CHECKING:
    import sqlite3

# Figures of answers that belong to no stored conversation: completions, and chats that asked for no more.
TABLE = """
CREATE TABLE figures (
    created REAL NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, tokens INTEGER NOT NULL,
    seconds REAL NOT NULL, drafted INTEGER NOT NULL, accepted INTEGER NOT NULL, speed_up REAL
) STRICT;
"""
UNKNOWN = "unknown"  # the kind of answers that were stored before kinds existed
# Sums for each day, pair and kind, in the order in which `_group` unpacks them. An answer's seconds begin
# with its first token, so that token is left out of the rate.
_SUMS = f"""
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
_DAY, _PAIR, _KIND, _UNFINISHED, _ANSWERS = range(5)  # columns of `_SUMS`
_ONE_DAY = datetime.timedelta(days=1)


def statistics(db: sqlite3.Connection | None, days: int, pair: str) -> Statistics:
    """Return the sums of the `days` that end today, and of `pair` alone unless that is empty.

    `db` is None if nothing was ever stored.
    """
    today = datetime.datetime.now().astimezone().date()
    first = today - (days - 1) * _ONE_DAY
    since = datetime.datetime.combine(first, datetime.time()).timestamp()
    rows = db.execute(_SUMS, (since, pair, pair)).fetchall() if db else []
    # A cell may count unfinished answers only, which have no figures.
    answered = [row for row in rows if row[_ANSWERS]]
    by_day = {group.name: group for group in _groups(answered, _DAY)}
    day = datetime.date.fromisoformat(min(by_day)) if by_day else today + _ONE_DAY
    days_since = [day + n * _ONE_DAY for n in range((today - day).days + 1)]
    return Statistics(
        days,
        first.isoformat(),
        today.isoformat(),
        pair,
        _group("", answered),
        [by_day.get(day.isoformat()) or Group(day.isoformat()) for day in days_since],
        _groups(answered, _PAIR),
        _groups(answered, _KIND),
        sum(row[_UNFINISHED] for row in rows),
    )


def _groups(rows: Sequence[Sequence[object]], column: int) -> list[Group]:
    """Return one group for each value of a column, the one with most tokens first."""
    names = sorted({str(row[column]) for row in rows})
    groups = [_group(name, [row for row in rows if row[column] == name]) for name in names]
    return sorted(groups, key=lambda group: -group.tokens)


def _group(name: str, rows: Sequence[Sequence[object]]) -> Group:
    columns = zip(*(row[_ANSWERS:] for row in rows), strict=True)
    answers, tokens, seconds, drafted, accepted, *others = map(sum, columns) if rows else [0] * 8
    timed_tokens, compared, plain = others  # seconds of the same answers with and without drafts
    return Group(
        *(name, answers, tokens, seconds, timed_tokens / seconds if seconds else None),
        *(drafted, accepted, accepted / drafted if drafted else None),
        *(compared, plain / compared if compared else None, plain - compared if compared else None),
    )
