"""Pictures in prompts: what is read, beside llama.cpp's own library; reuse, drafts, and a full context."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.api.pictures import gif_of_long_codes
from benchmarks.synthetic_projector import PATCH, PICTURE_TOKENS, png, write_projector
from localspec.engine.llama import (
    Batch,
    Context,
    ContextSettings,
    Model,
    PictureRows,
    Projector,
    is_picture,
    picture_tokens,
    split_pictures,
)
from localspec.engine.pair.lane import EXACT_CHUNK_TOKENS
from localspec.engine.prompt import pictures as prompt_pictures
from localspec.engine.prompt.picture_child import DECODING_LIMIT_S, OpenProjector
from localspec.engine.prompt.pictures import Encoded, Pictures, RequestPictures, place_pictures
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import Cancelled, ContextExceeded, InvalidRequest, LoadFailed
from localspec.protocol.frames import (
    ChatPrompt,
    EngineSettings,
    Generate,
    Message,
    PairFiles,
    Sampling,
    SpeculationSettings,
)
from localspec.protocol.settings import PICTURE_PASS_ROWS
from tests.support.architectures import write as write_architecture
from tests.support.heads import contextual_heads
from tests.support.pairs import CONTEXT_SHAPE, contextual_pair
from tests.support.recurrent import lfm2_pair
from tests.support.rescoring import NEAR_TIE
from tests.support.running import GREEDY, PLAIN, Answer, Running, drafting, running, skip_on

MARK = "<the place of a picture>"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"


def never() -> bool:
    return False


class Seeing:
    """A loaded pair with a projector, asked about pictures."""

    def __init__(self, engine: Running, pictures: Pictures) -> None:
        self.engine, self.pictures = engine, pictures
        renderer = TemplateRenderer(TEMPLATE, "", "")
        self.preparer = Preparer(engine.pair, renderer, pictures=pictures)

    def start(
        self,
        text: str,
        pictures: Sequence[bytes],
        *,
        max_tokens: int = 24,
        sampling: Sampling = GREEDY,
        speculative: SpeculationSettings = PLAIN,
        **options: Any,
    ) -> Answer:
        """Submit a question, in which `MARK` stands for each picture."""
        request = Generate(
            max(self.engine.answers, default=0) + 1,
            ChatPrompt([Message("user", text)], pictures=list(pictures), picture_mark=MARK),
            sampling=sampling,
            max_tokens=max_tokens,
            speculative=speculative,
            return_tokens=True,
            **options,
        )
        return self.engine.submit(self.preparer.prepare(request))

    def ask(self, text: str, *pictures: bytes, **options: Any) -> Answer:
        answer = self.start(text, pictures, **options)
        self.engine.finish()
        return answer


def written(answer: Answer) -> list[int]:
    """Return the tokens of an answer. Rows of a picture that share a place are no tokens of the text."""
    assert answer.done
    return [token for delta in answer.deltas for token in delta.ids]


@contextlib.contextmanager
def seeing(
    files: PairFiles, projector: Path, *, decoding_limit_s: int = DECODING_LIMIT_S, **settings: Any
) -> Iterator[Seeing]:
    files = msgspec.structs.replace(files, projector=str(projector))
    with contextlib.ExitStack() as opened:
        job = OpenProjector(
            str(projector), files.target, 1, False, decoding_limit_s=decoding_limit_s
        )
        pictures = Pictures(job)
        opened.callback(pictures.close)
        assert pictures.why_unusable() == ""
        loaded = Seeing(opened.enter_context(running(files, **settings)), pictures)
        opened.callback(loaded.preparer._renderer.close)
        yield loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def files(folder: Path) -> PairFiles:
    return contextual_pair(folder / "pair")


@pytest.fixture(scope="module")
def projector(folder: Path) -> Path:
    return write_projector(folder / "mmproj.gguf", CONTEXT_SHAPE.n_embd)


@pytest.fixture(scope="module")
def loaded(files: PairFiles, projector: Path) -> Iterator[Seeing]:
    with seeing(files, projector) as pair:
        yield pair


def read_with_library(
    model: Model, context: Context, projector: Path, text: str, pictures: Sequence[bytes]
) -> int:
    """Have mtmd read a prompt into an empty context, and return how many places it takes."""
    import llama_cpp.mtmd_cpp as library

    options = library.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.warmup = False, 1, False
    handle = library.mtmd_init_from_file(os.fsencode(projector), model.handle, options)
    assert handle
    chunks = library.mtmd_input_chunks_init()
    encoded = text.replace(MARK, library.mtmd_default_marker().decode()).encode()
    bitmaps = []
    for picture in pictures:
        data = (ctypes.c_uint8 * len(picture)).from_buffer_copy(picture)
        bitmaps.append(library.mtmd_helper_bitmap_init_from_buf(handle, data, len(picture), False))
    parts = library.mtmd_input_text(encoded, len(encoded), True, True)
    array = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
    assert library.mtmd_tokenize(handle, chunks, ctypes.byref(parts), array, len(bitmaps)) == 0
    n_past = ctypes.c_int32()
    code = library.mtmd_helper_eval_chunks(
        handle, context.handle, chunks, 0, 0, context.n_ctx, True, ctypes.byref(n_past)
    )
    assert code == 0
    library.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        library.mtmd_bitmap_free(bitmap)
    library.mtmd_free(handle)
    return int(n_past.value)


def check_beside_library(
    files: PairFiles, projector: Path, question: str, pictures: Sequence[bytes], *answers: Answer
) -> int:
    """Check that answers are greedy where llama.cpp's library reads the question and passes have one row.

    A token whose logit is as high but for rounding counts as the highest. Return the places of the prompt.
    """
    settings = ContextSettings(n_ctx=1024, n_batch=512, n_seq=1, n_outputs=1, n_threads=1)
    prompt = f"[user] {question}\n[assistant]"
    with Model(files.target, n_gpu_layers=0) as model, Context(model, settings) as context:
        for answer in answers:
            context.clear()
            n_prompt = read_with_library(model, context, projector, prompt, pictures)
            batch, row, tokens = Batch(1), -1, written(answer)
            assert tokens
            for place, token in enumerate(tokens, start=n_prompt):
                logits = context.logits(row)
                assert logits.max() - logits[token] <= NEAR_TIE, (place - n_prompt, tokens)
                batch.clear()
                row = batch.add(token, place, 0, True)
                context.decode(batch)
    return n_prompt


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        (f"{MARK}What is that?", (1,)),
        (f"First {MARK} and then {MARK}: which is larger?", (2, 3)),
        (f"{MARK}{MARK} twice the same", (4, 4)),
    ],
    ids=["one", "two", "equal"],
)
def test_an_answer_is_that_of_llama_cpps_library(
    loaded: Seeing, files: PairFiles, projector: Path, text: str, seeds: tuple[int, ...]
) -> None:
    pictures = [png(seed) for seed in seeds]
    answer = loaded.ask(text, *pictures)
    n_prompt = check_beside_library(files, projector, text, pictures, answer)
    assert answer.done.prompt_tokens == n_prompt


def test_a_large_picture_is_read_in_several_passes(files: PairFiles, folder: Path) -> None:
    large = write_projector(folder / "mmproj-large.gguf", CONTEXT_SHAPE.n_embd, size=12 * PATCH)
    text, pictures = f"{MARK}What is that?", [png(1)]
    with seeing(files, large, n_batch=64) as pair:
        answer = pair.ask(text, *pictures)
        n_passes = answer.done.passes
    assert n_passes >= 24 + 144 // 64
    check_beside_library(files, large, text, pictures, answer)


def check_indivisible(files: PairFiles, file: Path, *, n_batch: int = 256) -> None:
    """Check answers about pictures that are read as a whole, beside llama.cpp's library and each other."""
    text, first, other = f"Look: {MARK}What is that?", png(1, 160, 128), png(2, 160, 128)
    with seeing(files, file, n_batch=n_batch) as pair:
        answer = pair.ask(text, first)
        assert all(part.is_indivisible for part in pair.pictures.encode(first, never).rows)
        n_prompt = check_beside_library(files, file, text, [first], answer)
        assert answer.done.prompt_tokens >= n_prompt
        unlike = pair.ask(text, other)
        assert written(unlike) != written(answer)
        why = f"Look: {MARK}Why?"
        again = pair.ask(why, first)
        assert count_cached(again) > count_cached(unlike)
        both = f"{MARK} and {MARK}?"
        two = pair.start(both, [first, other], speculative=drafting(3, "ngram"))
        bystander = pair.start(text, [other])
        pair.engine.finish()
        check_beside_library(files, file, text, [other], unlike, bystander)
        check_beside_library(files, file, both, [first, other], two, pair.ask(both, first, other))
        exact = pair.ask(text, first, exact=True)
        assert written(exact) == written(pair.ask(text, first, exact=True))
        pair.engine.forget()
        check_beside_library(files, file, why, [first], again, pair.ask(why, first))


