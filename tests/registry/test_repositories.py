"""Which file and which draft a pull takes from repositories as they are listed on the hub.

Names and sizes are those of real listings, as far as they were seen in threads and on model pages. The
content is a small model of the right kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import pytest

from benchmarks.synthetic import TINY_TARGET, target_cycle, write_model
from benchmarks.synthetic_block import write_block
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_heads import write_heads, write_heads_apart
from benchmarks.synthetic_sidecar import write_with_sidecar
from localspec.registry.header.fit import FreeMemory
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.offline import ListedFile
from localspec.registry.hub.repository import parse_reference
from localspec.registry.pulls.decide import decide
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.targets import PullTarget
from tests.support.gguf_files import STRING, model
from tests.support.hub import TestHub

# What the model of a repository is: without heads (for which sidecar), or with heads in its file.
Kind = Literal["qwen35", "glm4moe", "gemma4", "llama", "with heads", "other"]
MEMORY = FreeMemory(ram=96 << 30, vram=24_000_000_000)


@dataclass(frozen=True)
class Listing:
    """A repository: its files with sizes in GB, what `pull` asks for, and what it takes.

    draft: the sidecar that is taken, "in the file", or "" for drafts from the text.
    """

    repo: str
    kind: Kind
    files: dict[str, float]
    target: str
    draft: str
    asked: str = ""


# Each repository with the kind of its model, what is pulled of it and what drafts for that. Then come its
# files with their sizes in GB, where * stands for each quantization.
_TABLE = """
ggml-org/Qwen3.6-27B-GGUF (qwen35): Qwen3.6-27B-Q4_K_M.gguf + mtp-Qwen3.6-27B-Q4_0.gguf
  Qwen3.6-27B-*.gguf BF16 53.8, Q8_0 28.6, Q4_K_M 16.5
  mtp-Qwen3.6-27B-*.gguf BF16 5.9, Q8_0 3.1, Q4_0 1.7
  dflash-Qwen3.6-27B-*.gguf BF16 3.5, Q8_0 1.9
  mmproj-Qwen3.6-27B-Q8_0.gguf 0.6
ggml-org/Qwen3.6-27B-GGUF:Q8_0 (qwen35): Qwen3.6-27B-Q8_0.gguf + mtp-Qwen3.6-27B-Q8_0.gguf
  Qwen3.6-27B-*.gguf BF16 53.8, Q8_0 28.6, Q4_K_M 16.5
  mtp-Qwen3.6-27B-*.gguf BF16 3.9, Q8_0 2.1, Q4_0 1.1
ggml-org/Qwen3.6-35B-A3B-GGUF (qwen35): Qwen3.6-35B-A3B-Q4_K_M.gguf + mtp-Qwen3.6-35B-A3B-Q8_0.gguf
  Qwen3.6-35B-A3B-*.gguf BF16 69.4, Q8_0 36.9, Q4_K_M 21.2
  mtp-Qwen3.6-35B-A3B-*.gguf BF16 3.3, Q8_0 1.8, Q4_0 1.0
ggml-org/Qwen3.8-27B-GGUF (qwen35): Qwen3.8-27B-Q4_K_M.gguf + mtp-Qwen3.8-27B-Q8_0.gguf
  Qwen3.8-27B-*.gguf BF16 54.0, Q8_0 28.7, Q4_K_M 16.6
  dflash-Qwen3.8-27B-*.gguf BF16 3.6, Q8_0 1.9, Q4_0 1.0
  mtp-Qwen3.8-27B-*.gguf BF16 3.0, Q8_0 1.6, Q4_0 0.9
ggml-org/Qwen3-8B-GGUF (llama): Qwen3-8B-Q8_0.gguf + dflash-Qwen3-8B-Q8_0.gguf
  Qwen3-8B-*.gguf BF16 16.4, Q8_0 8.7, Q4_K_M 5.0
  dflash-Qwen3-8B-*.gguf BF16 2.1, Q8_0 1.1
  dspark-Qwen3-8B-*.gguf BF16 2.4, Q8_0 1.3
