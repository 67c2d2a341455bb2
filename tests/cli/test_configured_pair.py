"""Test the configured pair: how it is chosen, where it is shown, and which errors name it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import wait_for
from tests.support.extras import needs
from tests.support.gguf_files import model
from tests.support.programs import in_ollama
from tests.support.pulling import PullingHome, pulling_home
from tests.support.terminal import terminal


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullingHome]:
    """Yield a home where the pair `tiny` is pulled."""
    folder = tmp_path_factory.mktemp("home")
    with pulling_home(folder) as home:
        home.environment["OLLAMA_MODELS"] = str(folder / "ollama")
        assert home.run("pull", "tiny").returncode == 0
        yield home


@pytest.fixture(autouse=True)
def default_pair(home: PullingHome) -> Iterator[None]:
    yield
    home.run("config", "unset", "pair")


def test_use_chooses_an_installed_pair(home: PullingHome) -> None:
    assert home.run("use").stdout == "builtin\n"
    assert home.run("use", "tiny").stdout.startswith("pair: builtin → tiny.")
    assert home.run("use").stdout == home.run("config", "get", "pair").stdout == "tiny\n"
    assert home.run("use", "little").returncode == 0  # little is an alias of tiny.
    assert home.run("use").stdout == "tiny\n"
    assert home.run("use", "builtin").returncode == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "There is no pair 'nothing'."),
        ("coder-7b", "The pair 'coder-7b' is not pulled yet; run: localspec pull coder-7b"),
        ("qwen2.5-coder:7b", "run: localspec pull coder-7b"),
        ("/none.gguf", "/none.gguf does not exist."),
    ],
)
def test_use_refuses_unusable_pairs(home: PullingHome, name: str, message: str) -> None:
    run = home.run("use", name)
    assert (run.returncode != 0, run.stdout) == (True, "")
    assert message in run.stderr
    assert home.run("use").stdout == "builtin\n"


def test_use_starts_the_daemon(home: PullingHome) -> None:
    home.run("stop")
    assert home.run("use", "nothing").returncode == 1
    assert home.run("status").returncode == 0


def marked_names(listing: str) -> list[str]:
    return re.findall(r"^(\S+) \* ", listing, re.MULTILINE)


def test_the_configured_pair_is_marked_and_shown(home: PullingHome) -> None:
    assert marked_names(home.run("list").stdout) == ["builtin"]
    home.run("config", "set", "pair", "little")  # little is an alias of tiny.
    assert (
        marked_names(home.run("list").stdout)
        == marked_names(home.run("list", "--all").stdout)
        == ["tiny"]
    )
    assert json.loads(home.run("list", "--json").stdout)["configured"] == "tiny"
    home.run("load", "builtin")
    for command in (["status"], ["status", "-v"]):
        output = home.run(*command).stdout
        assert re.search(r"^pair +tiny: unloaded$", output, re.MULTILINE)
        assert re.search(r"^also +builtin: ready", output, re.MULTILINE)
    assert json.loads(home.run("status", "--json").stdout)["configured"] == "tiny"


def test_a_chat_marks_the_configured_pair(home: PullingHome) -> None:
    home.run("use", "tiny")
    with terminal(home.environment, "chat", columns=100) as session:
        session.expect("tiny")  # The status line names it before any answer.
        session.send("/pair\r")
        session.expect("* tiny")
        session.send("/pair builtin\r")
        session.expect("Now using builtin.")
        session.send("/pair\r")
        session.expect("* builtin")
        assert "the configured pair" not in session.text


@needs("service")
def test_errors_name_a_missing_configured_pair(home: PullingHome) -> None:
    home.run("use", "tiny")
    run = home.run("rm", "-y", "tiny")
    assert run.returncode == 0
    assert "tiny is the configured pair" in run.stderr
    assert "localspec use NAME" in run.stderr
    try:
        for command in (["ask", "hi"], ["load"]):
            run = home.run(*command)
            assert (run.returncode, run.stdout) == (1, "")
            assert run.stderr.startswith("localspec: The configured pair 'tiny' is not pulled yet")
            assert "run: localspec pull tiny" in run.stderr
            assert "localspec use NAME" in run.stderr
            assert "localspec config unset pair" in run.stderr
            assert "any_model" not in run.stderr
        assert "The configured pair 'tiny' is not pulled yet" in home.run("doctor").stdout
    finally:
        assert home.run("pull", "tiny").returncode == 0


def test_removing_another_pair_causes_no_warning(home: PullingHome) -> None:
    home.run("use", "builtin")
    try:
        assert home.run("rm", "-y", "tiny").stderr == ""
    finally:
        assert home.run("pull", "tiny").returncode == 0


@pytest.mark.parametrize("name", ["nobodys", "Ollama-has-not:7b", "/none/x.gguf", "/a,b,c.gguf"])
def test_an_unusable_name_is_reported_as_the_configured_pair(
    home: PullingHome, name: str, tmp_path: Path
) -> None:
    file = Path(home.run("config", "path").stdout.strip())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'pair = "{name}"\n')
    home.run("restart")
    run = home.run("ask", "hi")
    assert run.returncode == 1
    assert run.stderr.startswith("localspec: The configured pair")
    assert "localspec use NAME" in run.stderr
    assert "any_model" not in run.stderr
    answer = home.chat("hi")  # Other programs get the same message.
    assert (answer.status, "The configured pair" in answer.error["message"]) == (404, True)


def test_a_pair_from_a_variable_suggests_unsetting_it(home: PullingHome) -> None:
    home.run("stop")
    home.environment["LOCALSPEC_PAIR"] = "nobodys"
    try:
        assert "unset LOCALSPEC_PAIR" in home.run("ask", "hi").stderr
    finally:
        del home.environment["LOCALSPEC_PAIR"]
        home.run("restart")


def test_any_model_is_suggested_only_over_http(home: PullingHome) -> None:
    for command in (
        ["ask", "-m", "gpt-4o", "hi"],
        ["load", "gpt-4o"],
        ["complete", "-m", "x", "f:1"],
    ):
        assert "any_model" not in home.run(*command).stderr
    assert "any_model" in home.chat("hi", model="gpt-4o").error["message"]


def test_an_existing_pair_is_replaced_with_a_flag(home: PullingHome, tmp_path: Path) -> None:
    file = model(layers=1).write(tmp_path / "a.gguf")
    assert home.run("add", "mine", "--target", str(file)).returncode == 0
    run = home.run("add", "mine", "--target", str(file))
    assert (run.returncode, "--replace" in run.stderr) == (1, True)
    assert home.run("add", "mine", "--target", str(file), "--replace").returncode == 0
    file.unlink()
    run = home.run("ask", "-m", "mine", "hi")
    assert "Restore it, or remove the pair: localspec rm mine" in run.stderr
    assert "accept" not in run.stderr
    home.run("rm", "-y", "mine")


def test_a_name_of_ollamas_means_the_pair_with_the_same_model(
    home: PullingHome, tmp_path: Path
) -> None:
    file = model(layers=1).write(tmp_path / "a.gguf")
    assert home.run("add", "qwen3-4b-mine", "--target", str(file)).returncode == 0
    assert json.loads(home.run("show", "qwen3:4b-mine", "--json").stdout)["name"] == "qwen3-4b-mine"
    assert home.run("use", "qwen3:4b-mine").returncode == 0
    assert home.run("use").stdout == "qwen3-4b-mine\n"
    assert json.loads(home.run("show", "--json").stdout)["name"] == "qwen3-4b-mine"
    for command in (["ask", "-m", "qwen3:4b", "hi"], ["show", "qwen3:4b"], ["use", "qwen3:4b"]):
        assert "run: localspec pull qwen3-4b" in home.refused(*command)
    in_ollama(Path(home.environment["OLLAMA_MODELS"]),
              "registry.ollama.ai/library/qwen3/4b-mine", model(layers=1, seed=5).data())  # fmt: skip
    view = json.loads(home.run("show", "qwen3:4b-mine", "--json").stdout)
    assert view["name"] == "qwen3:4b-mine", "Ollama's own model goes before a pair"
    home.run("config", "unset", "pair")
    home.run("rm", "-y", "qwen3-4b-mine")


def test_pull_understands_ollamas_names(home: PullingHome) -> None:
    run = home.run("pull", "qwen2.5-coder:latest")
    assert run.returncode == 1
    assert "Did you mean" in run.stderr
    assert "coder-7b" in run.stderr
    home.catalogue.write_text(home.catalogue.read_text().replace("little", "small-1b"))
    assert home.run("rm", "-y", "tiny").returncode == 0
    outputs: list[str] = []

    def pull_succeeds() -> bool:
        run = home.run("pull", "small:1b")
        outputs.append(run.stdout)
        return run.returncode == 0

    wait_for(pull_succeeds, "the new alias")
    assert "tiny is installed" in outputs[-1]


@pytest.mark.parametrize("target", ["a,b.gguf", "a,b,c.gguf", "with , blank.gguf"])
@pytest.mark.parametrize("draft", ["", "d.gguf", "d,e.gguf"])
def test_a_comma_in_a_files_name_is_part_of_it(
    home: PullingHome, tmp_path: Path, target: str, draft: str
) -> None:
    files = [model(layers=1, seed=1).write(tmp_path / target)]
    if draft:
        files.append(model(layers=1, seed=1).write(tmp_path / draft))
    name = ",".join(map(str, files))
    view = json.loads(home.run("show", name, "--json").stdout)
    assert view["target"]["path"] == str(files[0])
    assert (view["draft"] or {}).get("path") == (str(files[1]) if draft else None)
    assert home.run("use", name).returncode == 0
