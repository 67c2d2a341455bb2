"""models.toml: which pairs there are. The shipped file, and the user's own laid over it."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from localspec.errors import CatalogueError, ModelNotFound
from localspec.paths import read_file
from localspec.protocol.pairs import DraftKind
from localspec.protocol.sampling import parameters
from localspec.protocol.settings import Context, Endpoints, Upstream
from localspec.registry import ollama_names, upstreams

VERSION = 1
GIB = 1 << 30
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_LONGEST_NAME = 64
# The hub's own rules for repositories (huggingface_hub, validate_repo_id): no "--", no "..".
REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?<![.-])")
FILE = re.compile(r"(?!.*\.\.)(?:[A-Za-z0-9_][\w.-]*/)*[A-Za-z0-9_][\w.-]*\.gguf")
SHA256 = re.compile(r"[0-9a-f]{64}")
ENDPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}:[1-9]\d{0,4}")
REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,127}")
_NAMED = "a name (lowercase letters, digits, '.', '_', '-')"
_NO_DEFAULTS = ("seed", "dry_sequence_breakers")
_MEMORY = re.compile(r"cpu|\d{1,3}(-\d{1,3})?")


_LONGEST_TEMPLATE = 1 << 20  # bytes; the longest of known models has 20 thousand


def reserved(name: str) -> str:
    """What the name means already wherever a pair is named, as a clause; empty where it is free."""
    if name == "builtin":
        return "it is the name of the built-in pair"
    if name in ("default", "localspec"):
        return "it stands for the configured pair"
    return "it would be taken for a file" if name.endswith(".gguf") else ""


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file on the hub, the first of a sharded one. Hash and size where they are known.

    weights: the repository of the same model in its own format, and its rows of token embeddings.
    """

    repo: str
    file: str
    weights: str = ""
    vocabulary: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    verified: str = ""  # where the names were seen
    revision: str = "main"
    sha256: str = ""
    template_sha256: str = ""  # of the chat template's text
    size_gib: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a person says of a pair in place of its target's file, and no more.

    chat_template: a file, beside models.toml unless its path is absolute, and once it is read its text.
    sampling: defaults by parameter. keep: once loaded it leaves for no other pair. idle_unload: seconds
    without a request before it is unloaded, 0: never; else as the configuration says. rpc: machines that
    have layers of the target.
    """

    chat_template: str = ""
    sampling: dict[str, float] = {}
    keep: bool = False
    idle_unload: Annotated[float, msgspec.Meta(ge=0, le=10_000_000)] | None = None
    rpc: Endpoints = ()

    @property
    def says(self) -> bool:
        """Whether it says anything."""
        told = self.chat_template or self.sampling or self.keep or self.rpc
        return bool(told) or self.idle_unload is not None


class Pair(Preset, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the catalogue. `memory`: GB of GPU memory it is meant for, or "cpu".

    heads: a file of heads that were trained with the target and predict several tokens (MTP);
    embedded_heads: they are in the target's own file. year: of the target, 0 where it is not known.
    context: tokens that are worth reserving memory for, 0 where nothing is known.
    """

    summary: str
    target: Weights
    draft: Weights | None = None
    heads: Weights | None = None
    embedded_heads: bool = False
    year: Annotated[int, msgspec.Meta(ge=0, le=9999)] = 0
    context: Context = 0
    aliases: tuple[str, ...] = ()
    roles: tuple[Literal["chat", "fim", "embed", "rerank"], ...] = ("chat",)
    licence: str = "unknown"
    memory: str = "cpu"
    hybrid: bool = False
    reported: str = ""

    @property
    def kind(self) -> DraftKind:
        """What drafts for the target."""
        if {"embed", "rerank"} & set(self.roles):
            return "none"
        if self.draft:
            return "model"
        if self.heads:
            return "mtp-sidecar"
        return "mtp-embedded" if self.embedded_heads else "ngram"

    @property
    def files(self) -> tuple[Weights, ...]:
        """The target's, and that of what drafts for it, where that is one."""
        return tuple(each for each in (self.target, self.draft or self.heads) if each)

    def estimated_bytes(self) -> int:
        """Memory this pair wants, from the catalogue alone: sizes where known, else the class.

        A fifth on top of the weights and 1 GiB stand for the caches; a header says it better.
        """
        sizes = [each.size_gib for each in (self.target, self.draft, self.heads) if each]
        if all(sizes):
            return int((sum(sizes) * 1.2 + 1) * GIB)
        least = self.memory.split("-")[0]
        return int(least if least.isdigit() else 4) * GIB


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Pairs by name, the other names people type for them, what goes before a pair's own files, and pairs
    that other servers answer for.
    """

    pairs: Mapping[str, Pair]
    aliases: Mapping[str, str]
    presets: Mapping[str, Preset] = field(default_factory=dict)  # by pair, of those that have one
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)

    def find(self, name: str) -> tuple[str, Pair]:
        """Return a pair's own name and the pair, for its name, an alias or Ollama's name of its target.

        Raises:
            ModelNotFound: with the nearest names there are.
        """
        wanted = name.strip().lower()
        own = wanted if wanted in self.pairs else self.aliases.get(wanted)
        hint = ""
        if own is None and ollama_names.is_ollama_name(wanted):
            same = self.same_model(wanted)
            own = same[0] if len(same) == 1 else None
            hint = one_of(same or self._owners(ollama_names.same_family(wanted, self.names)))
        if own is not None:
            return own, self.pairs[own]
        hint = hint or did_you_mean(wanted, self.names)
        raise ModelNotFound(
            f"There is no pair '{name[:80]}' in the catalogue.{hint} See: localspec catalogue",
            param="model",
        )

    @property
    def names(self) -> list[str]:
        """The names and aliases of all pairs."""
        return [*self.pairs, *self.aliases]

    def same_model(self, name: str) -> list[str]:
        """Return the own names of the pairs whose target is Ollama's model `name`."""
        return self._owners(ollama_names.same_model(name, self.names))

    def _owners(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self.aliases.get(name, name) for name in names))


