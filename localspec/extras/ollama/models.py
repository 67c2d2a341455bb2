"""Format pairs as Ollama's models, for /api/tags, /api/show and /api/ps."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import localspec
from localspec.extras.ollama.answer import format_time
from localspec.extras.ollama.wire import (
    Details,
    OllamaModel,
    OllamaProgress,
    OllamaShown,
    OllamaVersion,
)
from localspec.protocol.answers import PairStatus
from localspec.protocol.pairs import PairView
from localspec.protocol.requests import sampling_parameters

if TYPE_CHECKING:
    from localspec.registry.pulls.messages import PullState


# The release of Ollama whose API this is. Clients refuse servers that are older than they support.
VERSION = OllamaVersion("0.13.0", localspec.__version__)
_TAG = ":latest"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_FOREVER_S = 4_102_444_800.0  # Unix time of the year 2100


def tagged(name: str) -> str:
    """Return a pair's name as Ollama writes it, always with a tag."""
    return name if ":" in name else name + _TAG


def untagged(name: str) -> str:
    """Return a name without the default tag."""
    return name.removesuffix(_TAG)


def list_entry(view: PairView) -> OllamaModel:
    """Return a pair as an entry of /api/tags."""
    return OllamaModel(
        name=tagged(view.name),
        model=tagged(view.name),
        modified_at=format_time(view.created),
        size=view.size,
        digest=_digest(view),
        details=_details(view),
    )


def running_entry(view: PairView, status: PairStatus) -> OllamaModel:
    """Return a loaded pair as an entry of /api/ps."""
    model = list_entry(view)
    model.size = status.memory or view.needed
    on_gpu = status.plan.on_gpu if status.plan else 0
    model.size_vram = 0 if status.backend == "cpu" else on_gpu or view.needed
    unloads_in = status.unloads_in
    model.expires_at = format_time(_FOREVER_S if unloads_in is None else time.time() + unloads_in)
    model.context_length = status.n_ctx or view.context
    return model


def describe_model(view: PairView, n_ctx: int, defaults: dict[str, Any]) -> OllamaShown:
    """Return a pair as the answer of /api/show.

    `n_ctx` is the context that it is served with, and `defaults` are its sampling defaults if it is loaded.
    """
    target = view.target
    architecture = target.architecture
    sampling = {
        parameter.name: defaults[parameter.name]
        for parameter in sampling_parameters()
        if parameter.name in defaults
    }
    settings = {**({"num_ctx": n_ctx} if n_ctx else {}), **sampling}
    model_info: dict[str, Any] = {
        "general.architecture": architecture,
        "general.parameter_count": target.parameters,
        f"{architecture}.context_length": target.context,
        f"{architecture}.block_count": target.layers,
        f"{architecture}.embedding_length": target.width,
    }
    if not target.context:  # a model on another server, of which nothing is known
        model_info = {}
    return OllamaShown(
        modelfile=f"# To see all of it: localspec show {view.name}\nFROM {target.file}\n",
        parameters="\n".join(
            f"{name:<30} {value:g}"
            for name, value in settings.items()
            if isinstance(value, int | float)  # lists belong to samplers that Ollama does not have
        ),
        template=target.template.text if target.template else "",
        details=_details(view),
        model_info=model_info,
        capabilities=view.capabilities,
        modified_at=format_time(view.created),
        license=view.licence,
    )


def progress_lines(state: PullState) -> list[OllamaProgress]:
    """Return a pull's state as lines of /api/pull: one per file while downloading, else one."""
    match state.state:
        case "checking":
            return [OllamaProgress("pulling manifest")]
        case "downloading":
            return [
                OllamaProgress(f"pulling {file.file}", total=file.size, completed=file.done)
                for file in state.files
            ]
        case "verifying":
            return [OllamaProgress("verifying sha256 digest")]
        case "done":
            return [OllamaProgress("success")]
    return []


def _details(view: PairView) -> Details:
    target = view.target
    size = next(
        (
            f"{target.parameters / unit:.1f}{suffix}"
            for unit, suffix in _UNITS
            if target.parameters >= unit
        ),
        str(target.parameters or ""),
    )
    return Details(target.architecture, [target.architecture], size, target.quantization)


def _digest(view: PairView) -> str:
    """Return a digest of all files of the pair, which changes whenever one of them does."""
    models = [model for model in (view.target, view.draft) if model]
    text = "\n".join(f"{model.file} {model.size} {model.sha256}" for model in models)
    return hashlib.sha256(text.encode()).hexdigest()
