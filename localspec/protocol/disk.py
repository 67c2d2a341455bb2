"""Models on this disk as they are sent over HTTP: /localspec/disk, /drafts. Sizes in bytes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from localspec.protocol.pairs import AddRequest, File
from localspec.protocol.reading import OrDefault, Request


class DiskRequest(Request):
    """A request for the models on this disk.

    - `folders`: absolute paths that are searched in addition to the places where programs keep
      models.
    - `environment`: the variables of the client's shell that say where those places are.
    """

    folders: OrDefault[Annotated[list[File], Meta(max_length=64)]] = field(default_factory=list)
    environment: OrDefault[dict[str, str]] = field(default_factory=dict)


class DraftsRequest(Request):
    """A request for the models that could draft for a target.

    - `target`: the name of a pair, whose target is meant, an absolute path, or a name of Ollama's.
    """

    target: File
    folders: OrDefault[Annotated[list[File], Meta(max_length=64)]] = field(default_factory=list)
    measure: OrDefault[bool] = False


class DraftGain(Struct):
    """The measured benefit of a draft model, with 95 % intervals.

    - `acceptance`: per drafted token.
    - `speed_up`: over the target alone, at `depth`, the depth that pays best. If it is below 1 at
      every depth, the daemon does not draft.
    - `low`, `high`: the interval of `speed_up`.
    """

    acceptance: float
    acceptance_low: float
    acceptance_high: float
    speed_up: float
    low: float
    high: float
    depth: int


class DraftView(Struct):
    """A possible draft model.

    - `ratio`: the target's bytes of weights divided by the draft's.
    - `reason`: why it does not match, if it does not.
    - `gain`: present if it was measured.
    - `tied`: the measurement does not distinguish it from the one before it.
    - `file`: the name that `add` takes for it: its name in Ollama, or its path.
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
    """An event of /drafts: the draft being measured, or in the last one the list, best first.

    - `plain`: the speed of the target alone in tokens per second, if it was measured.
    - `file`: the name that `add` takes for the target.
    - `pair`: a free name for a pair of it.
    """

    target: str
    measuring: str = ""
    plain: float | None = None
    drafts: list[DraftView] | None = None
    file: str = ""
    pair: str = ""


class DiskModel(Struct):
    """A model on this disk.

    - `origin`: the program that put it there.
    - `size`: bytes of weights.
    - `problem`: why it cannot be used.
    - `drafts`: paths of the models that can draft for it, the best first as far as is known without
      measuring.
    """

    name: str
    path: str
    origin: str
    size: int
    problem: str = ""
    drafts: tuple[str, ...] = ()


class Disk(Struct):
    """An event of /disk: the folder being searched, or in the last one everything found.

    - `pairs`: pairs worth making, each in the form that POST /localspec/pairs takes.
    - `problems`: one sentence for each place that could not be searched.
    """

    looking: str = ""
    models: list[DiskModel] | None = None
    pairs: list[AddRequest] = []
    problems: list[str] = []
