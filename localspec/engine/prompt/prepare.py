"""Prepare a request for the engine: tokens, sampler, compiled grammar.

This happens in threads beside the step loop (`preparers`), so that a slow template or a large grammar delays
no other answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import msgspec

from localspec.chat.dialect import pieces
from localspec.chat.reader import reader_of
from localspec.engine.cache.prefixes import Prefix
from localspec.engine.llama import (
    PictureRows,
    Vocab,
    check_tokens,
    infill_rule,
    is_picture,
)
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.pair.profile import WIDTHS
from localspec.engine.prompt.infill import (
    MAX_CHARS_PER_TOKEN,
    infill_tokens,
    make_text_tokenizer,
    prompt_budget,
)
from localspec.engine.prompt.pictures import Encoded, Pictures, RequestPictures, place_pictures
from localspec.engine.prompt.preparers import (
    EngineRequest,
    IsCancelled,
    Request,
    SmallRequest,
    Unfinished,
    answer_tokenize,
)
from localspec.engine.prompt.special_tokens import RenderedPrompt, SpecialTokens
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sampling.grammars.compile import NEVER_CANCELLED, Grammars
from localspec.engine.sampling.guide import CombinedGuide, DeferredGuide
from localspec.engine.sampling.loops import LoopGuard, count_repeats
from localspec.engine.sampling.penalties import Breakers, BreakerTable
from localspec.engine.sampling.sampler import MinimumLength, Sampler, infill_sampler
from localspec.engine.sampling.settings import Settings, resolve_settings
from localspec.engine.sampling.thoughts import NO_LIMIT, ThoughtLimit, ThoughtMarker
from localspec.engine.sequence import TokenizedRequest
from localspec.engine.speculation.drafters.ngram import NgramDrafter, NgramIndex
from localspec.errors import EXCEEDS_CONTEXT, ContextExceeded, InvalidRequest
from localspec.protocol.calls import CallFormat
from localspec.protocol.frames import (
    ApplyTemplate,
    ChatPrompt,
    CountTokens,
    Detokenize,
    Generate,
    InfillPrompt,
    Message,
    MixedPrompt,
    Prompt,
    Sampling,
    SpeculationSettings,
    TextPrompt,
    Tokenize,
    TokenPrompt,
)

THINK, END_THINK = "<think>", "</think>"
_UNKNOWN_MARKS = (
    "This model marks its thoughts in a way that is not known, so they are part of its answer's "
    "text."
)
# A part of a word: two letters, or a character of an East Asian script.
_WORD = re.compile(r"[^\W\d_]{2}|[\u2e80-\u9fff\uac00-\ud7af]")
_TWO_BOS = "The prompt begins with two BOS tokens: its own '{0}', and one that the model adds."
# Characters of the end of a prompt, enough for a marker that the template has opened.
TAIL_CHARS = 64
_MAX_CHARS_PER_TOKEN = 8  # Average in texts of long words.
# Characters of a too long text that are tokenized to estimate its number of tokens.
_SAMPLE_CHARS = 4096


class Preparer:
    """A preparer of requests for one loaded pair. It is not thread-safe; each thread has its own."""

    def __init__(
        self,
        pair: LoadedPair,
        renderer: TemplateRenderer,
        grammars: Grammars | None = None,
        special: SpecialTokens | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """Prepare for requests of `pair`.

        grammars: the compiler of grammars; by default, one that compiles in this process.
        special: the pair's special tokens, if another preparer has found them already.
        pictures: what encodes pictures; None: the pair reads text only.
        """
        self._pair = pair
        self._pictures = pictures
        self._renderer = renderer
        self._grammars = grammars or Grammars(pair.vocab)
        self._special = special or SpecialTokens(pair.vocab, pair.chat_template)
        renderer.watch(self._special.spellings)
        vocab = pair.vocab
        self._breakers = BreakerTable(lambda: vocab.words, vocab.tokenize_piece)
        self._tail = ""  # The end of the last chat prompt, of which no more is kept.
        self._rows: list[PictureRows] = []  # The pictures of the last prompt.
        self._infill_text = make_text_tokenizer(vocab)
        # Uses the costs measured at loading, so that prompts do not change while an editor is in use.
        self._infill_budget = prompt_budget(pair.learned.costs.target.per_token_ms(WIDTHS[-1]))

    def estimate_s(self, request: Request) -> float:
        """Estimate the seconds that preparing the request takes, in a hundredth of that time."""
        chat = _chat_of(request)
        # Templates put special tokens around each message.
        n_cuts = 0 if chat is None else len(chat.messages)
        return self._pair.vocab.estimate_s("\n".join(_texts(request)), cuts=n_cuts)

    def find_pictures(self, request: Request) -> RequestPictures:
        """Find out which pictures of a request are encoded already."""
        pictures = RequestPictures()
        if self._pictures is None:
            return pictures
        for file in dict.fromkeys(_pictures_of(request)):
            if (encoded := self._pictures.find(file)) is not None:
                pictures.encoded[file] = encoded
            else:
                pictures.missing.append(file)
        return pictures

    def encode_next(
        self, request: Request, pictures: RequestPictures, is_cancelled: IsCancelled
    ) -> None:
        """Encode the first missing picture of a request, in any thread.

        Raises:
            InvalidRequest: the picture cannot be encoded.
            ContextExceeded: the pictures do not fit in the context.
            Cancelled: `is_cancelled` returned True.
            Unavailable: the process that encodes pictures does not work.
        """
        assert self._pictures is not None
        file = pictures.missing[0]
        pictures.encoded[file] = self._pictures.encode(file, is_cancelled)
        del pictures.missing[0]
        self._check_rows(pictures.encoded[file])
        files = _pictures_of(request)
        counts = [pictures.encoded[file].n_tokens for file in files if file in pictures.encoded]
        if (n_tokens := sum(counts)) >= self._pair.n_ctx:
            raise ContextExceeded(
                f"{len(counts)} of {len(files)} pictures have {n_tokens} tokens, which "
                f"{EXCEEDS_CONTEXT} of {self._pair.n_ctx} tokens; send fewer or set a larger "
                "`context`.",
                param="messages",
                n_prompt_tokens=n_tokens,
                n_ctx=self._pair.n_ctx,
            )

    def _check_rows(self, encoded: Encoded) -> None:
        """Refuse a picture whose rows attend to each other and do not fit into one pass."""
        context = self._pair.shared.context
        n_rows = max((len(part.rows) for part in encoded.rows if part.both_ways), default=0)
        if n_rows > context.n_ubatch:
            raise InvalidRequest(
                f"The picture has {n_rows} rows, and a pass holds {context.n_ubatch}; send a smaller one.",
                param="messages",
            )

    def prepare(self, request: EngineRequest) -> TokenizedRequest:
        """Return the request ready for `Engine.submit`, however long that takes.

        Raises:
            InvalidRequest: or a subclass, with the field at fault.
        """
        pictures = self.find_pictures(request)
        while pictures.missing:
            self.encode_next(request, pictures, NEVER_CANCELLED)
        ready = self.begin(request, pictures)
        return ready.finish(NEVER_CANCELLED) if isinstance(ready, Unfinished) else ready

    def begin(
        self, request: EngineRequest, pictures: RequestPictures
    ) -> TokenizedRequest | Unfinished[TokenizedRequest]:
        """Return the request ready for `Engine.submit`, or unfinished if a grammar must be compiled.

        pictures: those of the request, none of which is missing.

        Raises:
            InvalidRequest: or a subclass, with the field at fault.
        """
        if not isinstance(request, Generate):
            raise InvalidRequest(
                "This model writes text and computes no embeddings.", param="model"
            )
        self._tail = ""
        self._check_certain(request)
        reasoning = bool(request.thoughts)
        note = self._set_thoughts(request)
        tokens = self.tokens(request.prompt, pictures)
        rows = tuple(self._rows)
        settings = self._resolve_settings(request.sampling)
        tail, vocab = self._tail, self._pair.vocab
        texts = (vocab.tokenize(t, add_special=False, parse_special=True) for t in request.shown)
        shown = frozenset(shown[0] for shown in texts if len(shown) == 1)
        check_tokens(vocab, request.stop_token_ids, "stop_token_ids")
        limit = self._follow_thoughts(request)
        is_text = isinstance(request.prompt, TextPrompt | MixedPrompt)
        if is_text and vocab.add_bos and tokens[:2] == [vocab.bos] * 2:
            # The tokenizer adds another BOS token to that of the text. As in llama-server, both are read.
            note = _TWO_BOS.format(vocab.text(vocab.bos))
        exact = self._pair.is_exact(request, tokens)
        tokenized = TokenizedRequest(
            request,
            tokens,
            self._sampler(settings),
            limit if request.thinking is not None else None,
            self._ngram_index(request.speculative, tokens, settings),
            shown,
            tail,
            self._saved_prefix(request, tokens, exact),
            note,
            reader_of(request, tail, request.thoughts, reasoning=reasoning),
            self._loop_guard(request, limit, tokens),
            rows,
            exact,
        )
        job, _ = self._grammars.job(request, tail, self._form(request))
        if self._grammars.ready(job):
            return self._with_grammar(tokenized)
        return Unfinished(partial(self._with_grammar, tokenized))

    def _check_certain(self, request: Generate) -> None:
        """Raise InvalidRequest if a next turn depends on whether the client sends thoughts back."""
        prompt = request.prompt
        if request.id >= 0 or request.form or not isinstance(prompt, ChatPrompt):
            return
        *messages, answer, question = prompt.messages
        extra = {name: value for name, value in answer.extra.items() if name != "reasoning_content"}
        messages += Message(answer.role, answer.content, extra), question
        if self.render(prompt) != self.render(msgspec.structs.replace(prompt, messages=messages)):
            raise InvalidRequest("The next turn depends on whether it has the thoughts.")

    def _with_grammar(
        self, tokenized: TokenizedRequest, is_cancelled: IsCancelled = NEVER_CANCELLED
    ) -> TokenizedRequest:
        """Add the request's grammar. May be called in any thread."""
        request = tokenized.request
        guide, note = self._grammars.answer(
            request, tokenized.tail, tokenized.shown, is_cancelled, self._form(request)
        )
        if guide is not None:
            deferred = DeferredGuide(guide)
            limit = tokenized.matcher
            tokenized.matcher = deferred if limit is None else CombinedGuide(limit, deferred)
        tokenized.note = " ".join(filter(None, [note, tokenized.note]))
        if tokenized.request.min_tokens:
            vocab, guide = self._pair.vocab, tokenized.matcher
            ends = [*vocab.ends, *tokenized.request.stop_token_ids]
            minimum = MinimumLength(tokenized.request.min_tokens, ends, vocab.size)
            # The other guide comes first, so that a finished constraint may still end the answer.
            tokenized.matcher = minimum if guide is None else CombinedGuide(guide, minimum)
        return tokenized

    def _form(self, request: Generate) -> CallFormat | None:
        """Return how the model of a chat writes calls, and messages."""
        return self._renderer.dialect.calls if isinstance(request.prompt, ChatPrompt) else None

    def _set_thoughts(self, request: Generate) -> str:
        """Set the request's markers of thoughts to this model's. Return a note if they are unknown."""
        if not isinstance(request.prompt, ChatPrompt) or not request.thoughts:
            return ""
        dialect = self._renderer.dialect
        request.thoughts = list(dialect.thoughts)
        parts = (part for markers in request.thoughts for part in pieces(markers))
        request.shown = [*request.shown, *parts]
        return _UNKNOWN_MARKS if dialect.has_unknown_thoughts else ""

    def _follow_thoughts(self, request: Generate) -> ThoughtLimit | None:
        """Return the guide that limits the length of thoughts, or None if nothing can end them.

        A model whose template has no thoughts needs none.
        """
        limit, is_chat = request.thinking, isinstance(request.prompt, ChatPrompt)
        pairs = self._renderer.dialect.thoughts if is_chat else limit.markers if limit else ()
        vocab, markers = self._pair.vocab, []
        for opening, closing in pairs:
            tokens = vocab.tokenize(closing, add_special=False, parse_special=True)
            markers.append(ThoughtMarker(opening, closing, tokens))
        if not markers:
            return None
        piece = partial(vocab.piece, special=True)
        n_tokens = limit.tokens if limit is not None else NO_LIMIT
        return ThoughtLimit(n_tokens, markers, self._tail, piece, vocab.size)

    def _loop_guard(
        self, request: Generate, thoughts: ThoughtLimit | None, tokens: list[int]
    ) -> LoopGuard | None:
        scope = request.loop_guard or self._pair.settings.loop_guard
        if thoughts is None and scope != "all":
            return None
        vocab = self._pair.vocab
        ends_line = cache(lambda token: not is_picture(token) and b"\n" in vocab.piece(token))
        return LoopGuard(
            thoughts,
            has_word(vocab),
            limits_thoughts=request.thinking is not None,
            watches=scope,
            count_allowed=lambda: count_repeats(tokens, ends_line),
        )

    def _ngram_index(
        self, options: SpeculationSettings, prompt: list[int], settings: Settings
    ) -> NgramIndex:
        """Return the index for n-gram drafts. A prediction is cut to the length that an answer can have."""
        if not options.enabled or not NgramDrafter.asked_for(options):
            return NgramIndex()
        n_ctx = self._pair.n_ctx
        text = (options.prediction or "")[: n_ctx * MAX_CHARS_PER_TOKEN]
        predicted = self._pair.vocab.tokenize(text, add_special=False, parse_special=False)
        repeats = settings.greedy or settings.seed is not None
        return NgramIndex(predicted[:n_ctx], prompt, self._pair.memory, repeats=repeats)

    def _resolve_settings(self, sampling: Sampling) -> Settings:
        vocab, bias = self._pair.vocab, dict(sampling.logit_bias)
        for token in bias:
            vocab.check(token, f'logit_bias["{token}"]')
        for text, amount in sampling.text_bias.items():
            for token in vocab.tokenize(text, add_special=False, parse_special=False):
                bias[token] = bias.get(token, 0.0) + amount
        # As in llama-server, tokens that end an answer are never drawn, instead of ignored when drawn.
        forbidden = [*vocab.suppressed, *(vocab.ends if sampling.ignore_eos else ())]
        bias |= dict.fromkeys(forbidden, -math.inf)
        return replace(resolve_settings(sampling, self._pair.defaults), logit_bias=bias)

    def _sampler(self, settings: Settings) -> Sampler:
        breakers: Breakers = {}
        if settings.dry_multiplier > 0.0:
            breakers = self._breakers.find(settings.dry_sequence_breakers)
        rule = infill_rule(self._pair.vocab) if settings.infill else None
        infill = partial(infill_sampler, rule=rule) if rule is not None else None
        return Sampler(settings, breakers=breakers, narrowed=infill)

    def _saved_prefix(self, request: Generate, tokens: list[int], exact: bool) -> Prefix | None:
        """Return the saved state of the prompt's beginning, if any; the last token is always read."""
        if not request.cache_prompt or request.priority != "chat":
            return None
        return self._pair.load_saved_prefix(tokens[:-1], exact)

    def tokens(self, prompt: Prompt, pictures: RequestPictures, *, fits: bool = True) -> list[int]:
        """Return the tokens of a prompt of any kind, which has these pictures.

        fits: whether the prompt must fit in the context.

        Raises:
            InvalidRequest: the prompt is empty or invalid.
            ContextExceeded: the prompt does not fit.
        """
        vocab = self._pair.vocab
        self._rows = []
        match prompt:
            case TokenPrompt(tokens):
                check_tokens(vocab, tokens, "prompt")
            case MixedPrompt(parts):
                tokens = self._tokenize_mixed(parts, fits)
            case TextPrompt(text, special):
                if fits:
                    self._check_length(text)
                tokens = vocab.tokenize(text, add_special=True, parse_special=special)
            case InfillPrompt():
                tokens = infill_tokens(
                    vocab, prompt, self._pair.n_ctx, self._infill_budget, self._infill_text
                )
            case ChatPrompt():
                tokens = self._tokenize_chat(prompt, pictures, fits)
        if not tokens:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        return tokens

    def _tokenize_chat(
        self, prompt: ChatPrompt, pictures: RequestPictures, fits: bool
    ) -> list[int]:
        if prompt.pictures and self._pictures is None:
            raise InvalidRequest(
                f"The pair '{self._pair.files.name}' reads text and no pictures. "
                f"{self._pair.files.projector_hint}".rstrip(),
                param="messages",
            )
        rendered = self._without_bos(self.rendered(prompt))
        if prompt.parse_special:
            rendered = RenderedPrompt(rendered.text)
        if fits:
            self._check_length(rendered.text)
        parts = rendered.split(prompt.picture_mark)
        if len(parts) != len(prompt.pictures) + 1:
            raise InvalidRequest(
                "This model's chat template leaves out a picture of the messages.",
                param="messages",
            )
        encoded = [pictures.encoded[file] for file in prompt.pictures]
        for picture in encoded:
            self._check_rows(picture)
        tokens, self._rows = place_pictures(self._special.tokenize_parts(parts), encoded)
        if is_picture(tokens[-1]):
            raise InvalidRequest("The prompt ends with a picture; add text.", param="messages")
        return tokens

    def _tokenize_mixed(self, parts: Sequence[str | int], fits: bool) -> list[int]:
        vocab = self._pair.vocab
        if fits:
            self._check_length("".join(part for part in parts if isinstance(part, str)))
        tokens: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                tokens.append(vocab.check(part, "prompt"))
            else:
                tokens += vocab.tokenize(part, add_special=index == 0, parse_special=True)
        return tokens

    def _without_bos(self, prompt: RenderedPrompt) -> RenderedPrompt:
        """Remove the template's BOS token if the tokenizer adds one; two would change the answer."""
        vocab = self._pair.vocab
        bos = vocab.text(vocab.bos)
        if not vocab.add_bos or not bos or not prompt.text.startswith(bos):
            return prompt
        written = prompt.special is None or (0, len(bos)) in prompt.special[:1]
        return prompt.part(len(bos)) if written else prompt

    def _check_length(self, text: str) -> None:
        """Raise ContextExceeded for a text that cannot fit, without tokenizing it."""
        vocab, n_ctx = self._pair.vocab, self._pair.n_ctx
        if len(text) < n_ctx * _MAX_CHARS_PER_TOKEN:
            # Tokenizing the text costs about as much as for one that fits.
            return
        if (min_tokens := vocab.min_tokens(text)) >= n_ctx:
            sample = vocab.tokenize(text[:_SAMPLE_CHARS], add_special=False, parse_special=False)
            n_tokens = max(min_tokens, len(text) * len(sample) // _SAMPLE_CHARS)
            raise ContextExceeded(
                f"The prompt has about {n_tokens} tokens, which {EXCEEDS_CONTEXT} of {n_ctx} tokens; "
                "shorten it or set a larger `context`.",
                param="prompt",
                n_prompt_tokens=n_tokens,
                n_ctx=n_ctx,
            )

    def answer(self, request: SmallRequest, pictures: RequestPictures) -> dict[str, object]:
        """Return the answer to a small request, which needs no engine.

        pictures: those of the request, none of which is missing.

        Raises:
            InvalidRequest: the request is invalid.
        """
        match request:
            case ApplyTemplate(_, prompt):
                return {"prompt": self.render(prompt)}
            case CountTokens(_, prompt):
                return {"tokens": len(self.tokens(prompt, pictures, fits=False))}
            case Tokenize() | Detokenize():
                return answer_tokenize(self._pair.vocab, request)

    def render(self, prompt: ChatPrompt) -> str:
        return self.rendered(prompt).text

    def rendered(self, prompt: ChatPrompt) -> RenderedPrompt:
        """Return a rendered chat prompt, with the given beginning of the answer.

        That beginning is the caller's text. Only the markers of thoughts at its start count as special
        tokens, as they do where the model writes them.
        """
        rendered = self._renderer.rendered(prompt)
        text, prefix, markers = rendered.text, prompt.answer_prefix, list[str]()
        answers = prefix and prompt.continued != "reasoning_content"
        if answers and text.rstrip().endswith(THINK):
            # The template has opened thoughts, but the prefix is text.
            text += f"\n{END_THINK}\n\n"
            markers = [END_THINK]
        elif answers and prefix.lstrip().startswith(THINK):
            markers = [THINK, END_THINK]
        self._tail = text[-TAIL_CHARS:]
        if rendered.special is None:
            return RenderedPrompt(text + prefix)
        text += prefix
        special, start = list(rendered.special), len(rendered.text)
        for marker in markers:  # Each stands after the previous one.
            if (start := text.find(marker, start)) < 0:
                break
            special += [(start, start + len(marker))] if marker in self._special else []
            start += len(marker)
        return RenderedPrompt(text, special)


def _texts(request: Request) -> Iterator[str]:
    """Yield the texts of a request that will be tokenized."""
    match request:
        case Tokenize():
            yield request.text
        case Generate():
            yield request.speculative.prediction or ""
            yield from request.sampling.text_bias
            yield from _texts_of(request.prompt)
        case CountTokens(_, prompt):
            yield from _texts_of(prompt)


def _texts_of(prompt: Prompt) -> Iterator[str]:
    match prompt:
        case TextPrompt(text):
            yield text
        case MixedPrompt(parts):
            yield from (part for part in parts if isinstance(part, str))
        case InfillPrompt(prefix, suffix, extra, line):
            yield from (prefix, suffix, line)
            yield from (text for _, text in extra)
        case ChatPrompt(messages):
            for message in messages:
                yield message.content or ""
                if message.extra:  # Calls and thoughts.
                    yield msgspec.json.encode(message.extra).decode()
            # The tools of an agent are often longer than its chat.
            yield msgspec.json.encode((prompt.tools, prompt.template_kwargs)).decode()
            yield prompt.answer_prefix


def _chat_of(request: Request) -> ChatPrompt | None:
    prompt = request.prompt if isinstance(request, Generate | CountTokens) else None
    return prompt if isinstance(prompt, ChatPrompt) else None


def _pictures_of(request: Request) -> Sequence[bytes]:
    """Return the picture files in the prompt of a request."""
    chat = _chat_of(request)
    return () if chat is None else chat.pictures


def has_word(vocab: Vocab) -> Callable[[int], bool]:
    """Return a function that says whether a token has a word, or a part of one."""
    return cache(lambda token: _WORD.search(vocab.piece(token).decode(errors="ignore")) is not None)
