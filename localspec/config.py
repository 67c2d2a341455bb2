"""The configuration: defaults, then `config.toml`, then LOCALSPEC_* variables, then flags.

Each value remembers where it came from, so that `localspec config show` can display it. A mistake in the
file or the environment never stops the program: that value is ignored, the others apply, and `problems`
describes the mistake.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from msgspec import Meta

from localspec.errors import UsageError, replace_control_characters
from localspec.paths import read_file
from localspec.protocol.settings import (
    MAX_DRAFT_TOKENS,
    MIN_CONTEXT_TOKENS,
    Context,
    ExactSetting,
    FlashAttention,
    Gpu,
    KvType,
    KvTypeV,
    Layers,
    Limits,
    LoopGuardScope,
    Mebibytes,
    Parallel,
    SplitMode,
    Threads,
    limits_of,
)

_MAX_SHOWN_CHARACTERS = 60  # of a wrong value, in a sentence about it
_IGNORED = "it is ignored"
_MAX_NAME_CHARACTERS = 4096  # of a pair's name, which may consist of two paths
_Name = Annotated[str, Meta(max_length=_MAX_NAME_CHARACTERS)]


class Setting(NamedTuple):
    """The meaning of a setting."""

    text: str  # a description
    special: int | str | None = None  # a value with a meaning of its own
    word: str = ""  # what a person may type for that value
    least: int | None = None  # the smallest ordinary value
    at_once: bool = False  # whether a change needs no reload of the pair by the next question


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting that is ignored."""

    where: str  # a file with its line, or a variable
    reason: str  # what is wrong, as a clause
    instead: str  # what is used in its place, as a clause
    cure: str  # a command that corrects it
    conflict: bool = False  # the value itself is valid, but another setting excludes it

    @property
    def sentence(self) -> str:
        """The problem as one printable sentence, whatever characters the file contains."""
        sentence = f"{self.where}: {self.reason}; {self.instead}."
        return replace_control_characters(sentence, lines=False).encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of the daemon. Times are in seconds and sizes in MiB where the name says so."""

    pair: Annotated[
        str, Meta(min_length=1, max_length=_MAX_NAME_CHARACTERS), Setting("the pair that answers")
    ] = "builtin"
    pair_fim: Annotated[
        _Name, Setting("the pair that completes code in editors; empty: as `pair`", at_once=True)
    ] = ""
    pair_embed: Annotated[
        _Name, Setting("the model for embeddings; empty: the one installed", at_once=True)
    ] = ""
    pair_rerank: Annotated[
        _Name, Setting("the model that ranks documents; empty: the one installed", at_once=True)
    ] = ""
    context: Annotated[
        Context,
        Setting(
            "tokens of context shared by all running requests", 0, "auto", least=MIN_CONTEXT_TOKENS
        ),
    ] = 0
    parallel: Annotated[Parallel, Setting("sequences decoded together")] = 4
    threads: Annotated[Threads, Setting("CPU threads", 0, "auto")] = 0
    gpu_layers: Annotated[Layers, Setting("layers of the target on the GPU", -1, "all")] = -1
    split_mode: Annotated[SplitMode, Setting("how several GPUs share the target")] = "layer"
    main_gpu: Annotated[Gpu, Setting("GPU for the draft and for what is not split")] = 0
    kv_type: Annotated[
        KvType, Setting("data type of the KV cache; smaller ones hold more tokens")
    ] = "f16"
    kv_type_v: Annotated[KvTypeV, Setting("data type of its values, where keys have another")] = (
        "same"
    )
    flash_attention: Annotated[FlashAttention, Setting("flash attention")] = "auto"
    exact: Annotated[
        ExactSetting,
        Setting("answer byte-identically with and without a draft", "free", "free"),
    ] = False
    loop_guard: Annotated[
        LoopGuardScope, Setting("where answers that repeat themselves without progress are ended")
    ] = "thoughts"
    depth: Annotated[
        int, Meta(ge=-1, le=MAX_DRAFT_TOKENS), Setting("tokens to draft per pass", -1, "auto")
    ] = -1
    queue: Annotated[
        int, Meta(ge=0, le=100_000), Setting("maximum number of waiting requests", at_once=True)
    ] = 64
    prefix_memory: Annotated[Mebibytes, Setting("MiB of memory for cached prompts", 0, "none")] = (
        1024
    )
    prefix_disk: Annotated[Mebibytes, Setting("MiB of disk for cached prompts", 0, "none")] = 2048
    keep_responses: Annotated[
        bool,
        Setting(
            "keep answers of /v1/responses that do not say `store`, and threads of /v1/messages",
            at_once=True,
        ),
    ] = True
    memory: Annotated[
        Mebibytes, Setting("MiB of memory for all loaded pairs together", 0, "auto", at_once=True)
    ] = 0
    idle_unload: Annotated[
        float,
        Meta(ge=0, le=10_000_000),
        Setting("seconds without a request before a pair is unloaded", 0, "never", at_once=True),
    ] = 900.0
    watchdog: Annotated[
        float,
        Meta(ge=1, le=86_400),
        Setting("seconds before an engine that does not respond is killed"),
    ] = 60.0
    longest_gap: Annotated[
        float,
        Meta(ge=10, le=60_000),
        Setting("milliseconds an answer pauses at most while another prompt is read"),
    ] = 250.0
    log_prompts: Annotated[bool, Setting("write prompts to the daemon's log", at_once=True)] = False
    listen: Annotated[str, Setting("ADDRESS:PORT to also serve TCP", at_once=True)] = ""
    listen_anywhere: Annotated[
        bool, Setting("allow a `listen` address that other machines can reach", at_once=True)
    ] = False
    allow_hosts: Annotated[
        _Name,
        Setting(
            "other names of this machine that TCP clients may use, for containers", at_once=True
        ),
    ] = ""
    allow_origins: Annotated[
        _Name,
        Setting("web pages and browser extensions that may ask over TCP (CORS)", at_once=True),
    ] = ""
    any_model: Annotated[
        bool, Setting("answer requests for an unknown model with the configured pair", at_once=True)
    ] = False
    tune_by_night: Annotated[
        bool, Setting("tune the configured pair's draft by night", at_once=True)
    ] = False
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)
    problems: tuple[Problem, ...] = field(default=(), compare=False)


_DEFAULTS = Config()
# The settings that are lists: the pattern of an item, and an example for error messages.
_LIST_ITEMS = {
    "allow_hosts": (
        re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"),
        "host.docker.internal, box.lan (names without a port)",
    ),
    "allow_origins": (
        re.compile(r"\*|[A-Za-z][A-Za-z0-9+.-]*://(\*|[^/\\\s,*]+)"),
        "http://localhost:3000, chrome-extension://* (* allows every page)",
    ),
}
KEYS = tuple(f.name for f in fields(Config) if f.name not in ("origin", "problems"))
# The role of each pair setting. A person may also type the setting by its role ("pair.fim").
PAIR_ROLES = {"pair": "chat", "pair_fim": "fim", "pair_embed": "embed", "pair_rerank": "rerank"}
TRUE_WORDS, FALSE_WORDS = ("true", "on", "yes", "1"), ("false", "off", "no", "0")


@cache
def _type_hints() -> dict[str, Any]:
    return get_type_hints(Config, include_extras=True)


def describe_setting(key: str) -> Setting:
    meaning: Setting = _type_hints()[key].__metadata__[-1]
    return meaning


def list_values(key: str) -> tuple[str, ...]:
    """Return the values that can be typed for `key`, if they can be listed.

    For a number these are only the values that have a name.
    """
    if isinstance(getattr(_DEFAULTS, key), bool):
        return ("true", "false", *filter(None, [describe_setting(key).word]))
    return _limits_of(key).choices or tuple(filter(None, [describe_setting(key).word]))


def _limits_of(key: str) -> Limits:
    return limits_of(_type_hints()[key])


def host_and_port(listen: str) -> tuple[str, int]:
    """Split `listen` into an IP address and a port.

    An IPv6 address is written in brackets. Port 0 means any free port. Raises ValueError if `listen` is not
    an address and a port.
    """
    import ipaddress

    host, _, port = listen.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    is_ipv6 = host.startswith("[") and host.endswith("]")
    address = (ipaddress.IPv6Address if is_ipv6 else ipaddress.IPv4Address)(host.strip("[]"))
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise ValueError(listen)
    return str(address), int(port)


def check_value(key: str, value: Any) -> Any:
    """Return `value` converted to the type of `key`.

    Raises ValueError with a clause that names the key and what is allowed.
    """
    if key not in KEYS:
        raise ValueError(f"there is no setting '{shorten(key)}'{suggest_key(key)}")
    default, meaning = getattr(_DEFAULTS, key), describe_setting(key)
    if isinstance(value, str) and meaning.word and value.lower() == meaning.word:
        value = meaning.special
    if isinstance(value, str) and value == meaning.special:
        return value  # beside true and false
    if isinstance(default, float) and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    if isinstance(default, str) and isinstance(value, list):
        value = ", ".join(map(str, value))  # a file may have a TOML list
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        other = f" or {meaning.special}" if isinstance(meaning.special, str) else ""
        raise ValueError(
            f"'{key}' must be {kind[type(default)]}{other}, not {shorten(repr(value))}"
        )
    if isinstance(value, str):
        _check_text(key, value)
        return value
    bounds = _limits_of(key)
    low = meaning.least if meaning.least is not None and value != meaning.special else bounds.low
    # Also true for NaN.
    if low is not None and bounds.high is not None and not low <= value <= bounds.high:
        special = f"{meaning.special} ({meaning.word}) or " if meaning.least is not None else ""
        raise ValueError(
            f"'{key}' must be {special}between {low} and {bounds.high}, not {shorten(repr(value))}"
        )
    return value


def _check_text(key: str, value: str) -> None:
    """Check a text against the rules of `key`. Raises ValueError as `check_value`."""
    choices = _limits_of(key).choices
    if choices and value not in choices:
        raise ValueError(f"'{key}' must be one of {', '.join(choices)}, not {shorten(repr(value))}")
    if value != replace_control_characters(value, lines=False) or any(
        "\ud800" <= character <= "\udfff" for character in value
    ):
        raise ValueError(f"'{key}' contains an unprintable character: {shorten(ascii(value))}")
    if key in PAIR_ROLES and not (key == "pair") <= len(value) <= _MAX_NAME_CHARACTERS:
        raise ValueError(
            f"'{key}' must be a pair's name or a file; the default is {_DEFAULTS.pair!r}"
        )
    if key in PAIR_ROLES and value in ("default", "localspec"):
        raise ValueError(f"'{key}' cannot be '{value}', which means the configured pair")
    if key in _LIST_ITEMS:
        pattern, example = _LIST_ITEMS[key]
        for item in split_list(value):
            if not pattern.fullmatch(item):
                raise ValueError(
                    f"'{key}' must be a list such as {example}; {shorten(repr(item))} is none"
                )
    if key == "listen" and value:
        try:
            host_and_port(value)
        except ValueError:
            raise ValueError(
                "'listen' must be an address and a port, such as 127.0.0.1:8080 or [::1]:8080, "
                f"not {shorten(repr(value))}"
            ) from None


def split_list(value: str) -> list[str]:
    """Split the value of a list setting into its items."""
    return [item for item in re.split(r"[\s,]+", value) if item]


def resolve_key(name: str) -> str:
    """Return the key of a setting that a person may have named by its role ("pair.fim")."""
    return {f"pair.{role}": key for key, role in PAIR_ROLES.items()}.get(name, name)


def shorten(text: str) -> str:
    """Cut a text to the length that fits into a sentence."""
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def suggest_key(key: str) -> str:
    """Return a question that suggests the setting closest to `key`, or where all of them stand."""
    matches = difflib.get_close_matches(key[:_MAX_SHOWN_CHARACTERS], KEYS, 1)
    return f" (did you mean '{matches[0]}'?)" if matches else " (all settings: localspec config)"


def parse_value(key: str, text: str) -> Any:
    """Parse the text of an environment variable or argument by the type of its key.

    Text that does not have that type is returned unchanged; `check_value` then rejects it.
    """
    default = getattr(_DEFAULTS, key) if key in KEYS else ""
    if isinstance(default, bool):
        words = dict.fromkeys(TRUE_WORDS, True) | dict.fromkeys(FALSE_WORDS, False)
        return words.get(text.lower(), text)
    try:
        return type(default)(text)
    except ValueError:
        return text


def load_config(
    file: Path,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
    last: Config = _DEFAULTS,
    data: bytes | None = None,
) -> Config:
    """Read the configuration.

    A wrong value is replaced by that of `last`. If `data` is given, it is used as the content of the file.
    Raises UsageError if a flag is wrong; the message names the flag and what is allowed.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    table, problems = _read_table(file, data)
    if isinstance(table.get("pair"), dict):  # [pair]
        table |= {resolve_key(f"pair.{role}"): value for role, value in table.pop("pair").items()}

    def apply(key: str, value: Any, source: str, cure: str) -> None:
        try:
            values[key], origin[key] = check_value(key, value), source
        except ValueError as error:
            problems.append(Problem(source, str(error), _replacement_clause(key, last), cure))
            if key in KEYS:
                values[key] = getattr(last, key)

    for key, value in table.items():
        apply(key, value, str(file), f"localspec config unset {shlex.quote(key)}")
    for key in KEYS:
        variable = f"LOCALSPEC_{key.upper()}"
        if variable in environ:
            apply(key, parse_value(key, environ[variable]), variable, f"unset {variable}")
    for key, value in (flags or {}).items():
        try:
            values[key], origin[key] = check_value(key, value), "flag"
        except ValueError as error:
            raise UsageError(f"--{key.replace('_', '-')}: {error}.") from None
    return _drop_conflicts(Config(**values, origin=origin, problems=tuple(problems)))


