"""Test exports for other engines: options and keys exist there, and names are quoted."""

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

from localspec.cli.commands import add
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

# Options of each engine, as vLLM's and SGLang's parsers and the other sources list them.
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("engines.json").read_text())
CATALOGUE = load_catalogue(Path("/nonexistent"))
OWN = ExportedModel(
    "my model.gguf", path="/home/a b/it's $HOME/my model.gguf", original="/srv/my weights"
)
TOWER = Deployment(host="tower", gpus=2, context=32768)


def read_catalogue_pair(name: str, **counts: int) -> ExportedPair:
    entry = msgspec.to_builtins(_catalogue_entry(name, CATALOGUE.pairs[name]))
    return read_pair(name, entry, None, counts)


# A draft with another vocabulary, a draft with the same vocabulary, heads in a separate file, heads in
# the target's file, and a local file without a draft, with and without a projector for pictures.
PAIRS = [
    read_catalogue_pair("coder-32b"),
    read_catalogue_pair("llama33-70b"),
    read_catalogue_pair("gemma4-12b"),
    read_catalogue_pair("qwen36-27b"),
    ExportedPair("/home/a b/it's $HOME/my model.gguf", "ngram", OWN, here=True),
    ExportedPair("sees", "ngram", OWN, here=True, projector="/home/a b/mmproj it's.gguf"),
    ExportedPair("mixture", "ngram", OWN, here=True, gpu_layers=20, cpu_moe_layers=37),
]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.served_name)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def parse_options(command: EngineCommand, arguments: list[str]) -> dict[str, str]:
    """Parse the options of a command and check that the engine has each of them."""
    accepted_options: dict[str, Any] = RECORDED[command.short]["options"]
    options_: dict[str, str] = {}
    positionals = command.short in ("vllm", "trtllm")  # The model comes before the options.
    assert not positionals or not arguments[0].startswith("-")
    remaining = iter(arguments[positionals:])
    for word in remaining:
        assert word in accepted_options, f"{command.title} has no option {word}"
        assert word not in options_, f"{word} is given twice"
        value_type = accepted_options[word]
        options_[word] = "" if value_type == "nothing" else next(remaining)
        assert value_type != "integer" or options_[word].isdigit()
        assert not isinstance(value_type, list) or options_[word] in value_type, options_[word]
    return options_


@each_pair
@each_engine
def test_every_option_exists_in_the_engine(pair: ExportedPair, engine: str) -> None:
    served = ENGINES[engine](pair, TOWER)
    program_length = served.program
    options_ = parse_options(served, served.command[program_length:])
    assert (options_["--host"], options_["--port"]) == ("0.0.0.0", str(served.port))
    if engine == "vllm":
        keys = json.loads(options_["--speculative-config"])
        assert keys.keys() <= set(RECORDED["vllm"]["speculative_config"])
        assert keys["method"] in RECORDED["vllm"]["methods"]
    if engine == "trtllm":
        config = yaml.safe_load(served.files[options_["--config"]])
        kind = config["speculative_config"].pop("decoding_type")
        assert config["speculative_config"].keys() <= set(RECORDED["trtllm"]["kinds"][kind])
        assert config.keys() <= {"speculative_config", "disable_overlap_scheduler"}
    if engine == "sglang":
        assert options_["--speculative-algorithm"] in RECORDED["sglang"]["algorithms"]
    add_words = export.add_command(pair, TOWER, served)
    # This raises if `localspec add` refuses the arguments.
    add.command.make_context("add", add_words[2:])


@each_pair
@each_engine
def test_a_compose_file_is_valid(pair: ExportedPair, engine: str) -> None:
    compose = yaml.safe_load(export.render_compose(pair, Deployment(), engine))
    assert compose.keys() <= set(RECORDED["compose"]["file"])
    ((name, service),) = compose["services"].items()
    assert name == pair.served_name
    assert service.keys() <= set(RECORDED["compose"]["service"])
    words = [word.replace("$$", "$") for word in service["command"]]
    expected = ENGINES[engine](pair, replace(Deployment(), host="x"))
    if pair.target.repo:
        assert words == expected.command[expected.program :]
    else:
        mounts = service["volumes"][1:]
        assert len(mounts) == 1 + (bool(pair.projector) and engine == "llama-server")
        for mount in mounts:
            assert mount["source"].replace("$$", "$") in (
                "/home/a b/it's $HOME",
                "/srv/my weights",
                "/home/a b",
            )
            assert any(word.startswith(mount["target"]) for word in words + service["entrypoint"])
    assert service["ports"] == [f"127.0.0.1:{expected.port}:{expected.port}"]
    mounted = {config["source"] for config in service.get("configs", ())}
    assert mounted == compose.get("configs", {}).keys()


