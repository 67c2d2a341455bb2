"""The worker from the daemon's side: a child process at the other end of a socketpair."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.synthetic import Shape, target_cycle, vocabulary, write_model
from localspec.protocol import frames
from localspec.protocol.frames import (
    ApplyTemplate,
    Cancel,
    ChatPrompt,
    Constraint,
    CountTokens,
    Delta,
    Detokenize,
    Done,
    EngineSettings,
    Failed,
    Frame,
    Generate,
    Load,
    Loaded,
    LoadError,
    Loading,
    Message,
    MixedPrompt,
    PairFiles,
    Ping,
    Pong,
    Reply,
    Sampling,
    Shutdown,
    SpeculationSettings,
    Started,
    TextPrompt,
    Tokenize,
    TokenPrompt,
)
from tests.support.daemons import SLOW_ENGINE
from tests.support.gguf_files import relabelled
from tests.support.pairs import BOS, N_VOCAB, cycle_pair, expected
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SMALL = EngineSettings(n_ctx=512, n_batch=128, n_threads=1)
GREEDY = Sampling(temperature=0.0)
Kind = TypeVar("Kind", bound=Frame)


class Child:
    """A worker process and the frames received from it."""

    def __init__(self, engine: Sequence[str] = (sys.executable, "-m", "localspec.engine")) -> None:
        self._socket, worker_socket = socket.socketpair()
        self._socket.settimeout(PATIENCE)
        with worker_socket:
            self.process = subprocess.Popen(
                [*engine, "--fd", str(worker_socket.fileno())],
                pass_fds=[worker_socket.fileno()],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        self.received: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self._socket.sendall(frames.encode_frame(frame))

    def send_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> Frame:
        body = frames.read_frame(self._socket)
        assert body is not None, f"the worker went away after {self.received[-3:]}"
        frame: Frame = frames.from_worker_decoder.decode(body)
        self.received.append(frame)
        return frame

    def await_frame(self, kind: type[Kind], request: int | None = None) -> Kind:
        """Return the next frame of this kind about this request."""
        while True:
            frame = self.receive()
            if isinstance(frame, kind) and request in (None, getattr(frame, "id", None)):
                return frame

    def ending(self, request: int) -> Done | Failed:
        while True:
            frame = self.receive()
            if isinstance(frame, Done | Failed) and frame.id == request:
                return frame

    def text(self, request: int) -> str:
        return "".join(f.text for f in self.received if isinstance(f, Delta) and f.id == request)

    def load(self, files: PairFiles, settings: EngineSettings = SMALL) -> Loaded:
        self.send(Load(files, settings))
        return self.await_frame(Loaded)

    def hang_up(self) -> int:
        self._socket.close()
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def child() -> Iterator[Child]:
    worker = Child()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def loaded(cycle_files: PairFiles) -> Iterator[Child]:
    """Start a worker with a pair, for tests that do not change its state."""
    worker = Child()
    worker.load(cycle_files)
    yield worker
    worker.close()


_ids = count(100)


def _fresh_id() -> int:
    return next(_ids)


def make_request(first_token: int, **more: object) -> Generate:
    options: dict[str, object] = {"sampling": GREEDY, "max_tokens": 20, **more}
    return Generate(_fresh_id(), TokenPrompt([BOS, first_token]), **options)  # type: ignore[arg-type]


def expected_text(first_token: int, length: int) -> str:
    """Return the text of the tokens of a cycle in the synthetic vocabulary."""
    from gguf.vocab import bytes_to_unicode  # type: ignore[attr-defined,unused-ignore]

    spelled = {character: byte for byte, character in bytes_to_unicode().items()}
    words = vocabulary(N_VOCAB)
    raw = b"".join(
        bytes(spelled[character] for character in words[token])
        for token in expected(first_token, length)
    )
    return raw.decode("utf-8", "replace")


def test_loading_a_pair_reports_progress_and_its_description(
    child: Child, cycle_files: PairFiles
) -> None:
    info = child.load(cycle_files)
    stages = [f.stage for f in child.received if isinstance(f, Loading)]
    assert set(stages) == {"target", "draft", "profile"}
    fractions = [
        f.fraction for f in child.received if isinstance(f, Loading) and f.stage == "target"
    ]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert (info.name, info.n_ctx) == (cycle_files.name, 512)
    assert info.chat_template is not None
    assert info.speculation is None
    assert info.costs
    assert info.costs.target_ms


def test_an_answer_is_streamed_and_ends_with_its_statistics(loaded: Child) -> None:
    request = make_request(7, speculative=SpeculationSettings(depth=3, kind="draft"))
    loaded.send(request)
    started = loaded.await_frame(Started, request.id)
    assert started.prompt_tokens == 2
    done = loaded.ending(request.id)
    assert isinstance(done, Done)
    assert done.completion_tokens == 20
    assert done.speculation.active
    assert loaded.text(request.id) == expected_text(7, 20)


def test_small_requests_are_answered(loaded: Child) -> None:
    loaded.send(Tokenize(1, "ab <|end|>", parse_special=True))
    reply = loaded.await_frame(Reply, 1).value
    assert reply["tokens"][-1] == N_VOCAB - 1
    assert b"".join(reply["pieces"]) == b"ab <|end|>"
    loaded.send(Detokenize(2, reply["tokens"]))
    assert loaded.await_frame(Reply, 2).value == {"content": "ab <|end|>"}
    loaded.send(ApplyTemplate(3, ChatPrompt([Message("user", "hi")])))
    assert loaded.await_frame(Reply, 3).value == {"prompt": "<|bos|><|user|>hi<|end|><|assistant|>"}


def test_prompt_is_counted_as_read_even_if_it_does_not_fit(loaded: Child) -> None:
    chat = ChatPrompt([Message("user", "hi")])
    for prompt in (chat, TextPrompt("ab cd"), MixedPrompt([5, "ab", 7])):
        loaded.send(CountTokens(6, prompt))
        counted = loaded.await_frame(Reply, 6).value["tokens"]
        request = Generate(_fresh_id(), prompt, GREEDY, max_tokens=1)
        loaded.send(request)
        assert loaded.await_frame(Started, request.id).prompt_tokens == counted
        loaded.ending(request.id)
    loaded.send(CountTokens(7, TextPrompt("ab cd " * 2000)))
    assert loaded.await_frame(Reply, 7).value["tokens"] > 2000


def test_mixed_prompt_is_read_in_order(loaded: Child) -> None:
    loaded.send(Tokenize(8, "ab", add_special=True))
    beginning = loaded.await_frame(Reply, 8).value["tokens"]
    loaded.send(Tokenize(9, "ab"))
    within = loaded.await_frame(Reply, 9).value["tokens"]
    mixed = MixedPrompt(["ab", 5, 6, "ab", 7]), MixedPrompt([5, "ab", 7])
    plain = [*beginning, 5, 6, *within, 7], [5, *within, 7]
    for parts, tokens in zip(mixed, plain, strict=True):
        for prompt in (parts, TokenPrompt(tokens)):
            request = Generate(
                _fresh_id(), prompt, GREEDY, max_tokens=4, return_tokens=True, cache_prompt=False
            )
            loaded.send(request)
            assert loaded.await_frame(Started, request.id).prompt_tokens == len(tokens)
            assert isinstance(loaded.ending(request.id), Done)
            assert loaded.text(request.id) == expected_text(7, 4)


def test_deltas_carry_every_token_and_timings(loaded: Child) -> None:
    request = make_request(7, return_tokens=True, timings=True, stop=["never"])
    loaded.send(request)
    done = loaded.ending(request.id)
    assert isinstance(done, Done)
    deltas = [
        frame for frame in loaded.received if isinstance(frame, Delta) and frame.id == request.id
    ]
    assert [token for delta in deltas for token in delta.ids] == expected(7, 20)
    assert [delta.tokens for delta in deltas if delta.timings] == [d.tokens for d in deltas]
    for delta in deltas:
        assert delta.timings is not None
        assert delta.timings.predicted_n == delta.tokens
    assert deltas[-1].timings.predicted_ms <= done.timings.predicted_ms  # type: ignore[union-attr] # see above


def test_post_sampling_probabilities_sum_to_one(loaded: Child) -> None:
    sampling = Sampling(temperature=3.0, top_k=4, top_p=1.0, min_p=0.0, seed=5)
    for greedy in (False, True):
        request = make_request(
            7,
            sampling=GREEDY if greedy else sampling,
            top_logprobs=10,
            post_sampling=True,
            speculative=SpeculationSettings(depth=3),
        )
        loaded.send(request)
        assert isinstance(loaded.ending(request.id), Done)
        deltas = [
            frame
            for frame in loaded.received
            if isinstance(frame, Delta) and frame.id == request.id
        ]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert len(entries) == 20
        for entry in entries:
            assert len(entry.top) == (1 if greedy else 4)
            assert sum(math.exp(value) for _, _, value in entry.top) == pytest.approx(1.0)
            assert entry.logprob in [value for token, _, value in entry.top if token == entry.id]


def test_text_bias_is_a_bias_of_each_of_its_tokens(loaded: Child) -> None:
    loaded.send(Tokenize(10, "ab cd"))
    tokens = loaded.await_frame(Reply, 10).value["tokens"]
    texts = []
    for options in ({"text_bias": {"ab cd": 90.0}}, {"logit_bias": dict.fromkeys(tokens, 90.0)}):
        request = make_request(7, sampling=Sampling(temperature=0.0, **options))
        loaded.send(request)
        assert loaded.await_frame(Started, request.id).logit_bias == dict.fromkeys(tokens, 90.0)
        assert isinstance(loaded.ending(request.id), Done)
        texts.append(loaded.text(request.id))
    assert texts[0] == texts[1] != expected_text(7, 20)


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**40])
def test_detokenize_refuses_ids_outside_the_vocabulary(loaded: Child, token: int) -> None:
    loaded.send(Detokenize(4, [1, token]))
    assert loaded.await_frame(Failed, 4).code == "invalid_request"


def test_a_chat_is_answered_without_a_second_bos(loaded: Child) -> None:
    prompt = ChatPrompt([Message("user", "hi")])
    loaded.send(Tokenize(5, "<|bos|><|user|>hi<|end|><|assistant|>"))
    tokens = loaded.await_frame(Reply, 5).value["tokens"]
    request = Generate(_fresh_id(), prompt, GREEDY, max_tokens=4)
    loaded.send(request)
    assert loaded.await_frame(Started, request.id).prompt_tokens == len(tokens)
    assert isinstance(loaded.ending(request.id), Done)


def test_a_running_answer_is_cancelled(loaded: Child) -> None:
    request = make_request(7, max_tokens=None)
    loaded.send(request)
    loaded.await_frame(Delta, request.id)
    loaded.send(Cancel(request.id))
    done = loaded.ending(request.id)
    assert isinstance(done, Done)
    assert done.finish_reason in ("cancelled", "length")
    assert loaded.text(request.id) == expected_text(7, 500)[: len(loaded.text(request.id))]


@pytest.fixture(scope="module")
def unhurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Start a worker whose long passes take far more time than a frame, on any machine."""
    path = tmp_path_factory.mktemp("unhurried") / "target.gguf"
    shape = Shape(n_layer=8, n_embd=512, n_ff=1536, n_head=8, n_vocab=N_VOCAB, n_ctx=2048)
    write_model(path, shape, target_cycle(N_VOCAB))
    worker = Child()
    worker.load(
        PairFiles("slow", str(path)),
        EngineSettings(n_ctx=2048, n_batch=512, n_threads=1, gap_s=0.02),
    )
    yield worker
    worker.close()