ggml-org/gpt-oss-20b-GGUF (llama): gpt-oss-20b-mxfp4.gguf + eagle3-gpt-oss-20b-Q8_0.gguf
  gpt-oss-20b-mxfp4.gguf 12.1
  eagle3-gpt-oss-20b-*.gguf BF16 1.8, Q8_0 0.9
ggml-org/gpt-oss-120b-GGUF (llama): gpt-oss-120b-mxfp4-00001-of-00003.gguf + eagle3-gpt-oss-120b-Q8_0.gguf
  gpt-oss-120b-mxfp4-00001-of-00003.gguf 21.1
  gpt-oss-120b-mxfp4-00002-of-00003.gguf 21.1
  gpt-oss-120b-mxfp4-00003-of-00003.gguf 21.1
  eagle3-gpt-oss-120b-*.gguf BF16 2.3, Q8_0 1.2
ggml-org/gemma-4-31B-it-GGUF (gemma4): gemma-4-31B-it-Q4_K_M.gguf + mtp-gemma-4-31B-it-Q8_0.gguf
  gemma-4-31B-it-*.gguf BF16 61.4, Q8_0 32.6, Q4_K_M 18.3
  dflash-gemma-4-31B-it-*.gguf BF16 3.1, Q8_0 1.7
  mtp-gemma-4-31B-it-*.gguf BF16 0.96, Q8_0 0.51, Q4_0 0.28
ggml-org/gemma-4-26B-A4B-it-GGUF (gemma4): gemma-4-26B-A4B-it-Q4_K_M.gguf + mtp-gemma-4-26B-A4B-it-Q8_0.gguf
  gemma-4-26B-A4B-it-*.gguf BF16 50.5, Q8_0 26.9, Q4_K_M 16.8
  eagle3-gemma-4-26B-A4B-it-*.gguf BF16 1.1, Q8_0 0.6
  mtp-gemma-4-26B-A4B-it-*.gguf BF16 0.83, Q8_0 0.44, Q4_0 0.24
unsloth/gemma-4-E4B-it-GGUF (gemma4): gemma-4-E4B-it-Q8_0.gguf + mtp-gemma-4-E4B-it.gguf
  gemma-4-E4B-it-*.gguf BF16 15.1, Q8_0 8.2, UD_Q8_K_XL 8.7, IQ4_XS 4.7
  gemma-4-E4B-it-UD-Q4_K_XL.gguf 5.1
  mmproj-F16.gguf 0.99
  mmproj-BF16.gguf 0.99
  mtp-gemma-4-E4B-it.gguf 0.09
google/gemma-4-E2B-it-GGUF (gemma4): gemma-4-E2B-it-Q8_0.gguf + gemma-4-E2B-it-assistant-Q8_0.gguf
  gemma-4-E2B-it-Q8_0.gguf 5.0
  gemma-4-E2B-it-assistant-BF16.gguf 0.16
  gemma-4-E2B-it-assistant-Q8_0.gguf 0.09
unsloth/Qwen3.8-27B-GGUF (with heads): Qwen3.8-27B-UD-Q4_K_XL.gguf + in the file
  Qwen3.8-27B-UD-*.gguf Q8_K_XL 31.0, Q4_K_XL 17.9, Q2_K_XL 11.8
  mtp-Qwen3.8-27B-Q4_0.gguf 0.9
  imatrix_unsloth.gguf 0.01
# its smallest quantizations have no heads
unsloth/Qwen3.8-27B-GGUF:UD-IQ1_M (qwen35): Qwen3.8-27B-UD-IQ1_M.gguf + mtp-Qwen3.8-27B-Q4_0.gguf
  Qwen3.8-27B-UD-*.gguf Q4_K_XL 17.9, IQ1_M 7.9
  mtp-Qwen3.8-27B-Q4_0.gguf 0.9
unsloth/Qwen3.6-27B-MTP-GGUF (with heads): Qwen3.6-27B-Q4_K_M.gguf + in the file
  Qwen3.6-27B-*.gguf Q8_0 29.1, Q4_K_M 17.1, Q3_K_M 13.9
