"""Workloads: their names, shapes and texts; and whether the machine is quiet."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import jinja2
import pytest

from benchmarks import synthetic
from benchmarks.load import load_report
from benchmarks.measuring.workloads import BIG, TINY, WORKLOADS, build, shape, text, workload
from localspec.engine.llama import Model
from localspec.machine import host


def test_workloads_by_name() -> None:
    assert [w.name for w in WORKLOADS] == ["0.95", "0.9", "0.7", "0.4", "0.2", "0", "bursty"]
    assert all(workload(w.name) == w for w in WORKLOADS)
    assert workload("0.9/0.3").mean == pytest.approx(0.6)


@pytest.mark.parametrize("name", ["1.5", "-0.1", "0.1/0.2/0.3", "fast"])
def test_an_invalid_workload_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1|could not convert"):
        workload(name)


def test_a_shape_is_changed_by_name() -> None:
    changed = shape("layers=32,width=4096,kv-heads=8,quant=q8_0", BIG.target)
    assert (changed.n_layer, changed.n_embd, changed.n_head_kv, changed.quant) == (
        32,
        4096,
        8,
        "q8_0",
    )
    assert changed.n_vocab == BIG.target.n_vocab


@pytest.mark.parametrize("wrong", ["depth=3", "layers=many", "quant=q2_k", "layers"])
def test_an_unknown_change_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        shape(wrong, BIG.target)


def test_a_pair_is_written_once_and_its_text_follows_the_cycle(tmp_path: Path) -> None:
    messages: list[str] = []
    files = build(tmp_path, TINY, workload("0.7"), messages.append)
    build(tmp_path, TINY, workload("0.7"), messages.append)
    assert len(messages) == 2
    assert not list(tmp_path.rglob("*.part"))
    sample = text(files, 8, 400, random.Random(1))
    complete = [*sample.prompt, *sample.expected]
    assert complete == [complete[0], *synthetic.follow(files.cycle, complete[0], len(complete) - 1)]
    assert sample.acceptance == pytest.approx(0.7, abs=0.08)


def test_a_pair_for_code_has_tokens_for_it_and_fills_in(tmp_path: Path) -> None:
    small = synthetic.Shape(1, 64, 64, 4, 8192, code=True)
    cycle = synthetic.target_cycle(small.n_vocab, specials=len(small.specials))
    with Model(str(synthetic.write_model(tmp_path / "code.gguf", small, cycle))) as model:
        fim = model.vocab.fim
        assert [fim.prefix, fim.suffix, fim.middle] == [8189, 8190, 8191]
        code = Path(synthetic.__file__).read_text(encoding="utf-8")
        tokens = model.vocab.tokenize(code, add_special=False, parse_special=False)
    assert len(code) > 2 * len(tokens)
    assert set(cycle.tolist()) == set(range(8192 - 8))  # no special token follows anything


def test_a_pair_for_code_drafts_well_for_code_only() -> None:
    tokens = synthetic.code_tokens(8192)
    target, draft = synthetic.two_texts(tokens, (0.9, 0.2))

    def generate(first: str) -> tuple[set[int], float]:
        text = synthetic.follow(target, tokens.index(first), 1000)
        right = sum(int(draft[a]) == b for a, b in pairwise(text))
        return set(text), right / (len(text) - 1)

    code, in_code = generate(synthetic.CODE_MARK)
    other_tokens, in_text = generate(synthetic.TEXT_MARK)
    assert not code & other_tokens
    assert in_code == pytest.approx(0.9, abs=0.04)
    assert in_text == pytest.approx(0.2, abs=0.05)
    filled, in_the_middle = generate("<|fim_mid|>")
    assert len(filled & code) > 900
    assert in_the_middle == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize(("question", "mark"), [("```\nx = 1\n```", "#"), ("Why is it red?", ".")])
def test_the_template_tells_code_from_text(question: str, mark: str) -> None:
    template = jinja2.Environment(autoescape=True).from_string(synthetic.CODE_TEMPLATE)
    rendered = template.render(messages=[{"role": "user", "content": question}], bos_token="")
    assert rendered.endswith(f"<|assistant|>{mark}")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
def test_the_load_of_our_own_processes_is_left_out() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        other_processes = host.OtherProcesses()
        time.sleep(0.5)
        counted, left_out = other_processes.cores(()), other_processes.cores((child.pid,))
    finally:
        child.kill()
        child.wait()
    assert counted is not None
    assert left_out is not None
    assert counted - left_out > 0.05  # a share of one core, however busy the machine is
    # A process that has ended is not counted as ours.
    assert other_processes.cores((child.pid,)) is not None


def test_a_report_on_the_load_is_one_line() -> None:
    line = load_report(0.05)
    assert "load average" in line
    assert "\n" not in line
