"""Configuration: the sources of a value, and the messages about a wrong one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec import config
from localspec.config import KEYS, Config, load_config, resolve_key
from localspec.errors import UsageError, replace_control_characters
from localspec.protocol.frames import EngineSettings, SpeculationSettings
from localspec.protocol.settings import limits_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_flags_win_over_variables_over_the_file(file: Path) -> None:
    file.write_text('pair = "a"\nparallel = 2\nqueue = 3\n')
    loaded = load_config(file, {"LOCALSPEC_PARALLEL": "5", "LOCALSPEC_QUEUE": "6"}, {"queue": 7})
    assert (loaded.pair, loaded.parallel, loaded.queue) == ("a", 5, 7)
    assert loaded.origin == {"pair": str(file), "parallel": "LOCALSPEC_PARALLEL", "queue": "flag"}


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        (
            "paralel = 2",
            "no setting 'paralel' (did you mean 'parallel'?); it is ig",
            "unset paralel",
        ),
        ('parallel = "2"', "'parallel' must be a whole number, not '2'; 4 is used", "unset p"),
        ("parallel = true", "'parallel' must be a whole number, not True", "unset parallel"),
        ("parallel = 0", "'parallel' must be between 1 and 64, not 0", "unset parallel"),
        ("context = 8", "must be 0 (auto) or between 256 and 16777216, not 8", "unset context"),
        ("watchdog = nan", "'watchdog' must be between 1 and 86400, not nan", "unset watchdog"),
        ('kv_type = "q4"', "'kv_type' must be one of f16, q8_0", "unset kv_type"),
        ("exact = 1", "'exact' must be true or false or free, not 1", "unset exact"),
        ('pair = ""', "'pair' must be a pair's name or a file", "unset pair"),
        ('pair = "default"', "'pair' cannot be 'default'", "unset pair"),
        ("pair = ", ", line 1: Invalid value; it is ignored", "unset pair"),
        ('pair = "a"\nparallel == 2', ", line 2: Invalid value", "unset parallel"),
        ("queue = 1\nqueue = 2", ", line 2: 'queue' is set twice", "unset queue"),
        ("hello", ", line 1: Expected '='", "config edit"),
        ('listen = "0.0.0.0:80"', "can be reached from other machines", "unset listen"),
        ('kv_type = "q4_0"\nflash_attention = "off"', "needs 'flash_attention'", "unset kv_type"),
        ('kv_type_v = "q4_0"\nflash_attention = "off"', "needs 'flash_att", "unset kv_type_v"),
        ("[engine]\ncontext = 512", "no setting 'engine'", "unset engine"),
    ],
)
def test_a_wrong_file_is_named_with_key_limit_and_remedy(
    file: Path, text: str, message: str, remedy: str
) -> None:
    file.write_text(text)
    (problem,) = load_config(file, {}).problems
    assert problem.sentence.startswith(str(file))
    assert message in problem.sentence
    assert remedy in problem.cure


@pytest.mark.parametrize(
    ("data", "values", "problems"),
    [
        pytest.param(None, {}, 0, id="no file"),
        pytest.param(
            b'pair = "a"\ncontext = 8\nparallel = many\nqueue = 7\n',
            {"pair": "a", "queue": 7},
            2,
            id="wrong lines do not affect others",
        ),
        pytest.param(b"hello\r\nqueue = 3\r\n", {"queue": 3}, 1, id="lines end as on Windows"),
        pytest.param(b"\xef\xbb\xbfqueue = 3\n", {"queue": 3}, 0, id="a byte order mark"),
        pytest.param(b"queue = 3\npair = '\xff'\n# \xff\n", {"queue": 3}, 1, id="invalid text"),
    ],
)
def test_what_is_right_in_a_file_counts(
    file: Path, data: bytes | None, values: dict[str, Any], problems: int
) -> None:
    if data is not None:
        file.write_bytes(data)
    loaded = load_config(file, {})
    assert loaded == Config(**values)
    assert len(loaded.problems) == problems
    if data and b"\xff" in data:
        assert "contains an unprintable character" in loaded.problems[0].sentence


def test_a_wrong_value_leaves_the_last_good_one(file: Path) -> None:
    file.write_text("context = 8\nqueue = 7\n")
    loaded = load_config(file, {}, last=Config(context=512, queue=3, parallel=9))
    assert (loaded.context, loaded.queue, loaded.parallel) == (512, 7, 4)
    assert "512 is used instead" in loaded.problems[0].sentence


def test_an_unreadable_file_is_named_with_a_remedy(file: Path) -> None:
    file.mkdir()
    (problem,) = load_config(file, {}).problems
    assert problem.cure == f"mv {file} {file}.old"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("exact", "true", True),
        ("exact", "0", False),
        ("exact", "ON", True),
        ("exact", "FREE", "free"),
        ("watchdog", "2.5", 2.5),
        ("idle_unload", "30", 30.0),
        ("idle_unload", "never", 0.0),
        ("depth", "-1", -1),
        ("depth", "auto", -1),
        ("gpu_layers", "all", -1),
        ("pair", "7", "7"),
    ],
)
def test_variables_are_read_by_the_type_of_their_key(
    file: Path, variable: str, text: str, value: Any
) -> None:
    loaded = load_config(file, {f"LOCALSPEC_{variable.upper()}": text})
    assert not loaded.problems
    assert getattr(loaded, variable) == value


@pytest.mark.parametrize(
    ("variable", "text"), [("exact", "maybe"), ("queue", "x"), ("queue", "-1"), ("queue", "9" * 99)]
)
def test_a_wrong_variable_is_named(file: Path, variable: str, text: str) -> None:
    name = f"LOCALSPEC_{variable.upper()}"
    (problem,) = load_config(file, {name: text}).problems
    assert problem.sentence.startswith(f"{name}: '{variable}' must be")
    assert problem.cure == f"unset {name}"


def test_a_wrong_flag_is_named_as_it_was_typed(file: Path) -> None:
    with pytest.raises(UsageError, match="--idle-unload: 'idle_unload' must be"):
        load_config(file, {}, {"idle_unload": -1})
    with pytest.raises(UsageError, match="can be reached from other machines"):
        load_config(file, {}, {"listen": "0.0.0.0:80"})


def test_a_setting_has_one_definition_of_its_limits() -> None:
    """The configuration, the engine's settings and a request accept the same values."""
    hints = config._type_hints()
    engine = {field.name: field.type for field in msgspec.structs.fields(EngineSettings)}
    names = dict.fromkeys(("split_mode", "main_gpu", "flash_attention"))
    names |= {"context": "n_ctx", "threads": "n_threads", "gpu_layers": "n_gpu_layers"}
    names |= {"kv_type": "type_kv", "kv_type_v": "type_v"}
    for ours, theirs in names.items():
        assert limits_of(hints[ours]) == limits_of(engine[theirs or ours]), ours
    assert {field.name for field in msgspec.structs.fields(SpeculationSettings)} >= {"depth"}


