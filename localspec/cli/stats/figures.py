"""What is said of a group of answers, and what is said where it was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localspec.cli.terminal.figures import MIN_SPEED_UP_TOKENS, duration, rate, share, speed_up

KINDS = {
    "complete": "complete (FIM)",
    "json": "JSON by schema",
    "unknown": "not recorded",
}
_CLEAR = 0.03  # a speed-up nearer to 1 may be noise
NOT_MEASURED = "not measured"
COLUMNS = ("ANSWERS", "TOKENS", "TIME", "TOKENS/S", "ACCEPTED", "SPEED-UP", "SAVED")


def row(group: dict[str, Any]) -> list[str]:
    """A cell for each of COLUMNS."""
    ratio = _speed_up(group)
    saved = group["saved_seconds"] if ratio else None
    return [
        f"{group['answers']:,}",
        f"{group['tokens']:,}",
        duration(group["seconds"]),
        rate(group["tokens"], group["seconds"], group["tokens_per_second"]),
        "no drafts" if group["acceptance"] is None else share(group["acceptance"]),
        ratio or NOT_MEASURED,
        "" if saved is None else duration(saved),
    ]


def _speed_up(group: dict[str, Any]) -> str:
    """Return the speed-up of a group; empty if it was measured over too few tokens."""
    seconds = group["seconds"]
    measured = group["tokens"] * group["measured_seconds"] / seconds if seconds else 0
    return speed_up(group["speed_up"], measured)


def summary(found: dict[str, Any]) -> list[str]:
    """Sentences about all answers together."""
    total, days = found["total"], found["days"]
    when = "today" if days == 1 else f"in the last {days} days"
    of = f" by {found['pair']}" if found["pair"] else ""
    if not total["answers"]:
        return [f"No answers{of} were saved {when}."]
    answers = f"{total['answers']:,} answer{'s' * (total['answers'] != 1)}"
    per_second = rate(total["tokens"], total["seconds"], total["tokens_per_second"])
    speed = f", {per_second} tokens/s" if per_second else ""
    first = (
        f"{answers}{of} {when}: {total['tokens']:,} tokens in {duration(total['seconds'])}{speed}."
    )
    return [first, _speculation(total)]


def _speculation(total: dict[str, Any]) -> str:
    drafts = "no tokens were drafted"
    if total["acceptance"] is not None:
        drafts = f"{share(total['acceptance'])} of drafted tokens were accepted"
    ratio = _speed_up(total)
    if total["speed_up"] is None:
        return f"The speed-up was not measured; {drafts}."
    if not ratio:
        return (
            f"The speed-up was measured over fewer than {MIN_SPEED_UP_TOKENS} tokens, which says "
            f"nothing; {drafts}."
        )
    if abs(total["speed_up"] - 1) < _CLEAR:
        return f"{ratio} the speed of plain decoding, which is no clear difference; {drafts}."
    verb = "saved" if total["saved_seconds"] >= 0 else "lost"
    return (
        f"{ratio} the speed of plain decoding, which {verb} "
        f"{duration(abs(total['saved_seconds']))}; {drafts}."
    )


def notes(found: dict[str, Any]) -> list[str]:
    """What is not in the figures."""
    total, unfinished = found["total"], found["unfinished"]
    said = []
    if total["measured_seconds"] and total["measured_seconds"] < 0.995 * total["seconds"]:
        part = share(total["measured_seconds"] / total["seconds"])
        said.append(
            f"The speed-up was measured for {part} of the time; the rest is not counted in it."
        )
    if unfinished:
        were = "answer was" if unfinished == 1 else "answers were"
        said.append(f"{unfinished} {were} interrupted or failed and not counted.")
    said.append(
        "Not included: answers with --no-log, removed conversations, and programs that do not ask to "
        "be counted."
    )
    return said


def tables(found: dict[str, Any]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Headings and rows: by pair, by kind of work, and by day, of days with answers, the newest first."""
    days = [each for each in reversed(found["by_day"]) if each["answers"]]
    return [
        ("PAIR", [(each["name"], row(each)) for each in found["by_pair"]]),
        ("KIND", [(KINDS.get(each["name"], each["name"]), row(each)) for each in found["by_kind"]]),
        ("DAY", [(each["name"], row(each)) for each in days]),
    ]


class Series:
    """One figure over the days: None where there is none."""

    def __init__(self, name: str, values: Sequence[float | None], shown: Sequence[str]) -> None:
        self.name, self.values, self.shown = name, values, shown

    @property
    def most(self) -> float:
        return max((each for each in self.values if each is not None), default=0.0)

    @property
    def range(self) -> str:
        """As in "1.10× to 1.84×"; what it is each day where that never changes."""
        known = [
            (value, text)
            for value, text in zip(self.values, self.shown, strict=True)
            if value is not None
        ]
        if not known:
            return NOT_MEASURED
        low, high = min(known)[1], max(known)[1]
        return low if low == high else f"{low} to {high}"


def series(days: Sequence[dict[str, Any]]) -> list[Series]:
    """Tokens, the speed-up, and how many drafts were accepted."""
    tokens = [each["tokens"] if each["answers"] else None for each in days]
    ups = [each["speed_up"] if _speed_up(each) else None for each in days]
    shares = [each["acceptance"] for each in days]
    return [
        Series("tokens", tokens, [f"{each or 0:,}" for each in tokens]),
        Series("speed-up", ups, [f"{each or 0:.2f}×" for each in ups]),
        Series("accepted", shares, [share(each or 0) for each in shares]),
    ]


def merged(days: Sequence[dict[str, Any]], room: int) -> tuple[list[dict[str, Any]], int]:
    """At most `room` of them, each of several days where there are more; of how many."""
    each = -(-len(days) // max(room, 1))
    starts = range(0, len(days), each) if days else range(0)
    return [_together(days[at : at + each]) for at in starts], each


def _together(days: Sequence[dict[str, Any]]) -> dict[str, Any]:
    answers, tokens, drafted, accepted, taken = (
        sum(each[name] for each in days)
        for name in ("answers", "tokens", "drafted", "accepted", "measured_seconds")
    )
    plain = sum((each["speed_up"] or 0) * each["measured_seconds"] for each in days)
    name = days[0]["name"] if len(days) == 1 else f"{days[0]['name']} to {days[-1]['name']}"
    return {
        "name": name,
        "answers": answers,
        "tokens": tokens,
        "acceptance": accepted / drafted if drafted else None,
        "speed_up": plain / taken if taken else None,
        "seconds": sum(each["seconds"] for each in days),
        "measured_seconds": taken,
    }
