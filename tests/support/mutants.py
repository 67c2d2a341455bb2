"""Give damaged headers to llama.cpp itself: `python -m tests.support.mutants FOLDER SEED COUNT [KIND]`.

KIND says which file is damaged: a target, or what drafts for one. Each file that our checks accept is loaded
and given one prompt in a process forked for it. llama.cpp is
started in the children only, so that forking is safe. Prints one JSON line: the number of each outcome,
and for every death how the file was damaged and the last output.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import struct
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from benchmarks.synthetic import TINY_TARGET, target_cycle, write_model
from benchmarks.synthetic_block import Kind, write_block
from benchmarks.synthetic_eagle import write_eagle
from localspec.engine import environment, llama
from localspec.engine.engine import Engine
from localspec.engine.pair import profile
from localspec.engine.pair.load import load_pair
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import LocalspecError
from localspec.protocol.frames import (
    EngineSettings,
    Generate,
    PairFiles,
    Sampling,
    SpeculationSettings,
    TextPrompt,
)
from localspec.registry.header.gguf import FileSource, Header, StringArray, read_header
from localspec.registry.header.model import read_local_model
from localspec.registry.header.pairing import check_pair
from localspec.registry.header.weights import check_weights
from tests.support.gguf_files import ARRAY, F32, I32, STRING, U32, mutants, with_key
from tests.support.heads import Target, cycle_heads
from tests.support.pairs import contextual_pair, target_alone

SETTINGS = EngineSettings(n_ctx=128, n_batch=64, n_threads=1, n_gpu_layers=0, parallel=1)
INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    33,
    64,
    128,
    511,
    513,
    4096,
    65535,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
)
FLOATS = (0.0, -1.0, 1e-30, 1e30, 3e38, float("nan"), float("inf"), 0.5, 10_000.0)
# Keys that a file may have in addition to those of ours. Lists are of I32, except BPE merges.
ADDED: dict[str, tuple[int, tuple[object, ...]]] = {
    "general.alignment": (U32, (0, 1, 2, 8, 16, 64)),
    "llama.rope.dimension_count": (U32, (0, 1, 3, 31, 33, 64, 1000, 2**31)),
    "llama.attention.key_length": (U32, (0, 1, 16, 31, 33, 64, 65535)),
    "llama.attention.value_length": (U32, (0, 1, 16, 33, 64, 65535)),
    "llama.expert_count": (U32, (1, 2, 1024, 2**31)),
    "llama.expert_used_count": (U32, (1, 2, 4)),
    "llama.attention.sliding_window": (U32, (1, 16, 512, 2**31)),
    "llama.vocab_size": (U32, (0, 1, 511, 513, 2**31)),
    "llama.nextn_predict_layers": (U32, (1, 2, 3)),
    "llama.rope.scaling.factor": (F32, FLOATS),
    "llama.rope.freq_base": (F32, FLOATS),
    "llama.attention.scale": (F32, FLOATS),
    "llama.logit_scale": (F32, FLOATS),
    "llama.rope.scaling.type": (STRING, ("yarn", "linear", "longrope", "none", "x", "")),
    "llama.rope.dimension_sections": (ARRAY, ((I32, [1, 2, 3, 4]), (I32, [1]))),
    "tokenizer.ggml.eot_token_id": (U32, (0, 5, 511, 512, 2**31)),
    "tokenizer.ggml.eog_token_ids": (ARRAY, ((I32, [0]), (I32, [1] * 600), (I32, [-7]))),
    "tokenizer.ggml.suppress_tokens": (ARRAY, ((I32, [0]), (I32, [-1]), (I32, [600]))),
    "tokenizer.ggml.precompiled_charsmap": (ARRAY, ((0, [1, 2, 3]), (0, []))),
    "general.sampling.penalty_repeat": (F32, FLOATS),
    "general.sampling.temp": (F32, FLOATS),
    "split.count": (2, (0, 1, 2)),
}


def make_pair(folder: Path, kind: str) -> PairFiles:
    """Return a pair whose last file is of this kind."""
    if kind == "target":
        return target_alone(contextual_pair(folder))
    if kind in ("qwen35", "qwen35 apart", "glm4moe", "glm4moe apart", "gemma4"):
        return cycle_heads(folder, 0.9, cast(Target, kind))
    target, sidecar = folder / "target.gguf", folder / "sidecar.gguf"
    cycle = target_cycle(TINY_TARGET.n_vocab)
    write_model(target, TINY_TARGET, cycle)
    if kind == "eagle3":
        write_eagle(sidecar, TINY_TARGET, cycle, 0.9)
    else:
        write_block(sidecar, TINY_TARGET, cycle, 0.9, kind=cast(Kind, kind))
    return PairFiles(kind, str(target), str(sidecar))


class Mutator:
    """Ways to damage one file's header."""

    def __init__(self, data: bytes, header: Header, seed: int) -> None:
        self.data, self.header, self.dice = data, header, random.Random(seed)

    def __call__(self) -> tuple[bytes, str]:
        return self.dice.choice((self.blind, self.stated, self.added, self.placed))()

    def blind(self) -> tuple[bytes, str]:
        seed = self.dice.randrange(2**31)
        return mutants(self.data, self.header.data_offset, 1, seed)[0], f"bits {seed}"

    def stated(self) -> tuple[bytes, str]:
        """Change a value in place to another of the same type."""
        dice, out = self.dice, bytearray(self.data)
        values = self.header.metadata.items()
        key = dice.choice([key for key, value in values if not isinstance(value, StringArray)])
        at = self.data.index(_name(key)) + len(_name(key)) + 4
        (kind,) = struct.unpack_from("<I", out, at - 4)
        if kind in (U32, I32):
            struct.pack_into("<I", out, at, dice.choice((*INTEGERS, dice.randrange(600))))
        elif kind == F32:
            struct.pack_into("<f", out, at, dice.choice(FLOATS))
        elif kind == STRING:
            (length,) = struct.unpack_from("<Q", out, at)
            out[at + 8 + dice.randrange(max(length, 1))] = dice.choice(b"aA\0\xff<1")
        elif kind == ARRAY:
            (count,) = struct.unpack_from("<Q", out, at + 4)
            struct.pack_into("<I", out, at + 12 + 4 * dice.randrange(count), dice.choice(INTEGERS))
        else:
            out[at] = dice.choice((0, 1, 255))
        return bytes(out), key

    def added(self) -> tuple[bytes, str]:
        architecture = self.header.metadata["general.architecture"]
        added = {re.sub(r"^llama[.]", f"{architecture}.", key): of for key, of in ADDED.items()}
        key = self.dice.choice([key for key in added if key not in self.header.metadata])
        kind, values = added[key]
        value = self.dice.choice(values)
        return with_key(self.data, key, kind, value), f"{key} = {value}"

    def placed(self) -> tuple[bytes, str]:
        """Change the name, shape or type of a tensor."""
        dice, out = self.dice, bytearray(self.data)
        tensor = dice.choice(self.header.tensors)
        at = self.data.rindex(_name(tensor.name), 0, self.header.data_offset)
        at += len(_name(tensor.name))
        kind_of_change = dice.randrange(3)
        if kind_of_change == 0:
            out[at - 1 - dice.randrange(len(tensor.name))] = dice.choice(b"abx019._")
        elif kind_of_change == 1 and len(tensor.shape) > 1:
            rows, columns = tensor.shape[0] // 2, tensor.shape[1] * 2
            struct.pack_into(
                "<QQ", out, at + 4, *dice.choice([(rows, columns), tensor.shape[::-1]])
            )
        else:
            kind = dice.choice((0, 1, 8, 24, 26, 30))
            struct.pack_into("<I", out, at + 4 + 8 * len(tensor.shape), kind)
        return bytes(out), f"{tensor.name}, way {kind_of_change}"


