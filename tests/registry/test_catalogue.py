"""Tests of the catalogue: the shipped models.toml, the user's file, and errors with file, line and key."""

from __future__ import annotations

import csv
import re
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import CatalogueError, ModelNotFound
from localspec.protocol.settings import Upstream
from localspec.registry.catalogue import (
    FILE_PATTERN,
    REPO_PATTERN,
    SHA256_PATTERN,
    CataloguePair,
    HubFile,
    load_catalogue,
    read_catalogue,
    reload_catalogue,
    shipped_catalogue_path,
)

SHIPPED = shipped_catalogue_path()
# Names, sizes and hashes copied from public catalogues (janhq/model-catalog and LocalAI's gallery, 2026),
# llama.cpp's presets and pages of huggingface.co. The hash is empty where none was published.
FACTS = Path(__file__).with_name("facts")
WEIGHTS = [
    (f"{name}.{role}", entry[role])
    for name, entry in tomllib.loads(SHIPPED.read_text())["pairs"].items()
    for role in ("target", "draft", "heads")
    if role in entry
]
GOOD = """
[pairs.mine]
summary = "my own"
aliases = ["my-pair"]

[pairs.mine.target]
repo = "me/models"
file = "big.gguf"
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "models.toml"


@pytest.mark.parametrize(("where", "weights"), WEIGHTS, ids=[where for where, _ in WEIGHTS])
def test_every_file_is_well_formed_and_has_its_source(
    where: str, weights: dict[str, object]
) -> None:
    assert REPO_PATTERN.fullmatch(str(weights["repo"])), where
    assert FILE_PATTERN.fullmatch(str(weights["file"])), where
    assert re.match(
        r"files seen in (janhq/|mudler/|llama\.cpp |huggingface\.co )|(verified|named) by others, 20",
        str(weights["verified"]),
    )
    assert SHA256_PATTERN.fullmatch(str(weights.get("sha256", "0" * 64)))


def test_the_shipped_catalogue_parses_strictly() -> None:
    pairs = read_catalogue(SHIPPED)[0]
    assert len(pairs) == 40
    assert all(pair.draft_kind != "ngram" and pair.year for pair in pairs.values())
    assert all(
        pair.hybrid == name.startswith(("qwen35", "qwen36", "qwen38"))
        for name, pair in pairs.items()
    )
    assert {role for pair in pairs.values() for role in pair.roles} == {
        "chat",
        "fim",
        "embed",
        "rerank",
    }


def read_facts(table: str) -> list[dict[str, str]]:
    with (FACTS / f"{table}.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, dialect="excel-tab", quoting=csv.QUOTE_NONE))


def test_the_shipped_catalogue_has_every_pair_of_the_facts() -> None:
    pairs = read_catalogue(SHIPPED)[0]
    rows = read_facts("pairs")
    for row in rows:
        pair = pairs[row["pair"]]
        weights = pair.target if row["role"] == "target" else pair.draft
        assert weights is not None
        assert (weights.repo, weights.file) == (row["repo"], row["file"])
        assert weights.sha256 == row["sha256"]
        assert pair.memory == row["memory"]
    assert len(rows) == 46


def test_the_shipped_catalogue_has_every_target_with_heads_of_the_facts() -> None:
    pairs = read_catalogue(SHIPPED)[0]
    rows = read_facts("heads")
    for row in rows:
        pair = pairs[row["pair"]]
        identity = (pair.target.repo, pair.target.file, pair.target.sha256)
        assert identity == (row["repo"], row["file"], row["sha256"])
        assert abs(pair.target.size_gib * 2**30 - int(row["bytes"])) < 2**30 / 100
        assert pair.draft_kind == row["kind"]
        if pair.sidecar:
            assert (pair.sidecar.file, pair.sidecar.sha256) == (
                row["heads_file"],
                row["heads_sha256"],
            )
        properties = (pair.licence, str(pair.context), pair.memory)
        assert properties == (row["licence"], row["context"], row["memory"])
    assert len(rows) == 10


@pytest.mark.parametrize("key", ["sidecar", "heads"])  # the second is the key of older files
@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("mtp-a-8b-Q8_0.gguf", "mtp-sidecar"),
        ("heads.gguf", "mtp-sidecar"),
        ("eagle3-a-8b-Q8_0.gguf", "eagle3"),
        ("a-8b-DFlash-Q8_0.gguf", "dflash"),
        ("dspark-a-8b-Q8_0.gguf", "dspark"),
    ],
)
def test_a_pair_may_have_a_sidecar(key: str, file: str, kind: str, user: Path) -> None:
    user.write_text(
        f'[pairs.mine]\nsummary = "m"\ntarget = {{repo = "o/a-8b", file = "a-8b.gguf"}}\n'
        f'{key} = {{repo = "o/a-8b", file = "{file}"}}\n'
    )
    pair = load_catalogue(user).pairs["mine"]
    assert pair.sidecar is not None
    assert (pair.sidecar.file, pair.draft_kind) == (file, kind)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("coder-14b", "coder-14b"),
        ("qwen2.5-coder-14b", "coder-14b"),
        ("Qwen2.5-Coder-14B", "coder-14b"),
        ("llama-3.1-8b", "llama31-8b"),
        ("gemma-3-12b", "gemma3-12b"),
    ],
)
def test_other_spellings_of_a_name_find_the_pair(alias: str, name: str, user: Path) -> None:
    assert load_catalogue(user).find(alias)[0] == name


def test_an_unknown_name_gets_the_nearest(user: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"Did you mean qwen2\.5-coder-14b"):
        load_catalogue(user).find("qwen2.5-coder-14")


def test_the_users_file_overlays(user: Path) -> None:
    user.write_text(GOOD + GOOD.replace("mine", "coder-7b").replace("my-pair", "other"))
    catalogue = load_catalogue(user)
    assert len(catalogue.pairs) == len(read_catalogue(SHIPPED)[0]) + 1
    assert catalogue.find("my-pair")[1].draft is None
    assert catalogue.find("coder-7b")[1].target.repo == "me/models"
    with pytest.raises(ModelNotFound):
        catalogue.find("qwen2.5-coder-7b")  # an alias of the pair that was replaced


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "line 1"),
        ("hello = 1", "line 1, hello: unknown key 'hello'"),
        ("version = 2", "line 1, version: version must be 1"),
        ("pairs = 1", "line 1, pairs: pairs must be a table"),
        (
            GOOD + "colour = 1",
            "line 9, pairs.mine.target.colour: 'target.colour' is not known; there may be repo or file",
        ),
        (
            GOOD.replace('"my own"', "3"),
            "line 3, pairs.mine.summary: 'summary' must be a string, not a whole number",
        ),
        (GOOD.replace('summary = "my own"\n', ""), "line 2, pairs.mine.summary"),
        (GOOD.replace('"my own"', '""'), "line 3, pairs.mine.summary: must not be empty"),
        (GOOD.replace("me/models", "models"), "line 7, pairs.mine.target.repo: 'models' is not a"),
        (GOOD.replace("me/models", "a/../b"), "line 7, pairs.mine.target.repo"),
        (GOOD.replace("big.gguf", "../big.gguf"), "line 8, pairs.mine.target.file"),
        (GOOD.replace("big.gguf", "big.bin"), "line 8, pairs.mine.target.file"),
        (GOOD.replace("mine", "Mine"), "pairs.Mine: 'Mine' is not a name"),
        (GOOD.replace("my-pair", "mine/x"), "line 4, pairs.mine.aliases"),
        (GOOD + 'sha256 = "abc"', "line 9, pairs.mine.target.sha256: 'abc' is not 64"),
        (GOOD.replace("summary", 'memory = "lots"\nsummary'), "line 3, pairs.mine.memory"),
        (
            GOOD.replace("summary", 'roles = ["x"]\nsummary'),
            "line 3, pairs.mine.roles.0: 'roles[0]' must be 'chat' or 'embed' or 'fim' or 'rerank', not 'x'",
        ),
        (
            GOOD.replace("summary", "year = -1\nsummary"),
            "pairs.mine.year: 'year' must be at least 0",
        ),
        (
            GOOD.replace("summary", 'keep = "x"\nsummary'),
            "'keep' must be true or false, not a string",
        ),
        ("[pairs]\nmine = 3", "line 2, pairs.mine: 'mine' must be a table, not a whole number"),
        (
            GOOD.replace("[pairs.mine.target]", "sampling.temperature = -1\n[pairs.mine.target]"),
            "pairs.mine.sampling.temperature: 'temperature' must be at least 0",
        ),
        (
            GOOD.replace("[pairs.mine.target]", "sampling.top_k = nan\n[pairs.mine.target]"),
            "pairs.mine.sampling.top_k: 'top_k' must be a finite number",
        ),
        (GOOD + GOOD.replace("mine", "two"), "line 12, pairs.two.aliases: 'my-pair' already means"),
        (
            GOOD.replace("mine", "builtin"),
            "line 2, pairs.builtin: 'builtin' cannot be a pair's name",
        ),
        (GOOD.replace("mine", "default"), "line 2, pairs.default: 'default' cannot be"),
        (GOOD.replace("mine", "localspec"), "line 2, pairs.localspec: 'localspec' cannot be"),
        (GOOD.replace("mine", '"x.gguf"'), "line 2, pairs.x.gguf: 'x.gguf' cannot be"),
        (GOOD.replace("my-pair", "builtin"), "line 4, pairs.mine.aliases: 'builtin' cannot be"),
        (GOOD.replace("my-pair", "a.gguf"), "line 4, pairs.mine.aliases: 'a.gguf' cannot be"),
    ],
)
def test_a_fault_is_named_with_its_line(text: str, message: str, user: Path) -> None:
    user.write_text(text)
    with pytest.raises(CatalogueError) as caught:
        read_catalogue(user)
    assert str(user) in caught.value.message
    assert message in caught.value.message


VALUES = st.one_of(
    st.sampled_from(["true", "[]", "{}", "''", "'x'", "['x']", "[[1]]", "{x = 1}", "1979-05-27"]),
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(["0.5", "nan", "-inf", "1e300"]),
)
ANY_KEYS = sorted({*CataloguePair.__struct_fields__, *Upstream.__struct_fields__, "colour"})
FILE_KEYS = sorted({*HubFile.__struct_fields__, "colour"})


@given(st.sampled_from(ANY_KEYS), VALUES, st.sampled_from(FILE_KEYS), VALUES)
def test_any_fault_is_explained_in_our_words(
    key: str, value: str, file_key: str, file_value: str
) -> None:
    """Nobody who edits the file knows the library that checks it, nor Python's names of types."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text(
            f"[pairs.mine]\n{key} = {value}\n[pairs.two]\nsummary = 's'\n"
            f"target = {{{file_key} = {file_value}}}\n"
        )
        with pytest.raises(CatalogueError) as caught:
            read_catalogue(file)
    message = caught.value.message
    assert re.search(r"line \d+, pairs\.(mine|two)", message), message
    for foreign in ("xpected", "bject", "nvalid enum", "required field", "`", "NoneType", "float"):
        assert foreign not in message, message


