"""The training loop: resumable, seeded, one line of progress.

The learning rate is constant and falls only at the end ("warm-up, stable, decay"), so any checkpoint
of the constant part can be finished by a short decay, or trained on.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .data import Batch, Mixture, Packer
from .model import Llama, Shape
from .optimizer import Muon

Hidden = Callable[[Tensor, Tensor], Tensor]
"""Tokens [B, T] and mask [B, 1, T, T] to hidden states [B, T, width]; compiled or not."""

WARMUP_STEPS = 20
MATRIX_RATE = 0.025
EMBEDDING_RATE, OUTPUT_RATE, VECTOR_RATE = 0.03, 0.004, 0.004
ECHO_STEPS = 250
ECHOES = Mixture(rows=16, length=112, code_share=0.7, echo_share=0.75)
"""Small first batches that teach copying, which code needs more than anything."""
LONG_EVERY = 8
LONG_LENGTH, LONG_REACH = 1024, 3.5
"""Every so many steps the rows are as long as the context, for editors send all the code that fits."""
TEACHER_TEMPERATURE = 0.5
"""The draft learns a sharpened target, because the pair decodes greedily: its first choice is what counts."""
LIKELIEST = 8
"""How many of the teacher's next tokens the draft learns; sharpened, they hold nearly all there is."""
AVERAGE_STEPS = 40
"""Length of the running average of the weights; it stands in for a decay in early exports."""
SAVE_EVERY_SECONDS = 120.0


@dataclass(frozen=True)
class Plan:
    """When to stop and when to let the learning rate fall."""

    until: int
    decay_from: int
    mixture: Mixture
    seed: int
    distinct: int | None = None
    """How many batches there are, after which they come again; None: every step has its own."""
    peak: float = 1.0
    """Factor on both learning rates until they fall: a trained model that goes on at 1 unlearns first."""

    def batch_at(self, step: int) -> int:
        if self.distinct is None or step < ECHO_STEPS:
            return step
        return ECHO_STEPS + (step - ECHO_STEPS) % self.distinct

    def mixture_at(self, step: int) -> Mixture:
        if step < ECHO_STEPS:
            return ECHOES
        if step % LONG_EVERY:
            return self.mixture
        rows = self.mixture.rows * self.mixture.length // LONG_LENGTH
        return replace(self.mixture, rows=rows, length=LONG_LENGTH, reach=LONG_REACH)

    def rate(self, step: int) -> float:
        """Factor on both learning rates at `step`."""
        warm = self.peak * min(1.0, (step + 1) / WARMUP_STEPS)
        if step < self.decay_from:
            return warm
        left = (self.until - step) / max(1, self.until - self.decay_from)
        return warm * max(0.02, left)


class Labels(NamedTuple):
    """What should come next at N places: K tokens of each, and how likely each of them is to be."""

    ids: Tensor
    """[N, K] int64."""
    shares: Tensor
    """[N, K], the K of a place summing to 1."""


class Teacher:
    """A trained model's labels. Its reading of a batch costs more than the draft's training on it, so it is kept."""

    def __init__(self, model: Llama, hidden: Hidden) -> None:
        self._model = model
        self._hidden = hidden
        self._known: dict[int, Labels] = {}

    @torch.no_grad()
    def labels(self, number: int, batch: Batch, device: str) -> Labels:
        """For every `batch.where`; `number` names the batch."""
        if number not in self._known:
            hidden = self._hidden(batch.tokens.to(device), batch.mask.to(device))
            logits = self._model.logits(hidden.flatten(0, 1)[batch.where.to(device)]).float()
            likeliest, ids = logits.topk(LIKELIEST)
            self._known[number] = Labels(ids, (likeliest / TEACHER_TEMPERATURE).softmax(-1))
        return self._known[number]


