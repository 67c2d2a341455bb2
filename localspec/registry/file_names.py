"""What the names of model files say: the quantization, and whether a file is a sidecar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from localspec.model_traits import SIDECAR_LABELS, SidecarKind

MAX_BITS = 8  # more bits cost memory and speed, and answers are no better
# A quantization in a file name. Special recipes have the prefix "UD-" or "i1-".
_QUANT_IN_NAME = re.compile(
    r"(?:^|(?<=[-._]))((?:UD[-_]|i1[-_])?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP\d(?:_MOE)?|NVFP\d|B?F16|FP16|F32|FP32))"
    r"(?=[-._]|$)",
    re.IGNORECASE,
)
# Words by which makers of models name a recipe of their own for several quantizations, as "KQuant-17GB".
_RECIPE_IN_NAME = re.compile(
    r"[-._]((?:kquant|dynamic|\d+(?:\.\d+)?gb)(?:-(?:dynamic|\d+(?:\.\d+)?gb))?)$", re.IGNORECASE
)
# Other names of folders for quantizations.
_BITS_FOLDER = re.compile(r"(?:gguf|(?:I?Q)?\d+(?:[-_.]?bits?)?)?", re.IGNORECASE)
# Words in the names of sidecars, each with what they draft with. Models have them too: those with heads in
# their file, or that are called an assistant.
_SIDECAR_WORDS: dict[SidecarKind, re.Pattern[str]] = {
    "mtp": re.compile(r"(?:^|[-._])mtp(?:[-._]|$)|gemma.*-assistant(?:[-._]|$)", re.IGNORECASE),
    "dflash": re.compile(
        r"(?:^|[-._])dflash\d*(?:[-._]|$)|muse.*-assistant(?:[-._]|$)", re.IGNORECASE
    ),
    "dspark": re.compile(r"(?:^|[-._])dspark\d*(?:[-._]|$)", re.IGNORECASE),
    "eagle3": re.compile(r"(?:^|[-._])eagle-?3(?:[-._]|$)", re.IGNORECASE),
}
# Names of sidecars alone: llama.cpp's converter puts the kind first, and llama.cpp takes none for a model.
_SURE_SIDECAR = re.compile(
    r"^(?:mtp|dflash|dspark|eagle3)-|[-._]mtp-only(?:[-._]|$)", re.IGNORECASE
)
# Files that are no models and do not draft: image projectors, importance matrices, and adapters, whose names
# may also say that one was merged into a model.
_NOT_A_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.IGNORECASE)
_MAY_BE_NO_MODEL = re.compile(r"(?:^|[-._])(?:lora|adapter|projector)(?:[-._]|$)", re.IGNORECASE)
_PROJECTOR_NAME = re.compile(r"(?:^|[-._])mmproj(?:[-._]|$)", re.IGNORECASE)
# Pictures are read about as well with eight bits as with 16, and rounding to fewer is seen in fine print.
_PROJECTOR_QUANTS = ("Q8_0", "F16", "BF16", "F32")
# Each drafted token reads the heads once, and a round drafts about three. Q8_0 drafts as well as 16 bits do.
# Four bits cost acceptance, which pays only where Q8_0 would be a large part of what a round reads.
_SIDECAR_QUANTS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
_MAX_SIDECAR_SHARE = 10  # target size / size of a sidecar of 8 bits


class SidecarFile(NamedTuple):
    """A sidecar, and what it drafts with."""

    file: str
    kind: SidecarKind

    def __str__(self) -> str:
        return f"{self.file} ({SIDECAR_LABELS[self.kind]})"


def guess_sidecar_kind(file: str) -> SidecarKind | None:
    """Return what a file would draft with by its name or folder, or None if they name no kind of sidecar.

    Only its header shows whether it is a sidecar.
    """
    path = PurePosixPath(file)
    for name in (strip_part(path.name), path.parent.name):
        for kind, pattern in _SIDECAR_WORDS.items():
            if pattern.search(name):
                return kind
    return None


def sidecar_order(
    sidecar: SidecarFile, size: int, target: str, target_size: int
) -> tuple[int, bool, int, int, str]:
    """Return the sort key of a sidecar, the smallest for the best: by kind, name, and quantization.

    size: its bytes. target: the target's file. target_size: bytes of all its parts, which decide whether 8
    bits pay.
    """
    stem, quant = split_quant(sidecar.file)
    bits = count_bits(quant)
    if quant == "Q8_0" and size * _MAX_SIDECAR_SHARE > target_size:
        rank = len(_SIDECAR_QUANTS)
    elif quant in _SIDECAR_QUANTS:
        rank = _SIDECAR_QUANTS.index(quant)
    else:  # others of four to eight bits, unnamed ones, more bits, and fewer than four
        places = (4 <= bits <= MAX_BITS, bits == 0, bits > MAX_BITS, True)
        rank = len(_SIDECAR_QUANTS) + 1 + places.index(True)
    kind = list(_SIDECAR_WORDS).index(sidecar.kind)
    return kind, split_quant(target)[0] not in stem, rank, len(sidecar.file), sidecar.file


def is_projector(file: str) -> bool:
    """Return whether a file looks like a projector, by which its target reads pictures."""
    return bool(_PROJECTOR_NAME.search(strip_part(PurePosixPath(file).name)))


def rank_projectors(sizes: Mapping[str, int], target: str) -> tuple[str, ...]:
    """Return the files that look like projectors, the best first: by folder and name, quantization, and size.

    sizes: bytes of each file. target: the target's file.
    """
    stem, folder = split_quant(target)[0], PurePosixPath(target).parent

    def order(file: str) -> tuple[bool, bool, int, int, str]:
        places = {quant: place for place, quant in enumerate(_PROJECTOR_QUANTS)}
        place = places.get(split_quant(file)[1], len(places))
        is_elsewhere = PurePosixPath(file).parent != folder
        return is_elsewhere, stem not in file.lower(), place, sizes[file], file

    return tuple(sorted(filter(is_projector, sizes), key=order))


def is_no_model(file: str) -> bool:
    """Return whether a file is no model, by a name that leaves no doubt."""
    name = strip_part(PurePosixPath(file).name)
    return bool(_NOT_A_MODEL.search(name) or _SURE_SIDECAR.search(name))


def may_be_no_model(file: str) -> bool:
    """Return whether a file may be a sidecar or adapter by its name, so that its header must be read."""
    name = strip_part(PurePosixPath(file).name)
    return bool(
        guess_sidecar_kind(file) or _NOT_A_MODEL.search(name) or _MAY_BE_NO_MODEL.search(name)
    )


def strip_part(name: str) -> str:
    """Return a file name without its ending and part number."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE)


