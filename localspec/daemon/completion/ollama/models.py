"""Pairs as Ollama's models: what /api/tags, /api/show and /api/ps say of them."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import localspec
from localspec.daemon.completion.ollama.answer import moment
from localspec.protocol.answers import PairStatus
from localspec.protocol.clients.ollama import (
    Details,
    OllamaModel,
    OllamaProgress,
    OllamaShown,
    OllamaVersion,
)
from localspec.protocol.pairs import PairView
from localspec.protocol.sampling import parameters

if TYPE_CHECKING:
    from localspec.registry.pulls.state import PullState

# The release of Ollama whose API is spoken here. Clients refuse those that are older than they know.
VERSION = OllamaVersion("0.13.0", localspec.__version__)
_TAG = ":latest"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_FOREVER = 4_102_444_800.0  # Unix time: the year 2100


def tagged(name: str) -> str:
    """A pair's name as Ollama would say it: every one of its has a tag."""
    return name if ":" in name else name + _TAG


def untagged(name: str) -> str:
    return name.removesuffix(_TAG)


def listed(view: PairView) -> OllamaModel:
    return OllamaModel(
        name=tagged(view.name),
        model=tagged(view.name),
        modified_at=moment(view.created),
        size=view.size,
        digest=_digest(view),
        details=_details(view),
    )


def running(view: PairView, status: PairStatus) -> OllamaModel:
    found = listed(view)
    found.size = status.memory or view.needed
    on_gpu = status.plan.on_gpu if status.plan else 0
    found.size_vram = 0 if status.backend == "cpu" else on_gpu or view.needed
    rests = status.unloads_in
    found.expires_at = moment(_FOREVER if rests is None else time.time() + rests)
    found.context_length = status.n_ctx or view.context
    return found


def shown(view: PairView, n_ctx: int, defaults: dict[str, Any]) -> OllamaShown:
    """`n_ctx`: the context it is served with; `defaults`: how its file says to sample, where it is loaded."""
    target = view.target
    kind = target.architecture
    sampled = {each.name: defaults[each.name] for each in parameters() if each.name in defaults}
    told = {"num_ctx": n_ctx, **sampled}
    known: dict[str, Any] = {
        "general.architecture": kind,
        "general.parameter_count": target.parameters,
        f"{kind}.context_length": target.context,
        f"{kind}.block_count": target.layers,
        f"{kind}.embedding_length": target.width,
    }
    return OllamaShown(
        modelfile=f"# To see all of it: localspec show {view.name}\nFROM {target.file}\n",
        parameters="\n".join(
            f"{name:<30} {value:g}"
            for name, value in told.items()
            if isinstance(value, int | float)  # a list is of a sampler that Ollama has not
        ),
        template=target.template.text if target.template else "",
        details=_details(view),
        model_info=known,
        capabilities=view.capabilities,
        modified_at=moment(view.created),
        license=view.licence,
    )


def progress(state: PullState) -> list[OllamaProgress]:
    """A pull's state as lines of /api/pull: one for each file that is being fetched, or for all."""
    match state.state:
        case "checking":
            return [OllamaProgress("pulling manifest")]
        case "downloading":
            return [
                OllamaProgress(f"pulling {each.file}", total=each.size, completed=each.done)
                for each in state.files
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
            f"{target.parameters / unit:.1f}{sign}"
            for unit, sign in _UNITS
            if target.parameters >= unit
        ),
        str(target.parameters),
    )
    return Details(target.architecture, [target.architecture], size, target.quantization)


def _digest(view: PairView) -> str:
    """Of all that makes the pair, as a manifest's is; another one when a file of it is."""
    models = [each for each in (view.target, view.draft) if each]
    text = "\n".join(f"{each.file} {each.size} {each.sha256}" for each in models)
    return hashlib.sha256(text.encode()).hexdigest()
