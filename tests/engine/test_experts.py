"""The experts of a mixture lie where a plan puts them, and its answers stay what they were.

Another process on this machine, whose memory can be limited, is the GPU: llama.cpp treats it as one.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.llama import Batch, Context, ContextSettings, Model, rpc
from localspec.engine.llama.rpc import has_rpc_backend
from localspec.engine.pair.models import make_pass_runner
from localspec.engine.speculation.warm_start import OTHER_TEXTS, TEXTS
from localspec.extras.embeddings.engine import load_embedding_model
from localspec.model_traits import ExpertTensor, find_expert, match_experts, order_experts
from localspec.protocol.frames import EngineSettings, PairFiles, Sampling, SpeculationSettings
from localspec.registry.header.gguf import Tensor
from localspec.registry.header.model import read_local_model
from tests.support import architectures
from tests.support.daemons import wait_for
from tests.support.rpc import rpc_worker
from tests.support.running import PLAIN, drafting, running, skip_on

MIB = 1 << 20
# Mixtures with separate matrices, with biases, with leading dense layers and a shared expert, with recurrent
# layers, and with fused matrices; those with True have heads of their own.
MIXTURES = {
    "qwen3moe": False,
    "gpt-oss": False,
    "glm4moe": True,
    "deepseek2": True,
    "qwen35moe": True,
}
PROMPT = [7, 3, 90, 41, 5, 12]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a worker's greeting as long as a busy machine takes."""
    monkeypatch.setattr(rpc, "GREETING_S", 60.0)


def write(architecture: str, folder: Path) -> Path:
    heads = int(MIXTURES[architecture])
    return architectures.write(architecture, folder, experts=True, heads=heads)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    if not has_rpc_backend():
        pytest.skip("this llama.cpp was built without GGML_RPC")
    with rpc_worker() as (endpoint, _):
        yield endpoint


def count_remote_mib(lines: list[str]) -> float:
    """Return the MiB of weights that llama.cpp put on the other device in the last load."""
    sizes = re.findall(r"RPC\d+.* model buffer size = +([\d.]+) MiB", "".join(lines))
    return float(sizes[-1]) if sizes else 0.0


def is_on_device(tensor: Tensor, layers: int, first_layer: int, apart: list[ExpertTensor]) -> bool:
    """Whether a tensor should be on the device, which has the layers from `first_layer` on."""
    if tensor.name == "token_embd.weight":
        return False
    if not tensor.name.startswith("blk."):
        return first_layer <= layers
    return int(tensor.name.split(".")[1]) >= first_layer and find_expert(tensor.name) not in apart


def read_logits(path: Path, lines: list[str] | None = None, **options: Any) -> Any:
    """Return the logits of a pass over some tokens. lines: llama.cpp's log, which is emptied first."""
    if lines is not None:
        lines.clear()
    with Model(str(path), **options) as model:
        settings = ContextSettings(n_ctx=256, n_batch=16, n_seq=1, n_outputs=8, n_threads=1)
        with Context(model, settings) as context:
            make_pass_runner(context, Batch(16))(8)
            return np.array([context.logits(row) for row in range(8)])


def assert_equal_but_for_rounding(logits: Any, truth: Any) -> None:
    """Compare logits, which a wrong or missing expert moves by about their own size."""
    assert np.abs(logits - truth).max() < 2e-2 < np.abs(truth).max()


