"""`scripts/bundle`: make one archive that sets localspec up where there is no network.

It holds this repository (as committed), every wheel for the machine named, llama.cpp's source without
what the build does not read, and `install`, which checks all of it, builds llama.cpp for what that
machine has, and asks a first question. Beside it lies its SHA-256.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import localspec
from airgap import archive, machines, packages, pairs
from localspec.errors import LocalspecError

ROOT = Path(__file__).resolve().parents[2]
INSTALL = Path(__file__).with_name("install")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/bundle", description=__doc__)
    add = parser.add_argument
    add("--platform", choices=machines.SYSTEMS, help="the machine it is for (this one's)")
    add("--python", metavar="X.Y", help="the Python it has (this one's)")
    add("--pair", action="append", default=[], metavar="NAME", help="add this pair's model files")
    add("--output", type=Path, metavar="FILE", help="the archive (dist/localspec-….tar.xz)")
    add("--fast", action="store_true", help="leave the archive uncompressed, to try it out")
    options = parser.parse_args(argv)
    try:
        local_machine = machines.this_machine()
        options.machine = machines.Machine(
            machines.SYSTEMS[options.platform] if options.platform else local_machine.system,
            machines.parse_python(options.python) if options.python else local_machine.python,
        )
    except ValueError as error:
        parser.error(f"{error}.")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    name = f"localspec-{localspec.__version__}-{options.machine.name}"
    output = options.output or ROOT / "dist" / f"{name}.tar.xz"
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="bundle-", dir=output.parent) as scratch:
            folder = Path(scratch, name)
            modified = fill(folder, options)
            say(f"packing {name}")
            part = Path(scratch, "archive")
            with part.open("wb") if options.fast else lzma.open(part, "wb") as packed:
                archive.pack(folder, packed, modified, name)
            part.replace(output)
    except (packages.BundleError, LocalspecError, OSError) as error:
        say(str(error))
        return 1
    beside = output.with_name(f"{output.name}.sha256")
    beside.write_text(f"{archive.sha256_of(output)}  {output.name}\n", encoding="utf-8")
    say(f"{output} ({output.stat().st_size / 1e6:.1f} MB), its checksum in {beside.name}")
    say(f"There: sha256sum -c {beside.name} && tar xf {output.name} && {name}/install")
    return 0


def fill(folder: Path, options: argparse.Namespace) -> int:
    """Everything but the packing; gives the time of the commit."""
    modified = copy_repository(folder)
    models = [pairs.add_pair(name, folder / "models") for name in options.pair]
    say(f"getting packages for {options.machine.name}")
    (folder / "packages").mkdir()
    wheels = packages.collect(ROOT, folder / "packages", options.machine)
    facts = {**machines.facts(options.machine, wheels), "pairs": models}
    (folder / "bundle.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    shutil.copy(INSTALL, folder / "install")
    sums = archive.checksums(folder)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    return modified


def copy_repository(folder: Path) -> int:
    """Return the files of the last commit, and its time."""
    if git("status", "--porcelain", "--untracked-files=no"):
        say("uncommitted changes are not in the bundle")
    with tempfile.TemporaryFile() as file:
        command = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD"]
        subprocess.run(command, stdout=file, check=True)
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            tar.extractall(folder, filter="tar")
    return int(git("log", "-1", "--format=%ct"))


def git(*arguments: str) -> str:
    """Return what git says about this checkout. Raises BundleError."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise packages.BundleError("git is not installed, and a bundle is a commit.") from None
    if done.returncode:
        raise packages.BundleError(f"This is no git checkout: {done.stderr.strip()}")
    return done.stdout.strip()


def say(text: str) -> None:
    print(f"localspec bundle: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