froggeric/Qwen3.6-27B-MTP-GGUF (with heads): Qwen3.6-27B-Q5_K_M-mtp.gguf + in the file
  Qwen3.6-27B-*-mtp.gguf Q8_0 29.1, Q5_K_M 19.9, Q4_K_M 17.1
  mmproj-Qwen3.6-27B-f16.gguf 0.9
LibertAIDAI/Qwen3.6-27B-NVFP4-MTP-GGUF (qwen35): Qwen3.6-27B-NVFP4-Q8_0-mtp.gguf + mtp-Qwen3.6-27B-NVFP4.gguf
  Qwen3.6-27B-NVFP4-Q4_K_M-mtp.gguf 15.0
  Qwen3.6-27B-NVFP4-Q8_0-mtp.gguf 19.0
  Qwen3.6-27B-NVFP4-BF16-mtp.gguf 28.0
  mtp-Qwen3.6-27B-NVFP4.gguf 5.6
  mmproj-Qwen3.6-27B-F16.gguf 0.9
unsloth/Qwen3.6-27B-GGUF (llama): Qwen3.6-27B-Q4_K_M.gguf
  Qwen3.6-27B-*.gguf Q8_0 28.6, Q4_K_M 16.8, IQ4_XS 15.0
ggml-org/DeepSeek-V4-Flash-GGUF (other): DeepSeek-V4-Flash-Q4_0-00001-of-00002.gguf
  DeepSeek-V4-Flash-Q4_0-00001-of-00002.gguf 40.0
  DeepSeek-V4-Flash-Q4_0-00002-of-00002.gguf 40.0
  mtp-DeepSeek-V4-Flash-*.gguf BF16 14.0, Q8_0 7.5
ggml-org/DeepSeek-V4-Flash-0731-GGUF (other): DeepSeek-V4-Flash-0731-Q4_0.gguf
  DeepSeek-V4-Flash-0731-Q4_0.gguf 80.0
  dspark-DeepSeek-V4-Flash-0731-*.gguf BF16 9.0, Q8_0 4.8
unsloth/Muse-Glimmer-30B-GGUF (llama): Muse-Glimmer-30B-UD-Q4_K_XL.gguf + dflash-kquant.gguf
  Muse-Glimmer-30B-UD-*.gguf Q8_K_XL 31.5, Q6_K_XL 25.0, Q4_K_XL 15.88
  mmproj-Muse-Glimmer-30B-*.gguf BF16 3.85, Q8_0 2.05
  mmproj-kquant.gguf 1.4
  dflash-kquant.gguf 1.63
meta-models/Muse-Glimmer-30B-GGUF (llama): muse-glimmer-30B-kquant-dynamic.gguf + dflash-kquant.gguf
  muse-glimmer-30B-kquant-17gb.gguf 16.76
  muse-glimmer-30B-kquant-dynamic.gguf 19.65
  mmproj-kquant.gguf 1.4
  dflash-kquant.gguf 1.63
# as its files were named later
meta-models/Muse-Glimmer-30B-GGUF (llama): Muse-Glimmer-30B-KQuant-17GB-Q4_K_M.gguf
  + dflash-Muse-Glimmer-30B-Q4_K_M.gguf
  Muse-Glimmer-30B-KQuant-17GB-Q4_K_M.gguf 16.76
  Muse-Glimmer-30B-KQuant-Dynamic-Q4_K_XL.gguf 19.65
  mmproj-kquant.gguf 1.4
  dflash-Muse-Glimmer-30B-Q4_K_M.gguf 1.63
unsloth/gemma-4-26B-A4B-it-qat-GGUF (gemma4): gemma-4-26B-A4B-it-qat-UD-Q4_K_XL.gguf
  + MTP/mtp-gemma-4-26B-A4B-it-Q8_0.gguf
  gemma-4-26B-A4B-it-qat-UD-Q4_K_XL.gguf 14.25
  mmproj-*.gguf BF16 1.19, F16 1.19, F32 2.29
  MTP/mtp-gemma-4-26B-A4B-it-*.gguf BF16 0.86, F16 0.86, Q8_0 0.46, Q4_0 0.25
  mtp-gemma-4-26B-A4B-it.gguf 0.25
