"""Pairs for other engines: each option and key is one of theirs, and a shell reads what was meant."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.cli.commands import pairs
from localspec.daemon.pairs.views import _catalogue_entry
from localspec.errors import UsageError
from localspec.extras.upstream import export
from localspec.extras.upstream.export import (
    ENGINES,
    Deployment,
    EngineCommand,
    ExportedModel,
    ExportedPair,
    read_pair,
)
from localspec.registry.catalogue import load_catalogue
from tests.support.daemons import Home, temporary_home

# As vLLM's and SGLang's own parsers list them, and the sources of the others: option → what it takes.
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("engines.json").read_text())
CATALOGUE = load_catalogue(Path("/nonexistent"))
OWN = ExportedModel(
    "my model.gguf", path="/home/a b/it's $HOME/my model.gguf", original="/srv/my weights"
)
TOWER = Deployment(host="tower", gpus=2, context=32768)


def catalogued(name: str, **counts: int) -> ExportedPair:
    entry = msgspec.to_builtins(_catalogue_entry(name, CATALOGUE.pairs[name]))
    return read_pair(name, entry, None, counts)


# A draft with another vocabulary, one with the same, heads in a file of their own, heads in the target's
# file, and a file of this machine without any draft.
PAIRS = [
    catalogued("coder-32b"),
    catalogued("llama33-70b"),
    catalogued("gemma4-12b"),
    catalogued("qwen36-27b"),
    ExportedPair("/home/a b/it's $HOME/my model.gguf", "ngram", OWN, here=True),
]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.served_name)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def options(served: EngineCommand, words: list[str]) -> dict[str, str]:
    """The options of a command, each of which the engine has, with a value where it takes one."""
    known: dict[str, Any] = RECORDED[served.short]["options"]
    found: dict[str, str] = {}
    model = served.short in ("vllm", "trtllm")  # stands before the options
    assert not model or not words[0].startswith("-")
    rest = iter(words[model:])
    for word in rest:
        assert word in known, f"{served.title} has no option {word}"
        assert word not in found, f"{word} is given twice"
        takes = known[word]
        found[word] = "" if takes == "nothing" else next(rest)
        assert takes != "integer" or found[word].isdigit()
        assert not isinstance(takes, list) or found[word] in takes, found[word]
    return found


@each_pair
@each_engine
def test_an_engine_knows_what_it_is_told(pair: ExportedPair, engine: str) -> None:
    served = ENGINES[engine](pair, TOWER)
    at = served.program
    told = options(served, served.command[at:])
    assert (told["--host"], told["--port"]) == ("0.0.0.0", str(served.port))
    if engine == "vllm":
        keys = json.loads(told["--speculative-config"])
        assert keys.keys() <= set(RECORDED["vllm"]["speculative_config"])
        assert keys["method"] in RECORDED["vllm"]["methods"]
    if engine == "trtllm":
        written = yaml.safe_load(served.files[told["--config"]])
        kind = written["speculative_config"].pop("decoding_type")
        assert written["speculative_config"].keys() <= set(RECORDED["trtllm"]["kinds"][kind])
        assert written.keys() <= {"speculative_config", "disable_overlap_scheduler"}
    if engine == "sglang":
        assert told["--speculative-algorithm"] in RECORDED["sglang"]["algorithms"]
    said = export.add_command(pair, TOWER, served)
    pairs.add_command.make_context("add", said[2:])  # raises where `localspec add` refuses it


@each_pair
@each_engine
def test_a_compose_file_is_one(pair: ExportedPair, engine: str) -> None:
    whole = yaml.safe_load(export.render_compose(pair, Deployment(), engine))
    assert whole.keys() <= set(RECORDED["compose"]["file"])
    ((name, service),) = whole["services"].items()
    assert name == pair.served_name
    assert service.keys() <= set(RECORDED["compose"]["service"])
    words = [word.replace("$$", "$") for word in service["command"]]
    expected = ENGINES[engine](pair, replace(Deployment(), host="x"))
    if pair.target.repo:
        assert words == expected.command[expected.program :]
    else:
        (mount,) = service["volumes"][1:]
        assert mount["source"].replace("$$", "$") in ("/home/a b/it's $HOME", "/srv/my weights")
        assert any(word.startswith(mount["target"]) for word in words + service["entrypoint"])
    assert service["ports"] == [f"127.0.0.1:{expected.port}:{expected.port}"]
    mounted = {each["source"] for each in service.get("configs", ())}
    assert mounted == whole.get("configs", {}).keys()


def test_what_an_engine_cannot_do_is_said() -> None:
    coder, _, beside, inside, _ = PAIRS
    drafts = {name: ENGINES[name](coder, TOWER) for name in ("vllm", "sglang", "trtllm")}
    assert '"use_heterogeneous_vocab":true' in " ".join(drafts["vllm"].command)
    assert "NGRAM" in drafts["sglang"].command
    assert all("152064 and 151936" in " ".join(each.notes) for each in drafts.values())
    for pair in (beside, inside):
        served = ENGINES["trtllm"](pair, TOWER)
        assert "NGram" in served.files["trtllm.yaml"]
        assert "NGram" in " ".join(served.notes)
    bare = replace(coder, draft=ExportedModel("b.gguf"))
    with pytest.raises(UsageError, match="--draft-weights OWNER/REPO"):
        ENGINES["sglang"](bare, TOWER)
    for engine in ("trtllm", "llama-server"):
        with pytest.raises(UsageError, match="one machine"):
            ENGINES[engine](coder, replace(TOWER, nodes=2))


def test_a_pair_that_fills_in_is_called_as_its_makers_call_it() -> None:
    """By that name the markers are known with which an engine without llama-server's /infill is asked."""
    from localspec.extras.upstream.dialects import KINDS
    from localspec.extras.upstream.request import build_request
    from localspec.protocol import frames

    names = [name for name, each in CATALOGUE.pairs.items() if "fim" in each.roles]
    assert names
    for name in names:
        for engine in ("vllm", "sglang"):
            served = ENGINES[engine](catalogued(name), TOWER)
            request = frames.Generate(0, frames.InfillPrompt("a", "b"), max_tokens=1)
            assert "a" in build_request(request, KINDS[engine], served.model).body["prompt"]
            told = export.add_command(catalogued(name), TOWER, served)
            assert told[told.index("--upstream-model") + 1] == served.model
            assert served.model in served.command