def explain_unread_variables(
    variables: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return a sentence for each setting among the variables that this process was not started with."""
    sentences = []
    for key in KEYS:
        variable = f"LOCALSPEC_{key.upper()}"
        value = variables.get(variable)
        if value is None or value == environ.get(variable):
            continue
        try:
            check_value(key, parse_value(key, value))
            advice = "to use it: localspec restart"
        except ValueError as error:
            advice = f"besides, {error}"
        sentences.append(
            f"{variable}={shorten(replace_control_characters(value))} has no effect on "
            f"the daemon, which was started without it; {advice}."
        )
    return sentences


def _replacement_clause(key: str, last: Config) -> str:
    """Return what replaces a wrong value, as a clause."""
    return f"{getattr(last, key)!r} is used instead" if key in KEYS else _IGNORED


def _drop_conflicts(config: Config) -> Config:
    """Return the configuration with defaults for values in conflict. Raises UsageError if one is a flag."""
    for key, reason in find_conflicts(config):
        source = config.origin.get(key, "default")
        if source == "flag":
            raise UsageError(f"{reason[:1].upper()}{reason[1:]}.")
        is_variable = source.startswith("LOCALSPEC_")
        cure = f"unset {source}" if is_variable else f"localspec config unset {key}"
        default = getattr(_DEFAULTS, key)
        problem = Problem(source, reason, _replacement_clause(key, _DEFAULTS), cure, conflict=True)
        config = replace(config, **{key: default}, problems=(*config.problems, problem))
    return config


def find_conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that another one excludes: the key that gives way, and the reason."""
    if config.listen and not config.listen_anywhere:
        import ipaddress

        if not ipaddress.ip_address(host_and_port(config.listen)[0]).is_loopback:
            yield (
                "listen",
                f"{config.listen} can be reached from other machines, and the traffic is not "
                "encrypted: use 127.0.0.1, or set listen_anywhere (--listen-anywhere) if that is "
                "what you want",
            )
    # The type of keys needs no flash attention.
    values_key = "kv_type" if config.kv_type_v == "same" else "kv_type_v"
    if (value_type := getattr(config, values_key)) != "f16" and config.flash_attention == "off":
        yield values_key, f"'{values_key}' {value_type} needs 'flash_attention' auto or on"


def _read_table(file: Path, data: bytes | None) -> tuple[dict[str, Any], list[Problem]]:
    """Parse config.toml and return its settings and the problems in it.

    If the whole file is not valid TOML, each line is parsed by itself, so that one mistake costs one line.
    """
    edit = "localspec config edit"
    try:
        data = read_file(file) if data is None else data
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        rename = f"mv {shlex.quote(str(file))} {shlex.quote(f'{file}.old')}"
        return {}, [Problem(str(file), f"it cannot be read ({error.strerror})", _IGNORED, rename)]
    text = decode_file(data)
    try:
        return tomllib.loads(text), []
    except (tomllib.TOMLDecodeError, RecursionError):
        pass
    table: dict[str, Any] = {}
    problems = []
    # The first line of each [table]; the lines after it are not settings.
    table_lines: dict[str, int] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if header := re.match(r"\s*\[\[?\s*[\"']?([^\]\"'.]*)", line):
            table_lines.setdefault(header[1].strip(), number)
        if table_lines:
            continue
        try:
            entries, reason = tomllib.loads(line), ""
            if duplicates := [key for key in entries if key in table]:
                reason = f"'{duplicates[0]}' is set twice"
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            entries, reason = {}, re.sub(r" \(at .*\)$", "", str(error))
        if not reason:
            table.update(entries)
            continue
        key = re.match(r"\s*([A-Za-z0-9_-]+)\s*=", line)
        cure = f"localspec config unset {key[1]}" if key else edit
        problems.append(Problem(f"{file}, line {number}", reason, _IGNORED, cure))
    for name, number in table_lines.items():
        reason, cure = (
            f"there is no setting '{name}'",
            f"localspec config unset {shlex.quote(name)}",
        )
        problems.append(Problem(f"{file}, line {number}", reason, _IGNORED, cure if name else edit))
    return table, problems or [Problem(str(file), "it is not TOML", _IGNORED, edit)]


def decode_file(data: bytes) -> str:
    """Decode a configuration file. Bytes that are not UTF-8 become surrogates, which no setting accepts."""
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