@pytest.mark.parametrize("n_batch", [256, 64])
def test_places_in_two_dimensions_are_those_of_llama_cpps_library(
    folder: Path, n_batch: int
) -> None:
    target = write_architecture("qwen2vl", folder, seed=4)
    files = PairFiles("two dimensions", str(target))
    file = write_projector(folder / "mmproj-mrope.gguf", 128, kind="qwen2vl_merger", scale=3.0)
    check_indivisible(files, file, n_batch=n_batch)


def test_rows_that_attend_to_each_other_are_read_as_by_llama_cpps_library(
    files: PairFiles, folder: Path
) -> None:
    file = write_projector(folder / "mmproj-gemma3.gguf", 64, kind="gemma3", size=8 * PATCH)
    check_indivisible(files, file)


def test_a_pass_holds_a_picture_also_without_flash_attention(
    files: PairFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSettings, "cpu_flash_attention", lambda *_args, **_options: "off")
    file = write_projector(folder / "mmproj-gemma3-256.gguf", 64, kind="gemma3", size=16 * PATCH)
    with seeing(files, file, n_batch=2048, n_ctx=1024) as pair:
        assert pair.engine.pair.shared.context.n_ubatch >= PICTURE_PASS_ROWS
        answer = pair.ask(f"{MARK}?", png(1))
        assert answer.done.prompt_tokens > PICTURE_PASS_ROWS