def one_of(names: Collection[str]) -> str:
    """Return a question about which of several names is meant, after a blank; empty if there is none."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


def did_you_mean(wanted: str, names: Iterable[str]) -> str:
    """A sentence with the names that are near, after a blank; nothing where none is."""
    if len(wanted) > _LONGEST_NAME:
        return ""  # nothing is near, and looking for it takes the longer
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def shipped_catalogue() -> Path:
    """models.toml: inside the package when installed, at the top of a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "models.toml"
    return inside if inside.exists() else package.parent / "models.toml"


def load_catalogue(user: Path, shipped: Path | None = None) -> Catalogue:
    """The shipped catalogue with the user's own (which need not exist) laid over it.

    Raises:
        CatalogueError: naming file, line and key, and what is allowed.
    """
    pairs: dict[str, Pair] = {}
    aliases: dict[str, str] = {}
    presets: dict[str, Preset] = {}
    servers: dict[str, Upstream] = {}
    for path in (shipped or shipped_catalogue(), user):
        if path == user and not path.exists():
            continue
        found, preset, server = read_catalogue(path, pairs)
        presets |= preset
        servers |= server
        for name, pair in found.items():
            aliases = {alias: own for alias, own in aliases.items() if own != name}
            pairs[name] = pair
            aliases.update(dict.fromkeys(pair.aliases, name))
    pairs = {name: pair for name, pair in pairs.items() if name not in servers}
    aliases = {alias: own for alias, own in aliases.items() if own in pairs}
    return Catalogue(pairs, aliases, presets, servers)


