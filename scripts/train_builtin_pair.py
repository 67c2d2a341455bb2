#!/usr/bin/env python3
"""Train, export and evaluate the pair of models that ships with localspec.

    scripts/setup train                        # installs torch, tokenizers and gguf
    scripts/train_builtin_pair.py all          # everything, resuming where it stopped
    scripts/train_builtin_pair.py evaluate     # what the shipped files can do

The steps, each of which can be run alone: `tokenizer`, `target`, `draft`, `export`, `evaluate`.
Data: the standard library's sources and, where a package such as Debian's python3-doc provides it, its
reference as HTML (`--docs` names another place).  Nothing is written into the repository but the
exported files; checkpoints lie in `--work`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

REPOSITORY = Path(__file__).resolve().parent.parent
BUILTIN = REPOSITORY / "localspec" / "builtin"
STEPS = ("tokenizer", "target", "draft", "export", "evaluate")


def default_work() -> Path:
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return Path.home() / ".cache" / "localspec-training"
    return user_cache_path("localspec") / "training"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=(*STEPS, "all"))
    parser.add_argument("--work", type=Path, default=default_work(), help="checkpoints and caches")
    parser.add_argument("--docs", type=Path, help="folder of the Python documentation as HTML")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="where the GGUF files go")
    parser.add_argument("--seed", type=int, default=20261)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, help="steps of the target or draft in all")
    parser.add_argument(
        "--decay-from", type=int, help="step at which the learning rate begins to fall"
    )
    parser.add_argument(
        "--peak", type=float, default=1.0, help="factor on the learning rates until they fall"
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=384, help="tokens per row")
    parser.add_argument("--code-share", type=float, default=0.82)
    parser.add_argument(
        "--breadth", type=float, default=0.25, help="weight of all but the most used objects"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile: needs a C++ compiler, a fifth faster"
    )
    parser.add_argument("--averaged", action="store_true", help="export the averaged weights")
    parser.add_argument(
        "--untaught",
        action="store_true",
        help="draft: learn from the data while there is no target",
    )
    parser.add_argument("--short", action="store_true", help="evaluate a sample only")
    parser.add_argument(
        "--reach", type=float, default=1.0, help="evaluate holes in so many times more context"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    if options.step == "evaluate":
        from builtin_pair.evaluate import evaluate, print_report

        return print_report(evaluate(options.out, options.short, options.reach))
    from builtin_pair import pipeline  # torch, which only training needs

    for step in STEPS[:-1] if options.step == "all" else (options.step,):
        pipeline.run(step, options)
    return main(["evaluate", "--out", str(options.out)]) if options.step == "all" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
