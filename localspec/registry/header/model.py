"""The numbers of a model according to its header, and the checks that protect llama.cpp.

llama.cpp aborts the process on some values (a layer count of 1000, a negative epsilon, zero heads). It
silently accepts others that make the model useless (an end token that does not exist, zeros where a download
stopped). All of these are rejected here with one sentence, before a worker sees the file.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from localspec import model_traits
from localspec.errors import BadGguf, UnsafeModel
from localspec.model_traits import (
    HEADS_ONLY_REASON,
    SidecarKind,
    explain_no_text,
    explain_unusable_heads,
    has_no_cache,
    infer_pooling,
    needs_whole_text,
    reads_target_cache,
    sidecar_kind,
)
from localspec.protocol.pairs import TemplateView
from localspec.protocol.settings import Pooling
from localspec.registry.header.architectures import (
    KNOWN,
    KvLengths,
    KvSize,
    Rollback,
    kv_size,
    rollback_kind,
)
from localspec.registry.header.gguf import (
    TENSOR_TYPES,
    FileSource,
    Header,
    NumberArray,
    Source,
    StringArray,
    Tensor,
    Value,
    read_header,
)
from localspec.registry.header.vocabulary import check_vocabulary
from localspec.registry.header.weights import check_tensors

# The tokens for filling in the middle, all three of which are needed: the metadata keys that name them, and
# the texts by which llama.cpp finds them without a key (llama_vocab::impl::load).
_FIM_TOKENS = (
    (
        ("fim_pre", "prefix"),
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
         "<|code_prefix|>", "<|prefix|>"),
    ),
    (
        ("fim_suf", "suffix"),
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
         "<|code_suffix|>", "<|suffix|>"),
    ),
    (
        ("fim_mid", "middle"),
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
         "<|code_middle|>", "<|middle|>"),
    ),
)  # fmt: skip
_SYSTEM_REFUSAL = re.compile(r"[Ss]ystem (role|message)s? (is |are )?not supported")
_ROLE_OUTPUT = re.compile(r"\{\{[^}]*\brole\b")


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a model that are not numbers.

    types: bytes of weights by tensor type, the largest first. licence: as stated, or "". heads: the number
    of layers that predict further tokens (MTP).
    """

    quantization: str
    types: dict[str, int]
    licence: str
    template: TemplateView | None
    fim: bool
    heads: int


def read_traits(headers: Iterable[Header]) -> Traits:
    """Return the properties of a model from the headers of its files, the first of which has the metadata."""
    header, *others = headers
    types: Counter[str] = Counter()
    for tensor in (tensor for part in (header, *others) for tensor in part.tensors):
        types[TENSOR_TYPES[tensor.kind][0]] += tensor.size
    by_size = dict(types.most_common())
    read = header.metadata.get
    file_type, text = read("general.file_type"), read("tokenizer.chat_template")
    heads = read(f"{read('general.architecture')}.nextn_predict_layers", 0)
    stated = model_traits.quantization_name(file_type) if type(file_type) is int else ""
    # As in "apache-2.0, Apache License 2.0, https://…".
    licence = map(read, ("general.license", "general.license.name", "general.license.link"))
    return Traits(
        quantization=stated or next(iter(by_size), ""),
        types=by_size,
        licence=", ".join(
            dict.fromkeys(name for name in licence if isinstance(name, str) and name)
        ),
        template=_describe_template(text) if isinstance(text, str) and text else None,
        fim=_has_fim_tokens(header),
        heads=heads if type(heads) is int else 0,
    )


def _describe_template(text: str) -> TemplateView:
    supports_system = not _SYSTEM_REFUSAL.search(text) and (
        "system" in text or bool(_ROLE_OUTPUT.search(text))
    )
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return TemplateView(sha256, len(text), "tools" in text, supports_system, text)


def _has_fim_tokens(header: Header) -> bool:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        return False

    def has(text: str) -> bool:
        data = text.encode()
        return struct.pack("<Q", len(data)) + data in tokens.raw

    return all(
        any(f"tokenizer.ggml.{key}_token_id" in header.metadata for key in keys)
        or any(map(has, texts))
        for keys, texts in _FIM_TOKENS
    )


MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_WIDTH = 1 << 20
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # LLAMA_ROPE_SCALING_TYPES
MAX_CONTEXT = 1 << 27
MAX_SHARDS = 999
_EAGLE_LAYERS = 3  # that a draft of EAGLE-3 reads
MAX_BLOCK = 64  # rows of a block of DFlash or DSpark
_CLASSIFIER_TENSORS = {"cls.weight", "cls.output.weight"}
_SHARD_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model: the header of its first file with the tensors of all, and the numbers that the registry needs.

    kv_heads: one number per layer. Sizes are in bytes, and `weights` counts all shards. template_hash:
    SHA-256 of the chat template, empty without one. pooling: set for a model that turns texts into numbers,
    None if it writes text. sidecar: what the file drafts with if it drafts for one target and writes no text.
    head_weights: the part of `weights` that is MTP heads behind the layers of the model.
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
    kept: KvSize
    parameters: int
    weights: int
    file_size: int
    rollback: Rollback
    template_hash: str
    pooling: Pooling | None = None
    sidecar: SidecarKind | None = None
    head_weights: int = 0

    @property
    def needs_whole_text(self) -> bool:
        """For a model with pooling, whether one pass must contain the whole text."""
        causal = self.header.metadata.get(f"{self.architecture}.attention.causal") is not False
        return needs_whole_text(self.architecture, causal=causal, pooling=self.pooling or "mean")

    @property
    def has_no_cache(self) -> bool:
        """Whether the model reads a text in one pass and keeps no cache of it."""
        return has_no_cache(self.architecture)

    @property
    def reads_target_cache(self) -> bool:
        """Whether the file holds MTP heads that have no cache and read that of their target."""
        return reads_target_cache(self.architecture)

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The layers of its target that a sidecar reads."""
        value = self.header.metadata.get(f"{self.architecture}.target_layers")
        return tuple(map(int, value.values())) if isinstance(value, NumberArray) else ()

    @property
    def trunk_layers(self) -> int:
        """The number of layers without MTP heads; for heads in a file of their own, those of their target."""
        return self.layers - self._declared_heads

    @property
    def unusable_heads_reason(self) -> str:
        """Why the MTP heads that the file declares cannot draft, as a clause, or an empty text."""
        if not self._declared_heads:
            return ""
        # Whether positions have several parts, by the rule of llama.cpp (`llama_hparams::use_mrope`).
        sections = self.header.metadata.get(f"{self.architecture}.rope.dimension_sections")
        mrope = isinstance(sections, NumberArray) and all(
            part > 0 for part in sections.values()[:2]
        )
        return explain_unusable_heads(self.architecture, self._declared_heads, mrope=mrope)

    @property
    def block_drafts(self) -> int:
        """The most tokens that a block sidecar drafts in one pass; 0 for any other file."""
        if self.sidecar not in ("dflash", "dspark"):
            return 0
        size = self.header.metadata.get("dflash.block_size")
        return (size if type(size) is int else MAX_BLOCK) - (self.sidecar == "dflash")

    @property
    def drafting_heads(self) -> int:
        """The number of MTP heads in the model's own file that draft for it."""
        return 0 if self.unusable_heads_reason else self._declared_heads

    @property
    def _declared_heads(self) -> int:
        count = self.header.metadata.get(f"{self.architecture}.nextn_predict_layers")
        return count if type(count) is int else 0


def shard_names(filename: str) -> list[str]:
    """Return the names of all files of a sharded model, given any of them.

    A model in one file is returned as a list with that name.

    Raises:
        BadGguf: the part numbers in the name are invalid.
    """
    match = _SHARD_SUFFIX.search(filename)
    if not match:
        return [filename]
    number, count = int(match[1]), int(match[2])
    if not 1 <= number <= count <= MAX_SHARDS:
        raise BadGguf(f"{filename} is not a valid name for a part of a model.")
    stem = filename[: match.start()]
    return [f"{stem}-{index:05d}-of-{count:05d}{match[3]}" for index in range(1, count + 1)]


def shard_paths(path: Path) -> list[Path]:
    """Return the files of a local model, which are all in one folder. Raises BadGguf, as `shard_names`."""
    return [path.with_name(name) for name in shard_names(path.name)]


def read_model(sources: Sequence[Source], *, as_draft: bool | None = False) -> ModelInfo:
    """Read and check the headers of a model's files: one, or all shards in order.

    as_draft: a sidecar is allowed too. None: the file may be a target or a draft.

    Raises:
        BadGguf, UnsafeModel: one sentence that names the file and what is wrong.
    """
    headers = [read_header(source) for source in sources]
    check_shards(headers)
    return describe_model(headers, as_draft=as_draft)


