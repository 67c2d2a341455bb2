"""The checks of `localspec doctor`. A finding names its cure, and a `CheckedMachine` is the outside world."""

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
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.config import Config, load_config
from localspec.errors import LocalspecError, NoAnswer, NoDaemon
from localspec.files import format_size
from localspec.paths import (
    Paths,
    check_socket_path,
    default_paths,
    expand_user,
    hf_cache_folder,
    split_model_names,
)

# A small pair takes 2 GB and a usual one 10 GB, so with less free space the next pull may fail.
LOW_DISK_BYTES = 10 << 30  # bytes
# With less free space neither a conversation nor a file that replaces another one can be saved.
MIN_FREE_BYTES = 1 << 20  # bytes
# With less free GPU memory not even a small draft model fits.
LOW_GPU_MIB = 1024
# With so much free GPU memory a loaded pair with weights in main memory would be faster. A plan leaves 1024.
MUCH_GPU_MIB = 2048


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    `state`: ok, note (works, but could be better) or bad (something does not work).
    """

    about: str
    state: Literal["ok", "note", "bad"]
    what: str
    cure: str = ""


def _raise_no_daemon() -> NoReturn:
    raise NoDaemon("No daemon is running.")


@dataclass(frozen=True)
class CheckedMachine:
    """The machine that is checked, as fields and functions that a test can replace."""

    host: machine.Host
    paths: Paths
    built: str | None  # backend of the installed llama.cpp; None if it is not installed
    architectures: str  # CMAKE_CUDA_ARCHITECTURES of that build; "" if unknown
    free: Callable[[Path], int]  # free bytes on the disk of an existing folder
    status: Callable[[], dict[str, Any]]
    pairs: Callable[[], dict[str, Any]] = _raise_no_daemon  # those of the catalogue included
    costs: Callable[[], list[str]] = _raise_no_daemon  # the daemon's notes on the configuration

    @classmethod
    def current(cls) -> CheckedMachine:
        """Return the machine that this process runs on."""
        return cls(
            machine.Host.current(),
            default_paths(),
            machine.installed_backend(),
            built_architectures(Path(sys.prefix)),
            lambda folder: shutil.disk_usage(folder).free,
            lambda: Client(autostart=False).status(),
            lambda: PairsClient(autostart=False).pairs(everything=True),
            lambda: Client(autostart=False).configure()["notes"],
        )


def built_architectures(venv: Path) -> str:
    """Return the CUDA architectures that scripts/setup recorded for its build, or an empty string."""
    try:
        stamp = (venv / "localspec.stamp").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"-DCMAKE_CUDA_ARCHITECTURES=([\w;-]+)", stamp)
    return match[1] if match else ""


def findings(system: CheckedMachine) -> Iterator[Finding]:
    """Yield every finding, in the order in which problems usually occur."""
    compiler = machine.find_compiler(system.host)
    build_plan = machine.plan_build(system.host, compiler) if compiler else None
    yield from _check_build(system, compiler, build_plan)
    yield from _check_folders(system.paths)
    yield from _check_settings(system, load_config(system.paths.config_file, system.host.env))
    yield from _check_daemon(system, machine.rebuild_command(build_plan))
    yield from _check_disk(system)
    yield from _check_network(system)


def _check_build(
    system: CheckedMachine, compiler: machine.Compiler | None, plan: machine.BuildPlan | None
) -> Iterator[Finding]:
    """Check compiler, GPU and AMX, and whether the installed build suits this machine."""
    rebuild_command = machine.rebuild_command(plan)
    if system.built is None:
        yield Finding("engine", "bad", "llama-cpp-python is not installed.", rebuild_command)
    else:
        yield Finding("engine", "ok", f"llama.cpp is built for {system.built}.")
    if compiler is None or plan is None:
        cure = f"{machine.install_hint(system.host, 'compiler')}, then {rebuild_command}"
        state: Literal["note", "bad"] = "bad" if system.built is None else "note"
        yield Finding("compiler", state, "There is no working C++ compiler.", cure)
        return
    yield Finding("compiler", "ok", compiler.version)
    for reason in plan.reasons:
        if reason.about == "AMX":
            yield Finding("AMX", "note" if reason.cure else "ok", reason.what, reason.cure)
        else:
            yield from _check_gpu(system, plan, reason)


def _check_gpu(
    system: CheckedMachine, plan: machine.BuildPlan, reason: machine.BuildReason
) -> Iterator[Finding]:
    """Check whether the build uses the best backend of this machine, and say why not."""
    rebuild_command, best, cure = machine.rebuild_command(plan), plan.backend, reason.cure
    if system.built not in (None, best):
        what = f"{reason} But llama.cpp is built for {system.built}."
        yield Finding("GPU", "note", what, rebuild_command)
        return
    if best == "vulkan" and machine.nvidia_gpus(system.host):
        then = rebuild_command if machine.CHECKOUT else "localspec doctor"
        cure = f"{machine.install_hint(system.host, 'cuda')}, then {then}"
    yield Finding("GPU", "note" if cure else "ok", reason.what, cure)
    if best == "cuda":
        yield from _check_cuda(system, rebuild_command)
    if best != "cpu" and machine.gpus_are_hidden(system.host):
        what, cure = "CUDA_VISIBLE_DEVICES hides every GPU.", "unset CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", "note", what, f"{cure}, then localspec stop")
    config = load_config(system.paths.config_file, system.host.env)
    if best != "cpu" and config.gpu_layers == 0:
        what = "gpu_layers is 0, so the GPU is not used."
        yield Finding("GPU", "note", what, "localspec config set gpu_layers -1")


def _check_cuda(system: CheckedMachine, rebuild_command: str) -> Iterator[Finding]:
    """Check driver and toolkit, whether the build runs on these GPUs, and their free memory."""
    host = system.host
    gpus, toolkit = machine.nvidia_gpus(host), machine.find_cuda_toolkit(host)
    driver_limit = machine.driver_cuda_version(host)
    if toolkit and gpus:
        limit = f" runs CUDA up to {driver_limit}" if driver_limit else ""
        message = f"Driver {gpus[0].driver or '(old)'}{limit}; nvcc is CUDA {toolkit.version}."
        yield Finding("CUDA", "ok", message)
    for gpu in gpus if system.built == "cuda" and system.architectures else []:
        if not machine.architectures_run_on(system.architectures, gpu.capability):
            message = (
                f"llama.cpp is built for architecture {system.architectures}, but {gpu.name} is "
                f"{gpu.capability.replace('.', '')}, so it cannot run there."
            )
            yield Finding("GPU", "bad", message, rebuild_command)
    for memory in machine.nvidia_memory(host):
        message = f"{memory.name}: {memory.free / 1024:.1f} of {memory.total / 1024:.1f} GiB free."
        if memory.free < LOW_GPU_MIB:
            cure = "run nvidia-smi to see which programs use it, or localspec unload"
            yield Finding("GPU", "note", f"{message} A pair will run on the CPU.", cure)
        else:
            yield Finding("GPU", "ok", message)


def _check_folders(paths: Paths) -> Iterator[Finding]:
    """Check the length of the socket's path and the permissions of the folders."""
    try:
        check_socket_path(paths.socket)
        yield Finding("socket", "ok", str(paths.socket))
    except LocalspecError as error:
        yield Finding("socket", "bad", error.message, "export LOCALSPEC_HOME=SHORTER-FOLDER")
    try:
        mode = paths.runtime.stat().st_mode & 0o777
    except OSError:
        mode = 0o700  # it will be created with this mode when the daemon starts
    if mode & 0o077:
        cure = f"chmod 700 {paths.runtime}"
        yield Finding("socket", "bad", f"{paths.runtime} is open to other users.", cure)
    given = os.environ.get("XDG_RUNTIME_DIR")
    follows_xdg = sys.platform == "linux" and not os.environ.get("LOCALSPEC_HOME")
    if (
        given
        and follows_xdg
        and paths == default_paths()
        and not paths.runtime.is_relative_to(given)
    ):
        problem = f"XDG_RUNTIME_DIR ({given}) is not used: it must be a folder of yours alone."
        yield Finding("socket", "note", problem, f"mkdir -p {given} && chmod 700 {given}")
    folders = (paths.config, paths.data, paths.state)
    for nearest in dict.fromkeys(map(_nearest_existing, folders)):
        if not os.access(nearest, os.W_OK | os.X_OK):
            cure = f"chmod u+rwx {nearest}, or export LOCALSPEC_HOME=ANOTHER-FOLDER"
            yield Finding("folders", "bad", f"{nearest} cannot be written.", cure)


