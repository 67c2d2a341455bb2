"""Any repository of the hub: what a person wrote for it, and which models its files are.

A reference is OWNER/REPO, with `:` and a quantization or a file's name behind it if one is meant;
the hub's own addresses of repositories and files are understood too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

from localspec.errors import BadGguf, InvalidRequest, NotOnHub
from localspec.registry.catalogue import FILE, REPO, REVISION
from localspec.registry.header.fit import Fits
from localspec.registry.header.model import shard_names
from localspec.registry.hub.hub import Listed

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_KINDS = ("datasets", "spaces", "api", "collections", "papers")
_TYPED = re.compile(r"[\w.-]{1,200}", re.ASCII)
# The last such word of a file's name. Makers put "UD-" or "i1-" before those of special recipes.
_QUANT = re.compile(
    r"(?:^|(?<=[-._]))((?:UD[-_]|i1[-_])?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP\d(?:_MOE)?|NVFP\d|B?F16|FP16|F32|FP32))"
    r"(?=[-._]|$)",
    re.IGNORECASE,
)
# Parts and helpers of models: images, importance matrices, adapters, heads that draft.
_NO_TARGET = re.compile(
    r"^mtp[-._]|(?:^|[-._])(?:mmproj|imatrix|lora|adapter|projector|eagle3|dflash\d*)(?:[-._]|$)",
    re.IGNORECASE,
)
_HEADS = re.compile(r"^mtp[-._]", re.IGNORECASE)
# Of each number of bits the mixture that most people run, and others are measured against.
_USUAL = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
_MOST_BITS = 8  # more of them cost memory and speed and answer no better
_BITS_BESIDE_GPU = 4  # where main memory has to help, speed is what is short
_LONGEST_NAME = 64
_SHOWN = 12  # quantizations in one sentence


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A repository, and what of it: `quant` or `file` (a path or its last part), else neither."""

    repo: str
    quant: str = ""
    file: str = ""
    revision: str = "main"

    def __str__(self) -> str:
        which = self.file or self.quant
        revision = f"@{self.revision}" if self.revision != "main" else ""
        return f"{self.repo}{':' if which else ''}{which}{revision}"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A quantization that a repository offers. Size in bytes; `taken`: this one is pulled."""

    quant: str
    size: int
    fits: Fits
    taken: bool = False


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a repository: its first file, in how many parts, bytes in all.

    `quant` is empty where the name states none; `stem` is the name without it, in small letters.
    """

    file: str
    parts: int
    size: int
    stem: str
    quant: str

    @property
    def label(self) -> str:
        return self.quant or PurePosixPath(self.file).name

    @property
    def bits(self) -> int:
        """Of a weight, by the quantization's name; 0 where nothing says it."""
        found = re.search(r"\d+", self.quant.removeprefix("i1-"))
        return int(found[0]) if found else 0


def reference(text: str, endpoint: str | None = None) -> Reference | None:
    """What a person wrote for a repository; None when it is a plain name, as the catalogue has them.

    `endpoint`: the address of the hub in use, whose addresses are understood as well.

    Raises:
        InvalidRequest: it looks like a reference and is none, or leads to another site.
    """
    written = text.strip()
    rest = re.sub(r"^hf:(//)?", "", written, flags=re.IGNORECASE)
    query = ""
    if re.match(r"https?://", rest, re.IGNORECASE):
        address = _address(rest)
        if address is None or address.netloc.rpartition("@")[2].lower() not in _hosts(endpoint):
            raise InvalidRequest(
                f"'{text[:200]}' is not a URL of the hub; use OWNER/REPO[:QUANT].",
                param="name",
            )
        rest, query = unquote(address.path).strip("/"), address.query
    else:
        first, slash, after = rest.partition("/")
        if first.lower() in _HOSTS and slash:
            rest = unquote(after.partition("#")[0].partition("?")[0])
    if "/" not in rest and rest == written:
        return None
    found = _parsed(rest.rstrip("/"), parse_qs(query).get("show_file_info", [""])[0])
    if found is None:
        raise InvalidRequest(
            f"'{text[:200]}' is not a repository; use OWNER/REPO[:QUANT] or "
            "OWNER/REPO:FILE.gguf (for a file on this disk: localspec add).",
            param="name",
        )
    return found