def test_limitations_of_engines_are_noted_or_refused() -> None:
    coder, _, with_separate_heads, with_own_heads, *_ = PAIRS
    drafts = {name: ENGINES[name](coder, TOWER) for name in ("vllm", "sglang", "trtllm")}
    assert '"use_heterogeneous_vocab":true' in " ".join(drafts["vllm"].command)
    assert "NGRAM" in drafts["sglang"].command
    assert all("152064 and 151936" in " ".join(command.notes) for command in drafts.values())
    for pair in (with_separate_heads, with_own_heads):
        served = ENGINES["trtllm"](pair, TOWER)
        assert "NGram" in served.files["trtllm.yaml"]
        assert "NGram" in " ".join(served.notes)
    without_repository = replace(coder, draft=ExportedModel("b.gguf"))
    with pytest.raises(UsageError, match="--draft-weights OWNER/REPO"):
        ENGINES["sglang"](without_repository, TOWER)
    for engine in ("trtllm", "llama-server"):
        with pytest.raises(UsageError, match="one machine"):
            ENGINES[engine](coder, replace(TOWER, nodes=2))


def test_a_fill_in_pair_has_its_official_name() -> None:
    """The name selects the fill-in markers for engines without llama-server's /infill."""
    from localspec.extras.upstream.dialects import KINDS
    from localspec.extras.upstream.request import build_request
    from localspec.protocol import frames

    names = [name for name, pair in CATALOGUE.pairs.items() if "fim" in pair.roles]
    assert names
    for name in names:
        for engine in ("vllm", "sglang"):
            served = ENGINES[engine](read_catalogue_pair(name), TOWER)
            request = frames.Generate(0, frames.InfillPrompt("a", "b"), max_tokens=1)
            assert "a" in build_request(request, KINDS[engine], served.model).body["prompt"]
            add_words = export.add_command(read_catalogue_pair(name), TOWER, served)
            assert add_words[add_words.index("--upstream-model") + 1] == served.model
            assert served.model in served.command


def test_several_machines_share_a_target() -> None:
    pair, deployment = PAIRS[1], Deployment(host="tower", nodes=2, gpus=4)
    served = ENGINES["vllm"](pair, deployment)
    options_ = parse_options(served, served.command[2:])
    assert (options_["--tensor-parallel-size"], options_["--pipeline-parallel-size"]) == ("4", "2")
    assert options_["--distributed-executor-backend"] == "ray"
    assert "ray start --address=tower:6379" in export.render_script(pair, deployment, served)
    served = ENGINES["sglang"](pair, deployment)
    commands = [served.command, *(command for _, command in served.rest)]
    parsed = [parse_options(served, words[3:]) for words in commands]
    assert [rank_options.pop("--node-rank") for rank_options in parsed] == ["0", "1"]
    assert parsed[0] == parsed[1]
    assert parsed[0]["--tp-size"] == "8"


@pytest.mark.parametrize(
    ("kind", "drafted", "accepted", "depth"),
    [
        ("model", 0, 0, 3),  # Nothing was measured.
        # An acceptance of 5 % does not pay for drafts at a tenth of a pass.
        ("model", 1000, 50, 0),
        ("model", 1000, 600, 3),
        ("model", 1000, 800, 6),
        ("ngram", 1000, 600, 6),
    ],
)
def test_the_depth_follows_the_measured_acceptance(
    kind: str, drafted: int, accepted: int, depth: int
) -> None:
    pair = replace(PAIRS[1], draft_kind=kind, drafted=drafted, accepted=accepted)
    assert pair.depth == depth
    assert str(depth) in pair.depth_note or "No drafts" in pair.depth_note
    if not depth:
        for engine in ENGINES.values():
            assert "spec" not in " ".join(engine(pair, TOWER).command)


NON_EMPTY_TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30
)


