"""From a request for numbers to rows of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localspec.engine.embedding.model import EmbeddingModel
from localspec.engine.llama import check_tokens
from localspec.engine.prompt.preparers import Small, about_tokens
from localspec.errors import EXCEEDS, ContextExceeded, InvalidRequest
from localspec.protocol.frames import Detokenize, Embed, EmbeddingInput, Generate, Rerank, Tokenize


@dataclass(frozen=True, slots=True)
class TokenizedInputs:
    """A request, and the tokens of each text whose numbers it asks for; none is longer than fits."""

    request: Embed | Rerank
    texts: list[list[int]]


class InputPreparer:
    """Prepares requests for one loaded model. Not thread-safe: each thread has its own."""

    def __init__(self, model: EmbeddingModel) -> None:
        self._model = model
        self._vocab = model.model.vocab
        self._template = model.model.template("rerank") if model.pooling == "rank" else None

    def seconds(self, request: Generate | Embed | Rerank | Small) -> float:
        """What preparing the request may cost."""
        return self._vocab.seconds("\n".join(_texts(request)))

    def begin(self, request: Generate | Embed | Rerank) -> TokenizedInputs:
        """Ready for `Encoder.submit`.

        Raises:
            InvalidRequest: it has nothing to read, or tokens that there are not; ContextExceeded.
        """
        match request:
            case Embed():
                if request.dimensions > (most := self._model.context.n_pooled):
                    raise InvalidRequest(
                        f"`dimensions` is {request.dimensions}, but {self._model.files.name} gives {most} "
                        "numbers.",
                        param="dimensions",
                    )
                found = [self._input(request, at) for at in range(len(request.inputs))]
            case Rerank():
                found = [self._judged(request, at) for at in range(len(request.documents))]
            case Generate():
                raise InvalidRequest("This model writes no text.", param="model")
        return TokenizedInputs(request, found)

    def answer(self, request: Small) -> dict[str, object]:
        """Of a small request, what can be said without a pass.

        Raises:
            InvalidRequest: it is about chats.
        """
        if not isinstance(request, Tokenize | Detokenize):
            raise InvalidRequest("This model has no chat template: it writes no text.")
        return about_tokens(self._vocab, request)

    # ------------------------------------------------------------------------ embeddings

    def _input(self, request: Embed, at: int) -> list[int]:
        tokens = self._tokens(request.inputs[at])
        if not tokens:
            raise InvalidRequest(f"Input {at + 1} is empty.", param="input")
        if request.most:
            tokens = _beginning(tokens, request.most)
        return self._fitting(tokens, f"Input {at + 1}", "input", request.truncate)

    def _tokens(self, asked: EmbeddingInput) -> list[int]:
        """Of a text with what the model wants around it; ids are taken as they are."""
        if isinstance(asked, str):
            return self._vocab.tokenize(asked, add_special=True, parse_special=True)
        found: list[int] = []
        for at, part in enumerate(asked):
            if isinstance(part, int):
                check_tokens(self._vocab, [part], "input")
                found.append(part)
            else:
                found += self._vocab.tokenize(part, add_special=at == 0, parse_special=True)
        return found

    def _fitting(self, tokens: list[int], what: str, param: str, cut: bool) -> list[int]:
        most = self._model.longest
        if len(tokens) <= most:
            return tokens
        if not cut:
            raise ContextExceeded(
                f"{what} has {len(tokens)} tokens, which {EXCEEDS}: {self._model.files.name} reads at most "
                f"{most} at once; shorten it, or send `truncate`: true to have its beginning alone read.",
                param=param,
                n_prompt_tokens=len(tokens),
                n_ctx=most,
            )
        return _beginning(tokens, most)

    # ------------------------------------------------------------------------ documents

    def _judged(self, asked: Rerank, at: int) -> list[int]:
        """A document with the query, as the model was trained to see both, or as llama-server has it."""
        document = self._shortened(asked.documents[at], asked.most)
        tokens = self._both(asked.query, document)
        while asked.truncate and len(tokens) > self._model.longest and document:
            document = document[: len(document) * self._model.longest // len(tokens)][:-1]
            tokens = self._both(asked.query, document)
        return self._fitting(tokens, f"Document {at + 1}, with the query,", "documents", cut=False)

    def _shortened(self, document: str, most: int) -> str:
        """Return the beginning of a document that has at most so many tokens alone; 0: all of it."""
        while most and document:
            count = len(self._vocab.tokenize(document, add_special=False, parse_special=False))
            if count <= most:
                break
            document = document[: len(document) * most // count]
        return document

    def _both(self, query: str, document: str) -> list[int]:
        vocab = self._vocab
        if self._template:
            text = self._template.replace("{query}", query).replace("{document}", document)
            return vocab.tokenize(text, add_special=False, parse_special=True)
        first, second = (
            vocab.tokenize(each, add_special=False, parse_special=False)
            for each in (query, document)
        )
        end = [vocab.eos if vocab.eos >= 0 else vocab.sep] if vocab.add_eos else []
        between = [*end, *([vocab.sep] if vocab.add_sep else [])]
        return [*([vocab.bos] if vocab.add_bos else []), *first, *between, *second, *end]


def _beginning(tokens: list[int], most: int) -> list[int]:
    """Return so many tokens of a text; the last one is kept, since it may say that the text ends."""
    return tokens if len(tokens) <= most else [*tokens[: most - 1], tokens[-1]]


def _texts(request: Generate | Embed | Rerank | Small) -> Iterator[str]:
    """The texts that become tokens."""
    match request:
        case Embed():
            for each in request.inputs:
                parts: Sequence[int | str] = [each] if isinstance(each, str) else each
                yield from (part for part in parts if isinstance(part, str))
        case Rerank():
            for document in request.documents:
                yield from (request.query, document)
        case Tokenize():
            yield request.text