def read_local_model(path: Path, *, as_draft: bool | None = False) -> ModelInfo:
    """Read and check the model at `path`; its shards must be in the same folder. as_draft: as `read_model`.

    Raises:
        BadGguf, UnsafeModel: one sentence that names the file and what is wrong.
    """
    return read_model([FileSource(part) for part in shard_paths(path)], as_draft=as_draft)


def check_shards(headers: Sequence[Header]) -> None:
    """Check that these files, in this order, form one model.

    Raises:
        BadGguf: they do not.
        UnsafeModel: the numbers that they state about it are invalid.
    """
    first = headers[0]
    stated = _read_integer(first, "split.count", 0)
    if (stated or 1) != len(headers):
        raise BadGguf(
            f"{first.name} is one of {stated or 1} parts, but {len(headers)} were found; keep "
            "the file name it has on the hub, with its -00001-of-… ending."
        )
    for index, header in enumerate(headers):
        if stated and _read_integer(header, "split.no", -1) != index:
            raise BadGguf(f"{header.name} is not part {index + 1} of {stated}.")
    total = _read_integer(first, "split.tensors.count", 0)
    if stated and total != sum(len(header.tensors) for header in headers):
        raise BadGguf(f"The parts of {first.name} do not contain the {total} tensors it declares.")


