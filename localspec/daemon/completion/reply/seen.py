"""How a model writes calls, where its template is of no known family: seen in what the template makes of
calls whose names and arguments are known.

The template runs in the process that also renders prompts for the engine, in a sandbox and with a clock.
What was found counts only if it reads those calls again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from localspec.children import helper_environment
from localspec.daemon.completion.reply.calls import Arguments, Call
from localspec.daemon.completion.reply.found import QUOTE, FoundCalls
from localspec.daemon.completion.reply.tools import UNKNOWN, format_of
from localspec.protocol.calls import ID, CallFormat

_TIME_LIMIT = 10.0  # seconds for the process to come up and render
_LONGEST = 1 << 18  # bytes of what a template makes of a short chat
_TEXT, _QUESTION = "zqanswer", "zqquestion"
_NAMES = "zqfirst", "zqsecond", "zqthird"
_KEYS = "zqtext", "zqcount", "zqdeep"
# A text that some templates write in another way than others.
_VALUES: tuple[Any, ...] = 'zq <said> "it"\nzq', 7391, {"zqinner": ["zqitem"]}
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_SMALL = {_KEYS[0]: _VALUES[0]}
_SCHEMA = {
    "type": "object",
    "properties": {
        key: {"type": kind, "description": "…"}
        for key, kind in zip(_KEYS, ("string", "integer", "object"), strict=True)
    },
}
_Called = Sequence[tuple[str, dict[str, Any]]]
_CALLS: tuple[_Called, ...] = (
    [],
    [(_NAMES[0], {})],
    [(_NAMES[0], _ARGUMENTS)],
    [(name, _SMALL) for name in _NAMES],
)
# Ids of nine letters and digits, which Mistral's templates want; what counts of them is the last digit.
_ID = "zqid0000{at}"
_IDS = re.compile("zqid0000(?=[0-9])")
# Arguments as an object, as its JSON, and with ids that Kimi's templates write in place of the name.
_WORDINGS = (False, _ID), (True, _ID), (False, "functions.{name}:{at}")
_MARKER = re.compile(r"<[^<>\s]{2,}>?|\[\w[^\[\]\s]+\]")


class _NotSeen(Exception):
    """The renderings have no notation that is understood here."""


_looking = threading.Lock()  # many ask at once, and one look is for all of them


def notation(template: str | None) -> CallFormat:
    """How a model with this template writes calls; UNKNOWN where that is not seen. Blocks, once for each
    template of no known family.
    """
    form = format_of(template)
    if not form.guessed or template is None:
        return form
    try:
        with _looking:
            return _found(template)
    except (
        OSError,
        subprocess.TimeoutExpired,
    ):  # the machine was too busy, and may not be next time
        return UNKNOWN


@lru_cache(maxsize=32)
def _found(template: str) -> CallFormat:
    rendered = _rendered(template)
    for at in range(0, len(rendered), len(_CALLS)):
        try:
            return _seen(*rendered[at : at + len(_CALLS)])
        except (_NotSeen, ValueError, IndexError, TypeError, RecursionError):
            continue
    return UNKNOWN


# ------------------------------------------------------------------------ what the template writes


def _rendered(template: str) -> list[str]:
    """The four conversations in all wordings; "" where that failed.

    Raises:
        OSError, TimeoutExpired: the process did not come up, or did not end.
    """
    asked = "".join(
        json.dumps({"template": template, "variables": _variables(calls, *wording)}) + "\n"
        for wording in _WORDINGS
        for calls in _CALLS
    )
    command = [sys.executable, "-P", "-m", "localspec.engine.prompt.template_child"]
    done = subprocess.run(
        command,
        input=asked.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_TIME_LIMIT,
        check=False,
        env=helper_environment(),
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()[1:] if len(line) < _LONGEST]
    texts = [_plain(str(reply.get("text", ""))) for reply in replies]
    whole = len(texts) == len(_WORDINGS) * len(_CALLS)  # else it has crashed, or goes on and on
    return texts if whole else []


def _plain(text: str) -> str:
    """Without what stands for our ids, and without the quotes of values, which are read anywhere."""
    return _IDS.sub("", text).replace(QUOTE[0], "").replace(QUOTE[1], "")


def _variables(calls: _Called, as_text: bool, identity: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else _TEXT}
    if calls:
        answer["tool_calls"] = [
            {
                "id": identity.format(name=name, at=at),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given) if as_text else given},
            }
            for at, (name, given) in enumerate(calls)
        ]
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": "…", "parameters": _SCHEMA},
        }
        for name in _NAMES
    ]
    return {
        "messages": [{"role": "user", "content": _QUESTION}, answer],
        "tools": tools,
        "documents": None,
        "bos_token": "",
        "eos_token": "",
        "add_generation_prompt": False,
    }


# ------------------------------------------------------------------------ what is seen in it


def _seen(plain: str, empty: str, full: str, three: str) -> CallFormat:
    """Raises _NotSeen, and ValueError where something is not where it should be."""
    start, end = _around(plain, full)
    one = _Calls(full[start : len(full) - end], [_ARGUMENTS])
    opening, (middle,), close = one.before[0], one.middles, one.close
    again = ""
    if all(name in three[start:] for name in _NAMES):
        some = _Calls(three[start : len(three) - end], [_SMALL] * 3, one.parameter)
        again = _merged(some.before[1], some.before[2])
        middle = _merged(*some.middles[:2])
        opening = _as_merged(opening, again)
    mark, lead = _marker(opening, plain[plain.index(_QUESTION) :])
    form = CallFormat(
        "found",
        (mark,),
        close.rstrip(),
        lead=lead,
        middle=middle,
        again=again,
        parameter=one.parameter,
    )
    for text, calls in ((empty, _CALLS[1]), (full, _CALLS[2]), (three, _CALLS[3])):
        wanted = calls if again or len(calls) == 1 else None
        if wanted and _read(form, text[start : len(text) - end]) != wanted:
            raise _NotSeen
    return form


def _marker(opening: str, plain: str) -> tuple[str, str]:
    """What marks a call and nothing else, and what stands between that and the call's name."""
    while (found := _MARKER.match(opening.lstrip())) is not None:
        mark = found[0]
        opening = opening.lstrip()[len(mark) :]
        if mark not in plain:  # or it marks every answer
            return mark, opening
    raise _NotSeen