def make_long_request(first_token: int, count: int = 1200, **more: Any) -> Generate:
    tokens = [first_token, *((7 * at) % 400 for at in range(count))]
    return Generate(_fresh_id(), TokenPrompt(tokens), GREEDY, max_tokens=2, **more)


def test_cancelling_a_request_ends_the_pass_over_its_prompt(unhurried: Child) -> None:
    leaving = make_long_request(1)
    unhurried.send(leaving)
    unhurried.await_frame(Started, leaving.id)
    unhurried.send(Cancel(leaving.id))
    done = unhurried.ending(leaving.id)
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"
    repeated = make_long_request(1, 2)
    unhurried.send(repeated)
    assert unhurried.await_frame(Started, repeated.id).cached_tokens == 0
    assert isinstance(unhurried.ending(repeated.id), Done)


def test_new_request_interrupts_a_wide_pass_and_is_answered_first(
    unhurried: Child,
) -> None:
    long, key = make_long_request(2), make_long_request(3, 10, priority="editor")
    unhurried.send(long)
    unhurried.await_frame(Started, long.id)
    unhurried.send(key)
    assert isinstance(unhurried.ending(key.id), Done)
    unhurried.send(Cancel(long.id))
    unhurried.ending(long.id)
    repeated = make_long_request(2, 1200)
    unhurried.send(repeated)
    assert unhurried.await_frame(Started, repeated.id).cached_tokens < 512
    assert isinstance(unhurried.ending(repeated.id), Done)


