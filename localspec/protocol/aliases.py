"""Fields of other servers' requests for text that are served here under names of ours.

vLLM's and SGLang's clients send them (outlines, instructor, their own SDKs). A request may use one name for
each thing.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.sampling import INT32, Count, RepeatPenalty, Sampled

MAX_CHOICE_TEXTS = 1024  # texts one of which an answer is to be
MAX_STOP_TOKENS = 128

ChoiceTexts = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)]


class StructuredOutputs(Request):
    """vLLM's constraint: one of `json` (a schema or its text), `regex`, `choice`, `grammar`, `json_object`.

    `structural_tag` is refused.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: ChoiceTexts | None = None
    grammar: str | None = None
    json_object: OrDefault[bool] = False
    structural_tag: Any = None


class Aliases(Sampled):
    """`guided_…` and `structured_outputs`: vLLM's constraints, in its older and its newer form. `ebnf`:
    SGLang's name of `grammar`. `repetition_penalty`: `repeat_penalty` elsewhere. `min_tokens`: neither the
    model's own end nor `stop_token_ids` come before so many tokens; a constraint that allows nothing more
    ends the answer all the same, and so does a stop string. `stop_token_ids`: token ids that end the answer
    and are not shown.
    """

    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    ebnf: str | None = None
    repetition_penalty: RepeatPenalty | None = None
    min_tokens: Count | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, le=INT32)]], Meta(max_length=MAX_STOP_TOKENS)]
        | None
    ) = None
