"""Parse references to repositories of the hub, and list the models in a repository.

A reference is OWNER/REPO, optionally followed by `:` and a quantization or file name. The hub's own URLs of
repositories and files are understood too.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

from localspec.errors import BadGguf, InvalidRequest, NotOnHub
from localspec.registry.catalogue import FILE_PATTERN, REPO_PATTERN, REVISION_PATTERN
from localspec.registry.file_names import (
    MAX_BITS,
    contains_word,
    count_bits,
    find_model_folder,
    is_no_model,
    split_name,
    split_quant,
    strip_part,
)
from localspec.registry.header.fit import Fits
from localspec.registry.header.model import shard_names
from localspec.registry.hub.offline import ListedFile

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_PATHS = ("datasets", "spaces", "api", "collections", "papers")
# A tag: a part of a path on the hub, as a rule a quantization.
_SUFFIX = re.compile(r"(?!.*\.\.)[^/\\\x00-\x1f\x7f-\x9f][^\\\x00-\x1f\x7f-\x9f]{0,199}")
# The most common quantization for each number of bits.
_COMMON_QUANTS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
_MAX_BITS_PARTLY_ON_GPU = 4  # a model partly in main memory is slow, so fewer bits are better
_MAX_NAME_CHARACTERS = 64
_MAX_LISTED = 12  # quantizations in one sentence
_COPY_SIZE_SHARE = 100  # a model in parts has the size of the whole one, but for a hundredth


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

    file: its first file. parts: the number of files. size: bytes of all files. quant: its quantization or
    recipe, empty if the name states none. recipe: a maker's recipe beside a quantization. model: its folder
    and name, in lower case and without these; files with the same are one model. oid: as in `ListedFile`,
    empty for several files. missing: a part that the repository lacks.
    """

    file: str
    parts: int
    size: int
    model: tuple[str, str]
    quant: str
    recipe: str = ""
    oid: str = ""
    missing: str = ""

    @property
    def stem(self) -> str:
        return self.model[1]

    @property
    def label(self) -> str:
        return "-".join(filter(None, (self.recipe, self.quant))) or PurePosixPath(self.file).name

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
        address, hub = _split_url(path), _split_url(endpoint or "")
        host, hub_host = (url.netloc.rpartition("@")[2].lower() for url in (address, hub))
        if not host or host not in (*_HOSTS, hub_host):
            raise InvalidRequest(
                f"'{text[:200]}' is not a URL of the hub; use OWNER/REPO[:QUANT].", param="name"
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


def _split_url(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError:  # brackets without an IPv6 address
        return urlsplit("")


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

    It consists of the owner, the repository and the part that is meant. It ends in some digits of its hash
    if it is too long, or if characters of it may not be in a name.
    """
    owner, _, repo = target.repo.lower().partition("/")
    repo = re.sub(r"[-._]gguf$", "", repo)
    suffix = target.quant.lower()
    if target.file:
        folder = find_model_folder(target.file)
        suffix = strip_part(PurePosixPath(target.file).name).lower()
        # The file's name may begin with the repository's.
        if re.match(rf"{re.escape(repo)}(?![a-z0-9])", suffix):
            repo, suffix = (repo, suffix[len(repo) :].lstrip("-._")) if folder else (suffix, "")
        repo = f"{repo}/{folder}" if folder else repo
    revision = "" if target.revision == "main" else target.revision[:12]
    written = "-".join(part for part in (owner, repo, suffix, revision) if part)
    name = re.sub(r"[^a-z0-9._-]+", "-", written).strip("._-")
    if len(name) > _MAX_NAME_CHARACTERS or not re.fullmatch(r"[\w./-]*", written, re.ASCII):
        digits = hashlib.sha256(written.encode()).hexdigest()[:8]
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

    Parts of a split file form one model, which is left out if a part is missing.

    everything: also return files that are something else by their names, and models with a missing part.
    """
    listed = {file.file: file for file in files if FILE_PATTERN.fullmatch(file.file)}
    choices: list[Choice] = []
    for file in listed:
        if not everything and is_no_model(file):
            continue
        try:
            parts = list_parts(file)
        except BadGguf:
            continue
        present = [part for part in parts if part in listed]
        missing = next((part for part in parts if part not in listed), "")
        if present[0] != file or (missing and not everything):
            continue
        name = split_name(file)
        choices.append(
            Choice(
                file=file,
                parts=len(parts),
                size=sum(listed[part].size for part in present),
                model=(find_model_folder(file), name.stem),
                quant=name.quant or name.recipe.upper(),
                recipe=name.recipe if name.quant else "",
                oid=listed[file].oid if len(parts) == 1 else "",
                missing=missing,
            )
        )
    return tuple(sorted(choices, key=lambda choice: (-choice.size, choice.file)))


def list_parts(file: str) -> list[str]:
    """Return all parts of a file on the hub, with their folder.

    Raises:
        BadGguf: the part numbers in its name are invalid.
    """
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in shard_names(name)]


def match_choices(target: Reference, offered: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the models of a repository that a reference may mean.

    A file or a tag means one of them. A reference without either means all quantizations of one model.

    Raises:
        NotOnHub: there is no such model.
        InvalidRequest: there are several, and the reference does not say which.
    """
    if not offered:
        raise NotOnHub(
            f"{target.repo} contains no GGUF file of a model that generates text; "
            "repositories that do are often named …-GGUF."
        )
    matched = (
        _match_file(target.file, offered) if target.file else _match_tag(target.quant, offered)
    )
    if not matched:
        names = _list_names([choice for choice in offered if not choice.missing])
        name = shlex.quote(f"{target.repo}:{names[-1]}") if names else ""
        example = f" Name one after a colon: {name}" if name else ""
        raise NotOnHub(
            f"{target.repo} has no '{target.file or target.quant}'; it has: "
            f"{_join_names(names) or 'no whole model'}.{example}"
        )
    if target.file:
        chosen = matched
    else:
        models = list(dict.fromkeys(choice.model for choice in matched))
        repository_model = derive_model_name(target.repo)
        namesakes = [model for model in models if derive_model_name(model[1]) == repository_model]
        model = namesakes[0] if len(namesakes) == 1 else models[0]
        if len(models) > 1 and len(namesakes) != 1:
            raise _several_models_error(target, matched)
        chosen = _merge_copies([choice for choice in matched if choice.model == model])
        if target.quant and len(chosen) > 1:
            tag = target.quant.lower()
            chosen = [choice for choice in chosen if choice.label.lower() == tag] or chosen
    labels = {choice.label.lower() for choice in chosen}
    if len(chosen) > (1 if target.file or target.quant else len(labels)):
        raise _several_models_error(target, chosen)
    if chosen[0].missing:
        raise NotOnHub(
            f"{target.repo} lacks {chosen[0].missing}, a part of {target.file}, so that it cannot be used."
        )
    return tuple(chosen)


def _several_models_error(target: Reference, matched: Sequence[Choice]) -> InvalidRequest:
    files = [choice.file for choice in matched]
    suffix = target.file or target.quant
    means = f"'{suffix}' may mean several files" if suffix else "contains several models"
    return InvalidRequest(
        f"{target.repo}{': ' if suffix else ' '}{means}; name a file of one: {_join_names(files)}. "
        f"For example: {shlex.quote(f'{target.repo}:{files[0]}')}",
        param="name",
    )


def _match_file(wanted: str, offered: Sequence[Choice]) -> list[Choice]:
    """Return the models one of whose files has this path, or this name if no folder is stated."""

    def select(convert: Callable[[str], str]) -> list[Choice]:
        return [
            choice for choice in offered if convert(wanted) in map(convert, list_parts(choice.file))
        ]

    def name_of(path: str) -> str:
        return PurePosixPath(path).name

    found = select(str) or select(str.lower)
    if found or "/" in wanted:
        return found
    return select(name_of) or select(lambda path: name_of(path).lower())


def _match_tag(tag: str, offered: Sequence[Choice]) -> list[Choice]:
    """Return the models that a tag may mean: a quantization, a whole name, or a part of a path.

    Of the last kind, llama.cpp takes what "-" or "." follows, so whole words come first.
    """
    offered = [choice for choice in offered if not choice.missing]
    if not tag:
        return list(offered)
    wanted = tag.lower()
    as_llama_cpp = re.compile(rf"{re.escape(tag)}[.-]", re.IGNORECASE)
    for is_match in (
        lambda choice: wanted in (choice.quant.lower(), choice.label.lower()),
        lambda choice: wanted == strip_part(PurePosixPath(choice.file).name).lower(),
        lambda choice: wanted == strip_part(choice.file).lower(),
        # The quantization of a special recipe, without its prefix.
        lambda choice: wanted == choice.quant.lower().partition("-")[2],
        lambda choice: contains_word(strip_part(choice.file), tag),
        lambda choice: as_llama_cpp.search(choice.file),
    ):
        matched = [choice for choice in offered if is_match(choice)]
        if matched:
            return matched
    return []


def _merge_copies(choices: Sequence[Choice]) -> list[Choice]:
    """Return the quantizations of one model, each once: of copies of one, the one in the fewest files."""
    merged: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.parts, choice.file)):
        if not any(_is_copy(choice, other) for other in merged):
            merged.append(choice)
    return [choice for choice in choices if choice in merged]


def _is_copy(choice: Choice, other: Choice) -> bool:
    """Return whether two files of one model hold the same: equal bytes, or one is split, the other whole."""
    if choice.label.lower() != other.label.lower():
        return False
    if choice.oid and other.oid:
        return choice.oid == other.oid
    is_same_size = abs(choice.size - other.size) * _COPY_SIZE_SHARE <= other.size
    return choice.parts != other.parts and is_same_size


def _list_names(offered: Sequence[Choice]) -> list[str]:
    """Return what to write after the colon for each model: its label, or its path if that is ambiguous."""

    def means_one(choice: Choice) -> bool:
        is_file = choice.label == PurePosixPath(choice.file).name
        match = _match_file if is_file else _match_tag
        return match(choice.label, offered) == [choice]

    return [choice.label if means_one(choice) else choice.file for choice in offered]


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