def test_a_request_is_cancelled_before_it_runs(unhurried: Child) -> None:
    """It waits because each sequence is taken by a request that writes for seconds."""
    writing = [
        make_request(first, max_tokens=450) for first in range(1, EngineSettings().parallel + 1)
    ]
    for request in writing:
        unhurried.send(request)
        unhurried.await_frame(Started, request.id)
    waiting = make_request(9, max_tokens=400)
    unhurried.send(waiting)
    unhurried.send(Cancel(waiting.id))
    failed = unhurried.ending(waiting.id)
    assert isinstance(failed, Failed)
    assert failed.code == "cancelled"
    assert not any(isinstance(f, Started) and f.id == waiting.id for f in unhurried.received)
    for request in writing:
        unhurried.send(Cancel(request.id))
        assert isinstance(unhurried.ending(request.id), Done)


def test_cancelling_an_unknown_or_finished_request_is_no_error(loaded: Child) -> None:
    loaded.send(Cancel(999_999))
    request = make_request(7)
    loaded.send(request)
    loaded.ending(request.id)
    loaded.send(Cancel(request.id))
    loaded.send(Ping(6))
    assert loaded.await_frame(Pong, 6).id == 6


def test_a_ping_is_answered_while_answers_are_written(loaded: Child) -> None:
    requests = [make_request(first_token, max_tokens=450) for first_token in (1, 2, 3)]
    for request in requests:
        loaded.send(request)
    loaded.await_frame(Delta, requests[0].id)
    loaded.send(Ping(7))
    loaded.await_frame(Pong, 7)
    # A tokenizer's request has its own thread and does not wait either.
    loaded.send(Tokenize(8, "ab"))
    loaded.await_frame(Reply, 8)
    finished = {f.id for f in loaded.received if isinstance(f, Done)}
    assert not finished.issuperset(r.id for r in requests)
    for request in requests:
        if request.id not in {f.id for f in loaded.received if isinstance(f, Done)}:
            loaded.ending(request.id)
        assert loaded.text(request.id).startswith(
            expected_text(request.prompt.tokens[-1], 300)[:300]  # type: ignore[union-attr]
        )


