"""Parse references to repositories of the hub, and list the models in a repository.

A reference is OWNER/REPO, optionally followed by `:` and a quantization or file name. The hub's own URLs of
repositories and files are understood too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

from localspec.errors import BadGguf, InvalidRequest, NotOnHub
from localspec.registry.catalogue import FILE_PATTERN, REPO_PATTERN, REVISION_PATTERN
from localspec.registry.file_names import (
    MAX_BITS,
    count_bits,
    is_no_model,
    split_quant,
    strip_part,
)
from localspec.registry.header.fit import Fits
from localspec.registry.header.model import shard_names
from localspec.registry.hub.hub import ListedFile

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_PATHS = ("datasets", "spaces", "api", "collections", "papers")
_SUFFIX = re.compile(r"[\w.-]{1,200}", re.ASCII)
# The most common quantization for each number of bits.
_COMMON_QUANTS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
_MAX_BITS_PARTLY_ON_GPU = 4  # a model partly in main memory is slow, so fewer bits are better
_MAX_NAME_CHARACTERS = 64
_MAX_LISTED = 12  # quantizations in one sentence


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A repository, and the part of it that is meant.

    quant: a quantization. file: a path, or its last part. At most one of the two is set.
    """

    repo: str
    quant: str = ""
    file: str = ""
    revision: str = "main"

    def __str__(self) -> str:
        suffix = self.file or self.quant
        revision = f"@{self.revision}" if self.revision != "main" else ""
        return f"{self.repo}{':' if suffix else ''}{suffix}{revision}"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A quantization that a repository offers. Size in bytes; `taken`: this one is pulled."""

    quant: str
    size: int
    fits: Fits
    taken: bool = False


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a repository.

    file: its first file. parts: the number of files. size: bytes of all files. quant: empty if the name
    states none. stem: the name without it, in lower case.
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
        """The bits of a weight, according to the quantization's name; 0 if it does not state them."""
        return count_bits(self.quant)


def parse_reference(text: str, endpoint: str | None = None) -> Reference | None:
    """Parse a reference to a repository; return None for a plain name, as pairs of the catalogue have.

    endpoint: the address of the hub in use, whose URLs are understood too.

    Raises:
        InvalidRequest: the text looks like a reference but is not valid, or leads to another site.
    """
    written = text.strip()
    path = re.sub(r"^hf:(//)?", "", written, flags=re.IGNORECASE)
    query = ""
    if re.match(r"https?://", path, re.IGNORECASE):
        address = _split_url(path)
        if address is None or address.netloc.rpartition("@")[2].lower() not in _known_hosts(
            endpoint
        ):
            raise InvalidRequest(
                f"'{text[:200]}' is not a URL of the hub; use OWNER/REPO[:QUANT].",
                param="name",
            )
        path, query = unquote(address.path).strip("/"), address.query
    else:
        host, slash, location = path.partition("/")
        if host.lower() in _HOSTS and slash:
            path = unquote(location.partition("#")[0].partition("?")[0])
    if "/" not in path and path == written:
        return None
    parsed = _parse_path(path.rstrip("/"), parse_qs(query).get("show_file_info", [""])[0])
    if parsed is None:
        raise InvalidRequest(
            f"'{text[:200]}' is not a repository; use OWNER/REPO[:QUANT] or "
            "OWNER/REPO:FILE.gguf (for a file on this disk: localspec add).",
            param="name",
        )
    return parsed


def _known_hosts(endpoint: str | None) -> tuple[str, ...]:
    url = _split_url(endpoint) if endpoint else None
    return (*_HOSTS, url.netloc.rpartition("@")[2].lower()) if url else _HOSTS


def _split_url(text: str) -> SplitResult | None:
    try:
        return urlsplit(text)
    except ValueError:  # brackets without an IPv6 address
        return None


def _parse_path(path: str, file: str) -> Reference | None:
    """Parse OWNER/REPO[:WHICH], OWNER/REPO/FILE.gguf or OWNER/REPO/blob/REVISION/FILE.gguf."""
    path, _, suffix = path.partition(":")
    parts = path.split("/")
    repo, folders, revision = "/".join(parts[:2]), parts[2:], "main"
    if len(parts) < 2 or parts[0] in _OTHER_PATHS or not REPO_PATTERN.fullmatch(repo):
        return None
    if folders and folders[0] in ("blob", "resolve", "raw", "tree"):
        count = 3 if folders[1:2] == ["refs"] else 1
        revision, folders = "/".join(folders[1 : 1 + count]), folders[1 + count :]
        if not REVISION_PATTERN.fullmatch(revision):
            return None
    if folders and folders[-1].lower().endswith(".gguf"):
        file = "/".join(folders)
    elif folders and revision == "main":
        return None
    if suffix.lower().endswith(".gguf"):
        file, suffix = suffix, ""
    if suffix.lower() == "latest":  # Ollama's tag for the default one
        suffix = ""
    if not folders and parts[1].lower().endswith(".gguf"):
        return None  # a local file in a folder
    if (file and not FILE_PATTERN.fullmatch(file)) or (suffix and not _SUFFIX.fullmatch(suffix)):
        return None
    return Reference(repo=repo, quant="" if file else suffix, file=file, revision=revision)


def derive_pair_name(target: Reference) -> str:
    """Return the name of the pair that a pull of this reference creates. It is always the same.

    It consists of the owner, the repository and the part that is meant. A name that is too long is cut and
    ends in some digits of its hash.
    """
    owner, _, repo = target.repo.lower().partition("/")
    repo = re.sub(r"[-._]gguf$", "", repo)
    suffix = target.quant
    if target.file:
        repo, suffix = strip_part(PurePosixPath(target.file).name).lower(), ""
    revision = "" if target.revision == "main" else target.revision[:12]
    name = "-".join(part for part in (owner, repo, suffix.lower(), revision) if part)
    name = re.sub(r"[^a-z0-9._-]+", "-", name).strip("._-")
    if len(name) > _MAX_NAME_CHARACTERS:
        digits = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: _MAX_NAME_CHARACTERS - 9].rstrip('._-')}-{digits}"
    return name


