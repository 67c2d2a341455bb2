"""Frames between the daemon and its engine worker, over one socketpair.

A frame is a 4-byte little-endian length and a msgpack body with one tagged struct. Requests carry
an `id` chosen by the daemon, and every message about a request carries the same id.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from localspec.protocol.calls import ToolSet
from localspec.protocol.dialect import Dialect
from localspec.protocol.pieces import Piece, Text, merge_pieces
from localspec.protocol.requests import SamplingParameters
from localspec.protocol.settings import (
    DrafterKind,
    LoopGuardScope,
    Pooling,
    Upstream,
    VerificationRule,
)
from localspec.protocol.settings import EngineSettings as EngineSettings

# Bytes. A prompt of a million tokens is a few MB; more than this is a bug, not a request.
MAX_FRAME_BYTES = 256 * 1024 * 1024
_HEADER = struct.Struct("<I")
# The name under which states are saved for requests that name no conversation.
ANONYMOUS_CLIENTS = "clients"
PRIVATE = "private"  # stands for the conversation of private requests; nothing of it is saved


class Frame(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of all frames."""


# ---------------------------------------------------------------------------- contents of a request


class Message(msgspec.Struct, omit_defaults=True):
    """One chat message as the template sees it. `extra` holds tool calls, names and so on."""

    role: str
    content: str | None = None
    extra: dict[str, Any] = {}


class ChatPrompt(msgspec.Struct, tag="chat", omit_defaults=True):
    """A chat that is rendered by the target's own chat template."""

    messages: list[Message]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    answer_prefix: str = ""  # written as the beginning of the answer, which does not repeat it
    # The answer continues the last message. Its turn is not closed, and no new one is opened.
    # `answer_prefix` repeats its text, or its thoughts, in which case it has nothing else.
    continued: Literal["", "content", "reasoning_content"] = ""
    parse_special: bool = False  # special tokens that messages spell out are parsed as such
    pictures: list[bytes] = []  # files; `picture_mark` stands for each in the texts, in this order
    picture_mark: str = ""


class TextPrompt(msgspec.Struct, tag="text", omit_defaults=True):
    """A plain text. `special` parses control tokens in it. BOS follows the model's own flag."""

    text: str
    special: bool = True


class TokenPrompt(msgspec.Struct, tag="tokens"):
    """Token ids, used unchanged."""

    tokens: list[int]


class InfillPrompt(msgspec.Struct, tag="infill", omit_defaults=True):
    """A fill-in-the-middle prompt.

    It is assembled with the model's own FIM tokens, as llama-server's /infill does.
    """

    prefix: str
    suffix: str
    extra: list[tuple[str, str]] = []  # repository context as (file name, text) pairs
    prompt: str = ""  # the beginning of the line that contains the cursor; it follows the prefix
    n_predict: int = 0