class Trainee:
    """A model with its optimizers, its averaged weights and how far it has come."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Llama(shape).to(device)
        matrices = [
            p for n, p in self.model.named_parameters() if n.startswith("blk") and p.dim() == 2
        ]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.muon = Muon(matrices)
        groups: list[dict[str, Any]] = [
            {"params": [self.model.token_embd.weight], "base": EMBEDDING_RATE}
        ]
        if self.model.output is not None:
            groups.append({"params": [self.model.output.weight], "base": OUTPUT_RATE})
        groups.append({"params": vectors, "base": VECTOR_RATE})
        self.adam = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10)
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0

    def state(self) -> dict[str, Any]:
        return {
            "shape": asdict(self.model.shape),
            "model": self.model.state_dict(),
            "average": self.average,
            "muon": self.muon.momentum,
            "adam": self.adam.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        torch.save(self.state(), partial)
        partial.replace(path)

    def restore(self, path: Path, device: str) -> None:
        state = torch.load(path, map_location=device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.muon.momentum = state["muon"]
        self.adam.load_state_dict(state["adam"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    @torch.no_grad()
    def update(self, factor: float) -> None:
        self.muon.step(MATRIX_RATE * factor, beta=min(0.95, 0.85 + self.step / 1000))
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        keep = 1 - 1 / min(self.step + 2, AVERAGE_STEPS)
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 1 - keep)
        self.step += 1


def load_model(path: Path, device: str = "cpu", averaged: bool = False) -> Llama:
    state = torch.load(path, map_location=device, weights_only=True)
    model = Llama(Shape(**state["shape"])).to(device)
    model.load_state_dict(state["average"] if averaged else state["model"])
    return model.eval()


def best_dtype(device: str) -> torch.dtype:
    """bfloat16 where a quick measurement shows it faster; CPUs without AMX or AVX512-BF16 crawl in it."""
    if device != "cpu":
        return torch.bfloat16
    a = torch.randn(512, 512)
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = a.to(dtype)
        x @ x
        begin = time.perf_counter()
        for _ in range(4):
            x @ x
        times[dtype] = time.perf_counter() - begin
    return min(times, key=lambda dtype: times[dtype])


def train(
    trainee: Trainee,
    packer: Packer,
    plan: Plan,
    checkpoint: Path,
    device: str,
    teaching: Llama | None = None,
    compiled: bool = False,
) -> None:
    """Train up to `plan.until`; with a `teaching` model learn its likeliest tokens instead of the data's.

    SIGTERM or Ctrl-C ends it after the step under way, with a checkpoint.
    """
    dtype = best_dtype(device)

    def reader(model: Llama) -> Hidden:
        return torch.compile(model.hidden, dynamic=False) if compiled else model.hidden

    hidden = reader(trainee.model)
    teacher = Teacher(teaching, reader(teaching)) if teaching else None
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    saved = time.monotonic()
    stop = _StopRequest()
    while trainee.step < plan.until and not stop.made:
        begin = time.monotonic()
        number = plan.batch_at(trainee.step)
        batch = packer.batch(random.Random(f"{plan.seed}/{number}"), plan.mixture_at(number))
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            labels = (
                teacher.labels(number, batch, device)
                if teacher
                else Labels(batch.targets[:, None].to(device), torch.ones(1, 1, device=device))
            )
            loss = _loss(trainee.model, hidden, batch, device, labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        trainee.update(plan.rate(trainee.step))
        trainee.tokens += batch.tokens.numel()
        # A stopped process (SIGSTOP) must not count as training time.
        trainee.seconds += min(60.0, time.monotonic() - begin)
        _report(trainee, plan, loss.item(), time.monotonic() - begin, batch.tokens.numel())
        if time.monotonic() - saved > SAVE_EVERY_SECONDS:
            trainee.save(checkpoint)
            saved = time.monotonic()
    trainee.save(checkpoint)


class _StopRequest:
    """Notices SIGTERM and SIGINT instead of dying of them."""

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True


def _loss(model: Llama, hidden: Hidden, batch: Batch, device: str, labels: Labels) -> Tensor:
    """Weighted cross-entropy."""
    states = hidden(batch.tokens.to(device), batch.mask.to(device)).flatten(0, 1)
    log_probs = model.logits(states[batch.where.to(device)]).float().log_softmax(-1)
    losses = -(log_probs.gather(-1, labels.ids) * labels.shares).sum(-1)
    return (losses * batch.weights.to(device)).sum()


def _report(trainee: Trainee, plan: Plan, loss: float, seconds: float, tokens: int) -> None:
    at_terminal = sys.stderr.isatty()
    if not at_terminal and trainee.step % 10:
        return
    done = trainee.step / plan.until
    bar = ("#" * round(20 * done)).ljust(20, ".")
    left = (plan.until - trainee.step) * trainee.seconds / trainee.step / 60
    line = (
        f"[{bar}] {trainee.step}/{plan.until}  loss {loss:.3f}  {tokens / seconds:,.0f} tokens/s  "
        f"{trainee.tokens / 1e6:.2f} M tokens  {left:.0f} min left"
    )
    print(line, end="\r" if at_terminal else "\n", file=sys.stderr, flush=True)
