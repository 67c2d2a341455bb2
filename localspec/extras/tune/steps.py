"""The steps of a training with PyTorch: their number, their size, and what each of them does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

WARM_UP_STEPS = 30
MAX_GRADIENT_NORM = 1.0
BYTES_PER_WEIGHT = 16  # the weight, its gradient, and two moments of Adam
STEP_BYTES = 4 << 30  # memory of a GPU for what a step computes


Item = TypeVar("Item")


def shuffle_batches(items: Sequence[Item], size: int = 1) -> Iterator[list[Item]]:
    """Yield batches of so many items without end, all items once in each of the random orders."""
    generator = random.Random(0)
    while True:
        order = generator.sample(items, len(items))[::-1]
        yield from (order[start : start + size] for start in range(0, len(order), size))


def free_torch_bytes() -> int:
    """Return the free memory of the GPU that PyTorch computes on, 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def place_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights that can be trained, on a GPU if its free memory holds the training."""
    needed = BYTES_PER_WEIGHT * sum(weight.numel() for weight in weights.values()) + STEP_BYTES
    device = "cuda" if free_torch_bytes() >= needed else "cpu"
    torch.set_float32_matmul_precision("high")  # a GPU may leave out the last digits of a product
    return {name: weight.detach().to(device).requires_grad_() for name, weight in weights.items()}


def run_steps(
    optimizer: torch.optim.Optimizer,
    weights: Sequence[Tensor],
    n_steps: int,
    seconds: float,
    threads: int,
    compute_loss: Callable[[], Tensor],
    report: Callable[[float], None],
) -> None:
    """Minimize a loss in steps that first grow and then shrink to nothing.

    Matrices are multiplied in bfloat16 where that is faster. A step whose gradient is not finite is left out.

    seconds: processor time that this may take on `threads` threads, so that time in which the process is
    paused does not count. One thread works while a GPU computes. report: called with the share of the work
    that is done before each step, with 1.0 when it is done.
    """
    torch.set_num_threads(threads)
    start = time.process_time()
    device = weights[0].device
    n_working = threads if device.type == "cpu" else 1
    half = is_bfloat16_faster(device)
    largest = [group["lr"] for group in optimizer.param_groups]
    for step in range(n_steps):
        spent = (time.process_time() - start) / (seconds * n_working)
        done = max(spent, step / n_steps)
        if done >= 1:
            break
        report(done)
        for group, step_size in zip(optimizer.param_groups, largest, strict=True):
            group["lr"] = step_size * min(1, (step + 1) / WARM_UP_STEPS) * (1 - done)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = compute_loss()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
        if torch.isfinite(norm):
            optimizer.step()
    report(1.0)


def is_bfloat16_faster(device: torch.device) -> bool:
    """Return whether a device multiplies matrices faster in bfloat16 than in float32. On the CPU, try it."""
    if device.type != "cpu":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    seconds = []
    for kind in (torch.bfloat16, torch.float32):
        matrix = torch.ones(512, 512, dtype=kind)
        matrix @ matrix
        start = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return seconds[0] < seconds[1] / 1.5