def test_several_machines_share_a_target() -> None:
    pair, place = PAIRS[1], Deployment(host="tower", nodes=2, gpus=4)
    served = ENGINES["vllm"](pair, place)
    told = options(served, served.command[2:])
    assert (told["--tensor-parallel-size"], told["--pipeline-parallel-size"]) == ("4", "2")
    assert told["--distributed-executor-backend"] == "ray"
    assert "ray start --address=tower:6379" in export.render_script(pair, place, served)
    served = ENGINES["sglang"](pair, place)
    both = [served.command, *(command for _, command in served.rest)]
    read_back = [options(served, words[3:]) for words in both]
    assert [each.pop("--node-rank") for each in read_back] == ["0", "1"]
    assert read_back[0] == read_back[1]
    assert read_back[0]["--tp-size"] == "8"


@pytest.mark.parametrize(
    ("kind", "drafted", "accepted", "depth"),
    [
        ("model", 0, 0, 3),  # nothing measured
        ("model", 1000, 50, 0),  # one token in twenty does not pay for drafts at a tenth of a pass
        ("model", 1000, 600, 3),
        ("model", 1000, 800, 6),
        ("ngram", 1000, 600, 6),
    ],
)
def test_the_depth_is_that_of_the_best_yield(
    kind: str, drafted: int, accepted: int, depth: int
) -> None:
    pair = replace(PAIRS[1], draft_kind=kind, drafted=drafted, accepted=accepted)
    assert pair.depth == depth
    assert str(depth) in pair.depth_note or "No drafts" in pair.depth_note
    if not depth:
        for engine in ENGINES.values():
            assert "spec" not in " ".join(engine(pair, TOWER).command)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@settings(max_examples=25)
@given(name=texts, file=texts, weights=texts, draft=texts)
def test_a_shell_and_compose_read_what_was_meant(
    name: str, file: str, weights: str, draft: str
) -> None:
    target = ExportedModel(file, path=f"/{file}", original=f"/{weights}")
    other = ExportedModel("b.gguf", path=f"/{draft}", original=f"/{draft}")
    pair = ExportedPair(name, "model", target, other, here=True)
    shown = []
    for engine in ENGINES.values():
        served = engine(pair, Deployment())
        served.files.clear()  # written into the folder where the script runs
        shown.append(served)
    scripts = "\n".join(export.render_script(pair, Deployment(), served) for served in shown)
    # In place of each program, one that prints its words.
    printed = "() { printf '%s\\0' \"$@\"; }\n"
    programs = "".join(f"{served.command[0]}{printed}" for served in shown)
    done = subprocess.run(["bash", "-c", programs + scripts], capture_output=True, check=True)
    words = [word for served in shown for word in served.command[1:]]
    assert done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1] == words
    assert done.stderr == b""
    service = yaml.safe_load(export.render_compose(pair, Deployment(), "llama-server"))["services"][
        pair.served_name
    ]
    found = [each["source"].replace("$$", "$") for each in service["volumes"][1:]]
    assert found == [str(Path(each.path).parent) for each in (target, other)]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake()
        yield home


def test_a_pair_is_exported_from_the_command_line(home: Home) -> None:
    shown = home.run("export", "qwen2.5-coder-7b", "--to", "vllm").stdout
    assert "vllm serve Qwen/Qwen2.5-Coder-7B-Instruct" in shown
    assert "# localspec add coder-7b-vllm --upstream http://127.0.0.1:8000/v1" in shown
    shown = home.run("export", "builtin", "--to", "llama-server", "--host", "tower").stdout
    assert "target.gguf" in shown
    assert "--fallback builtin" in shown
    assert "Copy the files" in shown
    refused = home.run("export", "builtin", "--to", "sglang")
    assert refused.returncode == 2
    assert "--weights OWNER/REPO" in refused.stderr
    named = home.run(
        *("export", "builtin", "--to", "sglang", "--weights", "a/b", "--draft-weights", "./c")
    )
    assert "--model-path a/b" in named.stdout
    assert f"-path {Path('c').absolute()}" in named.stdout
    for wrong in (("--host", "a b"), ("--nodes", "2"), ("--weights=-x"), ("--engine", "vllm")):
        words = wrong if isinstance(wrong, tuple) else (wrong,)
        assert home.run("export", "coder-7b", "--to", "vllm", *words).returncode == 2
    assert home.run("export", "nomic-embed", "--to", "vllm").returncode == 2
    assert "no pair 'nosuch'" in home.run("export", "nosuch", "--to", "vllm").stderr