def _nearest_existing(folder: Path) -> Path:
    # Path.exists raises for folders without permission and for names that are too long.
    exists = os.path.exists
    return next(path for path in (folder, *folder.parents) if exists(path))


def _check_settings(system: CheckedMachine, config: Config) -> Iterator[Finding]:
    """Check the configuration for errors, and for values that are too large for this machine."""

    def unset(key: str) -> str:
        origin = config.origin.get(key, "")
        is_variable = origin.startswith("LOCALSPEC_")
        return f"unset {origin}" if is_variable else f"localspec config unset {key}"

    for problem in config.problems:
        yield Finding("config", "bad", problem.sentence, problem.cure)
    if config.threads > (cores := settings.usable_cores()):
        has = f"this machine has only {cores} cores; {cores} are used."
        yield Finding("config", "note", f"threads is {config.threads}, but {has}", unset("threads"))
    with contextlib.suppress(LocalspecError):
        for cost in system.costs():
            cure = unset("context") if config.context else "localspec catalogue --fits"
            yield Finding("config", "note", cost, cure)
    if not config.problems:
        yield Finding("config", "ok", "The configuration is valid.")
    try:
        reason, pullable = _why_unavailable(system, config.pair)
    except LocalspecError as error:
        reason, pullable = error.message, False
    if reason:
        cure = f"localspec pull {config.pair}" if pullable else unset("pair")
        yield Finding("pair", "bad", reason, cure)