def _hosts(endpoint: str | None) -> tuple[str, ...]:
    address = _address(endpoint) if endpoint else None
    return (*_HOSTS, address.netloc.rpartition("@")[2].lower()) if address else _HOSTS


def _address(text: str) -> SplitResult | None:
    try:
        return urlsplit(text)
    except ValueError:  # of brackets that are no IPv6 address
        return None


def _parsed(path: str, file: str) -> Reference | None:
    """OWNER/REPO[:WHICH], OWNER/REPO/FILE.gguf or OWNER/REPO/blob/REVISION/FILE.gguf."""
    path, _, which = path.partition(":")
    parts = path.split("/")
    repo, rest, revision = "/".join(parts[:2]), parts[2:], "main"
    if len(parts) < 2 or parts[0] in _OTHER_KINDS or not REPO.fullmatch(repo):
        return None
    if rest and rest[0] in ("blob", "resolve", "raw", "tree"):
        count = 3 if rest[1:2] == ["refs"] else 1
        revision, rest = "/".join(rest[1 : 1 + count]), rest[1 + count :]
        if not REVISION.fullmatch(revision):
            return None
    if rest and rest[-1].lower().endswith(".gguf"):
        file = "/".join(rest)
    elif rest and revision == "main":
        return None
    if which.lower().endswith(".gguf"):
        file, which = which, ""
    if which.lower() == "latest":  # as others write "whichever"
        which = ""
    if not rest and parts[1].lower().endswith(".gguf"):
        return None  # a file in a folder here
    if (file and not FILE.fullmatch(file)) or (which and not _TYPED.fullmatch(which)):
        return None
    return Reference(repo=repo, quant="" if file else which, file=file, revision=revision)


def pair_name(wanted: Reference) -> str:
    """The pair that a pull of this makes: owner, repository and what was named of it, always the same.

    Names that are too long are cut, and end in some digits of the whole one's hash.
    """
    owner, _, repo = wanted.repo.lower().partition("/")
    repo = re.sub(r"[-._]gguf$", "", repo)
    which = wanted.quant
    if wanted.file:
        repo, which = _stem(PurePosixPath(wanted.file).name).lower(), ""
    revision = "" if wanted.revision == "main" else wanted.revision[:12]
    name = "-".join(part for part in (owner, repo, which.lower(), revision) if part)
    name = re.sub(r"[^a-z0-9._-]+", "-", name).strip("._-")
    if len(name) > _LONGEST_NAME:
        digits = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: _LONGEST_NAME - 9].rstrip('._-')}-{digits}"
    return name


def model_name(repo: str) -> str:
    """What a repository or file calls its model: without owner, quantization and ending, so that the
    same one is known elsewhere.
    """
    name = _split(repo.rpartition("/")[2])[0]
    name = re.sub(r"[-._](gguf|mtp|qat)(?=[-._]|$)", "", name)
    if re.match(r"[a-z-]+_[a-z]", name):  # another maker's, by whom it was packed
        name = name.partition("_")[2]
    return name.removeprefix("meta-")


def choices(files: Iterable[Listed], *, everything: bool = False) -> tuple[Choice, ...]:
    """The models of a repository that could be a target or a draft, the largest first.

    `everything`: also what by its name is something else; its header says what it is. The parts of
    a split file are one, and left out while one is missing. Of two files of one name and
    quantization the one in fewer parts counts.
    """
    sizes = {each.file: each.size for each in files if FILE.fullmatch(each.file)}
    found: dict[tuple[str, str], Choice] = {}
    for file in sorted(sizes):
        if _NO_TARGET.search(PurePosixPath(file).name) and not everything:
            continue
        try:
            parts = parts_of(file)
        except BadGguf:
            continue
        if parts[0] != file or not all(part in sizes for part in parts):
            continue
        stem, quant = _split(file)
        size = sum(sizes[part] for part in parts)
        choice = Choice(file=file, parts=len(parts), size=size, stem=stem, quant=quant)
        other = found.get((stem, quant))
        if other is None or choice.parts < other.parts:
            found[stem, quant] = choice
    return tuple(sorted(found.values(), key=lambda each: (-each.size, each.file)))


def parts_of(file: str) -> list[str]:
    """All parts of a file on the hub, in its folder there.

    Raises:
        BadGguf: the numbers in its name make no sense.
    """
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in shard_names(name)]