@settings(max_examples=25)
@given(name=NON_EMPTY_TEXTS, file=NON_EMPTY_TEXTS, weights=NON_EMPTY_TEXTS, draft=NON_EMPTY_TEXTS)
def test_names_are_quoted_for_a_shell_and_for_compose(
    name: str, file: str, weights: str, draft: str
) -> None:
    target = ExportedModel(file, path=f"/{file}", original=f"/{weights}")
    draft_model = ExportedModel("b.gguf", path=f"/{draft}", original=f"/{draft}")
    pair = ExportedPair(name, "model", target, draft_model, here=True)
    commands = []
    for engine in ENGINES.values():
        served = engine(pair, Deployment())
        served.files.clear()  # These would be written into the current folder.
        commands.append(served)
    scripts = "\n".join(export.render_script(pair, Deployment(), served) for served in commands)
    # Replace each program by a function that prints its arguments.
    print_arguments = "() { printf '%s\\0' \"$@\"; }\n"
    programs = "".join(f"{served.command[0]}{print_arguments}" for served in commands)
    result = subprocess.run(["bash", "-c", programs + scripts], capture_output=True, check=True)
    words = [word for served in commands for word in served.command[1:]]
    assert result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1] == words
    assert result.stderr == b""
    service = yaml.safe_load(export.render_compose(pair, Deployment(), "llama-server"))["services"][
        pair.served_name
    ]
    sources = [volume["source"].replace("$$", "$") for volume in service["volumes"][1:]]
    assert sources == [str(Path(model.path).parent) for model in (target, draft_model)]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake()
        yield home


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        ({"gpu_layers": -1, "cpu_moe_layers": 37}, {"--n-cpu-moe": "37"}),
        ({"gpu_layers": 20, "cpu_moe_layers": 0}, {"--gpu-layers": "20"}),
        ({"gpu_layers": 20, "cpu_moe_layers": 37}, {"--gpu-layers": "20", "--n-cpu-moe": "37"}),
        ({"gpu_layers": -1, "cpu_moe_layers": 0}, {}),
        ({"gpu_layers": 0, "cpu_moe_layers": 0}, {}),
        (None, {}),
    ],
)
def test_llama_server_gets_the_placement_of_this_machine(
    fit: dict[str, int] | None, expected: dict[str, str]
) -> None:
    model = {"file": "a.gguf", "repo": "", "path": "/a.gguf", "vocabulary": 9, "size": 9}
    view = {"name": "a", "kind": "ngram", "roles": ["chat"], "target": model, "fit": fit}
    command = ENGINES["llama-server"](read_pair("a", {}, view, {}), Deployment())
    options = parse_options(command, command.command[1:])
    assert {
        key: options[key] for key in ("--gpu-layers", "--n-cpu-moe") if key in options
    } == expected
    assert any("lies on the GPU" in note for note in command.notes) == bool(expected)


def test_a_pair_is_exported_from_the_command_line(home: Home) -> None:
    script = home.run("export", "qwen2.5-coder-7b", "--to", "vllm").stdout
    assert "vllm serve Qwen/Qwen2.5-Coder-7B-Instruct" in script
    assert "# localspec add coder-7b-vllm --upstream http://127.0.0.1:8000/v1" in script
    script = home.run("export", "builtin", "--to", "llama-server", "--host", "tower").stdout
    assert "target.gguf" in script
    assert "--fallback builtin" in script
    assert "Copy the files" in script
    assert "--weights OWNER/REPO" in home.refused("export", "builtin", "--to", "sglang", code=2)
    with_weights = home.run(
        *("export", "builtin", "--to", "sglang", "--weights", "a/b", "--draft-weights", "./c")
    )
    assert "--model-path a/b" in with_weights.stdout
    assert f"-path {Path('c').absolute()}" in with_weights.stdout
    for options_ in (("--host", "a b"), ("--nodes", "2"), ("--weights=-x"), ("--engine", "vllm")):
        words = options_ if isinstance(options_, tuple) else (options_,)
        assert home.run("export", "coder-7b", "--to", "vllm", *words).returncode == 2
    assert home.run("export", "nomic-embed", "--to", "vllm").returncode == 2
    assert "no pair 'nosuch'" in home.run("export", "nosuch", "--to", "vllm").stderr
