"""The slow part of scripts/setup: choose a build of llama.cpp, make it, fill .venv.

The standard library is all there is here.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import graph_per_width
from localspec import machine
from localspec.machine import Host

# Without a terminal a long build still gives a sign of life, but does not fill a CI log.
LINE_EVERY_S = 30
PER_WIDTH = "-graph-per-width"  # ends the key of a wheel that has a graph for each width


class SetupError(Exception):
    """What is wrong, in one sentence, and what to do, in another."""


@dataclass(frozen=True)
class Request:
    """What scripts/setup was asked for, and how it tells whether that is there."""

    root: str
    extras: frozenset[str]
    cmake_args: str | None
    again: bool
    fingerprint: Callable[[], dict[str, str]]
    read_stamp: Callable[[], dict[str, str]]
    up_to_date: Callable[[dict[str, str], set[str], str | None], bool]
    graphs: bool = False  # a graph for each width is asked for


def run(request: Request) -> int:
    """Do it, and give the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.update(package_source(Path(request.root)))
    try:
        with locked(Path(request.root, ".venv.lock"), "another setup of this checkout"):
            if request.again or not _done_meanwhile(request):
                refresh(request)
    except SetupError as error:
        print(f"localspec setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nlocalspec setup: stopped. Run it again to finish.", file=sys.stderr)
        return 130
    return 0


def package_source(root: Path) -> dict[str, str]:
    """Where pip finds packages: in a bundle for machines with no network, in its folder and nowhere else."""
    packages = root / "packages"
    if not packages.is_dir():
        return {}
    # As a URL, because pip splits what it finds there at spaces.
    links = packages.absolute().as_uri()
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": links, "PIP_CONFIG_FILE": os.devnull}


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _done_meanwhile(request: Request) -> bool:
    return request.up_to_date(request.read_stamp(), set(request.extras), request.cmake_args)