def test_rows_that_attend_to_each_other_must_fit_into_a_pass(
    files: PairFiles, folder: Path
) -> None:
    file = write_projector(folder / "mmproj-large.gguf", 64, kind="gemma3", size=10 * PATCH)
    with (
        seeing(files, file, n_batch=64) as pair,
        pytest.raises(InvalidRequest, match="has 100 rows, and a pass holds"),
    ):
        pair.ask(f"{MARK}?", png(1))


def count_cached(answer: Answer) -> int:
    assert answer.started is not None
    return answer.started.cached_tokens


def test_a_picture_is_found_again_by_its_content(
    loaded: Seeing, files: PairFiles, projector: Path
) -> None:
    first = loaded.ask(f"Before {MARK} behind", png(10))
    again = loaded.ask(f"Before {MARK} other words", png(10))
    other = loaded.ask(f"Before {MARK} other words", png(11))
    places = [index for index, token in enumerate(first.all_tokens) if is_picture(token)]
    assert len(places) == PICTURE_TOKENS
    assert count_cached(again) > places[-1]
    assert count_cached(other) == places[0]
    loaded.engine.forget()
    fresh = loaded.ask(f"Before {MARK} other words", png(11))
    assert count_cached(fresh) == 0
    check_beside_library(files, projector, f"Before {MARK} other words", [png(11)], fresh, other)


