"""What a header says about its model, and the checks that keep llama.cpp alive.

llama.cpp aborts the process on some values (a layer count of 1000, a negative epsilon, zero heads)
and silently accepts others that make the model useless (an end token that does not exist, zeros
where the download stopped). Each is refused here in one sentence, before a worker sees the file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from localspec.errors import BadGguf, UnsafeModel
from localspec.protocol.settings import Pooling
from localspec.purpose import has_no_cache, is_sidecar, no_heads, no_writer, pooled, reads_whole
from localspec.registry.header.architectures import Rollback, is_known, rollback
from localspec.registry.header.gguf import Header, NumberArray, Value, read_header
from localspec.registry.header.kept import Kept, Lengths, kept
from localspec.registry.header.source import FileSource, Source
from localspec.registry.header.vocabulary import check_vocabulary
from localspec.registry.header.weights import check_tensors

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_WIDTH = 1 << 20
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # LLAMA_ROPE_SCALING_TYPES
MAX_CONTEXT = 1 << 27
MAX_SHARDS = 999
_CLASSIFIERS = {"cls.weight", "cls.output.weight"}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Model:
    """One model: its first file's header and the numbers the rest of the registry asks for.

    `kv_heads` has one entry per layer. Sizes in bytes; `weights` counts all shards. `pooling`: of a model
    that turns texts into numbers; None: it writes text.
    """

    name: str
    header: Header
    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: tuple[int, ...]
    key_length: int
    feed_forward: int
    context: int
    vocabulary: int
    kept: Kept
    parameters: int
    weights: int
    file_size: int
    rollback: Rollback
    template_hash: str  # SHA-256 of the chat template, empty without one
    pooling: Pooling | None = None

    @property
    def reads_whole(self) -> bool:
        """Of one with a pooling: must a pass have all of a text?"""
        causal = self.header.metadata.get(f"{self.architecture}.attention.causal") is not False
        return reads_whole(self.architecture, causal=causal, pooling=self.pooling or "mean")

    @property
    def has_no_cache(self) -> bool:
        """Does it read a text at once and keep nothing of it?"""
        return has_no_cache(self.architecture)

    @property
    def sidecar(self) -> bool:
        """Is it MTP heads in a file of their own, which draft for one target?"""
        return is_sidecar(self.architecture)

    @property
    def no_heads(self) -> str:
        """Why the heads (MTP) that it declares cannot draft, as a clause; empty: nothing says so."""
        return no_heads(self.architecture, self._declared_heads) if self._declared_heads else ""

    @property
    def drafting_heads(self) -> int:
        """How many heads (MTP) in its own file draft for it."""
        return 0 if self.no_heads else self._declared_heads

    @property
    def _declared_heads(self) -> int:
        count = self.header.metadata.get(f"{self.architecture}.nextn_predict_layers")
        return count if type(count) is int else 0


def shard_names(filename: str) -> list[str]:
    """All files of a sharded model, given any one; a list of itself when it is not sharded.

    Raises:
        BadGguf: the numbers in the name make no sense.
    """
    found = _SHARD.search(filename)
    if not found:
        return [filename]
    number, count = int(found[1]), int(found[2])
    if not 1 <= number <= count <= MAX_SHARDS:
        raise BadGguf(f"{filename} is not a valid name for a part of a model.")
    stem = filename[: found.start()]
    return [f"{stem}-{index:05d}-of-{count:05d}{found[3]}" for index in range(1, count + 1)]


def shard_paths(path: Path) -> list[Path]:
    """The files of a local model, all beside each other. Raises BadGguf as `shard_names`."""
    return [path.with_name(name) for name in shard_names(path.name)]


def read_model(sources: Sequence[Source], *, as_draft: bool = False) -> Model:
    """Read and check the headers of a model's files (one, or all shards in order). as_draft: it may be heads
    that only draft.

    Raises:
        BadGguf, UnsafeModel: one sentence that names file and fault.
    """
    headers = [read_header(source) for source in sources]
    check_shards(headers)
    return describe(headers, as_draft=as_draft)


def read_local_model(path: Path, *, as_draft: bool = False) -> Model:
    """The model at `path`; its shards are looked for beside it. as_draft: as `read_model`.

    Raises:
        BadGguf, UnsafeModel: one sentence that names file and fault.
    """
    return read_model([FileSource(each) for each in shard_paths(path)], as_draft=as_draft)


def check_shards(headers: Sequence[Header]) -> None:
    """Do these files, in this order, make up one model?

    Raises:
        BadGguf: they do not. UnsafeModel: what they state of that is no number.
    """
    first = headers[0]
    stated = _whole(first, "split.count", 0)
    if (stated or 1) != len(headers):
        raise BadGguf(
            f"{first.name} is one of {stated or 1} parts, but {len(headers)} were found; keep "
            "the file name it has on the hub, with its -00001-of-… ending."
        )
    for index, header in enumerate(headers):
        if stated and _whole(header, "split.no", -1) != index:
            raise BadGguf(f"{header.name} is not part {index + 1} of {stated}.")
    total = _whole(first, "split.tensors.count", 0)
    if stated and total != sum(len(header.tensors) for header in headers):
        raise BadGguf(f"The parts of {first.name} do not contain the {total} tensors it declares.")


def describe(headers: Sequence[Header], *, as_draft: bool = False) -> Model:
    """The model's numbers, every one of them checked. as_draft: as `read_model`.

    Raises:
        BadGguf, UnsafeModel: one sentence that names file and fault.
    """
    first = headers[0]
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    architecture, pooling = _architecture(first, as_draft, tensors.keys())
    _check_floats(first, architecture)
    layers = _number(first, f"{architecture}.block_count", 1, MAX_LAYERS)
    width = _number(first, f"{architecture}.embedding_length", 1, MAX_WIDTH)
    heads = max(_per_layer(first, f"{architecture}.attention.head_count", layers, 1))
    kv_key = f"{architecture}.attention.head_count_kv"
    kv_heads = _per_layer(first, kv_key, layers, heads)
    _check_experts(first, architecture)
    _check_scaling(first, architecture)
    _number(first, f"{architecture}.full_attention_interval", 1, MAX_LAYERS, 1)
    alone = is_sidecar(architecture)  # all its layers are heads
    extra = _number(first, f"{architecture}.nextn_predict_layers", 0, layers - (not alone), 0)
    check_tensors(first.name, architecture, layers, 0 if alone else extra, tensors)
    window = _number(first, f"{architecture}.attention.sliding_window", 0, MAX_CONTEXT, 0)
    head_width = max(1, width // max(1, heads))
    lengths = Lengths(
        _head_length(first, architecture, "key_length", head_width),
        _head_length(first, architecture, "value_length", head_width),
    )
    template = first.metadata.get("tokenizer.chat_template")
    return Model(
        name=first.name,
        header=first,
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        key_length=lengths.key,
        feed_forward=_feed_forward(first, architecture, layers, width),
        context=_number(first, f"{architecture}.context_length", 1, MAX_CONTEXT),
        vocabulary=check_vocabulary(first, width, tensors),
        kept=kept(first, architecture, kv_heads, width, lengths),
        parameters=sum(tensor.elements for tensor in tensors.values()),
        weights=sum(header.weights for header in headers),
        file_size=sum(header.file_size for header in headers),
        rollback=rollback(architecture, window),
        template_hash=hashlib.sha256(template.encode()).hexdigest()
        if isinstance(template, str)
        else "",
        pooling=pooling,
    )


def _architecture(header: Header, as_draft: bool, tensors: Set[str]) -> tuple[str, Pooling | None]:
    """The architecture, one that llama.cpp knows, and what the model makes of a text, if it writes none."""
    architecture, pooling = header.metadata.get("general.architecture"), None
    if not (as_draft and isinstance(architecture, str) and is_sidecar(architecture)):
        pooling = _purpose(header, as_draft)
    if not isinstance(architecture, str) or not re.fullmatch(r"[a-z0-9._-]{1,64}", architecture):
        raise UnsafeModel(f"{header.name} does not declare a model architecture.")
    if not is_known(architecture):
        raise UnsafeModel(
            f"{header.name} has the architecture '{architecture}', which this localspec's "
            "llama.cpp does not support; a newer localspec may."
        )
    if pooling == "rank" and not tensors & _CLASSIFIERS:
        # llama.cpp would give it a number of another text of the same pass.
        raise UnsafeModel(
            f"{header.name} is a reranker without the part that scores (tensor 'cls.output.weight'); it "
            "was converted incorrectly, choose another."
        )
    return architecture, pooling


def _purpose(header: Header, as_draft: bool) -> Pooling | None:
    """Only models that write text, or turn it into numbers, are of use here; drafts write."""
    stated = header.metadata.get
    architecture = str(stated("general.architecture", ""))
    pooling = stated(f"{architecture}.pooling_type", 0)
    kind, causal = (
        str(stated("general.type", "model")),
        stated(f"{architecture}.attention.causal") is not False,
    )
    number = pooling if type(pooling) is int else 0
    found = pooled(architecture, kind=kind, causal=causal, pooling=number)
    reason = no_writer(architecture, kind=kind, causal=causal, pooling=number)
    if reason and (as_draft or not found):
        raise UnsafeModel(f"{header.name} cannot generate text: {reason}.")
    return found


def _whole(header: Header, key: str, default: int) -> int:
    """A whole number from the metadata, or UnsafeModel."""
    value: Value = header.metadata.get(key, default)
    if type(value) is not int:
        raise UnsafeModel(f"{header.name}: '{key}' must be a whole number.")
    return value


def _number(header: Header, key: str, low: int, high: int, default: int | None = None) -> int:
    """A whole number within its limits; `default` None makes it obligatory."""
    if default is None and key not in header.metadata:
        raise UnsafeModel(f"{header.name} does not declare '{key}'.")
    value = _whole(header, key, default or 0)
    if not low <= value <= high:
        raise UnsafeModel(
            f"{header.name}: '{key}' is {value} and must be between {low} and {high}."
        )
    return value


def _per_layer(header: Header, key: str, layers: int, default: int) -> tuple[int, ...]:
    """One number per layer; a single one counts for all, a list must have one for each."""
    value = header.metadata.get(key, default)
    numbers: tuple[Value, ...]
    if isinstance(value, NumberArray):
        if value.count < layers:
            raise UnsafeModel(
                f"{header.name}: '{key}' has {value.count} entries for {layers} layers."
            )
        numbers = tuple(value.values()[:layers])
    else:
        numbers = (value,) * layers
    low = 0 if isinstance(value, NumberArray) else 1  # layers without attention state 0
    result: list[int] = []
    for number in numbers:
        if type(number) is not int or not low <= number <= MAX_WIDTH:
            raise UnsafeModel(
                f"{header.name}: '{key}' must be whole numbers from {low} to {MAX_WIDTH}."
            )
        result.append(number)
    return tuple(result)


def _head_length(header: Header, architecture: str, which: str, default: int) -> int:
    return _number(header, f"{architecture}.attention.{which}", 1, 1 << 16, default)


def _check_floats(header: Header, architecture: str) -> None:
    """No architecture has a use for NaN or infinity; epsilons are small and positive."""
    for key, value in header.metadata.items():
        if not key.startswith(f"{architecture}.") or type(value) is not float:
            continue
        if not math.isfinite(value):
            raise UnsafeModel(f"{header.name}: '{key}' is {value}, which is not a finite number.")
        if key.endswith("epsilon") and not 0 <= value <= 0.1:
            raise UnsafeModel(f"{header.name}: '{key}' is {value} and must be between 0 and 0.1.")


def _check_experts(header: Header, architecture: str) -> None:
    experts = _number(header, f"{architecture}.expert_count", 0, MAX_EXPERTS, 0)
    used = header.metadata.get(f"{architecture}.expert_used_count", 0)
    if type(used) is int and not (0 < used <= experts or used == experts == 0):
        raise UnsafeModel(f"{header.name} uses {used} of {experts} experts per token.")


def _check_scaling(header: Header, architecture: str) -> None:
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ROPE_SCALINGS:
        raise UnsafeModel(
            f"{header.name}: '{architecture}.rope.scaling.type' is {scaling!r} and must be one of "
            f"{', '.join(ROPE_SCALINGS)}."
        )


def _feed_forward(header: Header, architecture: str, layers: int, width: int) -> int:
    """Of the widest layer."""
    return max(_per_layer(header, f"{architecture}.feed_forward_length", layers, 4 * width))
