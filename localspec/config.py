"""The configuration: defaults, then `config.toml`, then LOCALSPEC_* variables, then flags.

Every value remembers where it came from, so that `localspec config show` can say so.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from localspec.errors import UsageError
from localspec.paths import read_file


@dataclass(frozen=True, slots=True)
class Config:
    """How the daemon behaves. Times in seconds, sizes in MiB where the name says so; 0 means automatic."""

    pair: str = "builtin"
    context: int = 0  # tokens that all running requests share
    parallel: int = 4  # sequences decoded together
    threads: int = 0
    gpu_layers: int = -1  # -1: all that fit
    split_mode: Literal["layer", "row", "none"] = "layer"  # how several GPUs share the target
    main_gpu: int = 0  # the GPU of the draft, and of everything where nothing is split
    kv_type: Literal["f16", "q8_0"] = "f16"
    flash_attention: Literal["auto", "on", "off"] = "auto"
    exact: bool = False
    depth: int = -1  # -1: the policy decides; else a fixed number of drafted tokens
    queue: int = 64  # waiting requests before 503
    prefix_memory: int = 1024  # MiB for texts that lost their slot; 0: none
    prefix_disk: int = 2048  # MiB for conversations, to go on after a restart; 0: none
    idle_unload: float = 900.0  # unload the pair after so long without a request; 0: never
    watchdog: float = 60.0  # a worker that answers nothing for so long, or stands still, is ended
    log_prompts: bool = False
    listen: str = ""  # ADDRESS:PORT for TCP beside the Unix socket; empty: none
    listen_anywhere: bool = False  # `listen` may be an address that other machines reach
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)


_LIMITS: dict[str, tuple[float, float]] = {
    "context": (0, 1 << 24),
    "parallel": (1, 64),
    "threads": (0, 1024),
    "gpu_layers": (-1, 10_000),
    "main_gpu": (0, 15),
    "depth": (-1, 64),
    "queue": (0, 100_000),
    "prefix_memory": (0, 1 << 24),
    "prefix_disk": (0, 1 << 24),
    "idle_unload": (0, 10_000_000),
    "watchdog": (1, 86_400),
}
_CHOICES = {
    "kv_type": ("f16", "q8_0"),
    "split_mode": ("layer", "row", "none"),
    "flash_attention": ("auto", "on", "off"),
}
_DEFAULTS = Config()
KEYS = tuple(f.name for f in fields(Config) if f.name != "origin")


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
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(listen)
    return str(address), int(port)


def _checked(key: str, value: Any, where: str) -> Any:
    """`value` as the type of `key`, or a UsageError that names key, place and what is allowed."""
    if key not in KEYS:
        known = ", ".join(KEYS)
        raise UsageError(f"{where}: unknown key '{key}'; the keys are {known}.")
    default = getattr(_DEFAULTS, key)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise UsageError(f"{where}: '{key}' must be {kind[type(default)]}, not {value!r}.")
    if key in _LIMITS:
        low, high = _LIMITS[key]
        if not low <= value <= high:  # also refuses NaN
            raise UsageError(f"{where}: '{key}' must be between {low} and {high}, not {value}.")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise UsageError(f"{where}: '{key}' must be one of {', '.join(_CHOICES[key])}.")
    if key == "listen" and value:
        try:
            host_and_port(value)
        except ValueError:
            raise UsageError(
                f"{where}: 'listen' must be an address and a port, such as 127.0.0.1:8080 or "
                f"[::1]:8080, not {value!r}."
            ) from None
    return value


def from_text(key: str, text: str, where: str) -> Any:
    """The value of an environment variable or an argument, read by the type of its key.

    Raises:
        UsageError: naming `where`, the key and what is allowed.
    """
    default = getattr(_DEFAULTS, key) if key in KEYS else ""
    try:
        if isinstance(default, bool):
            value: Any = {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        else:
            value = type(default)(text)
    except (KeyError, ValueError):
        value = text
    return _checked(key, value, where)


def load_config(
    file: Path, environ: Mapping[str, str] = os.environ, flags: Mapping[str, Any] | None = None
) -> Config:
    """Read the configuration.

    Raises:
        UsageError: naming the file (with TOML's line), variable or flag, the key and what is allowed.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    try:
        table = tomllib.loads(read_file(file).decode())
    except FileNotFoundError:
        table = {}
    except OSError as error:
        raise UsageError(
            f"The configuration {file} cannot be read ({error.strerror}); make it a file that you "
            "can read, or remove it."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}.") from error
    for key, value in table.items():
        values[key], origin[key] = _checked(key, value, str(file)), str(file)
    for key in KEYS:
        variable = f"LOCALSPEC_{key.upper()}"
        if variable in environ:
            values[key] = from_text(key, environ[variable], variable)
            origin[key] = variable
    for key, value in (flags or {}).items():
        values[key], origin[key] = _checked(key, value, f"--{key.replace('_', '-')}"), "flag"
    return Config(**values, origin=origin)
