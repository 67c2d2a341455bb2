"""Test pulls of any repository of the hub: the quantization, the draft and the name of the pair."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic import Shape, target_cycle, write_model
from benchmarks.synthetic_heads import write_heads_apart
from benchmarks.synthetic_sidecar import TINY_GEMMA, write_with_sidecar
from tests.support.daemons import FAKE_WORKER
from tests.support.gguf_files import U32, model
from tests.support.pulling import PullingHome, pulling_home

REPO = "maker/Tiny-8B-GGUF"
BIG = model(filler=400_000, seed=1).data()
BIGGER = model(filler=800_000, seed=1).data()
SMALL = model(layers=1, filler=30_000, seed=2).data()
NO_PROJECTOR = b"x" * 99
NO_DRAFT = "No draft model is known for it; drafts come from the text itself (n-gram)."


@pytest.fixture
def home(tmp_path: Path) -> Iterator[PullingHome]:
    """Yield a home with the scripted engine, which needs no llama.cpp."""
    with pulling_home(tmp_path) as home:
        home.environment["LOCALSPEC_ENGINE"] = f"{sys.executable} {FAKE_WORKER}"
        home.hub.add(REPO, "README.md", b"about it")
        home.hub.add(REPO, "Tiny-8B-Q4_K_M.gguf", BIG)
        home.hub.add(REPO, "Tiny-8B-Q8_0.gguf", BIGGER)
        home.hub.add(REPO, "mmproj-Tiny-8B-F16.gguf", NO_PROJECTOR)
        yield home


def read_record(home: PullingHome, name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((home.store / "pairs" / f"{name}.json").read_text())
    return content


def pulled_file(home: PullingHome, name: str, role: str = "target") -> str | None:
    model = read_record(home, name)[role]
    return model["parts"][0]["file"] if model else None  # type: ignore[index]


def test_a_repository_is_pulled_and_answers(tmp_path: Path) -> None:
    """The real engine loads and answers with the pulled file."""
    with pulling_home(tmp_path) as home:
        home.hub.add(REPO, "Tiny-8B-F32.gguf", home.files[0].read_bytes())
        output = home.must_run("pull", f"https://huggingface.co/{REPO}")
        assert re.search(r"^F32 +\d+ KiB +yes +taken$", output, re.M), output
        assert NO_DRAFT in output
        assert "maker-tiny-8b is installed" in output
        run = home.run("ask", "-m", REPO, "-n", "4", "hi")  # The pair's name works too.
        assert run.returncode == 0, run.stderr
        home.run("unload")
        assert "Removed maker-tiny-8b" in home.run("rm", "-y", REPO).stdout
        run = home.run("ask", "-m", REPO, "hi")
        assert f"localspec pull {REPO}" in run.stderr


def test_the_quantization_and_the_pair_name_are_chosen(home: PullingHome) -> None:
    run = home.run("pull", REPO)
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert rows[1][:1] + rows[1][3:] == ["Q8_0", "yes", "taken"]
    assert rows[2][:1] + rows[2][3:] == ["Q4_K_M", "yes"]
    assert f"To choose another: localspec pull {REPO}:QUANTIZATION" in run.stdout
    assert "Pair name: maker-tiny-8b\n" in run.stdout
    assert pulled_file(home, "maker-tiny-8b") == "Tiny-8B-Q8_0.gguf"
    assert home.hub.sent <= 1.05 * len(BIGGER)
    # A repeated pull transfers nothing but the header of what could be a projector by now; a chosen
    # quantization is a pair of its own.
    bytes_sent = home.hub.sent + len(NO_PROJECTOR)
    assert home.run("pull", REPO).returncode == 0
    assert home.run("pull", "maker-tiny-8b").returncode == 0
    assert home.hub.sent == bytes_sent
    run = home.run("pull", f"hf.co/{REPO}:q4_k_m")
    assert "QUANTIZATION" not in run.stdout
    assert pulled_file(home, "maker-tiny-8b-q4_k_m") == "Tiny-8B-Q4_K_M.gguf"
    assert home.run("pull", f"{REPO}:Tiny-8B-Q4_K_M.gguf", "--name", "mine").returncode == 0
    assert pulled_file(home, "mine") == "Tiny-8B-Q4_K_M.gguf"
    assert "Q4_K_M of maker/Tiny-8B-GGUF" in home.run("list").stdout


def test_a_split_model_in_a_folder(home: PullingHome) -> None:
    from tests.support.gguf_files import shards

    for file, data in shards(model(filler=200_000), 3, "Split-Q6_K").items():
        home.hub.add("maker/split", f"Q6_K/{file}", data)
    home.must_run("pull", "maker/split")
    stored = read_record(home, "maker-split")["target"]
    assert len(stored["parts"]) == 3  # type: ignore[index]


def test_unknown_repositories_are_refused(home: PullingHome) -> None:
    for name, message in (
        (f"{REPO}:Q5_0", "has no 'Q5_0'; it has: Q8_0, Q4_K_M."),
        ("maker/none", "The hub has no repository maker/none"),
        ("https://example.com/a/b", "is not a URL of the hub"),
        ("models/a.gguf", "for a file on this disk: localspec add"),
    ):
        run = home.run("pull", name)
        assert run.returncode == 1
        assert message in run.stderr
        assert "maker" not in home.run("list").stdout


def test_existing_pairs_are_not_replaced(home: PullingHome) -> None:
    home.run("add", "maker-tiny-8b", "--target", str(home.files[0]))
    home.run("add", "tiny", "--target", str(home.files[0]))
    for name in (REPO, "tiny"):
        message = home.refused("pull", name)
        assert "is a pair of your own files, which a pull does not replace" in message
        assert "--name NAME" in message
    assert read_record(home, "tiny")["source"] == "own"
    assert home.run("pull", REPO, "--name", "other").returncode == 0
    run = home.run("pull", f"{REPO}:Q4_K_M", "--name", "other")
    assert (
        "A pair 'other' already exists; it was pulled as maker/Tiny-8B-GGUF, not as" in run.stderr
    )
    assert pulled_file(home, "other") == "Tiny-8B-Q8_0.gguf"
    assert "is a pair in the catalogue" in home.run("pull", REPO, "--name", "coder-7b").stderr
    assert "is not a valid pair name" in home.run("pull", REPO, "--name", "A B").stderr
    assert "part of the installation" in home.run("pull", REPO, "--name", "builtin").stderr


def test_a_draft_that_is_named_or_left_out(home: PullingHome) -> None:
    home.hub.add("maker/draft", "d-Q8_0.gguf", SMALL)
    run = home.run("pull", REPO, "--draft", "maker/draft:Q8_0")
    assert run.returncode == 0, run.stderr
    assert pulled_file(home, "maker-tiny-8b", "draft") == "d-Q8_0.gguf"
    assert home.run("pull", "tiny", "--no-draft").returncode == 0
    assert pulled_file(home, "tiny", "draft") is None
    assert (
        "pulled as tiny --no-draft, not as"
        in home.run("pull", "tiny", "--draft", "own/draft").stderr
    )
    run = home.run("pull", "tiny", "--draft", "own/draft", "--name", "both")
    assert pulled_file(home, "both", "draft") == "draft.gguf", run.stderr
    assert home.run("pull", "tiny", "--draft", "a/b", "--no-draft").returncode == 2
    assert "is not a repository" in home.run("pull", REPO, "--draft", "coder-7b").stderr


def test_a_draft_that_does_not_match_is_refused(home: PullingHome) -> None:
    alien = home.root / "alien.gguf"
    write_model(alien, Shape(1, 64, 128, 4, 300), target_cycle(300))
    home.hub.add("maker/alien", "alien.gguf", alien.read_bytes())
    assert "Tiny-8B-Q8_0.gguf and alien.gguf: " in home.refused(
        "pull", REPO, "--draft", "maker/alien"
    )
    assert home.hub.sent < len(BIG)


def test_the_catalogue_proposes_the_draft_of_the_same_model_and_family(home: PullingHome) -> None:
    home.catalogue.write_text(
        '[pairs.tin]\nsummary = "s"\n'
        '[pairs.tin.target]\nrepo = "else/Tiny-14b"\nfile = "t.gguf"\n'
        '[pairs.tin.draft]\nrepo = "maker/draft"\nfile = "d.gguf"\n'
    )
    home.hub.add("maker/draft", "d.gguf", SMALL)
    run = home.run("pull", f"{REPO}:Q4_K_M")
    assert "Draft: maker/draft/d.gguf, which the catalogue lists for tin.\n" in run.stdout
    assert pulled_file(home, "maker-tiny-8b-q4_k_m", "draft") == "d.gguf"
    assert home.hub.sent <= 1.05 * (len(BIG) + len(SMALL))


def test_heads_are_found_in_the_file_and_beside_it(home: PullingHome) -> None:
    with_heads = model(layers=3, filler=9000).put("llama.nextn_predict_layers", U32, 1).data()
    home.hub.add("maker/inside", "inside-Q4_0.gguf", with_heads)
    run = home.run("pull", "maker/inside")
    assert "Drafts: this model's own heads (MTP), which are in its file." in run.stdout
    assert "MTP heads of the architecture llama are not supported" in run.stdout
    home.hub.add(REPO, "mtp-Tiny-8B.gguf", b"heads")
    assert "(MTP)" not in home.run("pull", REPO).stdout
    target, sidecar = write_with_sidecar(home.root / "gemma")
    home.hub.add("maker/gemma", "gemma-F32.gguf", target.read_bytes())
    home.hub.add("maker/gemma", "mtp-gemma.gguf", sidecar.read_bytes())
    run = home.run("pull", "maker/gemma")
    assert "(MTP), mtp-gemma.gguf in the same repository." in run.stdout
    assert pulled_file(home, "maker-gemma", "draft") == "mtp-gemma.gguf"
    output = home.run("show", "maker-gemma").stdout
    assert re.search(r"^drafts +the MTP heads in the draft's file$", output, re.M)
    listed = json.loads(home.run("list", "--json").stdout)["pairs"]
    assert [pair["kind"] for pair in listed if pair["name"] == "maker-gemma"] == ["mtp-sidecar"]


def test_heads_without_a_trunk_are_pulled_with_their_target(home: PullingHome) -> None:
    """As in ggml-org's repositories: several quantizations of the heads, and sidecars of other kinds."""
    target, heads = home.root / "trunk.gguf", home.root / "heads.gguf"
    write_heads_apart(target, heads, acceptance=0.9)
    home.hub.add("maker/apart", "Apart-8B-Q4_0.gguf", target.read_bytes())
    for name in ("mtp-Apart-8B-BF16", "eagle3-Apart-8B-Q8_0", "mtp-Apart-8B-Q4_0"):
        write_heads_apart(home.root / "again.gguf", heads, acceptance=len(name) / 40)
        home.hub.add("maker/apart", f"{name}.gguf", heads.read_bytes())
    home.hub.add("maker/apart", "mtp-Apart-8B-Q8_0.gguf", b"broken")
    run = home.run("pull", "maker/apart")
    assert "own heads (MTP), mtp-Apart-8B-Q4_0.gguf in the same repository." in run.stdout
    assert "eagle3-Apart-8B-Q8_0.gguf (EAGLE-3)" in run.stdout
    for number, suffix in enumerate((":mtp-Apart-8B-BF16.gguf", ":BF16")):
        name = f"named-{number}"
        home.must_run("pull", "maker/apart", "--draft", f"maker/apart{suffix}", "--name", name)
        assert pulled_file(home, name, "draft") == "mtp-Apart-8B-BF16.gguf"
    run = home.run("pull", "maker/apart:mtp-Apart-8B-BF16.gguf")
    assert run.returncode != 0
    assert "holds only MTP heads; name it as the draft of the model they belong to" in run.stderr


