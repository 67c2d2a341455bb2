"""The dialect of a model, which is learnt from its chat template when its pair is loaded."""

from __future__ import annotations

import msgspec

from localspec.protocol.calls import UNKNOWN_FORMAT, CallFormat

ThoughtMarkers = tuple[str, str]  # the texts that open and close thoughts

# The markers of thoughts that are recognized in every model's answers.
REASONING_MARKERS: tuple[ThoughtMarkers, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)


class MessageForms(msgspec.Struct, frozen=True, omit_defaults=True):
    """The forms in which a chat template reads messages.

    - `parts`: it reads a message's text only in a list of parts.
    - `null_text`: a message with calls may have null as its text.
    - `json_arguments`: it reads the arguments of a call only as JSON text, not as an object.
    """

    parts: bool = False
    null_text: bool = False
    json_arguments: bool = False


class Dialect(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model writes calls and thoughts, and how its chat template reads messages.

    `chat/dialect` makes it. The defaults are those of a template of which
    nothing could be learnt.
    """

    calls: CallFormat = UNKNOWN_FORMAT
    # Markers of the model's thoughts; empty if it has none.
    thoughts: tuple[ThoughtMarkers, ...] = ()
    # The template renders thoughts, but their markers could not be detected.
    has_unknown_thoughts: bool = False
    messages: MessageForms = MessageForms()