def read_catalogue(
    path: Path, below: Collection[str] = ()
) -> tuple[dict[str, Pair], dict[str, Preset], dict[str, Upstream]]:
    """One file's pairs, presets and upstreams, strictly checked; it is laid over the pairs named `below`.

    Raises:
        CatalogueError: naming file, line and key, and what is allowed.
    """
    try:
        text = read_file(path).decode()
    except FileNotFoundError:
        raise CatalogueError(f"{path} does not exist.") from None
    except OSError as error:
        raise CatalogueError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CatalogueError(f"{path}: {error}.") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last = f"at line {text.count(chr(10)) + 1}, the last"
        what = str(error).replace("at end of document", last)  # else it names the line itself
        raise CatalogueError(f"{path}: {what}.") from error
    place = _Place(path, text)
    for key in table:
        if key not in ("version", "pairs"):
            raise place.error((key,), f"unknown key '{key}'; the keys are version and pairs")
    if table.get("version", VERSION) != VERSION:
        raise place.error(("version",), f"version must be {VERSION}")
    entries = table.get("pairs", {})
    if not isinstance(entries, dict):
        raise place.error(("pairs",), "pairs must be a table: [pairs.NAME]")
    read = {name: _read_entry(place, name, entry) for name, entry in entries.items()}
    pairs = {name: each for name, each in read.items() if isinstance(each, Pair)}
    _check_names(place, pairs, below)
    servers = {name: each for name, each in read.items() if isinstance(each, Upstream)}
    for name in servers:
        if what := reserved(name):
            raise place.error(("pairs", name), f"'{name}' cannot be a pair's name: {what}")
    others = {name: each for name, each in read.items() if isinstance(each, Preset)}
    presets = {name: _preset(place, name, each) for name, each in others.items() if each.says}
    return pairs, presets, servers