def _around(plain: str, full: str) -> tuple[int, int]:
    """How much is before an answer and behind it, whether it is a text or a call."""
    behind = min(plain.index(_TEXT), full.rindex(_NAMES[0]))
    start = _shared(plain[:behind], full[:behind])
    if (cut := _inside_marker(plain[:start])) is not None:
        start = cut
    end = _shared(plain[plain.index(_TEXT) + len(_TEXT) :][::-1], full[start:][::-1])
    tail = full[len(full) - end :]
    if _inside_marker(full[: len(full) - end]) is not None:
        end -= min(at + 1 for mark in ">]" if (at := tail.find(mark)) >= 0)
    return start, end


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = zip(one, other, strict=False)
    longest = min(len(one), len(other))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), longest)


def _inside_marker(text: str) -> int | None:
    """Where the marker begins that `text` ends in; None: it ends in none."""
    at = max(text.rfind("<"), text.rfind("["))
    return at if at >= 0 and not re.search(r"[>\]\s]", text[at:]) else None


class _Calls:
    """The literals in a text of calls with these arguments.

    before: what stands before each name; after the first with what closes the call before it.
    """

    def __init__(
        self, text: str, given: list[dict[str, Any]], parameter: tuple[str, ...] | None = None
    ) -> None:
        self.before: list[str] = []
        self.middles: list[str] = []
        self.parameter = parameter or ()
        at = 0
        for name, arguments in zip(_NAMES, given, strict=False):
            found = text.index(name, at)
            self.before.append(text[at:found])
            at = found + len(name)
            if parameter is None:
                at = self._first(text, at, arguments)
            elif parameter:
                at = self._tags(text, at, arguments)
            else:
                at = self._json(text, at, arguments)
        self.close = text[at:]

    def _first(self, text: str, at: int, arguments: dict[str, Any]) -> int:
        try:
            return self._json(text, at, arguments)
        except ValueError:
            self.parameter = _parameter(text[at:])
            return self._tags(text, at, arguments)

    def _json(self, text: str, at: int, arguments: dict[str, Any]) -> int:
        """Where the arguments end, which are JSON."""
        start = text.index("{", at)
        value, end = json.JSONDecoder().raw_decode(text, start)
        if value != arguments:
            raise ValueError("other arguments")
        self.middles.append(text[at:start])
        return end

    def _tags(self, text: str, at: int, arguments: dict[str, Any]) -> int:
        opening, _, _, close = self.parameter
        start = text.index(opening + next(iter(arguments)), at)
        self.middles.append(text[at:start])
        return text.index(close, text.index(_last(arguments, text, start), start)) + len(close)