unsloth/gemma-4-E2B-it-GGUF (gemma4): gemma-4-E2B-it-Q8_0.gguf + MTP/gemma-4-E2B-it-Q8_0-MTP.gguf
  gemma-4-E2B-it-*.gguf BF16 9.3, Q8_0 5.0, Q4_K_M 3.1
  MTP/gemma-4-E2B-it-*-MTP.gguf BF16 0.16, F16 0.16, Q8_0 0.09
# neither the repository nor a folder helps
maker/other-name-GGUF:Q8_0 (gemma4): gemma-4-E2B-it-Q8_0.gguf + gemma-4-E2B-it-Q8_0-MTP.gguf
  gemma-4-E2B-it-Q8_0.gguf 5.0
  gemma-4-E2B-it-Q8_0-MTP.gguf 0.09
  gemma-4-E2B-it-BF16-MTP.gguf 0.16
maker/Qwen3.8-27B-GGUF (qwen35): Qwen3.8-27B-Q4_K_M.gguf + Qwen3.8-27B-mtp-Q8_0.gguf
  Qwen3.8-27B-Q4_K_M.gguf 16.6
  Qwen3.8-27B-mtp-Q8_0.gguf 1.6
cook/gemma-3-4b-cooking-assistant-GGUF (llama): gemma-3-4b-cooking-assistant-Q8_0.gguf
  gemma-3-4b-cooking-assistant-*.gguf Q8_0 4.1
cook/muse-assistant-tuned-GGUF (llama): muse-assistant-tuned-Q8_0.gguf
  muse-assistant-tuned-*.gguf Q8_0 4.1
cook/Llama-3-8B-eagle3-tuned-GGUF (llama): Llama-3-8B-eagle3-tuned-Q8_0.gguf
  Llama-3-8B-eagle3-tuned-*.gguf Q8_0 4.1
cook/Llama-3-8B-DFlash-merged-GGUF (llama): Llama-3-8B-DFlash-merged-Q8_0.gguf
  Llama-3-8B-DFlash-merged-*.gguf Q8_0 4.1
cook/Llama-3-8B-lora-merged-GGUF (llama): Llama-3-8B-lora-merged-Q8_0.gguf
  Llama-3-8B-lora-merged-*.gguf Q8_0 4.1
cook/mtp-7b-GGUF (llama): mtp-7b-Q8_0.gguf
  mtp-7b-*.gguf Q8_0 4.1
cook/recipes-GGUF (llama): Llama-3-8B-cook-Q8_0.gguf
  Llama-3-8B-cook-Q8_0.gguf 8.0
  Llama-3-8B-cook-adapter-Q8_0.gguf 0.1
poolside/Laguna-XS-2.1-GGUF (other): Laguna-XS-2.1-Q8_0.gguf
  Laguna-XS-2.1-Q8_0.gguf 18.0
  Laguna-XS-2.1-DFlash-Q8_0.gguf 1.0
ggml-org/GLM-4.5-Air-GGUF (with heads): GLM-4.5-Air-Q4_K_M.gguf + in the file
  GLM-4.5-Air-*.gguf Q8_0 117.0, Q4_K_M 73.0, Q2_K 45.0
ggml-org/GLM-4.6-Air-GGUF (glm4moe): GLM-4.6-Air-Q4_K_M.gguf + mtp-GLM-4.6-Air-Q8_0.gguf
  GLM-4.6-Air-*.gguf Q8_0 115.0, Q4_K_M 71.0
  mtp-GLM-4.6-Air-*.gguf Q8_0 4.0, Q4_K_M 2.4
bartowski/Qwen2.5-Coder-7B-Instruct-GGUF (llama): Qwen2.5-Coder-7B-Instruct-Q8_0.gguf
  Qwen2.5-Coder-7B-Instruct-*.gguf Q8_0 8.1, Q6_K_L 6.5, IQ2_M 2.8, f16 15.2
  Qwen2.5-Coder-7B-Instruct.imatrix 0.005
