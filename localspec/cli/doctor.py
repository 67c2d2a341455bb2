"""What `localspec doctor` looks at. Each finding names its cure; the outside world is a `Machine`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import localspec
from localspec import machine
from localspec.cli import settings
from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import size
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.config import Config, load_config
from localspec.errors import LocalspecError, NoAnswer, NoDaemon
from localspec.paths import Paths, check_socket_path, default_paths, hf_cache, model_files

# A small pair has 2 GB, a usual one 10; less than this is trouble at the next pull.
LOW_DISK = 10 << 30  # bytes
# With less there is no room for a conversation, or a file that replaces another.
FULL = 1 << 20  # bytes
# With less of a GPU free, not even a small draft finds room.
LOW_GPU_MIB = 1024


@dataclass(frozen=True)
class Finding:
    """`state`: ok, note (works, could be better) or bad (something does not work)."""

    about: str
    state: Literal["ok", "note", "bad"]
    what: str
    cure: str = ""


def _nobody() -> NoReturn:
    raise NoDaemon("No daemon is running.")


@dataclass(frozen=True)
class Machine:
    """What is asked, so that a test can pose as any machine."""

    host: machine.Host
    paths: Paths
    built: str | None  # the backend of the installed llama.cpp; None: not installed
    architectures: str  # CMAKE_CUDA_ARCHITECTURES of that build; "" where nobody knows
    free: Callable[[Path], int]  # bytes on the disk of a folder that exists
    status: Callable[[], dict[str, Any]]
    pairs: Callable[[], dict[str, Any]] = _nobody  # with the catalogue's
    costs: Callable[[], list[str]] = _nobody  # of the configuration, as the daemon counts them

    @classmethod
    def here(cls) -> Machine:
        return cls(
            machine.Host.here(),
            default_paths(),
            machine.installed_backend(),
            built_architectures(Path(sys.prefix)),
            lambda folder: shutil.disk_usage(folder).free,
            lambda: Client(autostart=False).status(),
            lambda: PairsClient(autostart=False).pairs(everything=True),
            lambda: Client(autostart=False).configure()["notes"],
        )


def built_architectures(venv: Path) -> str:
    """As scripts/setup wrote down with what it built."""
    try:
        stamp = (venv / "localspec.stamp").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"-DCMAKE_CUDA_ARCHITECTURES=([\w;-]+)", stamp)
    return found[1] if found else ""


def findings(here: Machine) -> Iterator[Finding]:
    """Every finding, in the order in which things go wrong."""
    compiler = machine.compiler(here.host)
    plan = machine.plan_build(here.host, compiler) if compiler else None
    yield from _build(here, compiler, plan)
    yield from _folders(here.paths)
    yield from _settings(here, load_config(here.paths.config_file, here.host.env))
    yield from _daemon(here, machine.rebuild(plan))
    yield from _disk(here)
    yield from _network(here)


def _build(
    here: Machine, compiler: machine.Compiler | None, plan: machine.Plan | None
) -> Iterator[Finding]:
    """Compiler, GPU, AMX, and whether what is installed is what this machine could have."""
    again = machine.rebuild(plan)
    if here.built is None:
        yield Finding("engine", "bad", "llama-cpp-python is not installed.", again)
    else:
        yield Finding("engine", "ok", f"llama.cpp is built for {here.built}.")
    if compiler is None or plan is None:
        hint = machine.install_hint(here.host, "compiler")
        state: Literal["note", "bad"] = "bad" if here.built is None else "note"
        yield Finding(
            "compiler", state, "There is no working C++ compiler.", f"{hint}, then {again}"
        )
        return
    yield Finding("compiler", "ok", compiler.version)
    for reason in plan.reasons:
        if reason.about == "AMX":
            yield Finding("AMX", "note" if reason.cure else "ok", reason.what, reason.cure)
        else:
            yield from _gpu(here, plan, reason)


def _gpu(here: Machine, plan: machine.Plan, reason: machine.Reason) -> Iterator[Finding]:
    """What this machine could use, what is used, and why not more."""
    again, could = machine.rebuild(plan), plan.backend
    if here.built not in (None, could):
        yield Finding("GPU", "note", f"{reason} But llama.cpp is built for {here.built}.", again)
        return
    cure = reason.cure
    if could == "vulkan" and machine.nvidia_gpus(here.host):
        first = machine.install_hint(here.host, "cuda")
        cure = f"{first}, then {again if machine.CHECKOUT else 'localspec doctor'}"
    yield Finding("GPU", "note" if cure else "ok", reason.what, cure)
    if could == "cuda":
        yield from _cuda(here, again)
    if could != "cpu":
        yield from _gpu_settings(here)


def _cuda(here: Machine, again: str) -> Iterator[Finding]:
    """Driver and toolkit, what the build holds for these GPUs, and their memory."""
    host = here.host
    gpus, toolkit = machine.nvidia_gpus(host), machine.cuda_toolkit(host)
    runs = machine.driver_cuda(host)
    if toolkit and gpus:
        limit = f" runs CUDA up to {runs}" if runs else ""
        what = f"Driver {gpus[0].driver or '(old)'}{limit}; nvcc is CUDA {toolkit.version}."
        yield Finding("CUDA", "ok", what)
    for gpu in gpus if here.built == "cuda" and here.architectures else []:
        if not machine.runs_on(here.architectures, gpu.capability):
            what = (
                f"llama.cpp is built for architecture {here.architectures}, but {gpu.name} is "
                f"{gpu.capability.replace('.', '')}, so it cannot run there."
            )
            yield Finding("GPU", "bad", what, again)
    for each in machine.nvidia_memory(host):
        what = f"{each.name}: {each.free / 1024:.1f} of {each.total / 1024:.1f} GiB free."
        if each.free < LOW_GPU_MIB:
            cure = "run nvidia-smi to see which programs use it, or localspec unload"
            yield Finding("GPU", "note", f"{what} A pair will run on the CPU.", cure)
        else:
            yield Finding("GPU", "ok", what)


def _gpu_settings(here: Machine) -> Iterator[Finding]:
    """What a person has set, and that keeps a GPU unused."""
    if machine.hidden(here.host):
        what = "CUDA_VISIBLE_DEVICES hides every GPU."
        yield Finding("GPU", "note", what, "unset CUDA_VISIBLE_DEVICES, then localspec stop")
    if load_config(here.paths.config_file, here.host.env).gpu_layers == 0:
        what = "gpu_layers is 0, so the GPU is not used."
        yield Finding("GPU", "note", what, "localspec config set gpu_layers -1")


def _folders(paths: Paths) -> Iterator[Finding]:
    """Socket path, permissions."""
    try:
        check_socket_path(paths.socket)
        yield Finding("socket", "ok", str(paths.socket))
    except LocalspecError as error:
        yield Finding("socket", "bad", error.message, "export LOCALSPEC_HOME=SHORTER-FOLDER")
    try:
        mode = paths.runtime.stat().st_mode & 0o777
    except OSError:
        mode = 0o700  # made when the daemon starts
    if mode & 0o077:
        cure = f"chmod 700 {paths.runtime}"
        yield Finding("socket", "bad", f"{paths.runtime} is open to other users.", cure)
    folders = (paths.config, paths.data, paths.state)
    for nearest in dict.fromkeys(map(_existing, folders)):
        if not os.access(nearest, os.W_OK | os.X_OK):
            cure = f"chmod u+rwx {nearest}, or export LOCALSPEC_HOME=ANOTHER-FOLDER"
            yield Finding("folders", "bad", f"{nearest} cannot be written.", cure)


def _existing(folder: Path) -> Path:
    """The folder, or the one it will be made in."""
    there = os.path.exists  # Path's raises where one may not look, or of a name that is too long
    return next(each for each in (folder, *folder.parents) if there(each))


def _settings(here: Machine, config: Config) -> Iterator[Finding]:
    """What is set, and wrong, or too much for this machine."""
    for problem in config.problems:
        yield Finding("config", "bad", problem.what, problem.cure)
    if config.threads > (cores := settings.usable_cores()):
        what = (
            f"threads is {config.threads}, but this machine has only {cores} cores; {cores} "
            "are used."
        )
        yield Finding("config", "note", what, _unset(config, "threads"))
    with contextlib.suppress(LocalspecError):
        for cost in here.costs():
            cure = _unset(config, "context") if config.context else "localspec catalogue --fits"
            yield Finding("config", "note", cost, cure)
    if not config.problems:
        yield Finding("config", "ok", "The configuration is valid.")
    try:
        if missing := _missing(here, config.pair):
            what, pullable = missing
            cure = f"localspec pull {config.pair}" if pullable else _unset(config, "pair")
            yield Finding("pair", "bad", what, cure)
    except LocalspecError as error:
        yield Finding("pair", "bad", error.message, _unset(config, "pair"))


def _unset(config: Config, key: str) -> str:
    where = config.origin.get(key, "")
    return f"unset {where}" if where.startswith("LOCALSPEC_") else f"localspec config unset {key}"


def _missing(here: Machine, pair: str) -> tuple[str, bool] | None:
    """Why the configured pair cannot answer, and whether pulling it will help."""
    for name in model_files(pair):
        if name.startswith(("/", "~")) and not Path(name).expanduser().is_file():
            return f"The configured pair's file {name} is not there.", False
    if pair == "builtin" or "/" in pair or ":" in pair:
        return None
    try:
        entries = here.pairs()["pairs"]
        known = {name: each for each in entries for name in (each["name"], *each["aliases"])}
        if known.get(pair, {}).get("here"):
            return None
    except NoDaemon:
        if (here.paths.store / "pairs" / f"{pair}.json").is_file():
            return None
        known = {name: {} for name in _catalogue(here.paths)}
    if pair in known:
        return f"The configured pair '{pair}' is not pulled yet.", True
    return f"The configured pair '{pair}' does not exist.", False


def _catalogue(paths: Paths) -> Iterator[str]:
    """The names in both files of models, read without a daemon."""
    package = Path(localspec.__file__).parent
    for file in (package / "models.toml", package.parent / "models.toml", paths.user_catalogue):
        try:
            pairs = tomllib.loads(file.read_text(encoding="utf-8")).get("pairs", {})
        except (OSError, ValueError):
            continue
        for name, each in pairs.items():
            yield from (name, *each.get("aliases", ()))


def _daemon(here: Machine, again: str) -> Iterator[Finding]:
    try:
        status = here.status()
    except NoDaemon as error:
        if here.paths.socket.exists() and isinstance(error, NoAnswer):
            yield Finding("daemon", "bad", error.message, "localspec stop && localspec start")
        else:
            yield Finding("daemon", "ok", "Not running; the next question starts it.")
        return
    except LocalspecError as error:
        yield Finding("daemon", "bad", error.message, "localspec stop && localspec start")
        return
    if status["version"] != localspec.__version__:
        what = f"The daemon is localspec {status['version']}, but this is {localspec.__version__}."
        yield Finding("daemon", "note", what, "localspec stop && localspec start")
    else:
        asked = status["counts"]["requests"]
        what = f"pid {status['pid']}, {asked} request{'s' * (asked != 1)}."
        yield Finding("daemon", "ok", what)
    pair = status["pair"]
    if pair["state"] == "set_aside":
        what = f"The pair {pair['name']} is set aside: its engine crashed repeatedly."
        yield Finding("pair", "bad", what, "localspec start --reset")
    if status["safe_mode"]:
        what = (
            "The engine runs in safe mode, because it crashed at its first decode with the "
            "faster code."
        )
        # What pip built took no flags for this machine; scripts/setup has tried what it built.
        cure = f"a newer compiler, then {again}" if machine.CHECKOUT else again
        yield Finding("engine", "note", what, cure)
    known = {each.what for each in load_config(here.paths.config_file).problems}
    for problem in status.get("problems", []):
        if problem.endswith("TCP is not served."):
            yield Finding("tcp", "bad", problem, "localspec config unset listen")
        elif problem.startswith((str(here.paths.config_file), "LOCALSPEC_")):
            if problem not in known:  # of the daemon's environment, or of what the file was
                yield Finding("daemon", "bad", problem, "localspec stop && localspec start")
        else:
            yield Finding("files", "bad", problem, "correct the file; it is reloaded automatically")


def _disk(here: Machine) -> Iterator[Finding]:
    paths = here.paths
    full = [each for each in map(_existing, (paths.config, paths.state)) if here.free(each) < FULL]
    for folder in dict.fromkeys(full):
        what = (
            f"The disk of {folder} is full ({size(here.free(folder))} free): answers are not saved in the "
            "history, and the configuration cannot be changed."
        )
        yield Finding("disk", "bad", what, "delete files, or: localspec gc")
    if full:
        return
    folder = _existing(here.paths.store)
    free = here.free(folder)
    if free < LOW_DISK:
        what = f"Only {size(free)} free in {folder}; a pair may need more."
        yield Finding("disk", "note", what, "localspec gc, or localspec rm NAME")
    else:
        yield Finding("disk", "ok", f"{size(free)} free in {folder}")


def _network(here: Machine) -> Iterator[Finding]:
    """Only what the environment says: nothing is sent."""
    env = here.host.env
    hub = hf_cache(env)
    found = "Models there are used in place" if hub.is_dir() else "It does not exist yet"
    yield Finding("cache", "ok", f"Hugging Face cache. {found}: {hub}")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if env.get(name)]
    if offline and env[offline[0]].upper() in ("1", "ON", "YES", "TRUE"):
        what = f"{offline[0]} is set: pulls use only what is in the cache."
        yield Finding("network", "note", what, f"unset {offline[0]}")


def run(here: Machine, *, as_json: bool) -> int:
    """Print the findings; exit code 1 when one is bad."""
    found = []
    for each in findings(here):
        found.append(each)
        if not as_json:
            mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[each.state]
            cure = [("", f"→ {each.cure}")] if each.cure else []
            render.fields([(f"{mark}  {each.about:8}", each.what), *cure])
    if as_json:
        render.record([asdict(each) for each in found])
    return int(any(each.state == "bad" for each in found))
