"""Prepare requests for embeddings and rerankings: turn their texts into tokens."""

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
    """A request and the tokens of each of its texts, none of which is longer than the model reads."""

    request: Embed | Rerank
    texts: list[list[int]]


class InputPreparer:
    """A preparer of requests for one loaded model. It is not thread-safe; each thread has its own."""

    def __init__(self, model: EmbeddingModel) -> None:
        self._model = model
        self._vocab = model.model.vocab
        self._template = model.model.template("rerank") if model.pooling == "rank" else None

    def seconds(self, request: Generate | Embed | Rerank | Small) -> float:
        """Estimate the seconds that preparing the request takes."""
        return self._vocab.seconds("\n".join(_texts(request)))

    def begin(self, request: Generate | Embed | Rerank) -> TokenizedInputs:
        """Return the request ready for `Encoder.submit`.

        Raises:
            InvalidRequest: an input is empty or has tokens that are not in the vocabulary.
            ContextExceeded: a text is longer than the model reads.
        """
        match request:
            case Embed():
                if request.dimensions > (n_pooled := self._model.context.n_pooled):
                    raise InvalidRequest(
                        f"`dimensions` is {request.dimensions}, but {self._model.files.name} gives "
                        f"{n_pooled} numbers.",
                        param="dimensions",
                    )
                texts = [
                    self._tokenize_input(request, index) for index in range(len(request.inputs))
                ]
            case Rerank():
                texts = [
                    self._tokenize_document(request, index)
                    for index in range(len(request.documents))
                ]
            case Generate():
                raise InvalidRequest("This model writes no text.", param="model")
        return TokenizedInputs(request, texts)

    def answer(self, request: Small) -> dict[str, object]:
        """Return the answer to a small request, which needs no pass.

        Raises:
            InvalidRequest: the request is about chats.
        """
        if not isinstance(request, Tokenize | Detokenize):
            raise InvalidRequest("This model has no chat template: it writes no text.")
        return about_tokens(self._vocab, request)

    # ------------------------------------------------------------------------ embeddings

    def _tokenize_input(self, request: Embed, index: int) -> list[int]:
        tokens = self._tokenize_parts(request.inputs[index])
        if not tokens:
            raise InvalidRequest(f"Input {index + 1} is empty.", param="input")
        if request.most:
            tokens = _truncate(tokens, request.most)
        return self._fit(tokens, f"Input {index + 1}", "input", request.truncate)

    def _tokenize_parts(self, value: EmbeddingInput) -> list[int]:
        """Return the tokens of an input. Text gets the model's special tokens; ids are not changed."""
        if isinstance(value, str):
            return self._vocab.tokenize(value, add_special=True, parse_special=True)
        tokens: list[int] = []
        for index, part in enumerate(value):
            if isinstance(part, int):
                check_tokens(self._vocab, [part], "input")
                tokens.append(part)
            else:
                tokens += self._vocab.tokenize(part, add_special=index == 0, parse_special=True)
        return tokens

    def _fit(self, tokens: list[int], subject: str, param: str, cut: bool) -> list[int]:
        """Return tokens that the model can read at once. Raises ContextExceeded unless `cut` is set."""
        max_tokens = self._model.longest
        if len(tokens) <= max_tokens:
            return tokens
        if not cut:
            raise ContextExceeded(
                f"{subject} has {len(tokens)} tokens, which {EXCEEDS}: {self._model.files.name} reads at "
                f"most {max_tokens} at once; shorten it, or send `truncate`: true to have its beginning "
                "alone read.",
                param=param,
                n_prompt_tokens=len(tokens),
                n_ctx=max_tokens,
            )
        return _truncate(tokens, max_tokens)

    # ------------------------------------------------------------------------ documents

    def _tokenize_document(self, request: Rerank, index: int) -> list[int]:
        """Return the tokens of the query and a document, in the model's layout or llama-server's."""
        document = self._shorten(request.documents[index], request.most)
        tokens = self._tokenize_pair(request.query, document)
        while request.truncate and len(tokens) > self._model.longest and document:
            document = document[: len(document) * self._model.longest // len(tokens)][:-1]
            tokens = self._tokenize_pair(request.query, document)
        subject = f"Document {index + 1}, with the query,"
        return self._fit(tokens, subject, "documents", cut=False)

    def _shorten(self, document: str, max_tokens: int) -> str:
        """Return the beginning of a document with at most `max_tokens` tokens; 0 means all of it."""
        while max_tokens and document:
            count = len(self._vocab.tokenize(document, add_special=False, parse_special=False))
            if count <= max_tokens:
                break
            document = document[: len(document) * max_tokens // count]
        return document

    def _tokenize_pair(self, query: str, document: str) -> list[int]:
        vocab = self._vocab
        if self._template:
            text = self._template.replace("{query}", query).replace("{document}", document)
            return vocab.tokenize(text, add_special=False, parse_special=True)
        first, second = (
            vocab.tokenize(text, add_special=False, parse_special=False)
            for text in (query, document)
        )
        end = [vocab.eos if vocab.eos >= 0 else vocab.sep] if vocab.add_eos else []
        between = [*end, *([vocab.sep] if vocab.add_sep else [])]
        return [*([vocab.bos] if vocab.add_bos else []), *first, *between, *second, *end]


def _truncate(tokens: list[int], max_tokens: int) -> list[int]:
    """Return at most `max_tokens` tokens, with the last one, which may mark the end of the text."""
    return tokens if len(tokens) <= max_tokens else [*tokens[: max_tokens - 1], tokens[-1]]


def _texts(request: Generate | Embed | Rerank | Small) -> Iterator[str]:
    """Yield the texts of a request that will be tokenized."""
    match request:
        case Embed():
            for value in request.inputs:
                parts: Sequence[int | str] = [value] if isinstance(value, str) else value
                yield from (part for part in parts if isinstance(part, str))
        case Rerank():
            for document in request.documents:
                yield from (request.query, document)
        case Tokenize():
            yield request.text