def describe_model(headers: Sequence[Header], *, as_draft: bool | None = False) -> ModelInfo:
    """Return the numbers of a model after checking each of them. as_draft: as `read_model`.

    Raises:
        BadGguf, UnsafeModel: one sentence that names the file and what is wrong.
    """
    first = headers[0]
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    architecture, pooling, sidecar = _check_architecture(first, as_draft, tensors.keys())
    _check_floats(first, architecture)
    layers = _read_number(first, f"{architecture}.block_count", 1, MAX_LAYERS)
    width = _read_number(first, f"{architecture}.embedding_length", 1, MAX_WIDTH)
    head_weights = _check_layers(first, architecture, layers, sidecar, tensors)
    heads = max(_read_per_layer(first, f"{architecture}.attention.head_count", layers, 1))
    kv_heads = _read_per_layer(first, f"{architecture}.attention.head_count_kv", layers, heads)
    _check_experts(first, architecture)
    _read_number(first, f"{architecture}.full_attention_interval", 1, MAX_LAYERS, 1)
    window = _read_number(first, f"{architecture}.attention.sliding_window", 0, MAX_CONTEXT, 0)
    head_width = max(1, width // max(1, heads))
    length_keys = (f"{architecture}.attention.{part}_length" for part in ("key", "value"))
    lengths = KvLengths(*(_read_number(first, key, 1, 1 << 16, head_width) for key in length_keys))
    _check_rope(first, architecture, lengths.key, 2 if sidecar else 0)
    kept = kv_size(first, architecture, kv_heads, width, lengths)
    template = first.metadata.get("tokenizer.chat_template")
    text = template.encode() if isinstance(template, str) else None
    return ModelInfo(
        name=first.name,
        header=replace(first, tensors=tuple(tensors.values())),
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        key_length=lengths.key,
        feed_forward=max(
            _read_per_layer(first, f"{architecture}.feed_forward_length", layers, 4 * width)
        ),
        context=_read_number(first, f"{architecture}.context_length", 1, MAX_CONTEXT),
        vocabulary=check_vocabulary(first, width, tensors),
        kept=kept.of_heads() if sidecar == "mtp" and not reads_target_cache(architecture) else kept,
        parameters=sum(tensor.elements for tensor in tensors.values()),
        weights=sum(header.weights for header in headers),
        file_size=sum(header.file_size for header in headers),
        rollback="full" if sidecar else rollback_kind(architecture, window),
        template_hash="" if text is None else hashlib.sha256(text).hexdigest(),
        pooling=pooling,
        sidecar=sidecar,
        head_weights=head_weights,
    )


def _check_layers(
    header: Header,
    architecture: str,
    layers: int,
    sidecar: SidecarKind | None,
    tensors: Mapping[str, Tensor],
) -> int:
    """Check the tensors of the layers, and return the bytes of the last ones that are MTP heads."""
    all_are_heads = reads_target_cache(architecture)
    max_heads = layers if all_are_heads else layers - 1
    heads = _read_number(header, f"{architecture}.nextn_predict_layers", 0, max_heads, 0)
    trunk = 0 if all_are_heads else layers - heads
    required = range(trunk, layers) if sidecar == "mtp" else range(trunk)
    check_tensors(header.name, architecture, layers, required, tensors)
    if sidecar and sidecar != "mtp":
        _check_layer_reader(header, sidecar, tensors)
    prefixes = tuple(f"blk.{layer}." for layer in range(layers - heads, layers))
    return sum(tensor.size for name, tensor in tensors.items() if name.startswith(prefixes))


def _check_architecture(
    header: Header, as_draft: bool | None, tensors: Set[str]
) -> tuple[str, Pooling | None, SidecarKind | None]:
    """Return the architecture, the pooling of a model that turns texts into numbers, and a sidecar's kind."""
    read = header.metadata.get
    architecture, pooling = read("general.architecture"), None
    sidecar = sidecar_kind(architecture, tensors) if isinstance(architecture, str) else None
    kind, stated = str(read("general.type", "model")), read(f"{architecture}.pooling_type", 0)
    causal = read(f"{architecture}.attention.causal") is not False
    number = stated if type(stated) is int else 0
    prefix = str(read("general.architecture", ""))
    if sidecar:
        reason = explain_no_text(prefix) or HEADS_ONLY_REASON
        is_refused = as_draft is False
    else:
        pooling = infer_pooling(prefix, kind=kind, causal=causal, pooling=number)
        reason = explain_no_text(prefix, kind=kind, causal=causal, pooling=number)
        is_refused = bool(reason and (as_draft or not pooling))
    if is_refused:
        raise UnsafeModel(f"{header.name} cannot generate text: {reason}.")
    if not isinstance(architecture, str) or not re.fullmatch(r"[a-z0-9._-]{1,64}", architecture):
        raise UnsafeModel(f"{header.name} does not declare a model architecture.")
    if architecture not in KNOWN:
        raise UnsafeModel(
            f"{header.name} has the architecture '{architecture}', which this localspec's "
            "llama.cpp does not support; a newer localspec may."
        )
    if pooling == "rank" and not tensors & _CLASSIFIER_TENSORS:
        # llama.cpp would return a score that belongs to another text of the same pass.
        raise UnsafeModel(
            f"{header.name} is a reranker without the part that scores (tensor 'cls.output.weight'); it "
            "was converted incorrectly, choose another."
        )
    return architecture, pooling, sidecar


def _check_layer_reader(
    header: Header, sidecar: SidecarKind, tensors: Mapping[str, Tensor]
) -> None:
    """Check what llama.cpp's graphs of EAGLE-3 and DFlash expect, because they end the process otherwise."""
    name, architecture = header.name, "eagle3" if sidecar == "eagle3" else "dflash"
    layers = header.metadata.get(f"{architecture}.target_layers")
    count = layers.count if isinstance(layers, NumberArray) else 0
    if not 0 < count <= MAX_LAYERS or (sidecar == "eagle3" and count != _EAGLE_LAYERS):
        expected = f"{_EAGLE_LAYERS} layers" if sidecar == "eagle3" else "layers"
        raise UnsafeModel(
            f"{name} must name {expected} of its target in '{architecture}.target_layers'."
        )
    own_width = _read_number(header, f"{architecture}.embedding_length", 1, MAX_WIDTH)
    width = own_width
    if sidecar == "eagle3":
        width = _read_number(header, "eagle3.target_hidden_size", 1, MAX_WIDTH)
        if _read_number(header, "eagle3.block_count", 1, MAX_LAYERS) != 1:
            raise UnsafeModel(f"{name}: a draft of EAGLE-3 has one layer.")
    else:
        _check_block(header, tensors)
    fusion, mapping = tensors.get("fc.weight"), tensors.get("d2t")
    if fusion is None or fusion.shape != (count * width, own_width):
        raise UnsafeModel(
            f"{name}: the tensor 'fc.weight' does not make states of {own_width} numbers of {count} times "
            f"{width}."
        )
    if mapping is not None:
        output = tensors.get("output.weight")
        kind = TENSOR_TYPES[mapping.kind][0]
        if kind != "I64" or len(mapping.shape) != 1 or not output:
            raise UnsafeModel(f"{name}: the tensor 'd2t' is not a list of token ids.")
        if output.shape != (own_width, mapping.shape[0]):
            raise UnsafeModel(
                f"{name}: the tensor 'd2t' has {mapping.shape[0]} entries, and the output matrix the shape "
                f"{output.shape}."
            )


def _check_block(header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Check what a block sidecar states about its blocks."""
    name, mask = header.name, "tokenizer.ggml.mask_token_id"
    if "dflash.hyper_connection.count" in header.metadata:
        raise UnsafeModel(
            f"{name} is a draft for DeepSeek V4, which was not tested and is not used."
        )
    if mask not in header.metadata:
        raise UnsafeModel(
            f"{name} does not declare '{mask}', the token that its blocks are made of."
        )
    has_markov = "markov_w1.weight" in tensors
    _read_number(header, "dflash.block_size", 2, MAX_BLOCK, None if has_markov else MAX_BLOCK)
    if "selector_hidden.weight" in tensors:
        for key in ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"):
            _read_number(header, f"dflash.{key}", 1, MAX_WIDTH)


def _read_integer(header: Header, key: str, default: int) -> int:
    value: Value = header.metadata.get(key, default)
    if type(value) is not int:
        raise UnsafeModel(f"{header.name}: '{key}' must be a whole number.")
    return value


def _read_number(header: Header, key: str, low: int, high: int, default: int | None = None) -> int:
    """Return an integer within its limits. Without a default it is required."""
    if default is None and key not in header.metadata:
        raise UnsafeModel(f"{header.name} does not declare '{key}'.")
    value = _read_integer(header, key, default or 0)
    if not low <= value <= high:
        raise UnsafeModel(
            f"{header.name}: '{key}' is {value} and must be between {low} and {high}."
        )
    return value


def _read_per_layer(header: Header, key: str, layers: int, default: int) -> tuple[int, ...]:
    """Return one number per layer. A single number in the file applies to all layers."""
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
    low = 0 if isinstance(value, NumberArray) else 1  # in a list, layers without attention have 0
    result: list[int] = []
    for number in numbers:
        if type(number) is not int or not low <= number <= MAX_WIDTH:
            raise UnsafeModel(
                f"{header.name}: '{key}' must be whole numbers from {low} to {MAX_WIDTH}."
            )
        result.append(number)
    return tuple(result)


def _check_floats(header: Header, architecture: str) -> None:
    """Check that all floats of the architecture are finite, and that epsilons are small and not negative."""
    for key, value in header.metadata.items():
        if not key.startswith(f"{architecture}.") or type(value) is not float:
            continue
        if not math.isfinite(value):
            raise UnsafeModel(f"{header.name}: '{key}' is {value}, which is not a finite number.")
        if key.endswith("epsilon") and not 0 <= value <= 0.1:
            raise UnsafeModel(f"{header.name}: '{key}' is {value} and must be between 0 and 0.1.")


def _check_experts(header: Header, architecture: str) -> None:
    experts = _read_number(header, f"{architecture}.expert_count", 0, MAX_EXPERTS, 0)
    used = header.metadata.get(f"{architecture}.expert_used_count", 0)
    if type(used) is int and not (0 < used <= experts or used == experts == 0):
        raise UnsafeModel(f"{header.name} uses {used} of {experts} experts per token.")


def _check_rope(header: Header, architecture: str, key_length: int, fewest: int) -> None:
    """Check the scaling, and that an even number of a key's numbers is rotated, at least `fewest`."""
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ROPE_SCALINGS:
        raise UnsafeModel(
            f"{header.name}: '{architecture}.rope.scaling.type' is {scaling!r} and must be one of "
            f"{', '.join(ROPE_SCALINGS)}."
        )
    for part in ("", "_swa"):
        key = f"{architecture}.rope.dimension_count{part}"
        if (
            type(header.metadata.get(key)) is int
            and _read_number(header, key, fewest, key_length) % 2
        ):
            raise UnsafeModel(f"{header.name}: '{key}' must be an even number.")
    sections = header.metadata.get(f"{architecture}.rope.dimension_sections")
    if isinstance(sections, NumberArray):
        parts = sections.values()
        if min(parts, default=0) < 0 or sum(parts) > key_length:
            raise UnsafeModel(
                f"{header.name}: '{architecture}.rope.dimension_sections' does not divide a key's numbers."
            )