@pytest.mark.parametrize("n_kept", [0, 1, 3, 4])
def test_a_picture_is_encoded_once_by_a_request(
    files: PairFiles, projector: Path, monkeypatch: pytest.MonkeyPatch, n_kept: int
) -> None:
    """The cache has no room for all of its pictures. The next request encodes those that are missing."""
    questions = [
        f"{MARK}{MARK} or {MARK} or {MARK}, {MARK}?",
        f"{MARK}{MARK} and {MARK}{MARK}{MARK}?",
    ]
    shown = [png(seed) for seed in (70, 71, 72, 73, 70)]
    with seeing(files, projector) as pair:
        n_bytes = pair.pictures.encode(png(1), never).n_bytes
        monkeypatch.setattr(prompt_pictures, "CACHE_BYTES", n_kept * n_bytes)
        ask, counts = pair.pictures._ask, list[int]()

        def count(*arguments: Any) -> Any:
            counts[-1] += 1
            return ask(*arguments)

        monkeypatch.setattr(pair.pictures, "_ask", count)
        for question in [*questions, questions[0]]:
            counts.append(0)
            answer = pair.ask(question, *shown)
            check_beside_library(files, projector, question, shown, answer)
        assert counts == [4, 4 - max(n_kept, 1), 4 - max(n_kept, 1)]


def test_each_picture_of_a_request_can_be_cancelled(loaded: Seeing) -> None:
    prompt = ChatPrompt([Message("user", MARK * 2)], pictures=[png(80), png(81)], picture_mark=MARK)
    request = Generate(1, prompt)
    for n_left in (2, 1):
        pictures = loaded.preparer.find_pictures(request)
        assert len(pictures.missing) == n_left
        os.kill(loaded.pictures._child.pid, signal.SIGSTOP)  # so that it encodes nothing before
        with pytest.raises(Cancelled):
            loaded.preparer.encode_next(request, pictures, lambda: True)
        loaded.preparer.encode_next(request, pictures, never)


@pytest.mark.parametrize("kind", ["draft", "ngram", "auto"])
def test_drafts_change_no_greedy_answer(
    loaded: Seeing, files: PairFiles, projector: Path, kind: str
) -> None:
    question, pictures = f"This {MARK} and this {MARK}?", (png(20), png(21))
    drafted = loaded.ask(question, *pictures, max_tokens=64, speculative=drafting(3, kind))
    check_beside_library(files, projector, question, pictures, drafted)
    assert not any(map(is_picture, written(drafted)))
    if kind == "draft":
        assert drafted.done.speculation.accepted > 0