class MixedPrompt(msgspec.Struct, tag="mixed"):
    """Texts and token ids in sequence. BOS is added only before a text at the very beginning."""

    parts: list[str | int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt | MixedPrompt | InfillPrompt


class Sampling(SamplingParameters, omit_defaults=True):
    """Sampling parameters of a request."""

    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    text_bias: dict[str, float] = msgspec.field(default_factory=dict)  # of every token of a text
    ignore_eos: bool = False
    infill: bool = False  # comes last: an answer may end where it is not likely to go on


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A language that the answer must be in."""

    kind: Literal["json_object", "json_schema", "grammar", "regex"]
    source: str = ""  # JSON Schema text, GBNF, or a regular expression
    begun: str = ""  # the beginning of an answer that is continued
    param: str | None = None  # the request's field that contains the constraint
    strict: bool = False  # a schema is refused if one of its keywords cannot be enforced


class ThinkingLimit(msgspec.Struct, frozen=True):
    """How many tokens the thoughts before an answer may have."""

    tokens: int
    markers: list[tuple[str, str]]  # around thoughts; the second one ends them at the limit


class Rewrite(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text that the answer writes anew; it ends once the rest of the text certainly stays."""

    old: str
    marks: list[str] = []  # texts by which the model shows a cursor, which belong to no line


class SpeculationSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to speculate."""

    enabled: bool = True
    depth: int | None = None  # tokens drafted per round; None: the policy decides
    kind: DrafterKind = "auto"
    verification: VerificationRule = "auto"
    prediction: str | None = None  # text that the caller expects; drafts are looked up in it


# ---------------------------------------------------------------------------- daemon → worker


class PairFiles(msgspec.Struct, omit_defaults=True):
    """A pair by its name and absolute paths."""

    name: str
    target: str
    draft: str | None = None  # None: only the target
    # Files that draft for the target if the draft turns out to be of no use, the best first. The
    # target's own path stands for the heads in its file.
    other_drafts: tuple[str, ...] = ()
    draft_named: bool = False  # someone named the draft: it is not replaced while it is of any use
    tuned_draft: str = ""  # the draft that `localspec tune` has made, if there is one
    projector: str | None = None  # file by which the target reads pictures; None: only text
    projector_hint: str = ""  # what to do to have a projector, as a sentence
    chat_template: str = ""  # text of a chat template that replaces the one in the target's file
    sampling: dict[str, float] = {}  # default parameters that replace those in the target's file
    # How an embedding model makes one vector of a text. Such a model generates no text, see
    # daemon/worker/table.py.
    pooling: Pooling | None = None
    rpc: tuple[str, ...] = ()  # other machines that hold layers of the target
    upstream: Upstream | None = None  # the other server that answers; no worker gets such a pair


class Load(Frame, omit_defaults=True):
    """Load a pair. The reply is Loading…, then Loaded or LoadError."""

    pair: PairFiles
    settings: EngineSettings


# How a client sends an answer back: with its thoughts or bare, with blanks around it or trimmed, or what
# follows the end of thoughts in its text. "other": changed in a way that is not known. "": not seen yet.
AnswerForm = Literal["", "whole", "bare", "whole, trimmed", "bare, trimmed", "cut", "other"]


class SentBack(msgspec.Struct):
    """How a client sent the last answer of its chat back.

    - `right`: whether what was read ahead of that is in the prompt; None if nothing was.
    - `saved_ms`, `wasted_ms`: the time of reading what was and what was not.
    """

    form: AnswerForm
    right: bool | None = None
    saved_ms: float = 0.0
    wasted_ms: float = 0.0


class Generate(Frame, omit_defaults=True):
    """Generate one completion. The reply is Started, Reading…, Delta…, then Done or Failed."""

    id: int
    prompt: Prompt
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    max_tokens: int | None = None
    # Neither the model's own end nor `stop_token_ids` end the answer before this many tokens,
    # unless a constraint allows nothing else.
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []  # token ids that end the answer as the model's own end does
    constraint: Constraint | None = None
    thinking: ThinkingLimit | None = None
    # Where an answer that repeats itself without progress is ended.
    loop_guard: LoopGuardScope | None = None  # None: as the pair's settings say
    tools: ToolSet | None = None  # the tool calls that the answer may contain
    thoughts: list[tuple[str, str]] = []  # around thoughts before the constrained part
    speculative: SpeculationSettings = SpeculationSettings()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None  # report the prompt's own, with so many likelier tokens
    post_sampling: bool = False  # log-probabilities after all that changes a draw
    exact: bool | None = None
    cache_prompt: bool = True
    # Length in tokens from which a cached chunk may be moved to another position. The result is
    # close to what prefilling it there would give, but not equal. 0: none may be moved.
    n_cache_reuse: int = 0
    # "ahead": read while nobody waits, if no other text has to make room. The worker makes such requests
    # itself, and a client sends what it will probably ask.
    priority: Literal["chat", "editor", "ahead"] = "chat"
    reveal_draft: bool = False
    max_predict_ms: int | None = None  # end the answer at the first newline after this time
    single_line_indent: int | None = None  # end the answer at a line indented less than this
    rewrite: Rewrite | None = None  # see localspec/chat/rewriting.py
    shown: list[str] = []  # control tokens with text, such as a call's marker
    conversation: str | None = None  # id of a saved one, whose state is saved apart
    return_tokens: bool = False  # deltas include the ids of their tokens
    timings: bool = False  # deltas include the time taken so far
    progress: bool = False  # report every pass that prefills the prompt, also the last one
    private: bool = False  # without a conversation, save nothing of this request
    read_ahead: bool = False  # the chat's next turn may be read while nobody waits
    client: str = ""  # the name of the program that sends it, of a chat
    # How that client will send the answer back. "": what is read has to be the same with thoughts and
    # without; "other": nothing is read.
    form: AnswerForm = ""


EmbeddingInput = str | list[int | str]  # a text, token ids, or texts and ids mixed


class Embed(Frame, omit_defaults=True):
    """Turn texts into vectors.

    The reply is Reply with {"vectors": [bytes…], "tokens": [int…]}, with one item for each input:
    its vector as little-endian float32, and the number of tokens read.
    """

    id: int
    inputs: list[EmbeddingInput]
    truncate: bool = False  # read only the beginning of an input that is too long, or refuse it
    dimensions: int = 0  # return only this many leading elements; 0: all
    # 2 scales vectors to length 1; another p > 0 normalizes by the p-norm; 0 scales the largest
    # element to 32760; -1 changes nothing.
    normalize: int = 2
    most: int = 0  # tokens that are read of each input at most; 0: all


class Rerank(Frame, omit_defaults=True):
    """Score how well each document answers the query.

    The reply is Reply with {"scores": [float…], "tokens": [int…]}.
    """

    id: int
    query: str
    documents: list[str]
    truncate: bool = False  # read only the beginning of a document that is too long
    most: int = 0  # tokens that are read of each document at most; 0: all


class Cancel(Frame):
    """Stop request `id` within one step. It ends with Done and the finish_reason "cancelled"."""

    id: int


# The daemon holds a whole reply in memory, and it does nothing else while it decodes one.
MAX_REPLY_TOKENS = 1 << 20
MAX_REPLY_PIECES = 1 << 17
MAX_REPLY_TEXT_BYTES = 16 << 20  # bytes


class Tokenize(Frame, omit_defaults=True):
    """Tokenize a text.

    The reply is Reply with {"tokens": [...], "pieces": [bytes…]}; pieces are included on request
    only. More than MAX_REPLY_TOKENS tokens or MAX_REPLY_PIECES pieces are refused.
    """

    id: int
    text: str
    add_special: bool = False
    parse_special: bool = True
    pieces: bool = True


class Detokenize(Frame):
    """Turn token ids into text. The reply is Reply with {"content": str}.

    Ids outside the vocabulary are refused, and so is a text of more than MAX_REPLY_TEXT_BYTES.
    """

    id: int
    tokens: list[int]


class ApplyTemplate(Frame):
    """Render a chat. The reply is Reply with {"prompt": str}."""

    id: int
    prompt: ChatPrompt


class CountTokens(Frame):
    """Count the tokens of a prompt, even if it does not fit. The reply is Reply with {"tokens": int}."""

    id: int
    prompt: Prompt


class Ping(Frame):
    """Ask for a sign of life. Pong comes at once, even while a pass takes long."""

    id: int


class Forget(Frame):
    """Delete what is saved of a conversation's text; None: of all conversations.

    The reply is an empty Reply, once no file contains it and none will, even if the worker is
    shutting down.
    """

    id: int
    conversation: str | None


class Spare(Frame):
    """Limit the memory of cached prefixes without a slot.

    The reply is Reply with {"room": int}, the bytes that they may use from now on.
    """

    id: int
    most: int  # bytes from now on, if as many are available


class EndThoughts(Frame):
    """End the thoughts of a running generation, so that its answer follows.

    The reply is Reply with {"ended": bool}: whether the generation was in its thoughts.
    """

    id: int
    request: int  # the id of the generation


class Shutdown(Frame):
    """Save conversations' states, within a few seconds, and exit. The daemon has drained before."""


# ---------------------------------------------------------------------------- worker → daemon


class Loading(Frame):
    """Progress of a load. `stage` is "target", "draft" or "profile"; `fraction` is 0…1."""

    stage: str
    fraction: float


class PromptCost(msgspec.Struct, frozen=True):
    """The cost of prefilling prompts, in seconds."""

    token_s: float  # cost of a text's first token
    deeper_s: float = 0.0  # additional cost of a token for each token before it, due to attention

    def token_seconds(self, position: float) -> float:
        """Return the seconds that the token at this position takes."""
        return self.token_s + self.deeper_s * position

    def range_seconds(self, start: float, end: float) -> float:
        """Return the seconds that the tokens between two positions take."""
        return (end - start) * self.token_seconds((start + end) / 2)


class PassCosts(msgspec.Struct, frozen=True):
    """The cost of passes measured at load, in milliseconds.

    - `target_ms`, `draft_ms`: by the width of the pass in tokens.
    - `overhead_ms`: the cost of a round besides its passes.
    """

    target_ms: dict[int, float]
    draft_ms: dict[int, float]
    overhead_ms: float


class Loaded(Frame, omit_defaults=True):
    """The pair that is loaded, as /props and status show it."""

    name: str
    target_description: str
    draft_description: str | None
    n_ctx: int  # tokens that all requests share
    parallel: int
    chat_template: str | None
    bos_token: str
    eos_token: str
    dialect: Dialect = Dialect()  # what the engine has learnt from the chat template
    speculation: str | None = None  # the reason why drafts are impossible, if they are
    backend: str = "cpu"
    sampling_defaults: dict[str, Any] = {}  # of a request that does not set these parameters
    costs: PassCosts | None = None  # None: it generates no text
    notes: list[str] = []  # what was reduced for lack of memory
    reading: PromptCost | None = None  # as in Started
    reads_pictures: bool = False


class LoadError(Frame):
    """The pair cannot be loaded. The worker stays alive without a pair."""

    message: str


class TokenLogprob(msgspec.Struct):
    """One token and its log-probability under the target. `piece` is its raw bytes."""

    id: int
    piece: bytes
    logprob: float
    top: list[tuple[int, bytes, float]] = []
    offset: int = -1  # characters of the text before its bytes; -1 if another server does not say
    rank: int = 0  # of a prompt's token: 1 for the likeliest; 0 if it is not known
    # Of an answer's token: whether any of its text is content, and not reasoning or part of a call.
    is_content: bool = True


CacheSource = Literal["slot", "memory", "disk", "shift"]  # where cached tokens may come from
CACHE_SOURCES: tuple[CacheSource, ...] = get_args(CacheSource)
CacheLoss = Literal["evicted", "checkpoint"]  # why known tokens are not cached


class Started(Frame, omit_defaults=True):
    """The prompt is tokenized and has a slot."""

    id: int
    prompt_tokens: int
    cached_tokens: int
    # Where the cached tokens come from. "memory" and "disk" are prefixes without a slot; with
    # "shift" some were moved from another position of the text.
    cache: Literal[""] | CacheSource = ""
    logit_bias: dict[int, float] = {}  # the biases of a request that has any
    reading: PromptCost | None = None  # cost of prefilling the prompt, as far as it is known by now
    note: str = ""  # a part of the request that cannot be fulfilled
    news: str = ""  # a message for the user about the pair that answers
    stand_in: str = ""  # the pair that answers, if it is not the requested one
    exact_tokens: int | None = None  # cached ones before the first that was moved; None: not known


class Reading(Frame, omit_defaults=True):
    """A pass has prefilled a part of the prompt.

    The first token of a prompt follows nothing, so its log-probability is 0 and means nothing.
    """

    id: int
    processed: int  # tokens of the prompt that are in the cache now
    ms: float  # milliseconds since the request got its slot
    reading: PromptCost | None = None  # as in Started
    scores: list[TokenLogprob] = []  # of the prompt's next tokens, on request
    scores_from: int = 0  # position in the prompt of the first of them


class Timings(msgspec.Struct):
    """llama-server's `timings`, with its names. Times are milliseconds; rates are tokens per second.

    As in llama-server, `predicted_ms` is the time from the first token to the last, and the rates
    of predicted tokens do not include the first one. Five fields are extensions:

    - `cache_shift_n`: cached tokens that were moved in the cache for this request.
    - `cache_exact_n`: cached tokens before the first one that was moved, for this request or an
      earlier one. If it is less than `cache_n`, the answer is only close to what prefilling
      everything would give. It is left out if it is not known, as for another server.
    - `cache_ahead_n`: cached tokens that were read before the request came, while nobody waited.
    - `cache_known_n`: tokens with which the prompt and a recent prompt and answer begin alike. What
      follows is new, or stands behind a change.
    - `cache_loss`: why less than that is cached. `evicted`: the earlier text had to make room.
      `checkpoint`: the model's state could not go back so far. It is left out if (nearly) all is.
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
    cache_known_n: int | msgspec.UnsetType = msgspec.UNSET
    cache_ahead_n: int | msgspec.UnsetType = msgspec.UNSET
    cache_loss: CacheLoss | msgspec.UnsetType = msgspec.UNSET


class Delta(Frame, omit_defaults=True):
    """Pieces to show now: complete UTF-8 characters only, never a part of a stop string."""

    id: int
    pieces: list[Piece] = []
    logprobs: list[TokenLogprob] = []  # the tokens that produced the text, on request
    tokens: int = 0  # tokens generated so far
    ids: list[int] = []  # ids of the tokens that produced the text, on request
    timings: Timings | None = None  # time taken so far, on request

    @property
    def text(self) -> str:
        """The content, without reasoning and calls."""
        texts = [piece for piece in self.pieces if isinstance(piece, Text)]
        return "".join(piece.text for piece in texts if piece.kind == "content")

    @property
    def drafted(self) -> list[tuple[int, int]]:
        """The spans that came from a draft, of a delta that is one text."""
        match self.pieces:
            case [Text() as piece]:
                return piece.drafted
        return []

    def merge(self, more: Delta) -> Delta:
        """Return one delta with the content of this one and of `more`, which follows it."""
        return Delta(
            self.id,
            merge_pieces([*self.pieces, *more.pieces]),
            self.logprobs + more.logprobs,
            more.tokens,
            self.ids + more.ids,
            more.timings,
        )


class Speculation(msgspec.Struct):
    """What speculation did for one answer.

    - `rounds`: target passes that produced tokens.
    - `plain_tokens_per_second`: the rate that the target alone would have had in the same moments, from
      what passes cost by their width. What other programs on the machine have cost is in both rates.
    - `speed_up`: the achieved rate divided by that rate; null if it is not known.
    - `speed_up_reason`: why it is not known.
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
    speed_up_reason: str | None = None
    verification: str | None = None
    exact: bool = False
    predicted_accepted: int = 0
    predicted_rejected: int = 0


class Verified(msgspec.Struct, frozen=True, array_like=True):
    """One target pass that verified drafts of this kind; "" if it had none."""

    drafted: int
    accepted: int
    kind: str = ""


class Done(Frame, omit_defaults=True):
    """The end of a generation."""

    id: int
    finish_reason: str  # "stop" (the model's own end, or a stop string), "length" or "cancelled"
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    speculation: Speculation
    stop_string: str | None = None
    truncated: bool = False  # the context ended the answer, not the request's own limit
    loop: Literal["", "thoughts", "text"] = ""  # where the answer repeated itself, and was ended
    depths: list[int] = []  # `depths[n]` is the number of target passes that verified n drafts
    accepts: list[int] = []  # `accepts[n]` is the number of target passes that accepted n drafts
    passes: int = 0  # the engine's passes for all requests since the last request ended
    busy: int = 0  # the number of sequences in those passes, summed up
    trace: list[Verified] = []  # every pass that produced tokens, with `timings`
    sent_back: SentBack | None = None  # of a chat that goes on


class Failed(Frame, omit_defaults=True):
    """Request `id` failed; the worker goes on. The fields are those of errors.LocalspecError."""

    id: int
    code: str
    message: str
    param: str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class Preparing(Frame):
    """Request `id` is about to be tokenized, or has been.

    If the worker dies between the two, the request's text is the cause.
    """

    id: int
    begins: bool


class Reply(Frame):
    """The answer to an order, or to a small request: tokenize, apply a template, count tokens."""

    id: int
    value: dict[str, Any]


class Pong(Frame, omit_defaults=True):
    """The answer to Ping."""

    id: int
    # Seconds since the step loop last completed a pass or anything else; 0 if it has nothing to
    # do. A loop or a pass that never ends is detected by it.
    still_s: float = 0.0


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
    | EndThoughts
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
    | Notice
)

_encoder = msgspec.msgpack.Encoder()
to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode_frame(frame: Frame) -> bytes:
    """Return a frame's header and body, ready to send."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def frame_length(header: bytes | bytearray) -> int:
    """Return the length of the body in bytes. Raises ValueError if the stream is not ours or out of step."""
    length: int = _HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return length


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Yield the bodies of all complete frames and remove them. Raises ValueError as `frame_length`."""
    while len(buffer) >= HEADER_BYTES:
        end = HEADER_BYTES + frame_length(buffer[:HEADER_BYTES])
        if len(buffer) < end:
            return
        body = bytes(buffer[HEADER_BYTES:end])
        del buffer[:end]
        yield body


HEADER_BYTES = _HEADER.size


def read_frame(sock: socket.socket) -> bytes | None:
    """Return one body from a blocking socket, or None at a clean end of the stream."""
    header = _read_exactly(sock, HEADER_BYTES)
    return None if header is None else _read_exactly(sock, frame_length(header))


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < count:
        chunk = sock.recv(min(count - len(buffer), 1 << 20))
        if not chunk:
            return None
        buffer += chunk
    return bytes(buffer)