def test_heads_beside_a_target_draft_for_it(home: PullingHome) -> None:
    folder = home.root / "models"
    folder.mkdir()
    target, heads = folder / "Apart-8B-Q4_0.gguf", folder / "mtp-Apart-8B-Q8_0.gguf"
    write_heads_apart(target, heads, acceptance=0.9)
    run = home.run("add", "mine", "--target", str(target))
    assert (
        "note: mtp-Apart-8B-Q8_0.gguf, which lies beside the target, drafts for it." in run.stdout
    )
    assert home.run("add", "alone", "--target", str(target), "--no-draft").returncode == 0
    kinds = {
        pair["name"]: pair["kind"]
        for pair in json.loads(home.run("list", "--json").stdout)["pairs"]
    }
    assert (kinds["mine"], kinds["alone"]) == ("mtp-sidecar", "ngram")
    assert "the MTP heads in the draft's file" in home.run("show", str(target)).stdout


def test_heads_of_the_catalogue_are_used_only_if_they_fit(home: PullingHome) -> None:
    target, sidecar = write_with_sidecar(home.root / "gemma")
    wider_target, _ = write_with_sidecar(
        home.root / "other", replace(TINY_GEMMA, n_embd=96, n_head=3)
    )
    rows = []
    for name, file in (("right", target), ("wrong", wider_target)):
        home.hub.add(f"maker/{name}", "target.gguf", file.read_bytes())
        home.hub.add(f"maker/{name}", "mtp.gguf", sidecar.read_bytes())
        rows.append(f'[pairs.{name}]\nsummary = "s"\n')
        for role, part in (("target", "target"), ("heads", "mtp")):
            rows.append(f'[pairs.{name}.{role}]\nrepo = "maker/{name}"\nfile = "{part}.gguf"\n')
    home.catalogue.write_text("".join(rows))
    assert home.run("pull", "right").returncode == 0
    assert pulled_file(home, "right", "draft") == "mtp.gguf"
    output = home.must_run("pull", "wrong")
    assert "reads states of 64 numbers, and the target's have 96. Drafts come from" in output
    assert pulled_file(home, "wrong", "draft") is None