@pytest.mark.parametrize("kind", ["draft", "ngram", "auto"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_drafts_change_no_exact_answer(loaded: Seeing, kind: str, penalty: float) -> None:
    sampling = Sampling(temperature=0.0, repeat_penalty=penalty, repeat_last_n=-1)
    question, pictures = f"This {MARK} and this {MARK}?", (png(20), png(21))
    options: dict[str, Any] = {"max_tokens": 64, "sampling": sampling, "exact": True}
    plain = loaded.ask(question, *pictures, **options)
    drafted = loaded.ask(question, *pictures, speculative=drafting(3, kind), **options)
    assert written(drafted) == written(plain)
    assert not any(map(is_picture, written(drafted)))


def test_heads_draft_behind_a_picture(folder: Path) -> None:
    files = contextual_heads(folder / "heads", "gemma4")
    with Model(files.target, n_gpu_layers=0) as model:
        file = write_projector(folder / "mmproj-heads.gguf", model.n_embd)
    with seeing(files, file) as pair:
        drafted = pair.ask(f"This {MARK}?", png(1), max_tokens=48, speculative=drafting(3, "mtp"))
        check_beside_library(files, file, f"This {MARK}?", [png(1)], drafted)
        assert drafted.done.speculation.drafted > 0


def test_a_recurrent_state_goes_back_to_before_a_picture(folder: Path) -> None:
    files = lfm2_pair(folder / "lfm2")
    file = write_projector(folder / "mmproj-lfm2.gguf", 64)
    question = f"{'Many words before it. ' * 8}{MARK} and many words behind it."
    with seeing(files, file, n_ctx=1024) as pair:
        first = pair.ask(question, png(1))
        other = pair.ask(question, png(2))
        again = pair.ask(question, png(1))
        assert written(first) != written(other)
        check_beside_library(files, file, question, [png(1)], first, again)
        check_beside_library(files, file, question, [png(2)], other)


@skip_on(
    "rpc", why="what is kept of a pair is for its machines, and each engine has another worker"
)
def test_a_saved_state_holds_a_picture(files: PairFiles, projector: Path, tmp_path: Path) -> None:
    room: dict[str, Any] = {
        "states_dir": str(tmp_path),
        "states_bytes": 1 << 26,
        "prefix_bytes": 1 << 26,
    }
    # Shorter states are not saved.
    text = f"{'Words before the picture. ' * 12}{MARK} and words behind it."

    def ask_anew(picture: bytes) -> Answer:
        with seeing(files, projector, n_ctx=1024, **room) as pair:
            pair.engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6  # reading again is dear
            return pair.ask(text, picture, conversation="ab12")

    first = ask_anew(png(60))
    n_before = next(i for i, token in enumerate(first.all_tokens) if is_picture(token))
    again, other = ask_anew(png(60)), ask_anew(png(61))
    assert again.started is not None
    assert again.started.cache == "disk"
    assert count_cached(again) > n_before + PICTURE_TOKENS
    check_beside_library(files, projector, text, [png(60)], first, again)
    assert count_cached(other) == n_before


def test_several_are_read_at_the_same_time(
    loaded: Seeing, files: PairFiles, projector: Path
) -> None:
    questions = [(f"Number {seed} {MARK}?", png(30 + seed)) for seed in range(3)]
    together = [loaded.start(question, [picture]) for question, picture in questions]
    bystander = loaded.start("No picture at all?", [])
    loaded.engine.finish()
    for (question, picture), answer in zip(questions, together, strict=True):
        check_beside_library(files, projector, question, [picture], answer)
    check_beside_library(files, projector, "No picture at all?", [], bystander)


def test_a_request_that_gives_way_reads_its_picture_again(
    files: PairFiles, projector: Path
) -> None:
    with seeing(files, projector, n_ctx=256) as pair:
        questions = [(f"{MARK} number {seed}?", png(seed)) for seed in range(3)]
        answers = [pair.start(text, [picture], max_tokens=100) for text, picture in questions]
        pair.engine.finish()
        for (question, picture), answer in zip(questions, answers, strict=True):
            check_beside_library(files, projector, question, [picture], answer)


def test_an_exact_answer_does_not_depend_on_others(loaded: Seeing) -> None:
    alone = loaded.ask(f"Exactly {MARK}?", png(40), exact=True)
    beside = loaded.start(f"Exactly {MARK}?", [png(40)], exact=True)
    loaded.start(f"Other {MARK}?", [png(41)], speculative=drafting(3, "draft"))
    loaded.engine.finish()
    assert written(beside) == written(alone)


@pytest.mark.parametrize("kind", ["gemma3", "mlp"])
def test_what_is_reused_exactly_ends_before_a_picture_that_it_would_cut(
    files: PairFiles, folder: Path, kind: str
) -> None:
    """Reuse ends at a multiple of so many tokens, which is within this picture."""
    n_rows = EXACT_CHUNK_TOKENS + 16
    side = next(side for side in range(1, 99) if side**2 >= n_rows)
    file = write_projector(folder / f"mmproj-cut-{kind}.gguf", 64, kind=kind, size=side * PATCH)
    text = f"Look: {MARK}Why?"
    with seeing(files, file, n_ctx=1024, n_batch=1024) as pair:
        first = pair.ask(f"Look: {MARK}What is that?", png(1), exact=True)
        n_before = next(at for at, token in enumerate(first.all_tokens) if is_picture(token))
        assert n_before < EXACT_CHUNK_TOKENS < n_before + side**2
        again = pair.ask(text, png(1), exact=True)
        assert count_cached(again) <= n_before
        pair.engine.forget()
        assert written(pair.ask(text, png(1), exact=True)) == written(again)


def test_earlier_texts_are_remembered_without_their_pictures(loaded: Seeing) -> None:
    loaded.ask(f"{'Some words to remember. ' * 3}{MARK} and those behind it.", png(50))
    texts = loaded.engine.pair.memory.texts
    assert texts
    assert all(token >= 0 for _, text in texts for token in text)


def encode_all(preparer: Preparer, request: Generate, pictures: RequestPictures) -> None:
    while pictures.missing:
        preparer.encode_next(request, pictures, never)


def test_too_many_pictures_for_the_context_are_refused(files: PairFiles, projector: Path) -> None:
    with seeing(files, projector, n_ctx=256) as pair:
        prompt = ChatPrompt(
            [Message("user", MARK * 20)], pictures=[png(i) for i in range(20)], picture_mark=MARK
        )
        request = Generate(1, prompt)
        found = pair.preparer.find_pictures(request)
        assert len(found.missing) == 20
        with pytest.raises(ContextExceeded, match="16 of 20 pictures have 256 tokens"):
            encode_all(pair.preparer, request, found)


def test_a_picture_that_takes_long_to_decode_is_refused(files: PairFiles, projector: Path) -> None:
    with seeing(files, projector, decoding_limit_s=1) as pair:
        for _ in range(2):  # the process is another one then
            with pytest.raises(InvalidRequest, match="takes more than 1 seconds of processor time"):
                pair.ask(f"{MARK}?", gif_of_long_codes(4_000_000))
        check_beside_library(
            files,
            projector,
            f"{MARK}?",
            [png(1)],
            *(pair.ask(f"{MARK}?", png(1)) for _ in range(2)),
        )


def test_a_pair_without_a_projector_refuses_and_says_what_to_do(files: PairFiles) -> None:
    with running(files) as engine:
        engine.pair.files.projector_hint = "Pull it again."
        renderer = TemplateRenderer(TEMPLATE, "", "")
        preparer = Preparer(engine.pair, renderer)
        prompt = ChatPrompt([Message("user", MARK)], pictures=[png(1)], picture_mark=MARK)
        with pytest.raises(InvalidRequest, match=r"reads text and no pictures\. Pull it again\."):
            preparer.prepare(Generate(1, prompt))
        renderer.close()


def test_a_template_that_leaves_out_a_picture_is_refused(loaded: Seeing) -> None:
    prompt = ChatPrompt([Message("user", "no mark")], pictures=[png(1)], picture_mark=MARK)
    with pytest.raises(InvalidRequest, match="leaves out a picture"):
        loaded.preparer.prepare(Generate(1, prompt))


def test_the_projector_of_another_model_is_refused(files: PairFiles, folder: Path) -> None:
    other = write_projector(folder / "mmproj-other.gguf", 2 * CONTEXT_SHAPE.n_embd)
    with pytest.raises(LoadFailed, match="cannot load"):
        Projector(str(other), files.target, n_threads=1, on_gpu=False)
    pictures = Pictures(OpenProjector(str(other), files.target, 1, False))
    assert "cannot load" in pictures.why_unusable()
    pictures.close()


def test_a_target_that_reads_no_pictures_is_refused(folder: Path) -> None:
    files = contextual_heads(folder / "heads", "glm4moe")
    file = write_projector(folder / "mmproj-glm.gguf", 64)
    pictures = Pictures(OpenProjector(str(file), files.target, 1, False))
    assert "no pictures with a target of this kind (glm4moe)" in pictures.why_unusable()
    pictures.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=5), st.binary())
def test_rows_are_at_the_places_of_their_pictures(
    shapes: list[tuple[int, int]], identity: bytes
) -> None:
    pictures, texts = [], [[7]]
    for number, (n_before, n_rows) in enumerate(shapes):
        key = identity + bytes([number])
        tokens = [1] * n_before + picture_tokens(key, n_rows)
        rows = np.full((n_rows, 2), number, np.float32)
        pictures.append(Encoded(tokens, [PictureRows(n_before, rows, n_rows)]))
        texts.append([number] * (number % 2))
    tokens, placed = place_pictures(texts, pictures)
    covered = {place for part in placed for place in range(part.start, part.end)}
    assert covered == {place for place, token in enumerate(tokens) if is_picture(token)}
    assert [float(part.rows[0, 0]) for part in placed] == list(range(len(shapes)))
    assert [token for part in split_pictures(tokens) for token in part] == tokens


@given(st.binary(), st.binary(), st.integers(1, 64))
def test_tokens_of_pictures_are_theirs_alone(first: bytes, second: bytes, count: int) -> None:
    tokens = picture_tokens(first, count)
    assert len(tokens) == count
    assert all(-(1 << 31) <= token < 0 for token in tokens)
    assert (tokens == picture_tokens(second, count)) == (first == second)