class ModelName(NamedTuple):
    """The parts of a model's file name: its own, in lower case, the maker's recipe, and the quantization."""

    stem: str
    recipe: str
    quant: str


def split_name(file: str) -> ModelName:
    """Split a file name into its parts. The recipe and the quantization are empty if the name states none.

    If the file name states no quantization, that of the folder is used.
    """
    path = PurePosixPath(file)
    stem, quant, recipe = strip_part(path.name), "", ""
    if matches := list(_QUANT_IN_NAME.finditer(stem)):
        match = matches[-1]
        stem, quant = f"{stem[: match.start()].rstrip('-._')}{stem[match.end() :]}", match[1]
    elif folder := _QUANT_IN_NAME.fullmatch(path.parent.name):
        quant = folder[1]
    if found := _RECIPE_IN_NAME.search(stem):
        stem, recipe = stem[: found.start()], found[1]
    quant = f"i1-{quant[3:].upper()}" if quant[:2] == "i1" else quant.upper()
    return ModelName(stem.lower(), recipe, quant)


def split_quant(file: str) -> tuple[str, str]:
    """Split a file name into its lower-case stem and its quantization, or else the maker's recipe for it."""
    stem, recipe, quant = split_name(file)
    return stem, quant or recipe.upper()


def find_model_folder(file: str) -> str:
    """Return the folder of a file, in lower case and without what only repeats its quantization or name.

    Files of one name in two such folders are two models, as in `base/` and `instruct/`.
    """
    path = PurePosixPath(file)
    name = strip_part(path.name)
    folders = [_QUANT_IN_NAME.sub("", part).strip("-._") for part in path.parts[:-1]]
    return "/".join(
        folder.lower()
        for folder in folders
        if not (_BITS_FOLDER.fullmatch(folder) or contains_word(name, folder))
    )


def contains_word(text: str, word: str) -> bool:
    """Return whether a text has a word, or several, between others; capitals do not count."""
    pattern = rf"(?<![^\W_]){re.escape(word)}(?![^\W_])"
    return bool(re.search(pattern, text, re.IGNORECASE))


def count_bits(quant: str) -> int:
    """Return the bits of a weight, according to a quantization's name; 0 if it does not state them."""
    if not _QUANT_IN_NAME.fullmatch(quant):
        return 0
    return int(re.findall(r"\d+", quant.removeprefix("i1-"))[0])
