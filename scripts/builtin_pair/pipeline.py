"""The steps of the pipeline with their files and default sizes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .data import Mixture, Packer, Sources, load_code, load_entries, tokenizer_texts
from .model import Shape
from .questions import Questions
from .tokenizer import load_tokenizer, train_tokenizer
from .train import Plan, Trainee, load_model, train

VOCABULARY = 6144
TARGET = Shape(VOCABULARY, width=320, layers=6, heads=5, kv_heads=5, feed_forward=896)
DRAFT = Shape(VOCABULARY, width=128, layers=2, heads=4, kv_heads=2, feed_forward=320, tied=True)
DEFAULT_STEPS = {"target": 1600, "draft": 700}
DRAFT_BATCHES = 400
"""What the target reads out to the draft, again and again."""
DECAY_SHARE = 0.35


def run(step: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    work: Path = options.work
    if step == "export":
        from .export import export_pair

        export_pair(work, options.out, averaged=options.averaged)
        return
    questions = Questions(load_entries(work, options.docs), options.breadth)
    code = load_code()
    path = work / "tokenizer.json"
    if step == "tokenizer":
        if not path.exists():
            train_tokenizer(tokenizer_texts(questions, code, options.seed), VOCABULARY, path)
        return
    _train(step, options, Sources(questions, code, _tokenizer(path)))


def _tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        sys.exit(f"There is no tokenizer in {path.parent} yet: run the step `tokenizer` first.")
    return load_tokenizer(path)


def _train(step: str, options: argparse.Namespace, sources: Sources) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainee = Trainee(TARGET if step == "target" else DRAFT, device, options.seed)
    checkpoint = options.work / f"{step}.pt"
    if checkpoint.exists():
        trainee.restore(checkpoint, device)
    until = options.steps or DEFAULT_STEPS[step]
    decay_from = options.decay_from or round(until * (1 - DECAY_SHARE))
    mixture = Mixture(options.rows, options.length, options.code_share)
    taught = step == "draft" and not options.untaught
    distinct = DRAFT_BATCHES if taught else None
    plan = Plan(
        until, decay_from, mixture, options.seed + (step == "draft"), distinct, options.peak
    )
    teacher = load_model(options.work / "target.pt", device, options.averaged) if taught else None
    packer = Packer(sources)
    train(trainee, packer, plan, checkpoint, device, teacher, options.compile)
