"""What goes over the socket about models on this disk: /localspec/disk, /drafts. Sizes in bytes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from localspec.protocol.pairs import AddRequest, File
from localspec.protocol.reading import OrDefault, Request


class DiskRequest(Request):
    """`folders`: absolute paths, looked through beside the places where programs keep models.

    `environment`: the variables of the client's shell that say where those are.
    """

    folders: OrDefault[Annotated[list[File], Meta(max_length=64)]] = field(default_factory=list)
    environment: OrDefault[dict[str, str]] = field(default_factory=dict)


class DraftsRequest(Request):
    """`target`: a pair whose target is meant, an absolute path, or a name of Ollama's."""

    target: File
    folders: OrDefault[Annotated[list[File], Meta(max_length=64)]] = field(default_factory=list)
    measure: OrDefault[bool] = False


class DraftGain(Struct):
    """What a draft is worth: acceptance per drafted token, and the speed-up over the target alone that it
    gives at the depth that pays best, each with its 95 % interval. Where it never pays, below 1, the
    daemon does not draft.
    """

    acceptance: float
    acceptance_low: float
    acceptance_high: float
    speed_up: float
    low: float
    high: float
    depth: int


class DraftView(Struct):
    """A possible draft. `reason` is why not; `ratio` is target / draft in bytes of weights.

    `gain` is there where it was measured; `tied`: what was measured does not tell it apart from the one
    before it. `file` is what `add` takes for it: its name in Ollama, or its path.
    """

    name: str
    path: str
    origin: str
    size: int
    ratio: float
    matched: bool
    reason: str
    notes: tuple[str, ...] = ()
    gain: DraftGain | None = None
    tied: bool = False
    file: str = ""


class Drafts(Struct):
    """An event of /drafts: what is being measured, and in the last one the list, best first.

    `plain` is the target's speed alone in tokens per second, where it was measured. `file` is what `add`
    takes for the target, `pair` a free name for a pair of it.
    """

    target: str
    measuring: str = ""
    plain: float | None = None
    drafts: list[DraftView] | None = None
    file: str = ""
    pair: str = ""


class DiskModel(Struct):
    """A model on this disk: bytes of weights, who put it there, or in `problem` why it is of no use.

    `drafts`: paths of those that can draft for it, the best by what is known without measuring first.
    """

    name: str
    path: str
    origin: str
    size: int
    problem: str = ""
    drafts: tuple[str, ...] = ()


class Disk(Struct):
    """An event of /disk: what is being read, and in the last one all that was found.

    `pairs`: those worth making, each as POST /localspec/pairs takes it. `problems`: a sentence for each
    place that could not be looked into.
    """

    looking: str = ""
    models: list[DiskModel] | None = None
    pairs: list[AddRequest] = []
    problems: list[str] = []