def _last(arguments: dict[str, Any], text: str, start: int) -> str:
    """The last value, as the template writes it."""
    value = list(arguments.values())[-1]
    forms = [value] if isinstance(value, str) else [json.dumps(value), str(value)]
    return next((form for form in forms if form in text[start:]), "no such value")


def _parameter(text: str) -> tuple[str, ...]:
    """What stands before a key, before a text, before another value, and behind it."""
    keys = [text.index(key) for key in _KEYS]
    values = [text.index(_last({"": value}, text, 0)) for value in _VALUES]
    ends = [
        at + len(_last({"": value}, text, 0)) for at, value in zip(values, _VALUES, strict=True)
    ]
    before = [text[k + len(key) : v] for k, key, v in zip(keys, _KEYS, values, strict=True)]
    first, second = text[ends[0] : keys[1]], text[ends[1] : keys[2]]
    if before[1] != before[2] or first != second or not first.strip():
        raise _NotSeen
    opening = first[len(first) - _shared(first[::-1], text[: keys[0]][::-1]) :]
    if (cut := re.match(r"[^<\[]*[>\]]", opening)) is not None:  # the end of another marker
        opening = opening[cut.end() :]
    opening = opening.lstrip()
    close = first[: len(first) - len(opening)]
    if not opening or not text[ends[2] :].startswith(close.rstrip()) or not close.strip():
        raise _NotSeen
    if not text[ends[2] :].startswith(close):
        close = close.rstrip()
    if any(quote in before[0][-1:] for quote in "'\"") or len(close.split(close.strip())) != 2:
        raise _NotSeen
    return opening, before[0], before[1], close


def _merged(first: str, second: str) -> str:
    """Two literals as one, with ID where they count.

    Raises:
        _NotSeen: they differ in more.
    """
    parts = [re.split(r"(\d+)", each) for each in (first, second)]
    if len(parts[0]) != len(parts[1]):
        raise _NotSeen
    found = ""
    for at, (one, other) in enumerate(zip(*parts, strict=True)):
        if one != other and not at % 2:
            raise _NotSeen
        found += one if one == other else ID
    return found


def _as_merged(opening: str, again: str) -> str:
    """What opens the first call, with ID where it stands in what opens the next."""
    if ID not in again:
        return opening
    tail = again.rpartition(ID)[2]
    head = opening.removesuffix(tail)
    return re.sub(r"\d+\Z", ID, head) + tail if opening.endswith(tail) else opening


def _read(form: CallFormat, text: str) -> list[tuple[str, Any]] | None:
    reader = FoundCalls(form, dict.fromkeys(_NAMES, _SCHEMA))
    pieces, rest = reader.feed(text.partition(form.opens[0])[2])
    pieces += reader.end()
    if rest.strip() or reader.broken or not reader.over:
        return None
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, Call):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return [(name, json.loads(given)) for name, given in calls]
