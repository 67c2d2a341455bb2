"""PDF documents for tests, and what reading them lacks or never ends of."""

from __future__ import annotations

from pathlib import Path

from benchmarks.documents import (
    FIRST_OBJECT,
    SQUARE,
    exploding_pdf,
    image,
    pdf,
    show,
    slow_pdf,
    stream,
)

__all__ = ["FIRST_OBJECT", "SQUARE", "exploding_pdf", "image", "pdf", "show", "slow_pdf", "stream"]

ROOT = Path(__file__).parents[2]


def without_pictures_extra(folder: Path) -> dict[str, str]:
    """Return environment variables with which programs find no package of the extra `pictures`."""
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(('PIL', 'pypdfium2')))\n"
    )
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def with_endless_conversions(folder: Path, pid_file: Path) -> dict[str, str]:
    """Return environment variables with which a conversion never ends. Its process writes its id first."""
    (folder / "sitecustomize.py").write_text(
        "import os, pathlib, sys, time\n"
        "if 'localspec.daemon.completion.conversion_child' in sys.orig_argv:\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(f'{{os.getpid()}}\\n')\n"
        "    time.sleep(1e6)\n"
    )
    return {"PYTHONPATH": f"{folder}:{ROOT}"}