def _why_unavailable(system: CheckedMachine, pair: str) -> tuple[str, bool]:
    """Return why the configured pair cannot answer, or "", and whether pulling it would help."""
    for name in split_model_names(pair):
        if name.startswith(("/", "~")) and not expand_user(name).is_file():
            return f"The configured pair's file {name} is not there.", False
    if pair == "builtin" or "/" in pair or ":" in pair:
        return "", False
    try:
        entries = system.pairs()["pairs"]
        known = {name: entry for entry in entries for name in (entry["name"], *entry["aliases"])}
        if known.get(pair, {}).get("here"):
            return "", False
    except NoDaemon:
        if (system.paths.store / "pairs" / f"{pair}.json").is_file():
            return "", False
        known = {name: {} for name in _catalogue_names(system.paths)}
    if pair in known:
        return f"The configured pair '{pair}' is not pulled yet.", True
    return f"The configured pair '{pair}' does not exist.", False


def _catalogue_names(paths: Paths) -> Iterator[str]:
    """Yield the names and aliases in all files of models, which are read without a daemon."""
    package = Path(localspec.__file__).parent
    for file in (package / "models.toml", package.parent / "models.toml", paths.user_catalogue):
        try:
            pairs = tomllib.loads(file.read_text(encoding="utf-8")).get("pairs", {})
        except (OSError, ValueError):
            continue
        for name, entry in pairs.items():
            yield from (name, *entry.get("aliases", ()))


