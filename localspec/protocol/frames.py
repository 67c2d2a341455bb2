"""Frames between the daemon and its engine worker, over one socketpair.

A frame is a 4-byte little-endian length and a msgpack body holding one tagged struct. Requests carry
an `id` chosen by the daemon; every message about that request carries it back.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from localspec.protocol.calls import Tools
from localspec.protocol.sampling import Sampled
from localspec.protocol.settings import EngineSettings as EngineSettings
from localspec.protocol.settings import Pooling, Upstream

# Bytes. A prompt of a million tokens is a few MB; more than this is a bug, not a request.
MAX_FRAME = 256 * 1024 * 1024
_HEADER = struct.Struct("<I")
ANYONE = "clients"  # in place of a conversation, whose text is saved: of those who named none


class Frame(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of all frames."""


# ---------------------------------------------------------------------------- what a request asks


class Message(msgspec.Struct, omit_defaults=True):
    """One chat message as the template sees it. `extra` holds tool calls, names and so on."""

    role: str
    content: str | None = None
    extra: dict[str, Any] = {}


class ChatPrompt(msgspec.Struct, tag="chat", omit_defaults=True):
    """Rendered through the target's own chat template.

    `answer_prefix` is written after it as the beginning of the answer, which is not repeated.
    `continued`: the answer goes on with the last message, whose text (or thoughts, which then are all
    it has) `answer_prefix` repeats; its turn is not closed and none is opened.
    `parse_special`: special tokens that messages spell are read as such, and not as text.
    """

    messages: list[Message]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    answer_prefix: str = ""
    continued: Literal["", "content", "reasoning_content"] = ""
    parse_special: bool = False


class TextPrompt(msgspec.Struct, tag="text", omit_defaults=True):
    """Plain text. `special` parses control tokens written in it; BOS follows the model's own flag."""

    text: str
    special: bool = True


class TokenPrompt(msgspec.Struct, tag="tokens"):
    """Token ids, taken as they are."""

    tokens: list[int]


class InfillPrompt(msgspec.Struct, tag="infill", omit_defaults=True):
    """Fill-in-the-middle, assembled with the model's own FIM tokens as llama-server's /infill does.

    `extra` is repository context as (file name, text) pairs; `prompt` is the beginning of the line
    the cursor is in, and follows the prefix.
    """

    prefix: str
    suffix: str
    extra: list[tuple[str, str]] = []
    prompt: str = ""
    n_predict: int = 0