def heads(files: Iterable[Listed], target: str) -> str:
    """The file of heads beside a target (mtp-…), the one whose name is most like it; "" without."""
    stem = _split(target)[0]
    names = [each.file for each in files if _HEADS.match(PurePosixPath(each.file).name)]
    names = [name for name in names if FILE.fullmatch(name)]
    alike = [name for name in names if stem in PurePosixPath(name).name.lower()]
    return min(alike or names, key=lambda name: (len(name), name), default="")


def _stem(name: str) -> str:
    """A file's name without its ending and the number of its part."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE)


def _split(file: str) -> tuple[str, str]:
    """Name (small letters) and quantization of a file; the folder's name may state it instead."""
    path = PurePosixPath(file)
    stem = _stem(path.name)
    places = list(_QUANT.finditer(stem))
    if places:
        place = places[-1]
        rest = f"{stem[: place.start()].rstrip('-._')}{stem[place.end() :]}"
        return rest.lower(), _spelled(place[1])
    folder = _QUANT.fullmatch(path.parent.name)
    return stem.lower(), _spelled(folder[1]) if folder else ""


def _spelled(quant: str) -> str:
    return f"i1-{quant[3:].upper()}" if quant[:2] == "i1" else quant.upper()


def matching(wanted: Reference, offered: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those of a repository's models that a reference may mean.

    Where it says nothing: all quantizations of one model.

    Raises:
        NotOnHub: there is no such one. InvalidRequest: which of several models is not said.
    """
    if not offered:
        raise NotOnHub(
            f"{wanted.repo} contains no GGUF file of a model that generates text; "
            "repositories that do are often named …-GGUF."
        )
    found = _named(wanted, offered)
    if not found:
        labels = list(dict.fromkeys(each.label for each in offered))
        raise NotOnHub(
            f"{wanted.repo} has no '{wanted.file or wanted.quant}'; it has: "
            f"{_enumerated(labels)}. Name one after a colon: {wanted.repo}:{labels[-1]}"
        )
    stems = list(dict.fromkeys(each.stem for each in found))
    own = [stem for stem in stems if model_name(stem) == model_name(wanted.repo)]
    if len(stems) > 1 and len(own) != 1:
        files = [each.file for each in found]
        raise InvalidRequest(
            f"{wanted.repo} contains several models; name a file of one: "
            f"{_enumerated(files)}. For example: {wanted.repo}:{files[0]}",
            param="name",
        )
    return tuple(each for each in found if each.stem == (own or stems)[0])


def _named(wanted: Reference, offered: Sequence[Choice]) -> list[Choice]:
    file, quant = wanted.file.lower(), wanted.quant.lower()
    if file:
        exact = [each for each in offered if each.file.lower() == file]
        return exact or [
            each
            for each in offered
            if PurePosixPath(each.file).name.lower() == PurePosixPath(file).name
        ]
    if not quant:
        return list(offered)
    for same in (
        lambda each: each.quant.lower() == quant,
        lambda each: _stem(PurePosixPath(each.file).name).lower() == quant,
        lambda each: each.quant.lower().partition("-")[2] == quant,  # of a special recipe
    ):
        found = [each for each in offered if same(each)]
        if found:
            return found
    return []


def best(offered: Sequence[Choice], fits: Callable[[Choice], Fits]) -> Choice:
    """Which of a model's quantizations to take where none is named.

    Of those that fit into memory (the GPU's, where there is one) with a usual context those of the
    most bits, up to eight: more answer no better. Among them the one that most people run (Q8_0,
    Q6_K, Q5_K_M, Q4_K_M, …), else the largest. Where main memory has to help the GPU's, four bits
    are the most, for speed. Where nothing fits, the smallest: the pull then says what is lacking.
    """
    packed = [each for each in offered if each.bits <= _MOST_BITS] or list(offered)
    for room, most in (("yes", _MOST_BITS), ("partly", _BITS_BESIDE_GPU)):
        here = [each for each in packed if fits(each) == room]
        here = [each for each in here if each.bits <= most] or here[-1:]
        if here:
            bits = max(each.bits for each in here)
            same = [each for each in here if each.bits == bits]
            return max(same, key=lambda each: (each.quant in _USUAL, each.size))
    return min(packed, key=lambda each: each.size)


def _enumerated(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