def test_a_ping_is_answered_while_a_pass_takes_long(tmp_path: Path) -> None:
    """The answer tells how long the pass has run, so that a hanging pass is detected."""
    hang = tmp_path / "hang"
    slow = [sys.executable, "-P", str(SLOW_ENGINE), "0", str(hang)]
    child = Child(slow)
    try:
        child.load(cycle_pair(tmp_path / "cycle", 0.75))
        child.send(Ping(1))
        assert child.await_frame(Pong, 1).still_s < PATIENCE
        hang.touch()
        request = make_request(7)
        child.send(request)
        child.await_frame(Started, request.id)
        still = [0.0]
        while still[-1] < 0.2:
            child.send(Ping(2))
            still.append(child.await_frame(Pong, 2).still_s)
        assert not any(isinstance(frame, Delta) for frame in child.received)
        hang.unlink()
        assert isinstance(child.ending(request.id), Done)
        child.send(Ping(3))
        assert child.await_frame(Pong, 3).still_s < still[-1]
    finally:
        child.close()


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ({"constraint": Constraint("regex", "(", param="regex")}, "invalid_grammar regex"),
        (
            {"sampling": Sampling(logit_bias={10**6: 1.0})},
            'invalid_request logit_bias["1000000"]',
        ),
        ({"prompt": TokenPrompt([N_VOCAB])}, "invalid_request prompt"),
        ({"prompt": MixedPrompt(["a", N_VOCAB])}, "invalid_request prompt"),
        ({"prompt": TokenPrompt([])}, "invalid_request prompt"),
        ({"prompt": TokenPrompt([1] * 600)}, "context_length_exceeded prompt"),
    ],
)
def test_a_bad_request_fails_alone(loaded: Child, wish: dict[str, object], code: str) -> None:
    good, bad = make_request(7), Generate(_fresh_id(), **{"prompt": TokenPrompt([1]), **wish})  # type: ignore[arg-type]
    loaded.send(good)
    loaded.send(bad)
    endings: dict[int, Frame] = {}
    while len(endings) < 2:
        frame = loaded.receive()
        if isinstance(frame, Done | Failed):
            endings[frame.id] = frame
    failed = endings[bad.id]
    assert isinstance(failed, Failed)
    assert f"{failed.code} {failed.param}" == code
    assert "\n" not in failed.message
    assert isinstance(endings[good.id], Done)
    assert loaded.text(good.id) == expected_text(7, 20)


