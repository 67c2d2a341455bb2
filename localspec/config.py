"""The configuration: defaults, then `config.toml`, then LOCALSPEC_* variables, then flags.

Every value remembers where it came from, so that `localspec config show` can say so. What is wrong in the
file or the environment never stops anybody: it is left out, the rest counts, and `problems` says so.
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

from localspec.errors import UsageError, visible
from localspec.paths import read_file
from localspec.protocol.settings import (
    LEAST_CONTEXT,
    MAX_DRAFTED,
    Context,
    FlashAttention,
    Gpu,
    KvType,
    KvTypeV,
    Layers,
    Limits,
    Mebibytes,
    Parallel,
    SplitMode,
    Threads,
    limits,
)

_SHOWN = 60  # characters of a wrong value in a sentence about it
_IGNORED = "it is ignored"
_LONGEST = 4096  # characters of a pair's name: two paths


class About(NamedTuple):
    """What a setting means.

    special: a value with a meaning of its own, and `word`, by which a person may name it. least: the
    smallest other one. at_once: it counts from now on; the others count from the next question, which
    loads the pair again.
    """

    text: str
    special: int | None = None
    word: str = ""
    least: int | None = None
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is left out.

    `where`: a file, with its line, or a variable. `reason` and `instead`, what is used in its place, are
    clauses. `cure` is a command. `conflict`: it is right by itself, and another setting excludes it.
    """

    where: str
    reason: str
    instead: str
    cure: str
    conflict: bool = False

    @property
    def what(self) -> str:
        """In a sentence that can be written anywhere: a file may have anything in it."""
        said = f"{self.where}: {self.reason}; {self.instead}."
        return visible(said, lines=False).encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Config:
    """How the daemon behaves. Times in seconds, sizes in MiB where the name says so."""

    pair: Annotated[
        str, Meta(min_length=1, max_length=_LONGEST), About("the pair that answers")
    ] = "builtin"
    pair_fim: Annotated[
        str,
        Meta(max_length=_LONGEST),
        About("the pair that completes code in editors; empty: as `pair`", at_once=True),
    ] = ""
    pair_embed: Annotated[
        str,
        Meta(max_length=_LONGEST),
        About("the model for embeddings; empty: the one installed", at_once=True),
    ] = ""
    pair_rerank: Annotated[
        str,
        Meta(max_length=_LONGEST),
        About("the model that ranks documents; empty: the one installed", at_once=True),
    ] = ""
    context: Annotated[
        Context,
        About("tokens of context shared by all running requests", 0, "auto", least=LEAST_CONTEXT),
    ] = 0
    parallel: Annotated[Parallel, About("sequences decoded together")] = 4
    threads: Annotated[Threads, About("CPU threads", 0, "auto")] = 0
    gpu_layers: Annotated[Layers, About("layers of the target on the GPU", -1, "all")] = -1
    split_mode: Annotated[SplitMode, About("how several GPUs share the target")] = "layer"
    main_gpu: Annotated[Gpu, About("GPU for the draft and for what is not split")] = 0
    kv_type: Annotated[
        KvType, About("data type of the KV cache; smaller ones hold more tokens")
    ] = "f16"
    kv_type_v: Annotated[KvTypeV, About("data type of its values, where keys have another")] = (
        "same"
    )
    flash_attention: Annotated[FlashAttention, About("flash attention")] = "auto"
    exact: Annotated[bool, About("make every answer byte-identical with and without a draft")] = (
        False
    )
    depth: Annotated[
        int, Meta(ge=-1, le=MAX_DRAFTED), About("tokens to draft per pass", -1, "auto")
    ] = -1
    queue: Annotated[
        int, Meta(ge=0, le=100_000), About("maximum number of waiting requests", at_once=True)
    ] = 64
    prefix_memory: Annotated[Mebibytes, About("MiB of memory for cached prompts", 0, "none")] = 1024
    prefix_disk: Annotated[Mebibytes, About("MiB of disk for cached prompts", 0, "none")] = 2048
    keep_responses: Annotated[
        bool,
        About(
            "keep answers of /v1/responses that do not say `store`, and threads of /v1/messages",
            at_once=True,
        ),
    ] = True
    memory: Annotated[
        Mebibytes, About("MiB of memory for all loaded pairs together", 0, "auto", at_once=True)
    ] = 0
    idle_unload: Annotated[
        float,
        Meta(ge=0, le=10_000_000),
        About("seconds without a request before a pair is unloaded", 0, "never", at_once=True),
    ] = 900.0
    watchdog: Annotated[
        float,
        Meta(ge=1, le=86_400),
        About("seconds before an engine that does not respond is killed"),
    ] = 60.0
    longest_gap: Annotated[
        float,
        Meta(ge=10, le=60_000),
        About("milliseconds an answer pauses at most while another prompt is read"),
    ] = 250.0
    log_prompts: Annotated[bool, About("write prompts to the daemon's log", at_once=True)] = False
    listen: Annotated[str, About("ADDRESS:PORT to also serve TCP", at_once=True)] = ""
    listen_anywhere: Annotated[
        bool, About("allow a `listen` address that other machines can reach", at_once=True)
    ] = False
    allow_hosts: Annotated[
        str,
        Meta(max_length=_LONGEST),
        About("other names of this machine that TCP clients may use, for containers", at_once=True),
    ] = ""
    allow_origins: Annotated[
        str,
        Meta(max_length=_LONGEST),
        About("web pages and browser extensions that may ask over TCP (CORS)", at_once=True),
    ] = ""
    any_model: Annotated[
        bool, About("answer requests for an unknown model with the configured pair", at_once=True)
    ] = False
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)
    problems: tuple[Problem, ...] = field(default=(), compare=False)


