"""Cells and sentences about a group of answers, including what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localspec.cli.terminal.figures import (
    MIN_SPEED_UP_TOKENS,
    format_duration,
    format_rate,
    format_share,
    format_speed_up,
)

KINDS = {"complete": "complete (FIM)", "json": "JSON by schema", "unknown": "not recorded"}
_NOISE = 0.03  # a speed-up closer to 1 may be noise
NOT_MEASURED = "not measured"
COLUMNS = ("ANSWERS", "TOKENS", "TIME", "TOKENS/S", "ACCEPTED", "SPEED-UP", "SAVED")


def group_row(group: dict[str, Any]) -> list[str]:
    """Return a cell for each of COLUMNS."""
    ratio = _format_speed_up(group)
    saved = group["saved_seconds"] if ratio else None
    return [
        f"{group['answers']:,}",
        f"{group['tokens']:,}",
        format_duration(group["seconds"]),
        format_rate(group["tokens"], group["seconds"], group["tokens_per_second"]),
        "no drafts" if group["acceptance"] is None else format_share(group["acceptance"]),
        ratio or NOT_MEASURED,
        "" if saved is None else format_duration(saved),
    ]


def _format_speed_up(group: dict[str, Any]) -> str:
    """Return the speed-up of a group; empty if it was measured over too few tokens."""
    seconds = group["seconds"]
    measured_tokens = group["tokens"] * group["measured_seconds"] / seconds if seconds else 0
    return format_speed_up(group["speed_up"], measured_tokens)


def summary_sentences(statistics: dict[str, Any]) -> list[str]:
    """Return sentences about all answers together."""
    total, days = statistics["total"], statistics["days"]
    when = "today" if days == 1 else f"in the last {days} days"
    by_pair = f" by {statistics['pair']}" if statistics["pair"] else ""
    if not total["answers"]:
        return [f"No answers{by_pair} were saved {when}."]
    answers = f"{total['answers']:,} answer{'s' * (total['answers'] != 1)}"
    per_second = format_rate(total["tokens"], total["seconds"], total["tokens_per_second"])
    speed = f", {per_second} tokens/s" if per_second else ""
    duration = format_duration(total["seconds"])
    first = f"{answers}{by_pair} {when}: {total['tokens']:,} tokens in {duration}{speed}."
    return [first, _describe_speculation(total)]


def _describe_speculation(total: dict[str, Any]) -> str:
    drafts = "no tokens were drafted"
    if total["acceptance"] is not None:
        drafts = f"{format_share(total['acceptance'])} of drafted tokens were accepted"
    ratio = _format_speed_up(total)
    if total["speed_up"] is None:
        return f"The speed-up was not measured; {drafts}."
    if not ratio:
        return (
            f"The speed-up was measured over fewer than {MIN_SPEED_UP_TOKENS} tokens, which says "
            f"nothing; {drafts}."
        )
    if abs(total["speed_up"] - 1) < _NOISE:
        return f"{ratio} the speed of plain decoding, which is no clear difference; {drafts}."
    verb = "saved" if total["saved_seconds"] >= 0 else "lost"
    return (
        f"{ratio} the speed of plain decoding, which {verb} "
        f"{format_duration(abs(total['saved_seconds']))}; {drafts}."
    )


def note_sentences(statistics: dict[str, Any]) -> list[str]:
    """Return sentences about what the figures do not include."""
    total, unfinished = statistics["total"], statistics["unfinished"]
    sentences = []
    if total["measured_seconds"] and total["measured_seconds"] < 0.995 * total["seconds"]:
        measured = format_share(total["measured_seconds"] / total["seconds"])
        rest = "the rest is not counted in it."
        sentences.append(f"The speed-up was measured for {measured} of the time; {rest}")
    if unfinished:
        were = "answer was" if unfinished == 1 else "answers were"
        sentences.append(f"{unfinished} {were} interrupted or failed and not counted.")
    sentences.append(
        "Not included: answers with --no-log, removed conversations, and programs that do not ask to "
        "be counted."
    )
    return sentences


CLIENT_COLUMNS = ("READ AHEAD FOR", "RIGHT", "WRONG", "SAVED", "IN VAIN")


def client_rows(statistics: dict[str, Any]) -> list[list[str]]:
    """Return a row under CLIENT_COLUMNS for each client whose next turns were read ahead."""
    return [
        [
            client["client"],
            f"{client['right']:,} ({format_share(client['right'] / (client['right'] + client['wrong']))})",
            f"{client['wrong']:,}",
            format_duration(client["saved_seconds"]),
            format_duration(client["wasted_seconds"]),
        ]
        for client in statistics["read_ahead"]
    ]


def group_tables(statistics: dict[str, Any]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return headings and rows by pair, by kind of work, and by day with the newest first.

    Days without answers are left out.
    """
    days = [day for day in reversed(statistics["by_day"]) if day["answers"]]
    groups = [("PAIR", statistics["by_pair"]), ("KIND", statistics["by_kind"]), ("DAY", days)]
    names = {"KIND": KINDS}
    return [
        (
            head,
            [
                (names.get(head, {}).get(each["name"], each["name"]), group_row(each))
                for each in rows
            ],
        )
        for head, rows in groups
    ]


class Series:
    """One figure over the days; None on days without it."""

    def __init__(self, name: str, values: Sequence[float | None], shown: Sequence[str]) -> None:
        self.name, self.values, self.texts = name, values, shown
        known = [each for each in zip(values, shown, strict=True) if each[0] is not None]
        low, high = (min(known)[1], max(known)[1]) if known else (NOT_MEASURED, NOT_MEASURED)
        # A range such as "1.10× to 1.84×", or the value itself if it never changes.
        self.range = low if low == high else f"{low} to {high}"
        self.maximum = max((value for value in values if value is not None), default=0.0)


def make_series(days: Sequence[dict[str, Any]]) -> list[Series]:
    """Return tokens, speed-ups and acceptance rates over the days."""
    tokens = [day["tokens"] if day["answers"] else None for day in days]
    speed_ups = [day["speed_up"] if _format_speed_up(day) else None for day in days]
    rates = [day["acceptance"] for day in days]
    return [
        Series("tokens", tokens, [f"{value or 0:,}" for value in tokens]),
        Series("speed-up", speed_ups, [f"{value or 0:.2f}×" for value in speed_ups]),
        Series("accepted", rates, [format_share(value or 0) for value in rates]),
    ]


def merge_days(days: Sequence[dict[str, Any]], max_groups: int) -> tuple[list[dict[str, Any]], int]:
    """Merge days until there are at most `max_groups`, and return how many each stands for."""
    size = -(-len(days) // max(max_groups, 1))
    starts = range(0, len(days), size) if days else range(0)
    return [_merge(days[start : start + size]) for start in starts], size


def _merge(days: Sequence[dict[str, Any]]) -> dict[str, Any]:
    answers, tokens, drafted, accepted, measured_seconds = (
        sum(day[name] for day in days)
        for name in ("answers", "tokens", "drafted", "accepted", "measured_seconds")
    )
    plain = sum((day["speed_up"] or 0) * day["measured_seconds"] for day in days)
    name = days[0]["name"] if len(days) == 1 else f"{days[0]['name']} to {days[-1]['name']}"
    return {
        "name": name,
        "answers": answers,
        "tokens": tokens,
        "acceptance": accepted / drafted if drafted else None,
        "speed_up": plain / measured_seconds if measured_seconds else None,
        "seconds": sum(day["seconds"] for day in days),
        "measured_seconds": measured_seconds,
    }