def _name(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def generate(files: PairFiles) -> None:
    """Load a pair and answer with drafts, once greedily and once with sampling."""
    llama.initialise()
    pair = load_pair(files, SETTINGS, lambda _stage, _fraction: None)
    preparer = Preparer(pair, TemplateRenderer(None, "", ""))
    engine = Engine(pair, lambda _frame: None)
    prompt = TextPrompt("Hello  world <|end|> x\n\n 12")
    for number, temperature in enumerate((0.0, 0.8)):
        sampling = Sampling(temperature=temperature)
        request = Generate(
            number,
            prompt,
            sampling=sampling,
            max_tokens=4 if pair.drafter is None else 12,
            speculative=SpeculationSettings(depth=3),
        )
        engine.submit(preparer.prepare(request))
        while engine.active:
            engine.step()
    pair.close()


def outcome(files: PairFiles, words: BinaryIO) -> str:
    """Load the pair in a child process, and return how it ended."""
    child = os.fork()
    if child == 0:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
        signal.alarm(30)
        code = 0
        try:
            generate(files)
        except LocalspecError:
            code = 10
        except BaseException:
            traceback.print_exc()
            code = 11
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "answered", 10: "refused by the engine"}.get(code, f"died with {code}")


def check(files: PairFiles) -> None:
    """Check a pair as `localspec add` does. Raises LocalspecError."""
    target = read_local_model(Path(files.target))
    draft = read_local_model(Path(files.draft), as_draft=True) if files.draft else None
    check_weights(Path(files.draft or files.target))
    check_pair(target, draft)


def main(folder: Path, seed: int, count: int, kind: str = "target") -> None:
    environment.prepare()
    profile.BUDGET_S = 0.01
    files = make_pair(folder, kind)
    whole = Path(files.draft or files.target)
    mutate = Mutator(whole.read_bytes(), read_header(FileSource(whole)), seed)
    path = folder / "mutant.gguf"
    changes = {"draft": str(path)} if files.draft else {"target": str(path)}
    files = msgspec.structs.replace(files, **changes)
    counts: Counter[str] = Counter()
    deaths = []
    for _ in range(count):
        damaged, change = mutate()
        path.write_bytes(damaged)
        try:
            check(files)
        except LocalspecError:
            counts["refused by the checks"] += 1
            continue
        with tempfile.TemporaryFile() as words:
            result = outcome(files, words)
            counts[result] += 1
            if result.startswith("died"):
                words.seek(0)
                deaths.append([change, result, words.read()[-300:].decode("utf-8", "replace")])
    print(json.dumps({"counts": counts, "deaths": deaths}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
