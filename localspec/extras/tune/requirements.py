"""Check what a training needs besides localspec itself."""

from __future__ import annotations

import importlib.util

from localspec import installation
from localspec.errors import LocalspecError


def check_torch(method: str) -> None:
    """Check that PyTorch is installed if a method needs it. Raises LocalspecError."""
    if method not in ("weights", "new") or importlib.util.find_spec("torch") is not None:
        return
    trained = "A new draft is" if method == "new" else "All weights are"
    other = "" if method == "new" else " To train without it: --method rows"
    command = installation.install_extra_command("tune")
    raise LocalspecError(
        f"{trained} trained with PyTorch, which is not installed; run: {command}.{other}"
    )