def _check_daemon(system: CheckedMachine, rebuild_command: str) -> Iterator[Finding]:
    restart = "localspec stop && localspec start"
    try:
        status = system.status()
    except LocalspecError as error:
        is_stuck = isinstance(error, NoAnswer) and system.paths.socket.exists()
        if isinstance(error, NoDaemon) and not is_stuck:
            yield Finding("daemon", "ok", "Not running; the next question starts it.")
        else:
            yield Finding("daemon", "bad", error.message, restart)
        return
    version, ours = status["version"], localspec.__version__
    if version != ours:
        what = f"The daemon is localspec {version}, but this is {ours}."
        yield Finding("daemon", "note", what, restart)
    else:
        count = status["counts"]["requests"]
        what = f"pid {status['pid']}, {count} request{'s' * (count != 1)}."
        yield Finding("daemon", "ok", what)
    pair = status["pair"]
    yield from _check_placement(system, pair["name"], pair.get("plan"))
    if pair["state"] == "set_aside":
        what = f"The pair {pair['name']} is set aside: its engine crashed repeatedly."
        yield Finding("pair", "bad", what, "localspec start --reset")
    if status["safe_mode"]:
        what = "The engine runs in safe mode, because it crashed at its first decode with the faster code."
        # A build by pip used no flags for this machine, so rebuilding may help. scripts/setup has already
        # tested its own build, so only a newer compiler may help there.
        cure = f"a newer compiler, then {rebuild_command}" if machine.CHECKOUT else rebuild_command
        yield Finding("engine", "note", what, cure)
    file = system.paths.config_file
    known_problems = {problem.sentence for problem in load_config(file).problems}
    for problem in status.get("problems", []):
        if problem.endswith("TCP is not served."):
            yield Finding("tcp", "bad", problem, "localspec config unset listen")
        elif not problem.startswith((str(file), "LOCALSPEC_")):
            yield Finding("files", "bad", problem, "correct the file; it is reloaded automatically")
        elif (
            problem not in known_problems
        ):  # of its environment, or of an earlier state of the file
            yield Finding("daemon", "bad", problem, restart)


def _check_placement(
    system: CheckedMachine, pair: str, plan: dict[str, Any] | None
) -> Iterator[Finding]:
    """Check whether a GPU could hold more of the loaded pair than it does."""
    if not plan or (plan["gpu_layers"] < 0 and not plan["cpu_moe_layers"]):
        return
    parts = "experts" if plan["cpu_moe_layers"] else "layers"
    for gpu in machine.nvidia_memory(system.host) if system.built == "cuda" else ():
        if gpu.free >= MUCH_GPU_MIB:
            free = f"{gpu.name} has {gpu.free / 1024:.1f} GiB free"
            what = f"{free}, while {parts} of {pair} lie in main memory."
            yield Finding("GPU", "note", what, f"localspec unload {pair} && localspec load {pair}")


def _check_disk(system: CheckedMachine) -> Iterator[Finding]:
    paths = system.paths
    folders = map(_nearest_existing, (paths.state, paths.config))
    low = [folder for folder in folders if system.free(folder) < MIN_FREE_BYTES]
    full = {folder.stat().st_dev: folder for folder in low}  # often both are on one disk
    for folder in full.values():
        what = (
            f"The disk of {folder} is full ({format_size(system.free(folder))} free): answers are not "
            "saved in the history, and the configuration cannot be changed."
        )
        yield Finding("disk", "bad", what, "delete files, or: localspec gc")
    if full:
        return
    folder = _nearest_existing(paths.store)
    size = format_size(free := system.free(folder))
    if free < LOW_DISK_BYTES:
        what = f"Only {size} free in {folder}; a pair may need more."
        yield Finding("disk", "note", what, "localspec gc, or localspec rm NAME")
    else:
        yield Finding("disk", "ok", f"{size} free in {folder}")


def _check_network(system: CheckedMachine) -> Iterator[Finding]:
    """Check the variables of the environment that concern downloads. Nothing is sent."""
    env = system.host.env
    hub = hf_cache_folder(env)
    note = "Models there are used in place" if hub.is_dir() else "It does not exist yet"
    yield Finding("cache", "ok", f"Hugging Face cache. {note}: {hub}")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if env.get(name)]
    if offline and env[offline[0]].upper() in ("1", "ON", "YES", "TRUE"):
        message = f"{offline[0]} is set: pulls use only what is in the cache."
        yield Finding("network", "note", message, f"unset {offline[0]}")


def run(system: CheckedMachine, *, as_json: bool) -> int:
    """Print the findings and return the exit code, which is 1 if one of them is bad."""
    results = []
    for finding in findings(system):
        results.append(finding)
        if not as_json:
            mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[finding.state]
            cure = [("", f"→ {finding.cure}")] if finding.cure else []
            render.fields([(f"{mark}  {finding.about:8}", finding.what), *cure])
    if as_json:
        render.record([asdict(finding) for finding in results])
    return int(any(finding.state == "bad" for finding in results))