_DEFAULTS = Config()
# What a member may be, and an example.
_LISTS = {
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
# The pair of each role, by which a person names it ("pair.fim") as well.
PAIRS = {"pair": "chat", "pair_fim": "fim", "pair_embed": "embed", "pair_rerank": "rerank"}
TRUE, FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Config, include_extras=True)


def about(key: str) -> About:
    """What the setting `key` means."""
    found: About = _kinds()[key].__metadata__[-1]
    return found


def values(key: str) -> tuple[str, ...]:
    """What can be typed for `key`, where that can be listed; of numbers those that have a name."""
    if isinstance(getattr(_DEFAULTS, key), bool):
        return ("true", "false")
    return _limits(key).choices or ((about(key).word,) if about(key).word else ())


def _limits(key: str) -> Limits:
    return limits(_kinds()[key])


# ---------------------------------------------------------------------------- one value


def host_and_port(listen: str) -> tuple[str, int]:
    """The two parts of `listen`: an IP address, IPv6 in brackets, and a port (0: any free one).

    Raises:
        ValueError: it is something else.
    """
    import ipaddress

    host, _, port = listen.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    six = host.startswith("[") and host.endswith("]")
    address = (ipaddress.IPv6Address if six else ipaddress.IPv4Address)(host.strip("[]"))
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise ValueError(listen)
    return str(address), int(port)


def checked(key: str, value: Any) -> Any:
    """`value` as the type of `key`.

    Raises:
        ValueError: a clause that names the key and what is allowed.
    """
    if key not in KEYS:
        raise ValueError(f"there is no setting '{short(key)}'{near(key)}")
    default, said = getattr(_DEFAULTS, key), about(key)
    if isinstance(value, str) and said.word and value.lower() == said.word:
        value = said.special
    if isinstance(default, float) and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    if isinstance(default, str) and isinstance(value, list):
        value = ", ".join(map(str, value))  # of several values a file may have a list
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise ValueError(f"'{key}' must be {kind[type(default)]}, not {short(repr(value))}")
    if isinstance(value, str):
        return _checked_text(key, value)
    allowed = _limits(key)
    low = said.least if said.least is not None and value != said.special else allowed.low
    if low is not None and allowed.high is not None and not low <= value <= allowed.high:  # or NaN
        special = f"{said.special} ({said.word}) or " if said.least is not None else ""
        raise ValueError(
            f"'{key}' must be {special}between {low} and {allowed.high}, not {short(repr(value))}"
        )
    return value


def _checked_text(key: str, value: str) -> str:
    choices = _limits(key).choices
    if choices and value not in choices:
        raise ValueError(f"'{key}' must be one of {', '.join(choices)}, not {short(repr(value))}")
    if value != visible(value, lines=False) or any("\ud800" <= sign <= "\udfff" for sign in value):
        raise ValueError(f"'{key}' contains an unprintable character: {short(ascii(value))}")
    if key in PAIRS and not (key == "pair") <= len(value) <= _LONGEST:
        raise ValueError(
            f"'{key}' must be a pair's name or a file; the default is {_DEFAULTS.pair!r}"
        )
    if key in PAIRS and value in ("default", "localspec"):
        raise ValueError(f"'{key}' cannot be '{value}', which means the configured pair")
    if key in _LISTS:
        allowed, such_as = _LISTS[key]
        for each in listed(value):
            if not allowed.fullmatch(each):
                raise ValueError(
                    f"'{key}' must be a list such as {such_as}; {short(repr(each))} is none"
                )
    if key == "listen" and value:
        try:
            host_and_port(value)
        except ValueError:
            raise ValueError(
                "'listen' must be an address and a port, such as 127.0.0.1:8080 or [::1]:8080, "
                f"not {short(repr(value))}"
            ) from None
    return value


def listed(value: str) -> list[str]:
    """The members of a setting that is a list."""
    return [each for each in re.split(r"[\s,]+", value) if each]


def key_of(name: str) -> str:
    """The key that a person means: of a pair by its role ("pair.fim"), or as it is."""
    return {f"pair.{role}": key for key, role in PAIRS.items()}.get(name, name)


