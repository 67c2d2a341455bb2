"""From a request as asked to one that can run: tokens, sampler, compiled grammar.

Threads beside the step loop do that (`preparers`), so that a slow template or a large grammar stalls no
answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from localspec.engine.cache.prefixes import Prefix
from localspec.engine.llama import check_tokens
from localspec.engine.pair.measuring import WIDTHS
from localspec.engine.pair.pair import Pair
from localspec.engine.prompt.infill import LONG_TOKEN, infill_tokens, plain_text, prompt_budget
from localspec.engine.prompt.marks import NotSeen, pieces
from localspec.engine.prompt.preparers import Small, Unfinished, Work, about_tokens
from localspec.engine.prompt.special_tokens import RenderedPrompt, SpecialTokens
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sampling.deferred import DeferredGuide
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.grammars.compile import NOBODY_LEFT, Grammars, Left
from localspec.engine.sampling.guide import Both, Guide
from localspec.engine.sampling.infill import infill_sampler
from localspec.engine.sampling.minimum import MinimumLength
from localspec.engine.sampling.penalties import Breakers, BreakerTable
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings, resolve
from localspec.engine.sampling.thoughts import Marker, Thoughts
from localspec.engine.sequence import TokenizedRequest
from localspec.engine.speculation.drafters.ngram import NgramDrafter, NgramIndex
from localspec.errors import (
    EXCEEDS,
    ContextExceeded,
    InvalidRequest,
)
from localspec.protocol.frames import (
    ApplyTemplate,
    ChatPrompt,
    CountTokens,
    Detokenize,
    Generate,
    InfillPrompt,
    MixedPrompt,
    Prompt,
    Sampling,
    Speculative,
    TextPrompt,
    Tokenize,
    TokenPrompt,
)
from localspec.protocol.visibility import Regions

THINK, END_THINK = "<think>", "</think>"
_UNREAD = "This model marks its thoughts in a way that is not known, so they are part of its answer's text."
_TWO_BOS = "The prompt begins with two BOS tokens: its own '{0}', and one that the model adds."
TAIL = 64  # characters; enough for a marker that the template left open
_DENSE = 8  # characters of a token, in texts that are made of long words
_SAMPLE = 4096  # characters of a text that is not read whole, to say about how many tokens it has


class Preparer:
    """Prepares requests for one loaded pair. Not thread-safe: each thread has its own."""

    def __init__(
        self,
        pair: Pair,
        renderer: TemplateRenderer,
        grammars: Grammars | None = None,
        special: SpecialTokens | None = None,
    ) -> None:
        """grammars: compiles in a process of its own; by default, grammars are compiled in place.
        special: the pair's special tokens, where another preparer knows them already.
        """
        self._pair = pair
        self._renderer = renderer
        self._grammars = grammars or Grammars(pair.vocab)
        self._special = special or SpecialTokens(pair.vocab, pair.chat_template)
        renderer.watch(self._special.spellings)
        vocab = pair.vocab
        self._breakers = BreakerTable(lambda: vocab.words, vocab.tokenize_piece)
        self._rendered = ""  # the last chat prompt
        self._infill_text = plain_text(vocab)
        # As it was measured when the pair was loaded: prompts should not change under an editor.
        self._infill_budget = prompt_budget(pair.learned.costs.target.per_token_ms(WIDTHS[-1]))

    def seconds(self, request: Work | Small) -> float:
        """What preparing the request may cost, found in a hundredth of that."""
        return self._pair.vocab.seconds("\n".join(_texts(request)), cuts=_messages(request))

    def prepare(self, request: Work) -> TokenizedRequest:
        """Return the request ready for `Engine.submit`, however long that takes.

        Raises:
            InvalidRequest: and its subclasses, with the field at fault.
        """
        ready = self.begin(request)
        return ready.finish(NOBODY_LEFT) if isinstance(ready, Unfinished) else ready

    def begin(self, request: Work) -> TokenizedRequest | Unfinished[TokenizedRequest]:
        """Return the request ready for `Engine.submit`, or what is left to do where a grammar is to compile.

        Raises:
            InvalidRequest: and its subclasses, with the field at fault.
        """
        if not isinstance(request, Generate):
            raise InvalidRequest(
                "This model writes text and computes no embeddings.", param="model"
            )
        self._rendered = ""
        thoughts = list(request.thoughts)
        unread = self._mark(request)
        tokens = self.tokens(request.prompt)
        settings = self._settings(request.sampling)
        shown, tail = frozenset(self._control(request.shown)), self._rendered[-TAIL:]
        check_tokens(self._pair.vocab, request.stop_token_ids, "stop_token_ids")
        limit = self._limit(request)
        tokenized = TokenizedRequest(
            request,
            tokens,
            self._sampler(settings),
            limit,
            self._ngram_index(request.speculative, tokens),
            shown,
            tail,
            self._saved(request, tokens),
            " ".join(filter(None, [unread, self._second_bos(request.prompt, tokens)])),
            self._regions(request, thoughts, tail),
        )
        job, _ = self._grammars.job(request, tail)
        if self._grammars.ready(job):
            return self._with_grammar(tokenized)
        return Unfinished(partial(self._with_grammar, tokenized))

    def _second_bos(self, prompt: Prompt, tokens: list[int]) -> str:
        """Return a note on a text that begins with the BOS token which the tokenizer adds, too. Both are
        read, as in llama-server."""
        vocab = self._pair.vocab
        spelled = isinstance(prompt, TextPrompt | MixedPrompt) and vocab.add_bos
        if not spelled or tokens[:2] != [vocab.bos] * 2:
            return ""
        return _TWO_BOS.format(vocab.text(vocab.bos))

    def _with_grammar(
        self, tokenized: TokenizedRequest, left: Left = NOBODY_LEFT
    ) -> TokenizedRequest:
        """Add the request's grammar. In any thread.

        Raises:
            GrammarRejected: there is none that can be used.
            Cancelled: `left` says that nobody waits any more.
        """
        guide, note = self._grammars.answer(
            tokenized.request, tokenized.tail, tokenized.shown, left
        )
        if guide is not None:
            deferred = DeferredGuide(guide)
            limit = tokenized.matcher
            tokenized.matcher = deferred if limit is None else Both(limit, deferred)
        tokenized.note = " ".join(filter(None, [note, tokenized.note]))
        if tokenized.request.min_tokens:
            least, others = self._minimum(tokenized.request), tokenized.matcher
            # The other guide comes first, so that a finished constraint may still end the answer.
            tokenized.matcher = least if others is None else Both(others, least)
        return tokenized

    def _regions(
        self, request: Generate, thoughts: Sequence[tuple[str, str]], tail: str
    ) -> Regions | None:
        """Return what finds an answer's visible text, in which its stop strings hold; None: all of it is.

        thoughts: the markers that any model may have, beside which this one's own are in the request.
        """
        tools = request.tools
        if not request.stop or not (thoughts or tools):
            return None
        form, names = (tools.format, tools.schemas) if tools else (None, ())
        plain = tools is not None and not tools.required and request.constraint is None
        markers = [*request.thoughts, *thoughts]
        return Regions(markers, tail, form, names, plain_calls=plain)

    def _mark(self, request: Generate) -> str:
        """Have a chat's thoughts marked as this model marks them; returns what of them cannot be read."""
        if not isinstance(request.prompt, ChatPrompt):
            return ""
        try:
            request.thoughts = self._renderer.marks(request.thoughts)
        except NotSeen:
            request.thoughts = []
            return _UNREAD
        request.shown = [*request.shown, *(each for m in request.thoughts for each in pieces(m))]
        return ""

    def _limit(self, request: Generate) -> Guide | None:
        """The end of thoughts that may have only so many tokens; a model whose template knows none
        needs no end of them.
        """
        if request.thinking is None:
            return None
        try:
            known = self._renderer.marks(request.thinking.markers)
        except NotSeen:
            return None
        vocab, markers = self._pair.vocab, []
        for opening, closing in known:
            tokens = vocab.tokenize(closing, add_special=False, parse_special=True)
            markers.append(Marker(opening.encode(), closing.encode(), tokens))
        if not markers:
            return None
        piece = partial(vocab.piece, special=True)
        return Thoughts(request.thinking.tokens, markers, self._rendered[-TAIL:], piece, vocab.size)

    def _minimum(self, request: Generate) -> MinimumLength:
        vocab = self._pair.vocab
        ends = [*vocab.ends, *request.stop_token_ids]
        return MinimumLength(request.min_tokens, ends, vocab.size)

    def _ngram_index(self, asked: Speculative, prompt: list[int]) -> NgramIndex:
        """What drafts are looked up in. Of a prediction, as much as an answer can be long."""
        if not asked.enabled or not NgramDrafter.asked_for(asked):
            return NgramIndex()
        room = self._pair.n_ctx
        text = (asked.prediction or "")[: room * LONG_TOKEN]
        predicted = self._pair.vocab.tokenize(text, add_special=False, parse_special=False)
        return NgramIndex(predicted[:room], prompt, self._pair.memory)

    def _settings(self, asked: Sampling) -> Settings:
        settings = replace(resolve(asked, self._pair.defaults), logit_bias=self._bias(asked))
        never = list(self._pair.vocab.suppressed)
        if asked.ignore_eos:
            # as llama-server does: an end is never the likeliest, rather than passed over when it comes
            never += self._pair.vocab.ends
        if not never:
            return settings
        return replace(
            settings, logit_bias={**settings.logit_bias, **dict.fromkeys(never, -math.inf)}
        )

    def _bias(self, asked: Sampling) -> dict[int, float]:
        """Of the tokens that are named, and of those of the texts."""
        vocab = self._pair.vocab
        found = dict(asked.logit_bias)
        for token in found:
            vocab.check(token, f'logit_bias["{token}"]')
        for text, amount in asked.text_bias.items():
            for token in vocab.tokenize(text, add_special=False, parse_special=False):
                found[token] = found.get(token, 0.0) + amount
        return found

    def _sampler(self, settings: Settings) -> Sampler:
        breakers: Breakers = {}
        if settings.dry_multiplier > 0.0:
            breakers = self._breakers.find(settings.dry_sequence_breakers)
        narrowed = self._endings() if settings.infill else None
        return Sampler(settings, breakers=breakers, narrowed=narrowed)

    def _endings(self) -> Callable[[Distribution], Distribution]:
        vocab = self._pair.vocab
        return partial(infill_sampler, is_end=vocab.is_eog, end=vocab.end, piece=vocab.piece)

    def _saved(self, request: Generate, tokens: list[int]) -> Prefix | None:
        """What was left on disk of its beginning; the last token is always read."""
        if not request.cache_prompt or request.priority == "editor":
            return None
        exact = self._pair.settings.exact if request.exact is None else request.exact
        return self._pair.saved(tokens[:-1], exact)

    def _control(self, texts: Sequence[str]) -> Iterator[int]:
        """Those of `texts` that are one token of this vocabulary."""
        for text in texts:
            found = self._pair.vocab.tokenize(text, add_special=False, parse_special=True)
            if len(found) == 1:
                yield found[0]

    def tokens(self, prompt: Prompt, *, fits: bool = True) -> list[int]:
        """A prompt of any kind as tokens; one that does not fit is refused where it must.

        Raises:
            InvalidRequest: it is empty, or no prompt; ContextExceeded.
        """
        vocab = self._pair.vocab
        match prompt:
            case TokenPrompt(tokens):
                check_tokens(vocab, tokens, "prompt")
                found = tokens
            case MixedPrompt(parts):
                found = self._mixed(parts, fits)
            case TextPrompt(text, special):
                found = self._tokenized(text, special, fits)
            case InfillPrompt():
                found = infill_tokens(
                    vocab, prompt, self._pair.n_ctx, self._infill_budget, self._infill_text
                )
            case ChatPrompt():
                found = self._chat(prompt, fits)
        if not found:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        return found

    def _tokenized(self, text: str, special: bool, fits: bool) -> list[int]:
        if fits:
            self._check_length(text)
        return self._pair.vocab.tokenize(text, add_special=True, parse_special=special)

    def _chat(self, prompt: ChatPrompt, fits: bool) -> list[int]:
        rendered = self._without_bos(self.rendered(prompt))
        if prompt.parse_special:
            rendered = RenderedPrompt(rendered.text)
        if fits:
            self._check_length(rendered.text)
        return self._special.tokenize(rendered)

    def _mixed(self, parts: Sequence[str | int], fits: bool) -> list[int]:
        vocab = self._pair.vocab
        if fits:
            self._check_length("".join(part for part in parts if isinstance(part, str)))
        found: list[int] = []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                found.append(vocab.check(part, "prompt"))
            else:
                found += vocab.tokenize(part, add_special=at == 0, parse_special=True)
        return found

    def _without_bos(self, prompt: RenderedPrompt) -> RenderedPrompt:
        """The tokenizer adds it; twice would change the answer."""
        vocab = self._pair.vocab
        bos = vocab.text(vocab.bos)
        if not vocab.add_bos or not bos or not prompt.text.startswith(bos):
            return prompt
        written = prompt.special is None or (0, len(bos)) in prompt.special[:1]
        return prompt.since(len(bos)) if written else prompt

    def _check_length(self, text: str) -> None:
        """Refuse, before it is read, a text that cannot fit (ContextExceeded)."""
        vocab, room = self._pair.vocab, self._pair.n_ctx
        if len(text) < room * _DENSE:  # reading it costs about what one that fits may
            return
        least = vocab.least_tokens(text)
        if least >= room:
            sample = vocab.tokenize(text[:_SAMPLE], add_special=False, parse_special=False)
            about = max(least, len(text) * len(sample) // _SAMPLE)
            raise ContextExceeded(
                f"The prompt has about {about} tokens, which {EXCEEDS} of {room} tokens; shorten it "
                "or set a larger `context`.",
                param="prompt",
                n_prompt_tokens=about,
                n_ctx=room,
            )

    def answer(self, request: Small) -> dict[str, object]:
        """Of a small request, without a pass.

        Raises:
            InvalidRequest
        """
        match request:
            case ApplyTemplate(_, prompt):
                return {"prompt": self.render(prompt)}
            case CountTokens(_, prompt):
                return {"tokens": len(self.tokens(prompt, fits=False))}
            case Tokenize() | Detokenize():
                return about_tokens(self._pair.vocab, request)

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text after the chat template."""
        return self.rendered(prompt).text

    def rendered(self, prompt: ChatPrompt) -> RenderedPrompt:
        """Return the prompt after the chat template, with the answer's beginning.

        That beginning is the caller's text. Only the thoughts that it begins with stand between the
        model's own markers, as they do where the model writes them.
        """
        rendered = self._renderer.rendered(prompt)
        prefix, markers = prompt.answer_prefix, []
        text = rendered.text
        answers = prefix and prompt.continued != "reasoning_content"
        if answers and text.rstrip().endswith(THINK):
            text += f"\n{END_THINK}\n\n"  # the template opened it; what follows is no thought
            markers = [END_THINK]
        elif answers and prefix.lstrip().startswith(THINK):
            markers = [THINK, END_THINK]
        self._rendered = text
        if rendered.special is None:
            return RenderedPrompt(text + prefix)
        text += prefix
        own = (span for span in _places(markers, text, len(rendered.text)))
        special = [
            *rendered.special,
            *(each for each in own if text[slice(*each)] in self._special),
        ]
        return RenderedPrompt(text, special)


def _places(markers: Sequence[str], text: str, start: int) -> Iterator[tuple[int, int]]:
    """Yield where the first of `markers` begins and ends in `text` from `start` on, then the second
    behind it, and so on."""
    for marker in markers:
        place = text.find(marker, start)
        if place < 0:
            return
        start = place + len(marker)
        yield place, start


def _texts(request: Work | Small) -> Iterator[str]:
    """The texts that become tokens."""
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
                if message.extra:  # calls and thoughts
                    yield msgspec.json.encode(message.extra).decode()
            # an agent's tools are longer than its chat
            yield msgspec.json.encode((prompt.tools, prompt.template_kwargs)).decode()
            yield prompt.answer_prefix


def _messages(request: Work | Small) -> int:
    """How many messages a chat has: templates put special tokens around each."""
    prompt = request.prompt if isinstance(request, Generate | CountTokens) else None
    return len(prompt.messages) if isinstance(prompt, ChatPrompt) else 0