def derive_model_name(repo: str) -> str:
    """Return the name of the model in a repository or file, without owner, quantization and ending.

    The same model thus has the same name in other repositories.
    """
    name = split_quant(repo.rpartition("/")[2])[0]
    name = re.sub(r"[-._](gguf|mtp(?:-only)?|qat)(?=[-._]|$)", "", name)
    if re.match(r"[a-z-]+_[a-z]", name):  # the packager put the owner before the name
        name = name.partition("_")[2]
    return name.removeprefix("meta-")


def list_choices(files: Iterable[ListedFile], *, everything: bool = False) -> tuple[Choice, ...]:
    """Return the models of a repository that could be a target or a draft, the largest first.

    Parts of a split file form one model, which is left out if a part is missing. Of two files with the same
    name and quantization, the one with fewer parts is used.

    everything: also return files that are something else by their name; their header shows what they are.
    """
    sizes = {file.file: file.size for file in files if FILE_PATTERN.fullmatch(file.file)}
    models: dict[tuple[str, str], Choice] = {}
    for file in sorted(sizes):
        if not everything and is_no_model(PurePosixPath(file).name):
            continue
        try:
            parts = list_parts(file)
        except BadGguf:
            continue
        if parts[0] != file or not all(part in sizes for part in parts):
            continue
        stem, quant = split_quant(file)
        size = sum(sizes[part] for part in parts)
        choice = Choice(file=file, parts=len(parts), size=size, stem=stem, quant=quant)
        known = models.get((stem, quant))
        if known is None or choice.parts < known.parts:
            models[stem, quant] = choice
    return tuple(sorted(models.values(), key=lambda choice: (-choice.size, choice.file)))


def list_parts(file: str) -> list[str]:
    """Return all parts of a file on the hub, with their folder.

    Raises:
        BadGguf: the part numbers in its name are invalid.
    """
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in shard_names(name)]


def match_choices(target: Reference, offered: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the models of a repository that a reference may mean.

    A reference without a quantization or file means all quantizations of one model.

    Raises:
        NotOnHub: there is no such model.
        InvalidRequest: the repository has several models and the reference does not say which.
    """
    if not offered:
        raise NotOnHub(
            f"{target.repo} contains no GGUF file of a model that generates text; "
            "repositories that do are often named …-GGUF."
        )
    matched = _match_suffix(target, offered)
    if not matched:
        labels = list(dict.fromkeys(choice.label for choice in offered))
        raise NotOnHub(
            f"{target.repo} has no '{target.file or target.quant}'; it has: "
            f"{_join_names(labels)}. Name one after a colon: {target.repo}:{labels[-1]}"
        )
    stems = list(dict.fromkeys(choice.stem for choice in matched))
    namesakes = [
        stem for stem in stems if derive_model_name(stem) == derive_model_name(target.repo)
    ]
    if len(stems) > 1 and len(namesakes) != 1:
        files = [choice.file for choice in matched]
        raise InvalidRequest(
            f"{target.repo} contains several models; name a file of one: "
            f"{_join_names(files)}. For example: {target.repo}:{files[0]}",
            param="name",
        )
    return tuple(choice for choice in matched if choice.stem == (namesakes or stems)[0])


def _match_suffix(target: Reference, offered: Sequence[Choice]) -> list[Choice]:
    file, quant = target.file.lower(), target.quant.lower()
    if file:
        exact = [choice for choice in offered if choice.file.lower() == file]
        return exact or [
            choice
            for choice in offered
            if PurePosixPath(choice.file).name.lower() == PurePosixPath(file).name
        ]
    if not quant:
        return list(offered)
    for is_match in (
        lambda choice: choice.quant.lower() == quant,
        lambda choice: strip_part(PurePosixPath(choice.file).name).lower() == quant,
        # The quantization of a special recipe, without its prefix.
        lambda choice: choice.quant.lower().partition("-")[2] == quant,
    ):
        matched = [choice for choice in offered if is_match(choice)]
        if matched:
            return matched
    return []


def choose_quantization(offered: Sequence[Choice], fits: Callable[[Choice], Fits]) -> Choice:
    """Return the quantization of a model to use if none is named.

    Of those that fit into memory (the GPU's, if there is one) with a common context, it takes those with the
    most bits, up to eight. Among these it takes the most common one (Q8_0, Q6_K, Q5_K_M, Q4_K_M, …), else
    the largest. If a model must be partly in main memory, the limit is four bits, for speed. If nothing
    fits, it takes the smallest, and the pull then reports the missing memory.
    """
    quantized = [choice for choice in offered if choice.bits <= MAX_BITS] or list(offered)
    for fit, max_bits in (("yes", MAX_BITS), ("partly", _MAX_BITS_PARTLY_ON_GPU)):
        candidates = [choice for choice in quantized if fits(choice) == fit]
        candidates = [choice for choice in candidates if choice.bits <= max_bits] or candidates[-1:]
        if candidates:
            bits = max(choice.bits for choice in candidates)
            finalists = [choice for choice in candidates if choice.bits == bits]
            return max(finalists, key=lambda choice: (choice.quant in _COMMON_QUANTS, choice.size))
    return min(quantized, key=lambda choice: choice.size)


def _join_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(names[:_MAX_LISTED])}{suffix}"
