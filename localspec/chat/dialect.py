"""Learn a model's dialect from its chat template: how it writes calls and thoughts, and reads messages.

What the template says literally is read from its text. Everything else is seen in what it renders for
short chats whose texts, thoughts and calls are known. All of this happens once, when a pair is loaded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from localspec.chat.families import read_family
from localspec.chat.notations.literal_calls import CDATA_MARKERS, LiteralCalls
from localspec.chat.wordings import (
    Messages,
    with_forms,
    with_parts,
    with_text_arguments,
)
from localspec.errors import TemplateFailed, TemplateRaised
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, EXPLAINED, UNKNOWN_FORMAT, CallFormat
from localspec.protocol.dialect import REASONING_MARKERS, Dialect, MessageForms, ThoughtMarkers
from localspec.protocol.pieces import Arguments, Call

PLACEHOLDER = "zqplaceqz"  # A placeholder for a text, which no template contains.
TIME_LIMIT_S = 10.0  # for all probes of a template, in addition to the last one
_QUESTION, _THOUGHTS, _ANSWER = "zqquestion", "zqthoughts", "zqanswer"

# Renders a template with these variables, or raises TemplateRaised or TemplateFailed.
Render = Callable[[dict[str, Any]], str]


class _Prober:
    """Renders probes until the template was stopped once, or the time is up.

    A template that does not end must not delay the load by the time limit of every probe.
    """

    def __init__(self, render: Render, bos: str = "", eos: str = "") -> None:
        self._render = render
        # Tools and documents are None instead of missing, as in the renderer that templates are written
        # for.
        self._variables: dict[str, Any] = {"tools": None, "documents": None, "bos_token": bos}
        self._variables |= {"eos_token": eos, "add_generation_prompt": False}
        self._deadline = time.monotonic() + TIME_LIMIT_S

    def render(self, messages: Messages, **variables: Any) -> str:
        """Return the rendered text. Raises TemplateRaised or TemplateFailed."""
        if time.monotonic() > self._deadline:
            raise TemplateFailed("The chat template takes too long.")
        try:
            return self._render({**self._variables, **variables, "messages": messages})
        except TemplateFailed:
            self._deadline = 0.0
            raise

    def writes_mark(self, messages: Messages) -> bool:
        """Return whether the template renders PLACEHOLDER. Raises TemplateFailed."""
        try:
            return PLACEHOLDER in self.render(messages)
        except TemplateRaised:
            return False


def learn_dialect(template: str | None, render: Render, bos: str = "", eos: str = "") -> Dialect:
    """Return the dialect of a model with this chat template, as far as it can be learnt.

    render: renders the template. bos, eos: the texts of these special tokens.
    """
    if template is None:
        return Dialect(EXPLAINED, REASONING_MARKERS)
    prober = _Prober(render, bos, eos)
    forms = _learn_message_forms(prober)
    thoughts, is_unknown = _learn_thoughts(template, prober, forms)
    return Dialect(_learn_calls(template, prober), thoughts, is_unknown, forms)


# The forms in which the template reads messages.


_NOTHING = re.compile(r"\b(?:none|null)\b", re.IGNORECASE)


def _learn_message_forms(prober: _Prober) -> MessageForms:
    question = {"role": "user", "content": PLACEHOLDER}
    try:
        parts = not prober.writes_mark([question]) and prober.writes_mark([with_parts(question)])
        chat = _call_chat("", PLACEHOLDER, parts=parts)
        as_json = not prober.writes_mark(chat) and prober.writes_mark(
            [*map(with_text_arguments, chat)]
        )
        return MessageForms(parts, _allows_null(prober, parts), as_json)
    except TemplateFailed:
        return MessageForms()


def _allows_null(prober: _Prober, parts: bool) -> bool:
    """Return whether a message with calls may have null as its text.

    It may not if the template then writes "null" or fails. Where it may, null is used, because some
    templates render an empty text as a turn of its own.
    """
    for fields in ({}, {"reasoning_content": "So."}):
        try:
            counts = [
                len(
                    _NOTHING.findall(
                        prober.render(_call_chat(content, PLACEHOLDER, parts=parts, **fields))
                    )
                )
                for content in ("", None)
            ]
        except TemplateRaised:
            return False
        if counts[0] != counts[1]:
            return False
    return True


def _call_chat(content: str | None, argument: str, *, parts: bool, **fields: Any) -> Messages:
    """Return a chat with a question, a call and its result; fields: added to the call's message."""
    function = {"name": "look", "arguments": {"at": argument}}
    call = {"id": "abcdef123", "type": "function", "function": function}
    chat: Messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": content, "tool_calls": [call], **fields},
        {"role": "tool", "content": "Seen.", "tool_call_id": call["id"], "name": "look"},
    ]
    return [*map(with_parts, chat)] if parts else chat