def test_a_file_that_cannot_be_read_is_named(user: Path) -> None:
    with pytest.raises(CatalogueError, match=f"{user} does not exist"):
        read_catalogue(user)
    user.mkdir()
    with pytest.raises(CatalogueError, match=f"{user} cannot be read: "):
        read_catalogue(user)
    user.rmdir()
    user.write_bytes(GOOD.replace("my own", "mein Größtes").encode("latin-1"))
    with pytest.raises(CatalogueError, match=f"{user}: .*can't decode"):
        read_catalogue(user)


def test_an_alias_that_would_mean_nothing_is_named(user: Path) -> None:
    """The name of a shipped pair always means that pair, so an alias of that name would do nothing."""
    user.write_text(GOOD.replace("my-pair", "coder-7b"))
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(user)
    assert f"{user}, line 4, pairs.mine.aliases: 'coder-7b' " in caught.value.message
    user.write_text(GOOD.replace("my-pair", "qwen2.5-coder-7b"))  # itself only an alias
    assert load_catalogue(user).find("qwen2.5-coder-7b")[0] == "mine"


def test_a_broken_edit_keeps_the_last_good_catalogue(user: Path) -> None:
    user.write_text(GOOD)
    good = reload_catalogue(user)
    assert "mine" in good.pairs
    user.write_text(GOOD + "colour = 1")
    kept = reload_catalogue(user, good)
    assert "mine" in kept.pairs
    assert "colour" in kept.problem
    assert "stays in use" in kept.problem
    user.write_text(GOOD.replace("mine", "yours"))
    mended = reload_catalogue(user, kept)
    assert "yours" in mended.pairs
    assert not mended.problem