class _Place:
    """Finds the line of a key. tomllib keeps no positions, so on an error the text is searched."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = text.splitlines()

    def error(self, keys: tuple[str, ...], what: str) -> CatalogueError:
        dotted = ".".join(keys)
        return CatalogueError(f"{self.path}, line {self._line(keys)}, {dotted}: {what}.")

    def _line(self, keys: tuple[str, ...]) -> int:
        """The line of the key itself, else of the innermost table around it that has a header."""
        for depth in range(len(keys), -1, -1):
            start = self._header(keys[:depth])
            if start is None:
                continue
            if depth == len(keys):
                return start + 1
            key = re.compile(rf'\s*["\']?{re.escape(keys[depth])}["\']?\s*[=.]')
            for number, line in enumerate(self.lines[start + (depth > 0) :], start + (depth > 0)):
                if line.lstrip().startswith("["):
                    break
                if key.match(line):
                    return number + 1
            if depth:
                return start + 1
        return 1

    def _header(self, keys: tuple[str, ...]) -> int | None:
        if not keys:
            return 0
        dotted = ".".join(keys)
        for number, line in enumerate(self.lines):
            found = re.match(r"\s*\[([^\[\]]+)\]", line)
            if found and re.sub(r"[\s\"']", "", found[1]) == dotted:
                return number
        return None


def _preset(place: _Place, name: str, entry: Preset) -> Preset:
    """With the template's text, every number checked, and nothing of a pair's own."""
    keys = ("pairs", name, "sampling")
    known = {each.name: each.kind for each in parameters() if each.name not in _NO_DEFAULTS}
    for key, value in entry.sampling.items():
        if key not in known:
            raise place.error((*keys, key), f"there is no sampling parameter '{key[:40]}'")
        try:
            msgspec.convert(int(value) if value == int(value) else value, known[key], strict=False)
        except (msgspec.ValidationError, OverflowError, ValueError) as error:
            raise place.error((*keys, key), f"{value} is not allowed: {error}") from None
    for endpoint in entry.rpc:
        if not ENDPOINT.fullmatch(endpoint):
            raise place.error(("pairs", name, "rpc"), f"'{endpoint[:80]}' is not HOST:PORT")
    told = Preset(
        sampling=entry.sampling, keep=entry.keep, idle_unload=entry.idle_unload, rpc=entry.rpc
    )
    if not entry.chat_template:
        return told
    file = place.path.parent / Path(entry.chat_template).expanduser()
    try:
        text = read_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise place.error(
            ("pairs", name, "chat_template"), f"{file} cannot be read: {why}"
        ) from None
    if not text.strip() or len(text) > _LONGEST_TEMPLATE:
        raise place.error(
            ("pairs", name, "chat_template"), f"{file} is empty or too large for a template"
        )
    return msgspec.structs.replace(told, chat_template=text)


def _read_entry(place: _Place, name: str, entry: object) -> Pair | Preset | Upstream:
    """A pair; without a target, what is said of one that is here, or the server that has it."""
    said = set(entry) if isinstance(entry, dict) else set()
    kind: type[Pair | Preset | Upstream] = Pair
    if said and said <= set(Preset.__struct_fields__):
        kind = Preset
    elif "upstream" in said:
        kind = Upstream
    try:
        pair = msgspec.convert(entry, kind, strict=True)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        keys = tuple(re.findall(r"\w+", where))
        field = re.search(r"field `(\w+)`", what)
        if field:
            keys += (field[1],)
        what = what.replace("Object", "the table").replace("`", "'")
        raise place.error(("pairs", name, *keys), what[:1].lower() + what[1:]) from None
    if isinstance(pair, Upstream):
        if not NAME.fullmatch(name):
            raise place.error(("pairs", name), f"'{name}' is not {_NAMED}")
        key, wrong = upstreams.problem(name, pair)
        if wrong:
            raise place.error(("pairs", name, key), wrong)
        return pair
    if not isinstance(pair, Pair):
        return pair
    for keys, pattern, value, shape in _patterns(name, pair):
        if value and not pattern.fullmatch(value):
            raise place.error(("pairs", name, *keys), f"'{value}' is not {shape}")
    for key, value in (("summary", pair.summary), ("target.repo", pair.target.repo)):
        if not value:
            raise place.error(("pairs", name, *key.split(".")), "must not be empty")
    return pair


def _patterns(name: str, pair: Pair) -> Iterator[tuple[tuple[str, ...], re.Pattern[str], str, str]]:
    """Every string with a fixed shape: where it is, its pattern, its value, what it should be."""
    yield (), NAME, name, _NAMED
    for alias in pair.aliases:
        yield ("aliases",), NAME, alias, _NAMED
    yield ("memory",), _MEMORY, pair.memory, "a number of GB, a range such as 16-24, or cpu"
    for role, weights in (("target", pair.target), ("draft", pair.draft), ("heads", pair.heads)):
        if weights:
            yield (role, "repo"), REPO, weights.repo, "a repository (OWNER/NAME)"
            yield (role, "file"), FILE, weights.file or "?", "the name of a .gguf file"
            yield (role, "weights"), REPO, weights.weights, "a repository (OWNER/NAME)"
            yield (role, "sha256"), SHA256, weights.sha256, "64 lowercase hexadecimal digits"
            yield (
                (role, "template_sha256"),
                SHA256,
                weights.template_sha256,
                "64 lowercase hexadecimal digits",
            )
            yield (role, "revision"), REVISION, weights.revision or "?", "a branch, tag or commit"


def _check_names(place: _Place, pairs: Mapping[str, Pair], below: Collection[str]) -> None:
    """No name may mean two things."""
    owner: dict[str, str] = {name: name for name in (*below, *pairs)}
    for name, pair in pairs.items():
        if what := reserved(name):
            raise place.error(("pairs", name), f"'{name}' cannot be a pair's name: {what}")
        for alias in pair.aliases:
            if what := reserved(alias):
                what = f"'{alias}' cannot be a pair's other name: {what}"
            elif owner.setdefault(alias, name) != name:
                what = f"'{alias}' already means '{owner[alias]}'"
            if what:
                raise place.error(("pairs", name, "aliases"), what)


class LiveCatalogue:
    """The catalogue as it is now; a broken edit keeps the last good one, `problem` says so."""

    def __init__(self, user: Path, shipped: Path | None = None) -> None:
        self._user = user
        self._shipped = shipped or shipped_catalogue()
        self.problem = ""
        try:
            self.current = load_catalogue(user, self._shipped)
        except CatalogueError as error:
            # At start there is no last good one: the shipped file alone keeps the pairs usable.
            self.problem = f"{error.message} Your file is ignored until it is corrected."
            self.current = load_catalogue(self._shipped, self._shipped)

    @property
    def files(self) -> tuple[Path, Path]:
        """The files to watch."""
        return self._shipped, self._user

    def reload(self) -> bool:
        """Read both files again; False when they are broken and the last good ones stay."""
        try:
            self.current = load_catalogue(self._user, self._shipped)
        except CatalogueError as error:
            self.problem = f"{error.message} The last good catalogue stays in use."
            return False
        self.problem = ""
        return True
