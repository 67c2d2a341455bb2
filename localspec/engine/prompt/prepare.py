"""From a request as asked to one that can run: tokens, sampler, compiled grammar.

Runs in a thread beside the step loop, so that a slow template or a large grammar stalls nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from localspec.engine.cache.prefixes import Prefix
from localspec.engine.llama import Vocab, check_tokens
from localspec.engine.pair.pair import Pair
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.grammar import Grammars
from localspec.engine.sampling.infill import infill_sampler
from localspec.engine.sampling.penalties import Breakers, BreakerTable
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings, resolve
from localspec.engine.sequence import TokenizedRequest
from localspec.engine.speculation.drafters.ngram import NgramDrafter, NgramIndex
from localspec.errors import ContextExceeded, InvalidRequest
from localspec.protocol.frames import (
    ApplyTemplate,
    ChatPrompt,
    Detokenize,
    Generate,
    InfillPrompt,
    Prompt,
    Sampling,
    Speculative,
    TextPrompt,
    Tokenize,
    TokenPrompt,
)

DEFAULT_PREDICT = 128  # tokens kept free for an infill where the request does not say
LONG_TOKEN = 16  # characters: more than the tokens of any real text have on average
TAIL = 64  # characters; enough for a marker that the template left open
_SNIPPET = "\n\n--- snippet ---\n\n"
_SAMPLE = 4096  # characters of a text that is not read whole, to say about how many tokens it has


class Preparer:
    """Prepares requests for one loaded pair. Not thread-safe: each thread has its own."""

    def __init__(self, pair: Pair, renderer: TemplateRenderer) -> None:
        self._pair = pair
        self._renderer = renderer
        self._grammars = Grammars(pair.vocab)
        vocab = pair.vocab
        self._breakers = BreakerTable(lambda: vocab.words, vocab.tokenize_piece)
        self._rendered = ""  # the last chat prompt

    def seconds(self, request: Generate | Tokenize | Detokenize | ApplyTemplate) -> float:
        """What preparing the request may cost, found in a hundredth of that."""
        cutter = self._pair.vocab.cutter
        return cutter.seconds("\n".join(_texts(request)), cuts=_messages(request))

    def prepare(self, request: Generate) -> TokenizedRequest:
        """Ready for `Engine.submit`.

        Raises:
            InvalidRequest: and its subclasses, with the field at fault.
        """
        vocab = self._pair.vocab
        for token in request.sampling.logit_bias:
            vocab.check(token)
        self._rendered = ""
        tokens = self.tokens(request.prompt)
        settings = self._settings(request.sampling)
        matcher = self._grammars.compile(request.constraint) if request.constraint else None
        return TokenizedRequest(
            request,
            tokens,
            self._sampler(settings),
            matcher,
            self._ngram_index(request.speculative, tokens),
            frozenset(self._control(request.shown)),
            self._rendered[-TAIL:],
            self._saved(request, tokens),
        )

    def _ngram_index(self, asked: Speculative, prompt: list[int]) -> NgramIndex:
        """What drafts are looked up in. Of a prediction, as much as an answer can be long."""
        if not asked.enabled or not NgramDrafter.asked_for(asked):
            return NgramIndex()
        room = self._pair.n_ctx
        text = (asked.prediction or "")[: room * LONG_TOKEN]
        predicted = self._pair.vocab.tokenize(text, add_special=False, parse_special=False)
        return NgramIndex(predicted[:room], prompt)

    def _settings(self, asked: Sampling) -> Settings:
        settings = resolve(asked, self._pair.defaults)
        never = list(self._pair.vocab.suppressed)
        if asked.ignore_eos:
            # as llama-server does: an end is never the likeliest, rather than passed over when it comes
            never += self._pair.vocab.ends
        if not never:
            return settings
        return replace(
            settings, logit_bias={**settings.logit_bias, **dict.fromkeys(never, -math.inf)}
        )

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
        """What an earlier run of the daemon left on disk of this conversation."""
        if request.conversation is None or not request.cache_prompt:
            return None
        return self._pair.sessions.load(request.conversation, tokens)

    def _control(self, texts: Sequence[str]) -> Iterator[int]:
        """Those of `texts` that are one token of this vocabulary."""
        for text in texts:
            found = self._pair.vocab.tokenize(text, add_special=False, parse_special=True)
            if len(found) == 1:
                yield found[0]

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt of any kind as tokens. Raises InvalidRequest for an empty one."""
        vocab = self._pair.vocab
        match prompt:
            case TokenPrompt(tokens):
                check_tokens(vocab, tokens)
                found = tokens
            case TextPrompt(text, special):
                self._check_length(text)
                found = vocab.tokenize(text, add_special=True, parse_special=special)
            case InfillPrompt():
                found = infill_tokens(vocab, prompt, self._pair.n_ctx)
            case ChatPrompt():
                found = self._chat(vocab, prompt)
        if not found:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        return found

    def _chat(self, vocab: Vocab, prompt: ChatPrompt) -> list[int]:
        text = self.render(prompt)
        bos = vocab.text(vocab.bos)
        if vocab.add_bos and bos and text.startswith(bos):
            text = text[len(bos) :]  # the tokenizer adds it; twice would change the answer
        self._check_length(text)
        return vocab.tokenize(text, add_special=True, parse_special=True)

    def _check_length(self, text: str) -> None:
        """Refuse, before it is read, a text that cannot fit (ContextExceeded)."""
        vocab, room = self._pair.vocab, self._pair.n_ctx
        least = vocab.least_tokens(text)
        if least >= room:
            sample = vocab.tokenize(text[:_SAMPLE], add_special=False, parse_special=False)
            about = max(least, len(text) * len(sample) // _SAMPLE)
            raise ContextExceeded(
                f"The prompt has about {about} tokens and the context holds {room}; shorten it "
                "or set a larger `context`.",
                param="prompt",
                n_prompt_tokens=about,
                n_ctx=room,
            )

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text after the chat template."""
        text = self._renderer.render(prompt)
        answers = prompt.answer_prefix and prompt.continued != "reasoning_content"
        if answers and text.rstrip().endswith("<think>"):
            text += "\n</think>\n\n"  # the template opened it; what follows is no thought
        self._rendered = text
        return text + prompt.answer_prefix


def _texts(request: Generate | Tokenize | Detokenize | ApplyTemplate) -> Iterator[str]:
    """The texts that become tokens."""
    match request:
        case Tokenize():
            yield request.text
        case Generate():
            yield request.speculative.prediction or ""
            match request.prompt:
                case TextPrompt(text):
                    yield text
                case InfillPrompt():
                    asked = request.prompt
                    yield from (asked.prefix, asked.suffix, asked.prompt)
                    yield from (text for _, text in asked.extra)
                case ChatPrompt(messages):
                    yield from (message.content or "" for message in messages)


def _messages(request: Generate | Tokenize | Detokenize | ApplyTemplate) -> int:
    """How many messages a chat has: templates put special tokens around each."""
    prompt = request.prompt if isinstance(request, Generate) else None
    return len(prompt.messages) if isinstance(prompt, ChatPrompt) else 0


# ------------------------------------------------------------------------ fill-in-the-middle


def infill_tokens(vocab: Vocab, prompt: InfillPrompt, n_ctx: int) -> list[int]:
    """[repository context] [BOS] <prefix> prefix prompt <suffix> suffix <middle>.

    The repository context comes first, so that it stays in the prefix cache while somebody types.
    Text near the cursor matters most: what does not fit into the context is cut from the far ends of
    prefix and suffix (three quarters to the prefix), then from the repository context's beginning.

    Raises:
        InvalidRequest: the model has no fill-in-the-middle tokens.
    """
    fim = vocab.fim
    if min(fim.prefix, fim.suffix, fim.middle) < 0:
        raise InvalidRequest("This model has no fill-in-the-middle tokens.", param="input_prefix")

    def plain(text: str) -> list[int]:
        return vocab.tokenize(text, add_special=False, parse_special=False)

    room = n_ctx - (prompt.n_predict or DEFAULT_PREDICT) - 8
    line = plain(prompt.prompt)[-max(room // 4, 1) :]
    room -= len(line)
    prefix, suffix = plain(prompt.prefix), plain(prompt.suffix)
    prefix_room = max(room * 3 // 4, room - len(suffix))
    prefix = prefix[-prefix_room:] if prefix_room > 0 else []
    suffix = suffix[: max(room - len(prefix), 0)]
    room -= len(prefix) + len(suffix)
    extra = _repository(vocab, prompt, plain)[-room:] if room > 0 else []
    bos = [vocab.bos] if vocab.add_bos and vocab.bos >= 0 else []
    return [*extra, *bos, fim.prefix, *prefix, *line, fim.suffix, *suffix, fim.middle]


def _repository(vocab: Vocab, prompt: InfillPrompt, plain: Callable[[str], list[int]]) -> list[int]:
    """Other files: <repo> name, then <sep> file name and text for each; plain text without such tokens."""
    fim = vocab.fim
    tokens: list[int] = []
    if fim.repo >= 0:
        tokens += [fim.repo, *plain("myproject\n")]
    for name, text in prompt.extra:
        if fim.separator >= 0:
            tokens += [fim.separator, *plain(f"{name}\n"), *plain(text)]
        else:
            tokens += [*plain(_SNIPPET), *plain(text)]
    if fim.separator >= 0:
        tokens += [fim.separator, *plain("filename\n")]
    return tokens