def test_a_local_draft_is_used_in_place(home: PullingHome) -> None:
    """A draft may be a file of LM Studio or of another pair, whose file stays when that pair goes."""
    path = home.root / ".lmstudio" / "models" / "a" / "d.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(SMALL)
    run = home.run("pull", f"{REPO}:Q4_K_M")
    assert "Draft: d.gguf (LM Studio), which is on this disk and matches.\n" in run.stdout
    assert read_record(home, "maker-tiny-8b-q4_k_m")["draft"]["parts"][0]["path"] == str(path)  # type: ignore[index]
    assert home.run("ask", "-m", "maker-tiny-8b-q4_k_m", "say hello").stdout == "hello\n"
    home.run("unload")
    home.run("rm", "-y", "maker-tiny-8b-q4_k_m")
    assert path.exists()
    path.unlink()
    home.hub.add("maker/draft", "d-Q8_0.gguf", SMALL)
    home.run("pull", "maker/draft", "--no-draft", "--name", "little-one")
    run = home.run("pull", REPO)
    assert "Draft: d-Q8_0.gguf (pair little-one), which is on this disk" in run.stdout
    home.run("rm", "-y", "little-one")
    assert home.run("ask", "-m", "maker-tiny-8b", "say hello").stdout == "hello\n"


def test_several_names_and_which_of_them_failed(home: PullingHome) -> None:
    run = home.run("pull", "tiny", "nope", f"{REPO}:Q4_K_M", "maker/none")
    assert run.returncode == 1
    assert "tiny is installed" in run.stdout
    assert "maker-tiny-8b-q4_k_m is installed" in run.stdout
    assert run.stderr.splitlines()[-1] == "localspec: 2 of 4 pulls failed: nope, maker/none"
    assert home.run("pull", "tiny", "nope", "--name", "x").returncode == 2


def test_the_rate_limit_applies_to_all_files_of_a_pull(home: PullingHome) -> None:
    home.hub.add("maker/draft", "d-Q8_0.gguf", BIG)
    home.hub.add("maker/big", "b-Q8_0.gguf", BIGGER)
    run = home.run("pull", "maker/big", "--draft", "maker/draft", "--limit-rate", "600K", "--json")
    assert run.returncode == 0, run.stderr
    rates = [json.loads(line)["rate"] for line in run.stdout.splitlines()]
    assert 0 < max(rates) < 900_000
    assert "not a number of bytes" in home.run("pull", "x", "--limit-rate", "fast").stderr