def test_a_file_broken_at_the_start_leaves_the_shipped_pairs(user: Path) -> None:
    user.write_text("x = [")
    shipped = reload_catalogue(user)
    assert shipped.pairs == read_catalogue(SHIPPED)[0]
    assert "ignored" in shipped.problem


def test_estimated_size_tells_small_pairs_from_large_ones(user: Path) -> None:
    pairs = load_catalogue(user).pairs
    fits = {name: pair.estimated_bytes() <= 8 << 30 for name, pair in pairs.items()}
    assert fits["smollm2"]
    assert fits["qwen3-4b"]
    assert not fits["llama33-70b"]


# Settings that take precedence over those in a model's own file.


def test_the_users_file_sets_template_and_sampling_of_a_pair(user: Path) -> None:
    """Both work for an installed pair of any origin and for one that this file describes."""
    (user.parent / "mine.jinja").write_text("{{ messages }}")
    own = '[pairs.%s]\nchat_template = "mine.jinja"\nsampling = { temperature = 0, top_k = 1 }\n'
    user.write_text(own % "builtin" + own % "coder-7b" + GOOD)
    catalogue = load_catalogue(user, SHIPPED)
    preset = catalogue.presets["builtin"]
    assert preset.chat_template == "{{ messages }}"
    assert preset.sampling == {"temperature": 0, "top_k": 1}
    assert catalogue.presets.keys() == {"builtin", "coder-7b"}
    assert catalogue.pairs["coder-7b"].target.repo, "the shipped pair stays"
    user.write_text(GOOD.replace("aliases", 'chat_template = "mine.jinja"\naliases'))
    assert load_catalogue(user, SHIPPED).presets["mine"].chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("line", "key", "message"),
    [
        ('chat_template = "none.jinja"', "chat_template", "cannot be read: No such file"),
        ('chat_template = "empty.jinja"', "chat_template", "is empty or too large"),
        ('rpc = ["tower"]', "rpc", "'tower' is not HOST:PORT"),
        ("sampling = { temprature = 1 }", "sampling.temprature", "no sampling parameter"),
        ("sampling = { seed = 1 }", "sampling.seed", "no sampling parameter 'seed'"),
        ("sampling = { top_p = 2 }", "sampling.top_p", "'top_p' must be at most 1"),
        ("sampling = { top_k = 1.5 }", "sampling.top_k", "'top_k' must be a whole number"),
        ("sampling = { top_k = nan }", "sampling.top_k", "must be a finite number"),
        ("sampling = { top_k = inf }", "sampling.top_k", "must be a finite number"),
        ('sampling = { top_p = "1" }', "sampling", "must be a number, not a string"),
        ('template = "x"', "template", ""),
    ],
)
def test_a_wrong_setting_of_a_pair_is_named(user: Path, line: str, key: str, message: str) -> None:
    (user.parent / "empty.jinja").write_text(" ")
    user.write_text(f"[pairs.builtin]\n{line}\n")
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(user, SHIPPED)
    assert f", pairs.builtin.{key}" in caught.value.message
    assert message in caught.value.message