@contextmanager
def locked(path: Path, holder: str) -> Iterator[None]:
    """Hold a lock file; the system frees it whatever becomes of this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"localspec setup: waiting for {holder} to end.", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def refresh(request: Request) -> None:
    """Bring .venv to what is asked for. Its stamp is taken away meanwhile and comes back last."""
    host = Host.current()
    venv = Path(request.root, ".venv")
    stamp = request.read_stamp()
    facts = request.fingerprint()
    # Flags once given hold until others are given or everything is chosen afresh.
    user_args = request.cmake_args
    if user_args is None and not request.again and stamp.get("flags") == "user":
        user_args = stamp["cmake_args"]
    extras = sorted(request.extras | set(stamp.get("extras", "").split()))

    compiler = find_compiler(host)
    plan = machine.plan_build(host, compiler, user_args)
    version = llama_version(Path(request.root, "pyproject.toml"))
    key = machine.wheel_key(host, plan, compiler, version)
    for reason in plan.reasons:
        print(f"localspec setup: {reason}", file=sys.stderr)
    graphs = request.graphs or (not request.again and stamp.get("wheel", "").endswith(PER_WIDTH))
    if graphs and "-DGGML_CUDA=ON" not in plan.cmake_args:
        print("localspec setup: --graph-per-width is for CUDA only.", file=sys.stderr)
        graphs = False
    key += PER_WIDTH * graphs

    fits = all(stamp.get(name) == facts[name] for name in ("python", "root"))
    if request.again or not fits:
        make_venv(host, venv)
        stamp = {}
    folder = cache_folder(host) / "wheels" / key
    wheel = build_wheel(host, venv, plan, version, folder, graphs)
    # Up to here a .venv that was complete still is; from here on it is not, until the end.
    (venv / "localspec.stamp").unlink(missing_ok=True)
    if stamp.get("wheel", key) != key:
        remove_other_build(venv)
    install(venv, request.root, extras, wheel)

    write_stamp(
        venv / "localspec.stamp",
        facts
        | {
            "extras": " ".join(extras),
            "flags": plan.backend,
            "cmake_args": plan.cmake_args,
            "wheel": key,
        },
    )
    if "test" in extras:
        use_hooks(Path(request.root))
    print("localspec setup: ready.", file=sys.stderr)


def use_hooks(root: Path) -> None:
    """Have git run scripts/hooks in this checkout, unless it runs other hooks already.

    Does nothing without git, and in a copy that is no checkout, which may lie inside another repository.
    """
    if not (root / ".git").exists() or shutil.which("git") is None:
        return

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    folder = git("rev-parse", "--git-path", "hooks")
    if git("config", "--get", "core.hooksPath") or not folder:
        return
    hooks = Path(root, folder)
    if hooks.is_dir() and any(path.suffix != ".sample" for path in hooks.iterdir()):
        return
    git("config", "core.hooksPath", "scripts/hooks")
    print("localspec setup: commits are checked by scripts/hooks.", file=sys.stderr)


def find_compiler(host: Host) -> machine.Compiler:
    """Return the C++ compiler, or what to install to have one."""
    if compiler := machine.find_compiler(host):
        return compiler
    if named := host.env.get("CXX"):
        raise SetupError(f"CXX is `{named}`, and that makes no C++ program. Correct or unset CXX.")
    raise SetupError(
        "there is no working C++ compiler, and llama.cpp is built on the machine it runs on. "
        f"{machine.install_hint(host, 'compiler')}, then run this again."
    )


def llama_version(pyproject: Path) -> str:
    """Return the one version of llama-cpp-python that pyproject.toml names."""
    dependencies = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    (version,) = (
        name.partition("==")[2] for name in dependencies if name.startswith("llama-cpp-python==")
    )
    return str(version)


def cache_folder(host: Host) -> Path:
    """Where built wheels are kept, shared by all checkouts of this user."""
    home = Path.home()
    default = home / "Library/Caches" if host.system == "Darwin" else home / ".cache"
    return Path(host.env.get("XDG_CACHE_HOME") or default, "localspec")


def make_venv(host: Host, venv: Path) -> None:
    """Create a new, empty .venv of the Python that runs this."""
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            "this Python cannot make a virtual environment, its ensurepip module is missing. "
            f"{machine.install_hint(host, 'venv')}, then run this again."
        )
    shutil.rmtree(venv, ignore_errors=True)
    # Inside a .venv that no longer fits, sys.executable is that one's link to the real Python.
    python = getattr(sys, "_base_executable", None) or sys.executable
    command = [python, "-m", "venv", str(venv)]
    run_logged("making .venv", command, Path(f"{venv}.log"), os.environ)
    Path(f"{venv}.log").unlink()


def build_wheel(
    host: Host, venv: Path, plan: machine.BuildPlan, version: str, folder: Path, graphs: bool
) -> Path:
    """Return the wheel of llama-cpp-python for this plan, built now unless it was before.

    pip's cache stays out of it: it hands out wheels whatever flags they were built with.
    graphs: a graph for each width.
    """
    with locked(folder / "lock", "another build of the same wheel"):
        if built := sorted(folder.glob("*.whl")):
            return built[0]
        jobs = machine.build_jobs(os.cpu_count() or 1, machine.memory_bytes(), plan.backend)
        with scratch(folder / "building") as building:
            options = ["--no-deps", "--no-cache-dir", "--no-binary=llama-cpp-python"]
            source = f"llama-cpp-python=={version}"
            if graphs:
                command = [*pip(venv, "download"), *options, "--dest", str(building), source]
                run_logged("fetching llama.cpp", command, folder / "build.log", os.environ)
                source = str(unpack_edited(building))
            command = [
                *pip(venv, "wheel"),
                *("--verbose", *options, "--wheel-dir", str(building), source),
            ]
            env = {
                "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
                **host.env,
                "CMAKE_ARGS": plan.cmake_args,
                # Not in /tmp, which may be small, and where a build that was killed would stay.
                "TMPDIR": str(building / "tmp"),
            }
            (building / "tmp").mkdir()
            run_logged(
                "building llama.cpp, once for this machine", command, folder / "build.log", env
            )
            # Whole or not at all: a build that was stopped leaves nothing like a wheel behind.
            (made,) = building.glob("*.whl")
            return made.rename(folder / made.name)


def unpack_edited(folder: Path) -> Path:
    """Unpack the source in a folder, and have it keep a graph for each width if it can be edited."""
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    source = folder / archive.name.removesuffix(".tar.gz")
    if reason := graph_per_width.edit(source):
        print(f"localspec setup: one graph for all widths, because {reason}.", file=sys.stderr)
    return source


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Provide an empty folder that is removed afterwards, or at the next time if this process is killed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_other_build(venv: Path) -> None:
    """Take llama-cpp-python out; pip takes another build of the same version for the one it has."""
    command = [*pip(venv, "uninstall"), "--yes", "llama-cpp-python"]
    run_logged("removing the former build of llama.cpp", command, venv / "setup.log", os.environ)


def install(venv: Path, root: str, extras: Sequence[str], wheel: Path) -> None:
    """Install the package, editable, with its dependencies."""
    package = f"{root}[{','.join(extras)}]" if extras else root
    command = [*pip(venv, "install"), str(wheel), "--editable", package]
    run_logged("installing packages", command, venv / "setup.log", os.environ)


def pip(venv: Path, verb: str) -> list[str]:
    return [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        verb,
    ]


def write_stamp(path: Path, facts: Mapping[str, str]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{name}={value}\n" for name, value in facts.items()))
    fresh.replace(path)


# --- running what takes long


def run_logged(stage: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    """Run a command with its output in a file, show how far it is, explain it where it fails."""
    # A user's pip configuration may install elsewhere; here it has to be .venv.
    env = {**env, "PIP_USER": "0", "PYTHONNOUSERSITE": "1"}
    progress = Progress(stage)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w+", errors="replace") as output:
        # An interrupt that came while the process starts would leave it running.
        stopped = list[int]()
        handlers = [
            (each, signal.signal(each, lambda number, _: stopped.append(number)))
            for each in (signal.SIGINT, signal.SIGTERM)
        ]
        # A group of its own: when setup is stopped, every compiler below is stopped with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output.fileno(),
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,
        )
        try:
            for number, handler in handlers:
                signal.signal(number, handler)
            if stopped:
                raise KeyboardInterrupt
            with log.open(errors="replace") as tail:
                while process.poll() is None:
                    progress.show(last_step(tail.read()))
                    try:
                        process.wait(timeout=1 if progress.live else 5)
                    except subprocess.TimeoutExpired:
                        continue
        except BaseException:
            stop(process)
            raise
        finally:
            progress.close()
    if process.returncode:
        raise SetupError(explain(stage, log))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and all its children; an interrupt first, on which pip clears up."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=3)
    finally:  # also where a second interrupt ends the wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ninja: "[12/345] …"; make: "[ 12%] …".
STEP = re.compile(r"^\s*\[\s*(\d+/\d+|\d+%)\]", re.MULTILINE)


def last_step(output: str) -> str | None:
    """How far the build is, by the last line of its output that tells."""
    steps = STEP.findall(output)
    return steps[-1] if steps else None


class Progress:
    """One live line on a terminal; elsewhere a line at the start and one now and then."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.live = sys.stderr.isatty()
        self.started = self.said = time.monotonic()
        self.step = ""
        if not self.live:
            print(f"localspec setup: {stage} …", file=sys.stderr, flush=True)

    def show(self, step: str | None) -> None:
        """Draw the state; `step` where there is news of it."""
        self.step = f"{step} " if step else self.step
        now = time.monotonic()
        if self.live or now - self.said >= LINE_EVERY_S:
            self.said = now
            print(self._line(now), end="" if self.live else "\n", file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        minutes, seconds = divmod(int(now - self.started), 60)
        text = f"localspec setup: {self.stage} … {self.step}{minutes}:{seconds:02}"
        if not self.live:
            return text
        width = shutil.get_terminal_size().columns - 1
        return f"\r\033[K{text[:width]}"

    def close(self) -> None:
        if self.live:
            print(self._line(time.monotonic()), file=sys.stderr)


# What went wrong, by what the output says, and what to do about it. The first that fits is told.
CAUSES = (
    (
        r"No space left on device",
        "The disk is full. Free some space, or set XDG_CACHE_HOME to a folder on another disk.",
    ),
    (
        r"Killed signal|signal terminated program|: Killed|out of memory|std::bad_alloc",
        "Memory ran out. Set CMAKE_BUILD_PARALLEL_LEVEL=1, which compiles one file at a time.",
    ),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution"
        r"|Failed to establish a new connection|ConnectTimeout|ProxyError|Network is unreachable",
        "The package index cannot be reached. Check the network or set HTTPS_PROXY.",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "No package index (in a bundle: its folder `packages`) has it for this Python and system. "
        "Check pip's settings and the network.",
    ),
    (
        r"unsupported GNU version|Failed to detect a default CUDA architecture|nvcc fatal",
        "The CUDA compiler does not work here. Build for the CPU with CMAKE_ARGS=-DGGML_CUDA=OFF, "
        "or set CUDAHOSTCXX to a compiler that CUDA supports.",
    ),
)
UNKNOWN_CAUSE = "The lines above, or the log, tell the cause."
COMPLAINT = re.compile(
    r"error\b|fatal|failed to|Killed|No space left|undefined reference", re.IGNORECASE
)


def explain(stage: str, log: Path) -> str:
    """Return the lines of a log that matter, what to do, and where the rest is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if COMPLAINT.search(line) and "subprocess-exited" not in line]
    shown = (telling or lines)[-8:]
    cure = next((cure for sign, cure in CAUSES if re.search(sign, "\n".join(lines))), UNKNOWN_CAUSE)
    excerpt = "".join(f"    {line[:300]}\n" for line in shown)
    return f"{stage} failed.\n{excerpt}{cure}\nThe whole output: {shlex.quote(str(log))}"