anything = (
    st.integers(-(1 << 70), 1 << 70)
    | st.integers(-2, 300)
    | st.floats()
    | st.booleans()
    | st.text(max_size=20)
    | st.sampled_from(["f16", "q8_0", "on", "off", "auto", "all", "0.0.0.0:80", "127.0.0.1:0"])
)


@given(st.dictionaries(st.sampled_from(KEYS), anything), st.sampled_from(["text", "value"]))
def test_valid_values_count_and_invalid_ones_are_reported(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], source: str
) -> None:
    if source == "text":
        variables = {f"LOCALSPEC_{key.upper()}": str(value) for key, value in values.items()}
        loaded = load_config(tmp_path_factory.getbasetemp() / "none", variables)
    else:
        flags: dict[str, Any] = {}
        for key, value in values.items():
            try:
                flags[key] = config.check_value(key, value)
            except ValueError as error:
                message = str(error)
            else:
                message = key
            assert key in message
            assert message == replace_control_characters(message, lines=False)
        loaded = Config(**flags)
        for key, _ in config.find_conflicts(loaded):
            assert key in values
    for key in KEYS:
        value = getattr(loaded, key)
        assert config.check_value(key, value) == value


@given(
    st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            [*(f"{key} = " for key in KEYS), "x.y=1", "[t]", "[[t]]", "#", '"""']
        ).flatmap(lambda start: st.text(max_size=8).map(lambda rest: start + rest)),
        max_size=8,
    ).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))
)
def test_any_file_gives_a_configuration(data: bytes) -> None:
    loaded = load_config(Path("/nowhere/config.toml"), {}, data=data)
    for key in KEYS:
        assert config.check_value(key, getattr(loaded, key)) == getattr(loaded, key)
    for problem in loaded.problems:
        assert problem.cure
        problem.sentence.encode()  # can be sent
        assert problem.sentence == replace_control_characters(problem.sentence, lines=False)
    if not loaded.problems and data.isascii():
        tomllib.loads(data.decode())


@pytest.mark.parametrize(
    "text",
    [
        'pair = "one"\npair_fim = "two"\n',
        '[pair]\nchat = "one"\nfim = "two"\n',
        'pair.chat = "one"\npair.fim = "two"\n',
    ],
)
def test_pairs_are_named_by_their_roles_too(file: Path, text: str) -> None:
    file.write_text(text)
    loaded = load_config(file, {})
    assert (loaded, loaded.problems) == (Config(pair="one", pair_fim="two"), ())
    names = ("pair.chat", "pair.fim", "queue")
    assert [*map(resolve_key, names)] == ["pair", "pair_fim", "queue"]
    file.write_text('[pair]\nwrong = "one"\n')
    assert "there is no setting 'pair.wrong'" in load_config(file, {}).problems[0].reason