# The markers that a model puts around its thoughts, if it uses none of the known ones.
#
# What the template writes after the prompt, in a conversation whose answer has thoughts, is what the
# model writes.


# Markers of gpt-oss and Muse Glimmer, whose messages are parsed in another way.
CHANNELS = "<|channel|>", "to=self<|message|>"
_THOUGHT = re.compile("reasoning|thinking|thought", re.IGNORECASE)
# Variables that turn thinking on, by the names that different families of models use.
_THINKING: dict[str, Any] = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
# Templates read thoughts from one of these keys.
_KEYS_OF_THOUGHTS = "reasoning_content", "reasoning", "thinking"
_MAX_MARK_CHARS = 80
# Characters before a question that count as its own markers. Instructions before them may name the
# markers of thoughts.
_QUESTION_MARK_CHARS = 40
_THOUGHT_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]]+\]")


class _UnknownMarkers(Exception):
    """Raised when a template renders thoughts, but their markers cannot be detected."""


def _learn_thoughts(
    template: str, prober: _Prober, forms: MessageForms
) -> tuple[tuple[ThoughtMarkers, ...], bool]:
    """Return the markers of thoughts, and whether there are some that are unknown."""
    if not _THOUGHT.search(template):
        return _known_markers(template), False

    def render(messages: Messages, add_generation_prompt: bool, **variables: Any) -> str:
        worded = with_forms(messages, forms)
        return prober.render(worded, add_generation_prompt=add_generation_prompt, **variables)

    markers = _known_markers(template)
    if markers or any(marker in template for marker in CHANNELS):
        return markers, False
    try:
        detected = _detect_markers(partial(render, **_THINKING))
    except _UnknownMarkers:
        return (), True
    except (TemplateRaised, TemplateFailed):
        detected = None
    return (() if detected is None else (detected,)), False


def _known_markers(template: str) -> tuple[ThoughtMarkers, ...]:
    if "<|end_of_msg|>" in template:  # Kimi K3's template puts its markers together
        return tuple(pair for pair in REASONING_MARKERS if pair[0].startswith("<|open|>"))
    return tuple((o, c) for o, c in REASONING_MARKERS if o.rstrip() in template or c in template)


def _detect_markers(render: Callable[[Messages, bool], str]) -> ThoughtMarkers | None:
    """Return the markers of thoughts, or None if the template leaves out an answer's thoughts.

    render: takes messages and `add_generation_prompt`.

    Raises:
        _UnknownMarkers: the markers cannot be detected.
        TemplateRaised, TemplateFailed: see `render`.
    """
    question = {"role": "user", "content": _QUESTION}
    answer = {
        "role": "assistant",
        "content": _ANSWER,
        **dict.fromkeys(_KEYS_OF_THOUGHTS, _THOUGHTS),
    }
    text = render([question, answer], False)
    if _THOUGHTS not in text:
        return None
    head, _, tail = text.partition(_THOUGHTS)
    closing, has_answer, end = tail.partition(_ANSWER)
    question_mark, _, turn = head.partition(_QUESTION)
    question_mark = question_mark.rstrip().rpartition("\n")[2][-_QUESTION_MARK_CHARS:]
    prompt = render([question], True).partition(_QUESTION)[2]
    closing, opening = closing.strip(), _opening(turn, question_mark, prompt).strip()
    if not has_answer or not closing or not opening:
        raise _UnknownMarkers
    if max(len(opening), len(closing)) > _MAX_MARK_CHARS:
        raise _UnknownMarkers
    # A marker that also ends an answer or stands around every message would be found in wrong places.
    if opening == closing or any(
        part in question_mark + end for part in pieces((opening, closing))
    ):
        raise _UnknownMarkers
    return opening, closing