"""


def read_listings() -> Iterator[Listing]:
    table = re.sub(r"^#.*\n", "", _TABLE.strip(), flags=re.MULTILINE).replace("\n  + ", " + ")
    for block in re.split(r"\n(?=\S)", table):
        head, *rows = block.split("\n")
        match = re.fullmatch(r"([^ :]+)(:\S+)? \((.+)\): (\S+)(?: \+ (.+))?", head)
        assert match, head
        files: dict[str, float] = {}
        for row in rows:
            name, _, sizes = row.strip().partition(" ")
            for entry in sizes.split(", "):
                quant, _, size = entry.rpartition(" ")
                files[name.replace("*", quant)] = float(size)
        repo, asked, kind, target, draft = match.groups(default="")
        yield Listing(repo, cast(Kind, kind), files, target, draft, asked)


LISTINGS = [*read_listings()]


def write_contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each kind of file."""
    cycle = target_cycle(TINY_TARGET.n_vocab)
    for architecture in ("qwen35", "glm4moe"):
        files = folder / architecture, folder / f"{architecture} mtp"
        write_heads_apart(*files, architecture=architecture)
    write_heads(folder / "with heads")
    target, sidecar = write_with_sidecar(folder / "gemma")
    target.rename(folder / "gemma4")
    sidecar.rename(folder / "gemma4 mtp")
    write_model(folder / "llama", TINY_TARGET, cycle)
    write_eagle(folder / "eagle3", TINY_TARGET, cycle)
    for kind in ("dflash", "dspark"):
        write_block(folder / kind, TINY_TARGET, cycle, kind=kind)
    model(filler=4000).write(folder / "other")
    model().put("general.type", STRING, "adapter").write(folder / "adapter")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return write_contents(tmp_path_factory.mktemp("contents"))


def choose_content(listing: Listing, file: str, contents: dict[str, bytes]) -> bytes:
    """Return what a file of the listing holds."""
    name = file.lower().rpartition("/")[2]
    if listing.repo.startswith("cook/"):  # whatever their names say, these are whole models
        return contents["adapter" if "adapter" in name else "llama"]
    for kind in ("eagle3", "dflash", "dspark"):
        if kind in name:
            return contents[kind]
    is_apart = file == listing.draft or ("e2b" in name and name.endswith("-mtp.gguf"))
    if is_apart or name.startswith("mtp-") or "assistant" in name:
        return contents.get(f"{listing.kind} mtp", b"heads of another kind")
    return contents[listing.kind] if name.endswith(".gguf") else b"no model"


@pytest.mark.parametrize("listing", LISTINGS, ids=lambda listing: listing.repo + listing.asked)
def test_a_pull_takes_the_right_files(
    listing: Listing,
    contents: dict[str, bytes],
    hub: TestHub,
    puller: Puller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sizes = {file.replace("UD_", "UD-"): int(size * 1e9) for file, size in listing.files.items()}
    for file in sizes:
        hub.add(listing.repo, file, choose_content(listing, file, contents))
    listed = tuple(ListedFile(file, size) for file, size in sorted(sizes.items()))
    monkeypatch.setattr(Hub, "list_files", lambda *_: listed)
    if "-of-" in listing.target:  # the content is one file, whatever its name says
        monkeypatch.setattr("localspec.registry.pulls.pull.list_parts", lambda file: [file])
    puller.memory = MEMORY
    reference = parse_reference(listing.repo + listing.asked)
    assert reference is not None
    request = PullTarget(name="w", asked=listing.repo, target=reference)
    decision = decide(puller, request, {})
    pair = decision.pair
    assert pair.target.file == listing.target
    taken = pair.sidecar or pair.draft
    assert (taken.file if taken else "in the file" * pair.embedded_heads) == listing.draft
    unused = {file for file in sizes if file.startswith(("mtp-", "eagle3-", "dflash-", "dspark-"))}
    sentence = " ".join(decision.said)
    for file in sorted(unused - {listing.target, listing.draft})[:1]:
        assert "Not used: " in sentence, file