def test_a_load_that_fails_leaves_the_worker_ready_for_the_next(
    child: Child, cycle_files: PairFiles, tmp_path: Path
) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"<html>not found</html>" * 100)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(cycle_files.target).read_bytes()[:20_000])
    other_model = write_model(
        tmp_path / "other.gguf", Shape(1, 64, 64, 4, 1024), target_cycle(1024)
    )
    for files, words in [
        (PairFiles("p", "/nowhere/at/all.gguf"), "no model file"),
        (PairFiles("p", str(tmp_path)), "no model file"),
        (PairFiles("p", str(garbage)), "cannot load"),
        (PairFiles("p", str(cut)), "cannot load"),
        (PairFiles("p", cycle_files.target, str(garbage)), "cannot load"),
        (PairFiles("p", cycle_files.target, str(other_model)), "not a matched draft"),
    ]:
        child.send(Load(files, SMALL))
        error = child.await_frame(LoadError)
        assert words in error.message
        child.send(Generate(_fresh_id(), TextPrompt("x")))
        assert child.await_frame(Failed).code == "unavailable"
    child.load(cycle_files)
    request = make_request(7)
    child.send(request)
    assert isinstance(child.ending(request.id), Done)


def test_loading_another_pair_replaces_the_first(
    child: Child, cycle_files: PairFiles, contextual_files: PairFiles
) -> None:
    child.load(cycle_files)
    assert child.load(contextual_files).name == "contextual"
    assert child.load(cycle_files).name == "cycle"
    request = make_request(7)
    child.send(request)
    child.ending(request.id)
    assert child.text(request.id) == expected_text(7, 20)


def test_before_a_load_requests_are_refused_and_pings_answered(child: Child) -> None:
    child.send(Tokenize(1, "x"))
    assert child.await_frame(Failed, 1).code == "unavailable"
    child.send(Ping(2))
    assert child.await_frame(Pong, 2).id == 2


def test_measured_profile_is_stored_for_the_next_load(
    child: Child, cycle_files: PairFiles, tmp_path: Path
) -> None:
    settings = EngineSettings(n_ctx=512, n_batch=128, n_threads=1, state_dir=str(tmp_path))
    child.load(cycle_files, settings)
    child.send(Shutdown())
    assert child.process.wait(PATIENCE) == 0
    (stored,) = tmp_path.glob("profile-*.json")
    # The noise is set to zero, since a profile of a busy machine would be measured again.
    profile = json.loads(stored.read_text(encoding="utf-8")) | {"noise": 0.0}
    stored.write_text(json.dumps(profile), encoding="utf-8")
    restarted = Child()
    try:
        costs = restarted.load(cycle_files, settings).costs
        assert costs
        assert {str(width): ms for width, ms in costs.target_ms.items()} == profile["target_ms"]
    finally:
        restarted.close()


def test_it_ends_when_the_daemon_hangs_up_even_while_writing(
    child: Child, cycle_files: PairFiles
) -> None:
    child.load(cycle_files)
    child.send(make_request(7, max_tokens=None))
    child.await_frame(Started)
    assert child.hang_up() == 0


def test_it_ends_on_shutdown(child: Child) -> None:
    child.send(Shutdown())
    assert child.process.wait(PATIENCE) == 0


def test_it_outlives_the_terminals_interrupt(child: Child) -> None:
    child.send(Ping(1))
    child.await_frame(Pong)
    os.kill(child.process.pid, signal.SIGINT)
    child.send(Ping(2))
    assert child.await_frame(Pong, 2).id == 2


def test_it_ends_on_a_frame_it_cannot_read(child: Child) -> None:
    child.send_raw(b"\x04\x00\x00\x00junk")
    assert child.process.wait(PATIENCE) == 2


def test_nothing_is_written_to_its_stdout(child: Child, cycle_files: PairFiles) -> None:
    """Whatever llama.cpp prints must not reach a pipe that carries frames."""
    child.load(cycle_files)
    child.send(Shutdown())
    child.process.wait(PATIENCE)
    assert child.process.stdout is not None
    assert child.process.stdout.read() == b""


def test_prompt_that_is_slow_to_tokenize_delays_no_other(child: Child, tmp_path: Path) -> None:
    shipped = ROOT / "localspec" / "builtin" / "draft.gguf"
    model = relabelled(shipped, "gpt-4o", tmp_path / "slow.gguf")
    child.load(PairFiles("slow", str(model)))
    child.send(Tokenize(1, "<|end|>a" * 1000))
    child.send(Tokenize(2, "quick"))
    first_reply = child.await_frame(Reply)
    assert first_reply.id == 2
    assert len(child.await_frame(Reply, 1).value["tokens"]) == 2000


def test_a_prompt_that_cannot_fit_is_refused_unread(loaded: Child) -> None:
    loaded.send(Generate(5, TextPrompt("word " * 2_000_000)))
    failed = loaded.await_frame(Failed, 5)
    assert failed.code == "context_length_exceeded"
    assert "The prompt has about 8" in failed.message
