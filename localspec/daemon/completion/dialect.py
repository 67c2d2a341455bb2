"""Discover how a model writes calls, from what its template renders for calls that are known.

This is for templates of no known family. The template runs in the process that also renders prompts for
the engine, in a sandbox and with a time limit. A discovered notation is used only if its reader reads the
same calls again.
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
from localspec.daemon.completion.calls import CDATA_MARKERS, Arguments, Call, DialectCalls
from localspec.daemon.completion.tools import UNKNOWN_FORMAT, format_of
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, CallFormat

_RENDER_TIMEOUT_S = 10.0  # for the process to start and to render
_MAX_RENDERED_BYTES = 1 << 18  # of one short chat
_TEXT, _QUESTION = "zqanswer", "zqquestion"
_NAMES = "zqfirst", "zqsecond", "zqthird"
_KEYS = "zqtext", "zqcount", "zqdeep"
# The text contains characters that some templates escape.
_VALUES: tuple[Any, ...] = 'zq <said> "it"\nzq', 7391, {"zqinner": ["zqitem"]}
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_ONE_ARGUMENT = {_KEYS[0]: _VALUES[0]}
_SCHEMA = {
    "type": "object",
    "properties": {
        key: {"type": kind, "description": "…"}
        for key, kind in zip(_KEYS, ("string", "integer", "object"), strict=True)
    },
}
_CallList = Sequence[tuple[str, dict[str, Any]]]
_CALLS: tuple[_CallList, ...] = (
    [],
    [(_NAMES[0], {})],
    [(_NAMES[0], _ARGUMENTS)],
    [(name, _ONE_ARGUMENT) for name in _NAMES],
)
# Ids of nine letters and digits, as Mistral's templates require. Only the last digit distinguishes them.
_ID = "zqid0000{at}"
_ID_PREFIX = re.compile("zqid0000(?=[0-9])")
# Variants of the calls: arguments as an object, as JSON text, and with ids that Kimi's templates write
# instead of the name.
_VARIANTS = (False, _ID), (True, _ID), (False, "functions.{name}:{at}")
_MARKER = re.compile(r"<[^<>\s]{2,}>?|\[\w[^\[\]\s]+\]")


class _NotDiscovered(Exception):
    """The renderings use no notation that is supported here."""


_discovery_lock = threading.Lock()  # simultaneous requests share one discovery


def discover_call_format(template: str | None) -> CallFormat:
    """Return how a model with this template writes calls; UNKNOWN if that cannot be discovered.

    The first call for a template of no known family blocks while a process renders the template.
    """
    call_format = format_of(template)
    if not call_format.guessed or template is None:
        return call_format
    try:
        with _discovery_lock:
            return _discover(template)
    except (OSError, subprocess.TimeoutExpired):
        # The machine was too busy. The result is not cached, so the next request tries again.
        return UNKNOWN_FORMAT


@lru_cache(maxsize=32)
def _discover(template: str) -> CallFormat:
    rendered = _render_chats(template)
    for start in range(0, len(rendered), len(_CALLS)):
        try:
            return _derive_format(*rendered[start : start + len(_CALLS)])
        except (_NotDiscovered, ValueError, IndexError, TypeError, RecursionError):
            continue
    return UNKNOWN_FORMAT


# ------------------------------------------------------------------------ rendering


def _render_chats(template: str) -> list[str]:
    """Return the four chats in all variants; "" for a chat that the template cannot render.

    Raises:
        OSError: the process cannot be started.
        TimeoutExpired: the process did not end in time.
    """
    requests = "".join(
        json.dumps({"template": template, "variables": _variables(calls, *variant)}) + "\n"
        for variant in _VARIANTS
        for calls in _CALLS
    )
    command = [sys.executable, "-P", "-m", "localspec.engine.prompt.template_child"]
    child = subprocess.run(
        command,
        input=requests.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_RENDER_TIMEOUT_S,
        check=False,
        env=helper_environment(),
    )
    replies = [
        json.loads(line)
        for line in child.stdout.splitlines()[1:]
        if len(line) < _MAX_RENDERED_BYTES
    ]
    texts = [_normalize(str(reply.get("text", ""))) for reply in replies]
    # Fewer texts mean that the process crashed, or that a text was too long.
    is_complete = len(texts) == len(_VARIANTS) * len(_CALLS)
    return texts if is_complete else []


def _normalize(text: str) -> str:
    """Remove the prefix of the ids, and the quotes around values, which the reader always accepts."""
    return _ID_PREFIX.sub("", text).replace(CDATA_MARKERS[0], "").replace(CDATA_MARKERS[1], "")


def _variables(calls: _CallList, as_json: bool, id_format: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else _TEXT}
    if calls:
        answer["tool_calls"] = [
            {
                "id": id_format.format(name=name, at=number),
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments) if as_json else arguments,
                },
            }
            for number, (name, arguments) in enumerate(calls)
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


# ------------------------------------------------------------------------ discovery


def _derive_format(plain: str, empty: str, full: str, three: str) -> CallFormat:
    """Return the format that explains the four renderings of a variant.

    `plain` has a text answer, `empty` a call without arguments, `full` one with all arguments, and `three`
    three calls.

    Raises:
        _NotDiscovered: the renderings contradict each other.
        ValueError: a literal is not where it should be.
    """
    start, end = _find_answer(plain, full)
    single = _CallLiterals(full[start : len(full) - end], [_ARGUMENTS])
    opening, (middle,), close = single.before[0], single.middles, single.close
    again = ""
    if all(name in three[start:] for name in _NAMES):
        several = _CallLiterals(
            three[start : len(three) - end], [_ONE_ARGUMENT] * 3, single.parameter
        )
        again = _merge_literals(several.before[1], several.before[2])
        middle = _merge_literals(*several.middles[:2])
        opening = _merge_opening(opening, again)
    marker, lead = _find_marker(opening, plain[plain.index(_QUESTION) :])
    call_format = CallFormat(
        "found",
        (marker,),
        close.rstrip(),
        lead=lead,
        middle=middle,
        again=again,
        parameter=single.parameter,
    )
    for text, calls in ((empty, _CALLS[1]), (full, _CALLS[2]), (three, _CALLS[3])):
        expected = calls if again or len(calls) == 1 else None
        if expected and _read_calls(call_format, text[start : len(text) - end]) != expected:
            raise _NotDiscovered
    return call_format


def _find_marker(opening: str, plain: str) -> tuple[str, str]:
    """Return the marker that only a call has, and what stands between it and the name of the call."""
    while (match := _MARKER.match(opening.lstrip())) is not None:
        marker = match[0]
        opening = opening.lstrip()[len(marker) :]
        if marker not in plain:  # a text answer does not have it
            return marker, opening
    raise _NotDiscovered


def _find_answer(plain: str, full: str) -> tuple[int, int]:
    """Return the lengths of what precedes and what follows an answer, be it a text or a call."""
    limit = min(plain.index(_TEXT), full.rindex(_NAMES[0]))
    start = _common_prefix_length(plain[:limit], full[:limit])
    if (cut := _open_marker_start(plain[:start])) is not None:
        start = cut
    end = _common_prefix_length(plain[plain.index(_TEXT) + len(_TEXT) :][::-1], full[start:][::-1])
    tail = full[len(full) - end :]
    if _open_marker_start(full[: len(full) - end]) is not None:
        end -= min(position + 1 for bracket in ">]" if (position := tail.find(bracket)) >= 0)
    return start, end


def _common_prefix_length(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    longest = min(len(first), len(second))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), longest)


def _open_marker_start(text: str) -> int | None:
    """Return the start of the incomplete marker at the end of `text`; None if there is none."""
    start = max(text.rfind("<"), text.rfind("["))
    return start if start >= 0 and not re.search(r"[>\]\s]", text[start:]) else None


class _CallLiterals:
    """The literals in a text of calls with known arguments.

    `before` has what precedes each name. From the second entry on it includes what closes the previous
    call.
    """

    def __init__(
        self,
        text: str,
        argument_lists: list[dict[str, Any]],
        parameter: tuple[str, ...] | None = None,
    ) -> None:
        self.before: list[str] = []
        self.middles: list[str] = []
        self.parameter = parameter or ()
        position = 0
        for name, arguments in zip(_NAMES, argument_lists, strict=False):
            name_at = text.index(name, position)
            self.before.append(text[position:name_at])
            position = name_at + len(name)
            if parameter is None:
                position = self._read_first(text, position, arguments)
            elif parameter:
                position = self._read_tags(text, position, arguments)
            else:
                position = self._read_json(text, position, arguments)
        self.close = text[position:]

    def _read_first(self, text: str, position: int, arguments: dict[str, Any]) -> int:
        """Read the arguments of the first call, which decide between JSON and tags; return their end."""
        try:
            return self._read_json(text, position, arguments)
        except ValueError:
            self.parameter = _parameter_literals(text[position:])
            return self._read_tags(text, position, arguments)

    def _read_json(self, text: str, position: int, arguments: dict[str, Any]) -> int:
        """Read arguments in JSON, and return their end."""
        start = text.index("{", position)
        value, end = json.JSONDecoder().raw_decode(text, start)
        if value != arguments:
            raise ValueError("other arguments")
        self.middles.append(text[position:start])
        return end

    def _read_tags(self, text: str, position: int, arguments: dict[str, Any]) -> int:
        """Read arguments in tags, and return their end."""
        opening, _, _, close = self.parameter
        start = text.index(opening + next(iter(arguments)), position)
        self.middles.append(text[position:start])
        return text.index(close, text.index(_last_value(arguments, text, start), start)) + len(
            close
        )


def _last_value(arguments: dict[str, Any], text: str, start: int) -> str:
    """Return the last value as the template writes it."""
    value = list(arguments.values())[-1]
    forms = [value] if isinstance(value, str) else [json.dumps(value), str(value)]
    return next((form for form in forms if form in text[start:]), "no such value")


def _parameter_literals(text: str) -> tuple[str, ...]:
    """Return what precedes a key, a text value and another value, and what follows a value.

    Raises:
        _NotDiscovered: the parameters are not written alike.
        ValueError: a key or a value is missing.
    """
    keys = [text.index(key) for key in _KEYS]
    values = [text.index(_last_value({"": value}, text, 0)) for value in _VALUES]
    ends = [
        position + len(_last_value({"": value}, text, 0))
        for position, value in zip(values, _VALUES, strict=True)
    ]
    before = [
        text[key_at + len(key) : value_at]
        for key_at, key, value_at in zip(keys, _KEYS, values, strict=True)
    ]
    between, next_between = text[ends[0] : keys[1]], text[ends[1] : keys[2]]
    if before[1] != before[2] or between != next_between or not between.strip():
        raise _NotDiscovered
    opening = between[len(between) - _common_prefix_length(between[::-1], text[: keys[0]][::-1]) :]
    # The text before a key may start with the end of another marker.
    if (match := re.match(r"[^<\[]*[>\]]", opening)) is not None:
        opening = opening[match.end() :]
    opening = opening.lstrip()
    close = between[: len(between) - len(opening)]
    if not opening or not text[ends[2] :].startswith(close.rstrip()) or not close.strip():
        raise _NotDiscovered
    if not text[ends[2] :].startswith(close):
        close = close.rstrip()
    if any(quote in before[0][-1:] for quote in "'\"") or len(close.split(close.strip())) != 2:
        raise _NotDiscovered
    return opening, before[0], before[1], close


def _merge_literals(first: str, second: str) -> str:
    """Return two literals as one, with ID in place of numbers that differ.

    Raises:
        _NotDiscovered: more than numbers differs.
    """
    parts = [re.split(r"(\d+)", literal) for literal in (first, second)]
    if len(parts[0]) != len(parts[1]):
        raise _NotDiscovered
    merged = ""
    for index, (part, other_part) in enumerate(zip(*parts, strict=True)):
        if part != other_part and not index % 2:
            raise _NotDiscovered
        merged += part if part == other_part else CALL_ID_PLACEHOLDER
    return merged


def _merge_opening(opening: str, next_opening: str) -> str:
    """Return what opens the first call, with ID at the same position as in what opens the next."""
    if CALL_ID_PLACEHOLDER not in next_opening:
        return opening
    tail = next_opening.rpartition(CALL_ID_PLACEHOLDER)[2]
    head = opening.removesuffix(tail)
    return re.sub(r"\d+\Z", CALL_ID_PLACEHOLDER, head) + tail if opening.endswith(tail) else opening


def _read_calls(call_format: CallFormat, text: str) -> list[tuple[str, Any]] | None:
    """Return the calls that the format reads in `text`; None if it does not read all of the text."""
    reader = DialectCalls(call_format, dict.fromkeys(_NAMES, _SCHEMA))
    pieces, remaining = reader.feed(text.partition(call_format.opens[0])[2])
    pieces += reader.end()
    if remaining.strip() or reader.is_broken or not reader.is_finished:
        return None
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, Call):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return [(name, json.loads(arguments)) for name, arguments in calls]