@pytest.mark.parametrize("architecture", MIXTURES)
def test_each_kind_of_plan_is_carried_out(
    architecture: str, tmp_path: Path, endpoint: str, log_lines: list[str]
) -> None:
    """All layers on the device, some of them, and each with none, a part or all of their experts apart."""
    path = write(architecture, tmp_path)
    info = read_local_model(path)
    tensors = info.header.tensors
    experts = order_experts([tensor.name for tensor in tensors])
    assert len(experts) >= 2
    devices = [device for there in rpc.connect([endpoint])[0].values() for device in there]
    heads = MIXTURES[architecture]
    truth = read_logits(path, heads=heads)
    counts = (0, 1, len(experts) // 2 + 1, len(experts))
    for n_gpu_layers, cpu_experts in (*((-1, count) for count in counts), (info.layers, 2)):
        placed = {"n_gpu_layers": n_gpu_layers, "cpu_experts": cpu_experts, "devices": devices}
        logits = read_logits(path, log_lines, heads=heads, **placed)
        first_layer = 0 if n_gpu_layers < 0 else info.layers + 1 - n_gpu_layers
        expected = sum(
            tensor.size
            for tensor in tensors
            if is_on_device(tensor, info.layers, first_layer, experts[:cpu_experts])
        )
        assert count_remote_mib(log_lines) == pytest.approx(expected / MIB, abs=0.02)
        assert_equal_but_for_rounding(logits, truth)


@pytest.mark.parametrize("architecture", ["gpt-oss", "deepseek2"])
def test_exact_answers_are_the_same_bits_with_and_without_drafts(
    architecture: str, tmp_path: Path, endpoint: str
) -> None:
    path = write(architecture, tmp_path)
    drafts = drafting(3, "mtp" if MIXTURES[architecture] else "ngram")
    files = PairFiles("remote", str(path), rpc=(endpoint,))

    def ask(speculative: SpeculationSettings) -> list[tuple[int, float]]:
        endless = Sampling(temperature=0.0, ignore_eos=True)
        answer = engine.ask(PROMPT * 2, 30, endless, speculative, exact=True, top_logprobs=0)
        assert (answer.done.speculation.drafted > 0) == (speculative is drafts)
        return [
            (token, entry.logprob)
            for token, entry in zip(answer.tokens, answer.logprobs, strict=True)
        ]

    with running(files, cpu_experts=4) as engine:
        plain = ask(PLAIN)
        assert len(plain) == 30
        assert ask(drafts) == plain


def list_moved(lines: list[str]) -> list[str]:
    """Return the tensors that llama.cpp kept in main memory against its own choice."""
    return re.findall(r"tensor blk\.0\.ffn_(\w+)\.weight .* overridden to CPU", "".join(lines))


def test_experts_of_a_draft_lie_apart_too(tmp_path: Path, log_lines: list[str]) -> None:
    target, draft = (
        architectures.write("qwen3moe", tmp_path, experts=True, seed=seed) for seed in (0, 1)
    )
    files = PairFiles("two mixtures", str(target), str(draft))
    with running(files, cpu_experts=1, draft_cpu_experts=2) as engine:
        assert sorted(list_moved(log_lines)) == ["down_exps", "down_exps", "gate_exps"]
        assert engine.ask(PROMPT, 8, speculative=drafting(3)).done.speculation.drafted > 0


def test_experts_of_an_embedding_model_lie_apart_too(tmp_path: Path, log_lines: list[str]) -> None:
    path = architectures.write("qwen3moe", tmp_path, experts=True)
    files = PairFiles("numbers", str(path), pooling="last")
    model = load_embedding_model(files, EngineSettings(cpu_experts=2), lambda *_: None)
    model.close()
    assert sorted(list_moved(log_lines)) == ["down_exps", "gate_exps"]


def test_only_the_target_reads_in_wide_passes(tmp_path: Path, endpoint: str) -> None:
    target, draft = (
        architectures.write("qwen3moe", tmp_path, experts=True, seed=seed) for seed in (0, 1)
    )
    files = PairFiles("wide", str(target), str(draft), rpc=(endpoint,))
    with running(files, cpu_experts=3, n_batch=64, n_ubatch=256) as engine:
        assert engine.pair.drafter
        widths = engine.pair.shared.context.n_ubatch, engine.pair.drafter.context.n_ubatch
        assert widths == (256, 64)
        answer = engine.ask(PROMPT * 50, 8, speculative=drafting(2))
    with running(PairFiles("alone", str(target))) as alone:
        truth = alone.ask(PROMPT * 50, 8, speculative=PLAIN)
    assert answer.tokens == truth.tokens


def write_shaped(folder: Path, monkeypatch: pytest.MonkeyPatch, shape: architectures.Shape) -> Path:
    """Write a mixture of this shape in place of the usual one."""
    monkeypatch.setattr(architectures, "shape", lambda _: shape)
    return architectures.write("qwen3moe", folder, experts=True)


def limit_memory(pid: int, more: int) -> None:
    """Let a process have only so many bytes more than now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


@skip_on("cuda", why="a worker is the only device of this engine")
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
@pytest.mark.skipif(not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC")
def test_a_load_without_memory_moves_experts_first(
    tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device holds the dense weights and a part of the experts, which are 54 MiB."""
    shape = architectures.Shape(embd=256, heads=2, ff=1536, layers=6)
    path = write_shaped(tmp_path, monkeypatch, shape)
    with rpc_worker() as (endpoint, worker):
        wait_for(lambda: not rpc.find_problem(endpoint), "a worker that answers")
        limit_memory(worker.pid, 40 * MIB)
        with running(PairFiles("remote", str(path), rpc=(endpoint,)), n_ctx=512) as engine:
            settings = engine.pair.models.settings
            assert (settings.n_gpu_layers, engine.pair.n_ctx) == (-1, 512)
            assert 0 < settings.cpu_experts < 18
            assert 0 < count_remote_mib(log_lines) < 40
            (note,) = engine.pair.notes
            assert re.fullmatch(r"The experts of \d layers lie in main memory, because .*", note)
            make_pass_runner(engine.pair.shared.context, Batch(16))(8)


def name_experts(layers: int, *, heads: int = 0, fused: bool = False) -> list[str]:
    """Return the names of the tensors of a mixture's layers, whose last ones are heads."""
    parts = ("down", "gate_up") if fused else ("down", "gate", "up")
    names = [f"blk.{at}.ffn_{part}_exps.weight" for at in range(layers) for part in parts]
    names += [f"blk.{at}.attn_q.weight" for at in range(layers)]
    names += [f"blk.{at}.ffn_down_shexp.weight" for at in range(layers)]
    return names + [f"blk.{at}.nextn.eh_proj.weight" for at in range(layers - heads, layers)]


@given(
    layers=st.integers(2, 94),
    heads=st.integers(0, 1),
    fused=st.booleans(),
    spread=st.booleans(),
    data=st.data(),
)
def test_patterns_match_the_first_tensors_to_leave_and_no_others(
    layers: int, heads: int, fused: bool, spread: bool, data: st.DataObject
) -> None:
    names = name_experts(layers, heads=heads, fused=fused)
    experts = order_experts(names, spread=spread)
    assert len(experts) == layers * (2 if fused else 3)
    assert not heads or experts[-1].layer == layers - 1
    first = experts[: data.draw(st.integers(0, len(experts)))]
    patterns = match_experts(first)
    assert len(patterns) <= 2
    matched = {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
    assert matched == {name for name in names if find_expert(name) in first}


@given(layers=st.integers(8, 94), share=st.floats(0, 1), data=st.data())
def test_every_device_gives_the_same_share_of_its_experts(
    layers: int, share: float, data: st.DataObject
) -> None:
    """Each of several devices has consecutive layers, and loses at most two layers' experts more or less."""
    start = data.draw(st.integers(0, layers - 1))
    end = data.draw(st.integers(start + 1, layers))
    experts = order_experts(name_experts(layers), spread=True)
    moved = experts[: int(share * len(experts))]
    lost = sum(start <= expert.layer < end for expert in moved) / 3
    assert abs(lost - (end - start) * len(moved) / len(experts)) <= 2


@pytest.mark.skipif(not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC")
def test_two_devices_share_what_is_left_of_the_experts(
    tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = architectures.Shape(embd=128, heads=2, ff=192, layers=16)
    path = write_shaped(tmp_path, monkeypatch, shape)
    with ExitStack() as opened:
        endpoints = [opened.enter_context(rpc_worker())[0] for _ in range(2)]
        reached, problems = rpc.connect(endpoints)
        assert not problems
        devices = [device for there in reached.values() for device in there]
        logits = read_logits(path, log_lines, cpu_experts=24, devices=devices)
    sizes = re.findall(r"RPC\d+.* model buffer size = +([\d.]+) MiB", "".join(log_lines))
    first, second = map(float, sizes)
    assert abs(first - second) <= 3 * 3 * 2 * 128 * 192 * 4 / MIB  # three layers' experts
    assert_equal_but_for_rounding(logits, read_logits(path))


def test_measured_passes_read_consecutive_tokens_of_texts(tmp_path: Path) -> None:
    """All widths do so at the same places, so that they are compared on the same experts."""
    passes: list[list[int]] = []

    class Recorder(Batch):
        def clear(self) -> None:
            super().clear()
            passes.append([])

        def add(self, token: int, position: int, sequence: int, logits: bool) -> int:
            passes[-1].append(token)
            return super().add(token, position, sequence, logits)

    with Model(str(write("qwen3moe", tmp_path))) as model:
        settings = ContextSettings(n_ctx=256, n_batch=16, n_seq=1, n_outputs=16, n_threads=1)
        with Context(model, settings) as context:
            run = make_pass_runner(context, Recorder(16))
            for width in (4, 16, 4, 16):
                run(width)
        pieces = [b"".join(map(model.vocab.piece, tokens)) for tokens in passes]
    assert [len(tokens) for tokens in passes] == [4, 16, 4, 16]
    assert passes[0] == passes[1][:4]
    assert passes[2] == passes[3][:4] != passes[0]
    text = "".join((*TEXTS, *OTHER_TEXTS)).encode()
    assert all(piece in text for piece in (pieces[0], pieces[2]))
