"""Run embedding models and rerankers: from a request's texts to tokens, and from passes to vectors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from localspec.engine.engine import Emit, make_failure
from localspec.engine.interruption import Interruption
from localspec.engine.llama import (
    Aborted,
    Batch,
    Context,
    ContextSettings,
    DecodeFatal,
    Model,
    NotFinite,
    OutOfMemory,
    backend,
)
from localspec.engine.llama.model import States
from localspec.engine.pair.models import choose_thread_count, physical_cores, usable_cores
from localspec.engine.prompt.pictures import RequestPictures
from localspec.engine.prompt.preparers import SmallRequest, answer_tokenize
from localspec.errors import EXCEEDS_CONTEXT, Cancelled, ContextExceeded, InvalidRequest, LoadFailed
from localspec.model_traits import has_no_cache, needs_whole_text
from localspec.protocol.frames import (
    Detokenize,
    Embed,
    EmbeddingInput,
    EngineSettings,
    Generate,
    Loaded,
    PairFiles,
    Reply,
    Rerank,
    Tokenize,
)


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

    def estimate_s(self, request: Generate | Embed | Rerank | SmallRequest) -> float:
        """Estimate the seconds that preparing the request takes."""
        return self._vocab.estimate_s("\n".join(_texts(request)))

    def find_pictures(self, request: Generate | Embed | Rerank | SmallRequest) -> RequestPictures:
        """Return none: such a model reads text only."""
        del request
        return RequestPictures()

    def encode_next(
        self,
        request: Generate | Embed | Rerank | SmallRequest,
        pictures: RequestPictures,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Do nothing, because there are no pictures."""

    def begin(
        self, request: Generate | Embed | Rerank, _pictures: RequestPictures | None = None
    ) -> TokenizedInputs:
        """Return the request ready for `Encoder.submit`.

        Raises InvalidRequest for an input that is empty or has tokens outside the vocabulary, and
        ContextExceeded if a text is longer than the model reads.
        """
        match request:
            case Embed():
                if request.dimensions > (n_pooled := self._model.context.n_pooled):
                    raise InvalidRequest(
                        f"`dimensions` is {request.dimensions}, but {self._model.files.name} gives "
                        f"{n_pooled} numbers.",
                        param="dimensions",
                    )
                texts = [self._tokenize_input(request, i) for i in range(len(request.inputs))]
            case Rerank():
                count = len(request.documents)
                texts = [self._tokenize_document(request, i) for i in range(count)]
            case Generate():
                raise InvalidRequest("This model writes no text.", param="model")
        return TokenizedInputs(request, texts)

    def answer(
        self, request: SmallRequest, _pictures: RequestPictures | None = None
    ) -> dict[str, object]:
        """Return the answer to a request that needs no pass. Raises InvalidRequest if it is about chats."""
        if not isinstance(request, Tokenize | Detokenize):
            raise InvalidRequest("This model has no chat template: it writes no text.")
        return answer_tokenize(self._vocab, request)

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
                tokens.append(self._vocab.check(part, "input"))
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
                f"{subject} has {len(tokens)} tokens, which {EXCEEDS_CONTEXT}: {self._model.files.name} "
                f"reads at most {max_tokens} at once; shorten it, or send `truncate`: true to have its "
                "beginning alone read.",
                param=param,
                n_prompt_tokens=len(tokens),
                n_ctx=max_tokens,
            )
        return _truncate(tokens, max_tokens)

    def _tokenize_document(self, request: Rerank, index: int) -> list[int]:
        """Return the tokens of the query and a document, in the model's layout or llama-server's."""
        document = request.documents[index]
        while request.most and document:
            count = len(self._vocab.tokenize(document, add_special=False, parse_special=False))
            if count <= request.most:
                break
            document = document[: len(document) * request.most // count]
        tokens = self._tokenize_pair(request.query, document)
        while request.truncate and len(tokens) > self._model.longest and document:
            document = document[: len(document) * self._model.longest // len(tokens)][:-1]
            tokens = self._tokenize_pair(request.query, document)
        subject = f"Document {index + 1}, with the query,"
        return self._fit(tokens, subject, "documents", cut=False)

    def _tokenize_pair(self, query: str, document: str) -> list[int]:
        vocab = self._vocab
        if self._template:
            text = self._template.replace("{query}", query).replace("{document}", document)
            return vocab.tokenize(text, add_special=False, parse_special=True)
        texts = (query, document)
        first, second = (vocab.tokenize(t, add_special=False, parse_special=False) for t in texts)
        end = [vocab.eos if vocab.eos >= 0 else vocab.sep] if vocab.add_eos else []
        between = [*end, *([vocab.sep] if vocab.add_sep else [])]
        return [*([vocab.bos] if vocab.add_bos else []), *first, *between, *second, *end]


def _truncate(tokens: list[int], max_tokens: int) -> list[int]:
    """Return at most `max_tokens` tokens, with the last one, which may mark the end of the text."""
    return tokens if len(tokens) <= max_tokens else [*tokens[: max_tokens - 1], tokens[-1]]


def _texts(request: Generate | Embed | Rerank | SmallRequest) -> Iterator[str]:
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


# A pass holds as many texts as fit in its rows. Each text is a sequence of its own, and nothing is cached.

# Rows of a pass, unless a longer text must be read at once. Wider passes are not faster. Models that could
# also generate text have half as many, because llama.cpp allocates logits for each row.
PASS_ROWS = 512
MIN_TEXT_TOKENS = 256  # Tokens of the longest text; loading is not tried with fewer.
DEFAULT_TEXT_TOKENS = 2048  # Tokens of the longest text if the settings do not give a number.
MAX_TEXTS_PER_PASS = 64  # Texts in one pass.


class EmbeddingModel:
    """A loaded embedding model or reranker.

    longest: tokens of the longest text. pooling: the kind of pooling, "rank" for a reranker.
    """

    def __init__(
        self,
        files: PairFiles,
        settings: EngineSettings,
        progress: Callable[[str, float], None],
        longest: int,
        notes: Sequence[str] = (),
    ) -> None:
        """Load the model. longest: tokens of the longest text; 0 means the default.

        Raises OutOfMemory if memory does not hold the model and its pass. Raises LoadFailed if the model
        cannot be used for embeddings.
        """
        assert files.pooling is not None
        self.files, self.pooling, self.notes = files, files.pooling, list(notes)
        self._settings = settings
        with ExitStack() as opened:
            self._open(opened, progress, longest)
            self._opened = opened.pop_all()

    def _open(
        self, opened: ExitStack, progress: Callable[[str, float], None], longest: int
    ) -> None:
        settings = self._settings
        self.model = model = Model(
            self.files.target,
            n_gpu_layers=settings.n_gpu_layers,
            cpu_experts=settings.cpu_experts,
            split_mode=settings.split_mode,
            main_gpu=settings.main_gpu,
            extra_buffers=settings.extra_buffers,
            progress=partial(progress, "target"),
        )
        opened.enter_context(model)
        # An encoder such as T5's runs in another way.
        if model.vocab.size == 0 or model.has_encoder:
            raise LoadFailed(f"{model.path} cannot be used for embeddings.")
        trained = model.n_ctx_train or DEFAULT_TEXT_TOKENS
        self.longest = min(longest or DEFAULT_TEXT_TOKENS, trained)
        self.whole = needs_whole_text(
            model.architecture, causal=model.attends_causally, pooling=self.pooling
        )
        self.texts = MAX_TEXTS_PER_PASS if model.multi_sequence else 1
        min_rows = PASS_ROWS if has_no_cache(model.architecture) else PASS_ROWS // 2
        self.rows = max(min_rows, self.longest) if self.whole else min_rows
        threads = min(settings.n_threads or physical_cores(), usable_cores())
        sizes = ContextSettings(
            n_ctx=max(self.rows, self.longest),
            n_batch=self.rows,
            n_seq=self.texts,
            n_outputs=self.rows,
            n_threads=choose_thread_count(model, threads),
            flash_attention=settings.flash_attention,
            pooling=self.pooling,
        )
        self.context = opened.enter_context(Context(model, sizes))
        self._batch = Batch(self.rows)
        # A trial pass shows here whether a kernel ends the process or weights are not finite.
        try:
            self.encode([[0, min(1, model.vocab.size - 1)]])
        except NotFinite as error:
            raise LoadFailed(error.message) from None
        progress("target", 1.0)

    def encode(self, texts: Sequence[Sequence[int]]) -> list[States]:
        """Return the embedding or score (n_pooled,) of each text.

        All tokens must fit in `rows`, unless there is only one text.

        Raises NotFinite if a result is not finite, and DecodeError as `Context.decode`.
        """
        context, batch, sequences = self.context, self._batch, range(len(texts))
        batch.clear()
        try:
            for sequence, tokens in enumerate(texts):
                for position, token in enumerate(tokens):
                    # A text that need not be read at once may take several passes.
                    if batch.rows == self.rows:
                        context.decode(batch)
                        batch.clear()
                    batch.add(token, position, sequence, True)
            context.decode(batch)
            context.synchronize()
            return [np.array(context.pooled(sequence)) for sequence in sequences]
        finally:
            for sequence in sequences:
                context.remove(sequence, 0)

    def info(self) -> Loaded:
        vocab = self.model.vocab
        return Loaded(
            name=self.files.name,
            target_description=self.model.description,
            draft_description=None,
            n_ctx=self.longest,
            parallel=self.texts,
            chat_template=None,
            bos_token=vocab.text(vocab.bos),
            eos_token=vocab.text(vocab.eos),
            speculation=f"it is {'a reranker' if self.pooling == 'rank' else 'an embedding model'}",
            notes=self.notes,
            backend=backend() if self._settings.n_gpu_layers else "cpu",
        )

    def close(self) -> None:
        self._opened.close()


def load_embedding_model(
    files: PairFiles, settings: EngineSettings, progress: Callable[[str, float], None]
) -> EmbeddingModel:
    """Load a model, with shorter texts if memory does not hold a pass of the longest ones.

    Raises LoadFailed if the model cannot be loaded.
    """
    longest, notes = settings.n_ctx, list[str]()
    while True:
        try:
            return EmbeddingModel(files, settings, progress, longest, notes)
        except OutOfMemory:
            longest = (longest or DEFAULT_TEXT_TOKENS) // 2
            if longest < MIN_TEXT_TOKENS:
                raise
            notes = [f"Texts may have at most {longest} tokens: memory holds no more."]


_MAX_ABS_VALUE = 32760.0  # `normalize` 0 scales a vector so that its largest component is this


@dataclass(eq=False, slots=True)
class _Job:
    """A request and the vectors of its texts so far.

    alone: each text gets a pass of its own, because a shared pass gave NaN or infinite values.
    """

    inputs: TokenizedInputs
    vectors: list[States] = field(default_factory=list)
    alone: bool = False

    @property
    def id(self) -> int:
        return self.inputs.request.id

    @property
    def remaining(self) -> int:
        return len(self.inputs.texts) - len(self.vectors)


class Encoder:
    """Runs requests on one loaded model, in turns, so that a long request does not hold up short ones.

    Each pass holds as many texts as fit. One thread calls `submit`, `cancel` and `step`. An exception raised
    on behalf of one request ends only that request.
    """

    accepts = TokenizedInputs
    has_waiting_editor = has_idle_work = False

    def __init__(self, model: EmbeddingModel, emit: Emit) -> None:
        self._model, self._emit = model, emit
        self._jobs: deque[_Job] = deque()
        self.interruption = Interruption()  # called by other threads

    def submit(self, inputs: TokenizedInputs) -> None:
        self._jobs.append(_Job(inputs))

    def cancel(self, request_id: int) -> bool:
        """End a request now. Return False if there is no such request."""
        job = next((job for job in self._jobs if job.id == request_id), None)
        if job is not None:
            self._fail_job(job, Cancelled("The request was cancelled."))
        return job is not None

    @property
    def active(self) -> bool:
        return bool(self._jobs)

    def use_idle_time(self) -> None:
        """Do nothing: an encoder has nothing to learn."""

    def forget(self, conversation: str | None) -> None:
        """Do nothing: an encoder caches no text."""

    def forget_saved(self, _conversation: str | None, done: Callable[[], None]) -> None:
        """Call `done`: an encoder has no files."""
        done()

    def shrink_prompt_cache(self, _most: int) -> int:
        """Return 0: an encoder has no prompt cache."""
        return 0

    def end_thoughts(self, _request: int) -> bool:
        """Return False: an encoder has no thoughts."""
        return False

    def save(self) -> None:
        """Do nothing: an encoder learns nothing."""

    def close(self) -> None:
        self._model.close()

    def step(self) -> None:
        """Make one pass.

        Raises DecodeFatal if the context can no longer be trusted; the process must end.
        """
        selected = self._select_texts()
        jobs = dict.fromkeys(job for job, _ in selected)
        # A shared pass is not interrupted: the other requests would pay for it a second time.
        leaver = [job.id for job in jobs] if len(jobs) == 1 else []
        self._model.context.stop = self.interruption.begin_pass(leaver)
        try:
            encoded = self._model.encode([text for _, text in selected])
        except DecodeFatal:
            raise
        except Aborted:
            return
        except Exception as error:  # a bug of ours, too, ends only these requests
            # NaN or infinite values may come from any text of the pass, so after a shared pass each text gets
            # one of its own.
            is_shared = isinstance(error, NotFinite) and len(selected) > 1
            for job in jobs:
                if is_shared:
                    job.alone = True
                else:
                    self._fail_job(job, error)
            return
        for (job, _), vector in zip(selected, encoded, strict=True):
            job.vectors.append(vector)
        self._jobs.rotate(-1)
        for job in jobs:
            if not job.remaining:
                self._jobs.remove(job)
                self._emit(Reply(job.id, _build_reply(job)))

    def _select_texts(self) -> list[tuple[_Job, list[int]]]:
        """Return the texts of the next pass with their jobs, those of the first request first."""
        selected: list[tuple[_Job, list[int]]] = []
        free_rows = self._model.rows
        for job in self._jobs:
            for text in job.inputs.texts[len(job.vectors) :]:
                is_full = len(selected) == self._model.texts or len(text) > free_rows or job.alone
                if selected and is_full:
                    return selected
                selected.append((job, text))
                free_rows -= len(text)
        return selected

    def _fail_job(self, job: _Job, error: Exception) -> None:
        self._jobs.remove(job)
        self._emit(make_failure(job.id, error))


def _build_reply(job: _Job) -> dict[str, object]:
    request, tokens = job.inputs.request, [len(text) for text in job.inputs.texts]
    if not isinstance(request, Embed):
        return {"scores": [float(vector[0]) for vector in job.vectors], "tokens": tokens}
    size = request.dimensions or None
    vectors = [normalize_vector(vector[:size], request.normalize) for vector in job.vectors]
    return {"vectors": [vector.astype("<f4").tobytes() for vector in vectors], "tokens": tokens}


def normalize_vector(vector: States, norm: int) -> States:
    """Return `vector` scaled as llama.cpp's common_embd_normalize does it.

    norm: -1 leaves it as it is, 0 scales by the largest component, p > 0 by the p-norm.
    """
    if norm < 0:
        return vector
    magnitudes = np.abs(vector.astype(np.float64))
    if norm:
        length = float((magnitudes**norm).sum() ** (1 / norm))
    else:
        length = float(magnitudes.max()) / _MAX_ABS_VALUE
    return (vector / length).astype(np.float32) if length > 0 else vector