def short(text: str) -> str:
    """For a sentence."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def near(key: str) -> str:
    """A question after a comma where `key` may have meant another one; else nothing."""
    found = difflib.get_close_matches(key[:_SHOWN], KEYS, 1)
    return f" (did you mean '{found[0]}'?)" if found else ""


def parsed(key: str, text: str) -> Any:
    """What an environment variable or an argument means by the type of its key; it is not checked."""
    default = getattr(_DEFAULTS, key) if key in KEYS else ""
    value: Any = text
    try:
        if isinstance(default, bool):
            value = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}[text.lower()]
        else:
            value = type(default)(text)
    except (KeyError, ValueError):
        pass
    return value


# ---------------------------------------------------------------------------- all of them


def load_config(
    file: Path,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
    last: Config = _DEFAULTS,
    data: bytes | None = None,
) -> Config:
    """Read the configuration. Where a value is wrong, that of `last` stays. `data`: the file's, instead.

    Raises:
        UsageError: a flag is wrong; it names the flag and what is allowed.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    table, problems = _read(file, data)
    if isinstance(table.get("pair"), dict):  # [pair]
        table |= {key_of(f"pair.{role}"): value for role, value in table.pop("pair").items()}

    def take(key: str, value: Any, where: str, cure: str) -> None:
        try:
            values[key], origin[key] = checked(key, value), where
        except ValueError as error:
            problems.append(Problem(where, str(error), _instead(key, last), cure))
            if key in KEYS:
                values[key] = getattr(last, key)

    for key, value in table.items():
        take(key, value, str(file), f"localspec config unset {shlex.quote(key)}")
    for key in KEYS:
        variable = f"LOCALSPEC_{key.upper()}"
        if variable in environ:
            take(key, parsed(key, environ[variable]), variable, f"unset {variable}")
    for key, value in (flags or {}).items():
        try:
            values[key], origin[key] = checked(key, value), "flag"
        except ValueError as error:
            raise UsageError(f"--{key.replace('_', '-')}: {error}.") from None
    return _consistent(Config(**values, origin=origin, problems=tuple(problems)))


def _instead(key: str, last: Config) -> str:
    return f"{getattr(last, key)!r} is used instead" if key in KEYS else _IGNORED


def _consistent(config: Config) -> Config:
    """Without the values that exclude each other.

    Raises:
        UsageError: a flag is one of them.
    """
    for key, reason in conflicts(config):
        where = config.origin.get(key, "default")
        if where == "flag":
            raise UsageError(f"{reason[:1].upper()}{reason[1:]}.")
        cure = (
            f"unset {where}" if where.startswith("LOCALSPEC_") else f"localspec config unset {key}"
        )
        default = getattr(_DEFAULTS, key)
        problem = Problem(where, reason, _instead(key, _DEFAULTS), cure, conflict=True)
        config = replace(config, **{key: default}, problems=(*config.problems, problem))
    return config


def conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that another one excludes: the key that gives way, and why."""
    if config.listen and not config.listen_anywhere:
        import ipaddress

        if not ipaddress.ip_address(host_and_port(config.listen)[0]).is_loopback:
            yield (
                "listen",
                f"{config.listen} can be reached from other machines, and the traffic is not "
                "encrypted: use 127.0.0.1, or set listen_anywhere (--listen-anywhere) if that is "
                "what you want",
            )
    values = "kv_type" if config.kv_type_v == "same" else "kv_type_v"  # keys need nothing
    if (kind := getattr(config, values)) != "f16" and config.flash_attention == "off":
        yield values, f"'{values}' {kind} needs 'flash_attention' auto or on"


# ---------------------------------------------------------------------------- the file


def _read(file: Path, data: bytes | None) -> tuple[dict[str, Any], list[Problem]]:
    """What config.toml says, and what in it says nothing."""
    edit = "localspec config edit"
    try:
        data = read_file(file) if data is None else data
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        away = f"mv {shlex.quote(str(file))} {shlex.quote(f'{file}.old')}"
        return {}, [Problem(str(file), f"it cannot be read ({error.strerror})", _IGNORED, away)]
    text = as_text(data)
    try:
        return tomllib.loads(text), []
    except (tomllib.TOMLDecodeError, RecursionError):
        pass
    table: dict[str, Any] = {}
    problems = []
    tables: dict[str, int] = {}  # whose lines, after them, are no settings
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(r"\s*\[\[?\s*[\"']?([^\]\"'.]*)", line):
            tables.setdefault(header[1].strip(), number)
        if tables:
            continue
        try:
            entries, reason = tomllib.loads(line), ""
            if twice := [key for key in entries if key in table]:
                reason = f"'{twice[0]}' is set twice"
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            entries, reason = {}, re.sub(r" \(at .*\)$", "", str(error))
        if not reason:
            table.update(entries)
            continue
        key = re.match(r"\s*([A-Za-z0-9_-]+)\s*=", line)
        cure = f"localspec config unset {key[1]}" if key else edit
        problems.append(Problem(f"{file}, line {number}", reason, _IGNORED, cure))
    for name, number in tables.items():
        reason, cure = (
            f"there is no setting '{name}'",
            f"localspec config unset {shlex.quote(name)}",
        )
        problems.append(Problem(f"{file}, line {number}", reason, _IGNORED, cure if name else edit))
    return table, problems or [Problem(str(file), "it is not TOML", _IGNORED, edit)]


def as_text(data: bytes) -> str:
    """A file's text; bytes that are no UTF-8 stay what they are, and no value can have them."""
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