def _opening(turn: str, question_mark: str, prompt: str) -> str:
    """Return the marker that opens thoughts.

    turn: the text between the question and the thoughts. prompt: the text after the question in a prompt
    from which the model continues.
    """
    turn, prompt = turn.rstrip(), prompt.rstrip()
    if turn.startswith(prompt) and turn != prompt:  # The model writes the marker itself.
        return turn[len(prompt) :]
    if prompt.startswith(turn) and prompt != turn:
        # The prompt ends with the marker, which the template omits in earlier turns.
        return prompt[len(turn) :]
    if prompt == turn:  # The prompt ends with the marker, as do earlier turns.
        places = [match.start() for match in _THOUGHT_MARKER.finditer(prompt)]
        ends = (prompt[at:] for at in reversed(places))
        return next((end for end in ends if end not in question_mark), "")
    raise _UnknownMarkers


def pieces(markers: ThoughtMarkers) -> list[str]:
    """Return the markers and the parts of them that may be control tokens."""
    return [*markers, *(part for marker in markers for part in _THOUGHT_MARKER.findall(marker))]


# The notation of calls. A discovered notation is used only if its reader reads the same calls again.


_MAX_RENDERED_CHARS = 1 << 18  # of one short chat
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
_CALL_MARKER = re.compile(r"<[^<>\s]{2,}>?|\[\w[^\[\]\s]+\]")


class _NotDiscovered(Exception):
    """The renderings use no notation that is supported here."""


def learn_calls(template: str, render: Render) -> CallFormat:
    """Return how a model with this template writes calls; UNKNOWN_FORMAT if that cannot be discovered."""
    return _learn_calls(template, _Prober(render))


def _learn_calls(template: str, prober: _Prober) -> CallFormat:
    # Only a template that names no known format is rendered.
    form = read_family(template)
    if not form.guessed:
        return form
    for variant in _VARIANTS:
        try:
            return _derive_format(*(_render_calls(prober, calls, *variant) for calls in _CALLS))
        except (_NotDiscovered, ValueError, IndexError, TypeError, RecursionError):
            continue
        except TemplateFailed:
            break
    return UNKNOWN_FORMAT


def _render_calls(prober: _Prober, calls: _CallList, as_json: bool, id_format: str) -> str:
    """Return the text of a chat with these calls; "" if the template cannot render it.

    Raises:
        _NotDiscovered: the text is too long.
        TemplateFailed: the template was stopped.
    """
    try:
        text = prober.render(**_call_variables(calls, as_json, id_format))
    except TemplateRaised:
        return ""
    if len(text) > _MAX_RENDERED_CHARS:
        raise _NotDiscovered
    # Without the prefix of the ids, and the quotes around values, which the reader always accepts.
    return _ID_PREFIX.sub("", text).replace(CDATA_MARKERS[0], "").replace(CDATA_MARKERS[1], "")


def _call_variables(calls: _CallList, as_json: bool, id_format: str) -> dict[str, Any]:
    """Return the messages and the tools of a chat whose answer consists of these calls."""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else _ANSWER}
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
    }


def _derive_format(plain: str, empty: str, full: str, three: str) -> CallFormat:
    """Return the format that explains the four renderings of a variant.

    `plain` has a text answer, `empty` a call without arguments, `full` one with all arguments, and
    `three` three calls.

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
    full_opening = opening.lstrip()
    while (match := _CALL_MARKER.match(opening.lstrip())) is not None:
        marker = match[0]
        opening = opening.lstrip()[len(marker) :]
        if marker not in plain:  # a text answer does not have it
            return marker, opening
    for match in _CALL_MARKER.finditer(full_opening) if _CALL_MARKER.match(full_opening) else ():
        marker, lead = full_opening[: match.end()], full_opening[match.end() :]
        if marker not in plain and _CALL_MARKER.sub("", marker).strip():  # a role between markers
            return marker, lead
    raise _NotDiscovered


def _find_answer(plain: str, full: str) -> tuple[int, int]:
    """Return the lengths of what precedes and what follows an answer, be it a text or a call."""
    limit = min(plain.index(_ANSWER), full.rindex(_NAMES[0]))
    start = _common_prefix_length(plain[:limit], full[:limit])
    if (cut := _open_marker_start(plain[:start])) is not None:
        start = cut
    end = _common_prefix_length(
        plain[plain.index(_ANSWER) + len(_ANSWER) :][::-1], full[start:][::-1]
    )
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
    reader = LiteralCalls(call_format, dict.fromkeys(_NAMES, _SCHEMA))
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