class MixedPrompt(msgspec.Struct, tag="mixed"):
    """Texts and token ids, one after the other; BOS comes before a text at the beginning alone."""

    parts: list[str | int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt | MixedPrompt | InfillPrompt


class Sampling(Sampled, omit_defaults=True):
    """Sampling as asked. infill: llama.cpp's sampler of that name comes last, which lets a completion
    end where writing on is not likely. `text_bias` is for every token of a text.
    """

    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    text_bias: dict[str, float] = msgspec.field(default_factory=dict)
    ignore_eos: bool = False
    infill: bool = False


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A language the answer must be in. `source`: JSON Schema text, GBNF, or a regular expression;
    `begun`: how the answer begins, where it is continued. `param`: the field that asks for it. `strict`:
    a schema is refused if a keyword of it cannot be enforced; else the keyword is left out."""

    kind: Literal["json_object", "json_schema", "grammar", "regex"]
    source: str = ""
    begun: str = ""
    param: str | None = None
    strict: bool = False


class ThinkingLimit(msgspec.Struct, frozen=True):
    """How many tokens the thoughts before an answer may have. `markers`: pairs of texts between which
    thoughts stand; the second one ends them when there have been so many."""

    tokens: int
    markers: list[tuple[str, str]]


class Speculative(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to speculate. depth None: the policy decides; an int: that many, always.

    `prediction` is text the caller expects in the answer (OpenAI's field), drafted from by lookup.
    """

    enabled: bool = True
    depth: int | None = None
    kind: Literal["auto", "draft", "mtp", "ngram"] = "auto"
    verification: Literal["auto", "match", "rejection"] = "auto"
    prediction: str | None = None


# ---------------------------------------------------------------------------- daemon → worker


class PairFiles(msgspec.Struct, omit_defaults=True):
    """A pair by name and absolute paths. `draft` None: the target alone. `pooling`: the target writes
    nothing; it turns texts into numbers, and so makes one row of a text's (see purpose.py).

    `chat_template`, its text, and `sampling`, defaults by parameter, go before what the target's file says.
    `rpc`: other machines that have layers of the target. `upstream`: another server answers; there are no
    files then, and no worker is told of it.
    """

    name: str
    target: str
    draft: str | None = None
    chat_template: str = ""
    sampling: dict[str, float] = {}
    pooling: Pooling | None = None
    rpc: tuple[str, ...] = ()
    upstream: Upstream | None = None


class Load(Frame, omit_defaults=True):
    """Load a pair. Answered by Loading…, then Loaded or LoadError."""

    pair: PairFiles
    settings: EngineSettings


class Generate(Frame, omit_defaults=True):
    """Generate one completion. Answered by Started, Reading…, Delta…, then Done or Failed.

    `shown` are control tokens whose text belongs to the answer (a tool call's marker); others are
    silent. `max_predict_ms` ends the answer at the first newline after that time, and
    `single_line_indent` at a line indented less. `conversation`: the id of a kept one, whose state is
    then saved apart from others'. `private`: without one, nothing of it is saved. `n_cache_reuse`: the
    least tokens of a chunk of the cache that may be moved
    to another place of the text, near as that is to what reading it there would give; 0: none may.
    `progress`: every pass that reads the prompt is told of, also the last; else those before it only.
    `tools`: the calls that the answer may have. `thoughts`: markers around thoughts that may stand at its
    beginning, before what `tools` and `constraint` ask of the rest.
    `post_sampling`: log-probabilities are of the draw, after all that changes them. `return_tokens`:
    deltas name the tokens of their text, and `timings`: how long it has taken so far. `stop_token_ids` end
    the answer as the model's own end does; neither comes before `min_tokens` tokens, unless a constraint
    allows nothing else. `prompt_logprobs`: the prompt's own log-probabilities, with so many likeliest tokens
    beside each.
    """

    id: int
    prompt: Prompt
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    constraint: Constraint | None = None
    thinking: ThinkingLimit | None = None
    tools: Tools | None = None
    thoughts: list[tuple[str, str]] = []
    speculative: Speculative = Speculative()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    post_sampling: bool = False
    exact: bool | None = None
    cache_prompt: bool = True
    n_cache_reuse: int = 0
    priority: Literal["chat", "editor"] = "chat"
    reveal_draft: bool = False
    max_predict_ms: int | None = None
    single_line_indent: int | None = None
    shown: list[str] = []
    conversation: str | None = None
    return_tokens: bool = False
    timings: bool = False
    progress: bool = False
    private: bool = False


EmbeddingInput = str | list[int | str]  # a text, token ids, or texts and ids mixed


class Embed(Frame, omit_defaults=True):
    """Turn texts into numbers. Answered by Reply with {"vectors": [bytes…], "tokens": [int…]}, one of each
    for each input: float32, little-endian; how many tokens were read.

    `dimensions`: so many of the first numbers alone (0: all). `normalize`: 2 makes the sum of their
    squares 1, another p > 0 that of their p-th powers; 0 makes the largest 32760, and -1 changes nothing.
    An input that is too long is refused, unless `truncate`: then its beginning is read. `most`: tokens
    that are read of each input (0: all).
    """

    id: int
    inputs: list[EmbeddingInput]
    truncate: bool = False
    dimensions: int = 0
    normalize: int = 2
    most: int = 0


class Rerank(Frame, omit_defaults=True):
    """How well each document answers the query. Answered by Reply with {"scores": [float…],
    "tokens": [int…]}. `truncate`: of a document that is too long the beginning is read. `most`: tokens
    that are read of each document (0: all).
    """

    id: int
    query: str
    documents: list[str]
    truncate: bool = False
    most: int = 0


class Cancel(Frame):
    """Stop request `id` within one step; it answers Done with finish_reason "cancelled"."""

    id: int


# The daemon holds a whole reply, and nothing else happens there while it reads one.
MOST_TOKENS = 1 << 20
MOST_PIECES = 1 << 17
MOST_TEXT = 16 << 20  # bytes


class Tokenize(Frame, omit_defaults=True):
    """Answered by Reply with {"tokens": [...], "pieces": [bytes…]}, these only if they are asked for.

    More of them than MOST_TOKENS or MOST_PIECES are refused.
    """

    id: int
    text: str
    add_special: bool = False
    parse_special: bool = True
    pieces: bool = True


class Detokenize(Frame):
    """Answered by Reply with {"content": str}; ids outside the vocabulary are refused, and a text of
    more than MOST_TEXT.
    """

    id: int
    tokens: list[int]


class ApplyTemplate(Frame):
    """Answered by Reply with {"prompt": str}."""

    id: int
    prompt: ChatPrompt


class CountTokens(Frame):
    """Answered by Reply with {"tokens": int}, how long a prompt is, also one that does not fit."""

    id: int
    prompt: Prompt


class Ping(Frame):
    """Answered by Pong at once, also while a pass takes long."""

    id: int


class Forget(Frame):
    """Drop what is kept of a conversation's text, with None of all conversations.

    Answered by Forgotten once no file has it and none will get it, also while the worker ends.
    """

    id: int
    conversation: str | None


class Spare(Frame):
    """Prompts without a slot have room for `most` bytes from now on, or for as many as there are.

    Answered by Spared.
    """

    id: int
    most: int


class Shutdown(Frame):
    """Save conversations' states, for some seconds at most, and exit; the daemon has drained before."""


# ---------------------------------------------------------------------------- worker → daemon


class Loading(Frame):
    """Progress of a load: stage is "target", "draft", "profile"; fraction 0…1."""

    stage: str
    fraction: float


class PromptCost(msgspec.Struct, frozen=True):
    """What reading prompts costs, in seconds: a text's first token, and what each token that is before
    another adds to it, for attention looks at them all.
    """

    token_s: float
    deeper_s: float = 0.0

    def at(self, position: float) -> float:
        """Of the token at this position."""
        return self.token_s + self.deeper_s * position

    def of(self, start: float, end: float) -> float:
        """Of the tokens from one position to another."""
        return (end - start) * self.at((start + end) / 2)


class Loaded(Frame, omit_defaults=True):
    """The pair that is loaded, as /props and status show it. n_ctx: tokens that all requests share;
    sampling_defaults: how a request is sampled that says nothing of it.
    """

    name: str
    target_description: str
    draft_description: str | None
    n_ctx: int
    parallel: int
    chat_template: str | None
    bos_token: str
    eos_token: str
    speculation: str | None = None  # why not, when drafts are impossible
    backend: str = "cpu"
    sampling_defaults: dict[str, Any] = {}
    profile: dict[str, Any] = {}
    notes: list[str] = []  # what had to give for want of memory
    reading: PromptCost | None = None  # as Started has it


class LoadError(Frame):
    """The pair cannot be loaded; the worker stays empty and alive."""

    message: str


class TokenLogprob(msgspec.Struct):
    """One token and its log-probability under the target; `piece` are its raw bytes.

    `offset`: the character of the text in which its bytes begin; -1 where that is not known, of another
    server. `rank`, of a prompt's tokens: 1 for the likeliest; 0 where that is not known.
    """

    id: int
    piece: bytes
    logprob: float
    top: list[tuple[int, bytes, float]] = []
    offset: int = -1
    rank: int = 0


Cache = Literal["slot", "memory", "disk", "shift"]  # where cached tokens may come from
CACHES: tuple[Cache, ...] = get_args(Cache)


class Started(Frame, omit_defaults=True):
    """The prompt is tokenized and has a slot. `tail`: the last characters of a chat's prompt.

    `exact_tokens`: of the cached ones those before the first that was moved in the cache; None: it is not
    known. `cache`: where the cached tokens come from; "memory" and "disk" are prefixes that had no slot, of
    "shift" some were moved from another place of the text. `logit_bias`: of a request that has any.
    `reading`: what that costs, as far as it is known by now. `thoughts`: what opens and closes them.
    `note`: what of the request cannot be had. `news`: what whoever asked must be told of who answers, and
    `stand_in`: the pair that does, where it is not the one that was asked.
    """

    id: int
    prompt_tokens: int
    cached_tokens: int
    tail: str = ""
    cache: Literal[""] | Cache = ""
    logit_bias: dict[int, float] = {}
    reading: PromptCost | None = None
    note: str = ""
    thoughts: list[tuple[str, str]] = []
    news: str = ""
    stand_in: str = ""
    exact_tokens: int | None = None


class Reading(Frame, omit_defaults=True):
    """A pass has read a part of the prompt: so many of its tokens are read now, the cached ones
    among them, `ms` after the request got its slot. `reading`: as Started has it. `scores`: of the
    prompt's tokens the next ones, where `prompt_logprobs` were asked for, the first of them the prompt's
    token number `scores_from`. The first token of a prompt follows nothing, so its log-probability is 0
    and says nothing.
    """

    id: int
    processed: int
    ms: float
    reading: PromptCost | None = None
    scores: list[TokenLogprob] = []
    scores_from: int = 0


class Timings(msgspec.Struct):
    """llama-server's `timings`, in its names. Milliseconds; rates are tokens per second.

    As there, `predicted_ms` is from the first token to the last, and the rates of predicted tokens are of
    those after the first. What it has not, of the cached tokens: `cache_shift_n`, those moved in the cache
    for this request, and `cache_exact_n`, those before the first that was moved for this one or an earlier
    one: if that is fewer than `cache_n`, the answer is near to what a fresh reading gives. It is left out
    where it is not known, as of another server.
    """

    cache_n: int = 0
    cache_shift_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    prompt_per_token_ms: float = 0.0
    prompt_per_second: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_token_ms: float = 0.0
    predicted_per_second: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    cache_exact_n: int | msgspec.UnsetType = msgspec.UNSET


class CallPart(msgspec.Struct, omit_defaults=True):
    """A call that begins, where it has a `name`, and more of the JSON of its arguments. `index` counts
    the calls of an answer from 0.
    """

    index: int
    name: str = ""
    id: str = ""
    arguments: str = ""


class Delta(Frame, omit_defaults=True):
    """Text to show now: whole UTF-8 characters only, never part of a stop string.

    `logprobs` has the tokens that produced it when asked for, and `ids` their ids; `drafted` are
    (start, end) character spans of `text` that came from the draft, when `reveal_draft` was set.
    `tokens` have been generated so far, in the time that `timings` tell when asked for. `thought` and
    `calls`: what another server has told apart from the text; a worker's own is all text.
    """

    id: int
    text: str
    logprobs: list[TokenLogprob] = []
    drafted: list[tuple[int, int]] = []
    tokens: int = 0
    ids: list[int] = []
    timings: Timings | None = None
    thought: str = ""
    calls: list[CallPart] = []

    def and_then(self, more: Delta) -> Delta:
        """This and what follows it, in one."""
        shift = len(self.text)
        return Delta(
            self.id,
            self.text + more.text,
            self.logprobs + more.logprobs,
            self.drafted + [(start + shift, end + shift) for start, end in more.drafted],
            more.tokens,
            self.ids + more.ids,
            more.timings,
            self.thought + more.thought,
            self.calls + more.calls,
        )


class Speculation(msgspec.Struct):
    """What speculation did for one answer.

    `rounds` counts target passes that produced tokens. `plain_tokens_per_second` is the measured
    rate of width-1 passes at this context length; `speed_up` is the achieved rate over it.
    """

    active: bool = False
    kind: str | None = None
    reason: str | None = None
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    mean_tokens_per_pass: float = 0.0
    plain_tokens_per_second: float | None = None
    speed_up: float | None = None
    verification: str | None = None
    exact: bool = False
    predicted_accepted: int = 0
    predicted_rejected: int = 0


class Verified(msgspec.Struct, frozen=True, array_like=True):
    """What one target pass made of drafts of this kind; "" where it had none."""

    drafted: int
    accepted: int
    kind: str = ""


class Done(Frame, omit_defaults=True):
    """The end of a generation.

    finish_reason: "stop" (end of generation or a stop string), "length", "cancelled". `truncated`: it was
    the context that ended it, and not the request's own limit. `depths[n]`: target
    passes that verified n drafts; `accepts[n]`: those that accepted n of them. `passes`: of the engine for
    all requests, since the last one ended, with so many sequences altogether (`busy`). `trace`: every pass
    that wrote, in order, when `timings` were asked for.
    """

    id: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    speculation: Speculation
    stop_string: str | None = None
    truncated: bool = False
    depths: list[int] = []
    accepts: list[int] = []
    passes: int = 0
    busy: int = 0
    trace: list[Verified] = []


class Failed(Frame, omit_defaults=True):
    """Request `id` failed; the worker goes on. The fields are errors.LocalspecError's."""

    id: int
    code: str
    message: str
    param: str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class Preparing(Frame):
    """Request `id` is becoming tokens, or has: a death between the two is of its text's making."""

    id: int
    begins: bool


class Reply(Frame):
    """The answer to a small request: tokenize, detokenize, apply-template, count tokens."""

    id: int
    value: dict[str, Any]


class Pong(Frame, omit_defaults=True):
    """`still_s`: for how long the step loop has not come a pass, or anything else, further.

    0 where it has nothing to do. A loop or a pass that never ends is seen by it.
    """

    id: int
    still_s: float = 0.0


class Spared(Frame):
    """`room`: bytes that prompts without a slot may take from now on."""

    id: int
    room: int


class Forgotten(Frame):
    id: int


class Notice(Frame):
    """A sentence for the daemon's log."""

    text: str


ToWorker = (
    Load
    | Generate
    | Embed
    | Rerank
    | Cancel
    | Tokenize
    | Detokenize
    | ApplyTemplate
    | CountTokens
    | Forget
    | Spare
    | Ping
    | Shutdown
)
FromWorker = (
    Loading
    | Loaded
    | LoadError
    | Preparing
    | Started
    | Reading
    | Delta
    | Done
    | Failed
    | Reply
    | Pong
    | Forgotten
    | Spared
    | Notice
)

_encoder = msgspec.msgpack.Encoder()
to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(frame: Frame) -> bytes:
    """Header and body, ready to send."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME:
        raise ValueError(f"frame of {len(body)} bytes exceeds {MAX_FRAME}")
    return _HEADER.pack(len(body)) + body


def frame_length(header: bytes | bytearray) -> int:
    """Body length in bytes from a 4-byte header.

    Raises:
        ValueError: longer than MAX_FRAME, so the stream is not ours or out of step.
    """
    length: int = _HEADER.unpack(header)[0]
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes exceeds {MAX_FRAME}")
    return length


def taken(buffer: bytearray) -> Iterator[bytes]:
    """The bodies of the frames that are whole, each of which leaves the buffer.

    Raises:
        ValueError: as frame_length, after those before it.
    """
    while len(buffer) >= HEADER_SIZE:
        end = HEADER_SIZE + frame_length(buffer[:HEADER_SIZE])
        if len(buffer) < end:
            return
        body = bytes(buffer[HEADER_SIZE:end])
        del buffer[:end]
        yield body


HEADER_SIZE = _HEADER.size


def read_blocking(sock: socket.socket) -> bytes | None:
    """One body from a blocking socket, or None at a clean end of stream."""
    header = _read_exactly(sock, HEADER_SIZE)
    return None if header is None else _read_exactly(sock, frame_length(header))


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < count:
        chunk = sock.recv(min(count - len(buffer), 1 << 20))
        if not chunk:
            return None
        buffer += chunk
    return bytes(buffer)
