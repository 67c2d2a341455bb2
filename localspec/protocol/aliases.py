"""Fields of other servers' requests that are served here under names of ours.

Clients of vLLM and SGLang send them (outlines, instructor, their own SDKs). A request may use only
one name for each thing.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.sampling import INT32, Count, RepeatPenalty, Sampled

MAX_CHOICE_TEXTS = 1024  # texts in `choice`, one of which the answer has to be
MAX_STOP_TOKENS = 128  # token ids in `stop_token_ids`

ChoiceTexts = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)]


class StructuredOutputs(Request):
    """vLLM's constraint on an answer, of which exactly one kind may be set.

    - `json`: a schema, as an object or as its text.
    - `regex`, `grammar`: a regular expression or a grammar that the answer has to match.
    - `choice`: texts, one of which the answer has to be.
    - `json_object`: the answer has to be a JSON object.
    - `structural_tag`: refused.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: ChoiceTexts | None = None
    grammar: str | None = None
    json_object: OrDefault[bool] = False
    structural_tag: Any = None


class Aliases(Sampled):
    """Fields of vLLM and SGLang that text generation serves."""

    # vLLM's constraints, in their older form (`guided_…`) and their newer one.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # SGLang's name of `grammar`.
    ebnf: str | None = None
    # The name of `repeat_penalty` in vLLM and SGLang.
    repetition_penalty: RepeatPenalty | None = None
    # Before this many tokens neither the model's own end nor `stop_token_ids` may end the
    # answer. A stop string still may, and so does a constraint that allows no further token.
    min_tokens: Count | None = None
    # Token ids that end the answer and are not shown.
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, le=INT32)]], Meta(max_length=MAX_STOP_TOKENS)]
        | None
    ) = None
