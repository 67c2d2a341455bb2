"""The catalogue of pairs: the shipped models.toml, overlaid with the user's own."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from localspec import extras
from localspec.errors import CatalogueError, InvalidRequest, ModelNotFound
from localspec.model_traits import draft_kind, file_draft_kind
from localspec.paths import expand_user, read_file
from localspec.protocol.pairs import DraftKind
from localspec.protocol.reading import explain
from localspec.protocol.requests import sampling_parameters
from localspec.protocol.settings import Context, Endpoints, Upstream
from localspec.registry import ollama_names
from localspec.registry.file_names import guess_sidecar_kind

VERSION = 1
GIB = 1 << 30
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MAX_NAME_CHARACTERS = 64
# The hub's own rules for repositories (huggingface_hub, validate_repo_id): no "--", no "..".
REPO_PATTERN = re.compile(
    r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?<![.-])"
)
# A path on the hub. Blanks, "+" and brackets are common in names; no part begins with a dot, as ".." does.
_PATH_PART = r"(?![./-])[^/\\\x00-\x1f\x7f-\x9f]+"
FILE_PATTERN = re.compile(rf"(?:{_PATH_PART}/)*{_PATH_PART}\.[gG][gG][uU][fF]")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
ENDPOINT_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}:[1-9]\d{0,4}")
REVISION_PATTERN = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,127}")
_NAME_RULE = "a name (lowercase letters, digits, '.', '_', '-')"
# Sampling parameters for which a pair can have no default.
_NO_DEFAULTS = ("seed", "dry_sequence_breakers")
_DIGITS_RULE = "64 lowercase hexadecimal digits"
# Of each file: the key, the pattern, what stands for an empty text where none is allowed, the form in words.
_FILE_RULES = (
    ("repo", REPO_PATTERN, "", "a repository (OWNER/NAME)"),
    ("file", FILE_PATTERN, "?", "the name of a .gguf file"),
    ("weights", REPO_PATTERN, "", "a repository (OWNER/NAME)"),
    ("sha256", SHA256_PATTERN, "", _DIGITS_RULE),
    ("template_sha256", SHA256_PATTERN, "", _DIGITS_RULE),
    ("revision", REVISION_PATTERN, "?", "a branch, tag or commit"),
)
_MEMORY_CLASS = re.compile(r"cpu|\d{1,3}(-\d{1,3})?")
_MAX_TEMPLATE_CHARACTERS = 1 << 20  # the longest template of the known models has 20 000


def explain_reserved_name(name: str) -> str:
    """Return what a name already means where a pair is named, as a clause, or an empty text if it is free."""
    if name == "builtin":
        return "it is the name of the built-in pair"
    if name in ("default", "localspec"):
        return "it stands for the configured pair"
    return "it would be taken for a file" if name.endswith(".gguf") else ""


def check_pair_name(name: str) -> None:
    """Check the name of a new pair. Raises InvalidRequest."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRequest(
            f"'{name[:80]}' is not a valid pair name; use at most 64 lowercase letters, "
            "digits, '.', '_' and '-', starting with a letter or digit.",
            param="name",
        )
    if meaning := explain_reserved_name(name):
        raise InvalidRequest(f"'{name}' cannot be a pair's name: {meaning}.", param="name")


class HubFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file on the hub, or the first file of a sharded model.

    weights: the repository of the same model in its original format. vocabulary: the rows of its token
    embeddings, 0 if unknown. verified: where the names were checked. template_sha256: the hash of the chat
    template's text. The hashes and the size are empty or 0 if unknown.
    """

    repo: str
    file: str
    weights: str = ""
    vocabulary: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    verified: str = ""
    revision: str = "main"
    sha256: str = ""
    template_sha256: str = ""
    size_gib: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user states about a pair, in addition to or instead of the target's file.

    chat_template: a file, relative to the folder of models.toml; once it is read, its text. sampling:
    default values by parameter. keep: once loaded, the pair is not unloaded for another one. idle_unload:
    seconds without a request before it is unloaded, 0 for never, None for the configured time. rpc: machines
    that hold layers of the target.
    """

    chat_template: str = ""
    sampling: dict[str, float] = {}
    keep: bool = False
    idle_unload: Annotated[float, msgspec.Meta(ge=0, le=10_000_000)] | None = None
    rpc: Endpoints = ()

    @property
    def has_values(self) -> bool:
        """Whether anything is stated."""
        has_values = self.chat_template or self.sampling or self.keep or self.rpc
        return bool(has_values) or self.idle_unload is not None


class CataloguePair(Preset, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the catalogue.

    memory: GB of GPU memory that the pair is meant for, or "cpu". sidecar: a file that drafts for this target
    alone, such as heads trained with it that predict several tokens (MTP). embedded_heads: such heads are in
    the target's own file. projector: the file by which the target reads pictures. other_projector: the name
    of one that its repository has and that is left out. year: the target's release, 0 if unknown. context:
    tokens worth reserving memory for, 0 if unknown.
    """

    summary: str
    target: HubFile
    draft: HubFile | None = None
    sidecar: HubFile | None = None
    embedded_heads: bool = False
    projector: HubFile | None = None
    other_projector: str = ""
    year: Annotated[int, msgspec.Meta(ge=0, le=9999)] = 0
    context: Context = 0
    aliases: tuple[str, ...] = ()
    roles: tuple[Literal["chat", "fim", "embed", "rerank"], ...] = ("chat",)
    licence: str = "unknown"
    memory: str = "cpu"
    hybrid: bool = False
    reported: str = ""

    @property
    def draft_kind(self) -> DraftKind:
        """What drafts for the target."""
        draft: DraftKind | None = "model" if self.draft else None
        if self.sidecar and not self.draft:
            draft = file_draft_kind(guess_sidecar_kind(self.sidecar.file) or "mtp")
        return draft_kind(
            writes_text=not {"embed", "rerank"} & set(self.roles),
            draft=draft,
            has_heads=self.embedded_heads,
        )

    @property
    def files(self) -> tuple[HubFile, ...]:
        """The target's file, that of the model or sidecar that drafts for it, and the projector, if any."""
        files = (self.target, self.draft or self.sidecar, self.projector)
        return tuple(file for file in files if file)

    def estimated_bytes(self) -> int:
        """Return the memory that this pair needs, estimated from the catalogue alone.

        If all file sizes are known, it is their sum, plus a fifth and 1 GiB for the caches. Otherwise it is
        the pair's memory class. A header gives a better estimate.
        """
        files = (self.target, self.draft, self.sidecar, self.projector)
        sizes = [file.size_gib for file in files if file]
        if all(sizes):
            return int((sum(sizes) * 1.2 + 1) * GIB)
        minimum_gb = self.memory.split("-")[0]
        return int(minimum_gb if minimum_gb.isdecimal() else 4) * GIB


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All pairs by name, with their aliases, presets and upstream servers.

    presets: by pair name, for the pairs that have one. upstreams: the pairs that another server answers for.
    problem: the mistake in a file that was read and not taken, for whoever misses a pair.
    """

    pairs: Mapping[str, CataloguePair]
    aliases: Mapping[str, str]
    presets: Mapping[str, Preset] = field(default_factory=dict)
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)
    problem: str = ""

    def find(self, name: str) -> tuple[str, CataloguePair]:
        """Return the name and entry of a pair, found by its name, an alias or Ollama's name of its target.

        Raises:
            ModelNotFound: there is no such pair; the message suggests similar names.
        """
        query = name.strip().lower()
        pair_name = query if query in self.pairs else self.aliases.get(query)
        hint = ""
        if pair_name is None and ollama_names.is_ollama_name(query):
            candidates = self.find_same_model(query)
            pair_name = candidates[0] if len(candidates) == 1 else None
            hint = ask_which(
                candidates or self._owners(ollama_names.find_same_family(query, self.names))
            )
        if pair_name is not None:
            return pair_name, self.pairs[pair_name]
        hint = hint or suggest_names(query, self.names)
        raise ModelNotFound(
            f"There is no pair '{name[:80]}' in the catalogue.{hint} See: localspec catalogue"
            f"{self.problem and f'. {self.problem}'}",
            param="model",
        )

    @property
    def names(self) -> list[str]:
        """The names and aliases of all pairs."""
        return [*self.pairs, *self.aliases]

    def find_same_model(self, name: str) -> list[str]:
        """Return the names of the pairs whose target is Ollama's model `name`."""
        return self._owners(ollama_names.find_same_model(name, self.names))

    def _owners(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self.aliases.get(name, name) for name in names))


def ask_which(names: Collection[str]) -> str:
    """Return a question about which of several names is meant, after a space, or an empty text."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


def suggest_names(name: str, names: Iterable[str]) -> str:
    """Return a question that suggests similar names, after a space, or an empty text."""
    if len(name) > _MAX_NAME_CHARACTERS:
        return ""  # nothing is similar, and comparing long texts is slow
    return ask_which(difflib.get_close_matches(name, names, n=3, cutoff=0.5))


def shipped_catalogue_path() -> Path:
    """Return the shipped models.toml: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "models.toml"
    return inside if inside.exists() else package.parent / "models.toml"


def load_catalogue(user: Path, shipped: Path | None = None) -> Catalogue:
    """Load the shipped catalogue, overlaid with the user's own, which need not exist.

    Raises:
        CatalogueError: a file is wrong; the message names file, line and key, and what is allowed.
    """
    pairs: dict[str, CataloguePair] = {}
    aliases: dict[str, str] = {}
    presets: dict[str, Preset] = {}
    servers: dict[str, Upstream] = {}
    for path in (shipped or shipped_catalogue_path(), user):
        if path == user and not path.exists():
            continue
        file_pairs, file_presets, file_servers = read_catalogue(path, pairs)
        presets |= file_presets
        servers |= file_servers
        pairs |= file_pairs
        aliases = {alias: owner for alias, owner in aliases.items() if owner not in file_pairs}
        aliases |= {alias: name for name, pair in file_pairs.items() for alias in pair.aliases}
    pairs = {name: pair for name, pair in pairs.items() if name not in servers}
    aliases = {alias: owner for alias, owner in aliases.items() if owner in pairs}
    return Catalogue(pairs, aliases, presets, servers)


def read_catalogue(
    path: Path, below: Collection[str] = ()
) -> tuple[dict[str, CataloguePair], dict[str, Preset], dict[str, Upstream]]:
    """Read and strictly check one file's pairs, presets and upstreams.

    below: the names of the pairs that the file overlays.

    Raises:
        CatalogueError: the file is wrong; the message names file, line and key, and what is allowed.
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
        last_line = f"at line {text.count(chr(10)) + 1}, the last"  # other messages name the line
        problem = str(error).replace("at end of document", last_line)
        raise CatalogueError(f"{path}: {problem}.") from error
    locator = _KeyLocator(path, text)
    for key in table:
        if key not in ("version", "pairs"):
            raise locator.error((key,), f"unknown key '{key}'; the keys are version and pairs")
    if table.get("version", VERSION) != VERSION:
        raise locator.error(("version",), f"version must be {VERSION}")
    entries = table.get("pairs", {})
    if not isinstance(entries, dict):
        raise locator.error(("pairs",), "pairs must be a table: [pairs.NAME]")
    parsed = {name: _parse_entry(locator, name, entry) for name, entry in entries.items()}
    pairs = {name: entry for name, entry in parsed.items() if isinstance(entry, CataloguePair)}
    _check_names(locator, pairs, below)
    servers = {name: entry for name, entry in parsed.items() if isinstance(entry, Upstream)}
    for name in servers:
        if problem := explain_reserved_name(name):
            raise locator.error(("pairs", name), f"'{name}' cannot be a pair's name: {problem}")
    presets = {
        name: _complete_preset(locator, name, entry)
        for name, entry in parsed.items()
        if isinstance(entry, Preset) and entry.has_values
    }
    return pairs, presets, servers


class _KeyLocator:
    """Find the line of a key for error messages.

    tomllib keeps no positions, so the text is searched after an error.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = text.splitlines()

    def error(self, keys: tuple[str, ...], problem: str) -> CatalogueError:
        """Return the error for a key, with its file and line."""
        dotted = ".".join(keys)
        return CatalogueError(f"{self.path}, line {self._find_line(keys)}, {dotted}: {problem}.")

    def _find_line(self, keys: tuple[str, ...]) -> int:
        """Return the line of the key, or of the innermost table around it that has a header."""
        for depth in range(len(keys), -1, -1):
            start = self._find_header(keys[:depth])
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

    def _find_header(self, keys: tuple[str, ...]) -> int | None:
        if not keys:
            return 0
        dotted = ".".join(keys)
        for number, line in enumerate(self.lines):
            match = re.match(r"\s*\[([^\[\]]+)\]", line)
            if match and re.sub(r"[\s\"']", "", match[1]) == dotted:
                return number
        return None


def _complete_preset(locator: _KeyLocator, name: str, entry: Preset) -> Preset:
    """Return the checked preset of an entry, with the text of its chat template."""
    keys = ("pairs", name)
    types = {
        parameter.name: parameter.kind
        for parameter in sampling_parameters()
        if parameter.name not in _NO_DEFAULTS
    }
    for key, value in entry.sampling.items():
        if key not in types:
            raise locator.error(
                (*keys, "sampling", key), f"there is no sampling parameter '{key[:40]}'"
            )
        try:
            msgspec.convert(int(value) if value == int(value) else value, types[key], strict=False)
        except msgspec.ValidationError as error:
            raise locator.error((*keys, "sampling", key), _explain(error, Preset, key)) from None
        except (OverflowError, ValueError):
            raise locator.error(
                (*keys, "sampling", key), f"'{key}' must be a finite number"
            ) from None
    for endpoint in entry.rpc:
        if not ENDPOINT_PATTERN.fullmatch(endpoint):
            raise locator.error((*keys, "rpc"), f"'{endpoint[:80]}' is not HOST:PORT")
    template = _read_template(locator, name, entry.chat_template) if entry.chat_template else ""
    return Preset(
        chat_template=template,
        sampling=entry.sampling,
        keep=entry.keep,
        idle_unload=entry.idle_unload,
        rpc=entry.rpc,
    )


def _read_template(locator: _KeyLocator, name: str, written: str) -> str:
    file = locator.path.parent / expand_user(written)
    problem = ""
    try:
        text = read_file(file).decode()
        if not text.strip() or len(text) > _MAX_TEMPLATE_CHARACTERS:
            problem = "is empty or too large for a template"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "cannot be read: it is not UTF-8"
    if problem:
        raise locator.error(("pairs", name, "chat_template"), f"{file} {problem}")
    return text


def _explain(error: msgspec.ValidationError, kind: type[msgspec.Struct], whole: str) -> str:
    """Return what is wrong, as a clause. `whole` is the name of what was checked."""
    problem = explain(str(error), kind).message.removesuffix(".")
    return problem.replace("The request body", f"'{whole}'").replace("an object", "a table")


def _parse_entry(
    locator: _KeyLocator, name: str, entry: object
) -> CataloguePair | Preset | Upstream:
    """Parse one entry: a pair, an upstream server, or the preset of a pair if it has no target."""
    stated_keys = set(entry) if isinstance(entry, dict) else set()
    kind: type[CataloguePair | Preset | Upstream] = CataloguePair
    if stated_keys and stated_keys <= set(Preset.__struct_fields__):
        kind = Preset
    elif "upstream" in stated_keys:
        kind = Upstream
    if isinstance(entry, dict) and "heads" in entry and "sidecar" not in entry:  # until 0.2
        entry = {"sidecar" if key == "heads" else key: value for key, value in entry.items()}
    try:
        pair = msgspec.convert(entry, kind, strict=True)
    except msgspec.ValidationError as error:
        keys = tuple(re.findall(r"\w+", explain(str(error), kind).param or ""))
        raise locator.error(("pairs", name, *keys), _explain(error, kind, name)) from None
    if isinstance(pair, Upstream):
        if not NAME_PATTERN.fullmatch(name):
            raise locator.error(("pairs", name), f"'{name}' is not {_NAME_RULE}")
        upstream = extras.load("upstream", "catalogue")
        if upstream is None:
            raise locator.error(("pairs", name), "needs localspec's extra 'upstream'")
        key, problem = upstream.find_problem(name, pair)
        if problem:
            raise locator.error(("pairs", name, key), problem)
        return pair
    if not isinstance(pair, CataloguePair):
        return pair
    for keys, pattern, value, shape in _text_rules(name, pair):
        if value and not pattern.fullmatch(value):
            raise locator.error(("pairs", name, *keys), f"'{value}' is not {shape}")
    for key, value in (("summary", pair.summary), ("target.repo", pair.target.repo)):
        if not value:
            raise locator.error(("pairs", name, *key.split(".")), "must not be empty")
    return pair


def _text_rules(
    name: str, pair: CataloguePair
) -> Iterator[tuple[tuple[str, ...], re.Pattern[str], str, str]]:
    """Yield each text with a fixed form: its keys, its pattern, its value, and the form in words."""
    yield (), NAME_PATTERN, name, _NAME_RULE
    for alias in pair.aliases:
        yield ("aliases",), NAME_PATTERN, alias, _NAME_RULE
    yield ("memory",), _MEMORY_CLASS, pair.memory, "a number of GB, a range such as 16-24, or cpu"
    for role in ("target", "draft", "sidecar"):
        weights: HubFile | None = getattr(pair, role)
        if weights:
            for key, pattern, missing, shape in _FILE_RULES:
                yield (role, key), pattern, getattr(weights, key) or missing, shape


def _check_names(
    locator: _KeyLocator, pairs: Mapping[str, CataloguePair], below: Collection[str]
) -> None:
    """Check that no name has two meanings."""
    owner: dict[str, str] = {name: name for name in (*below, *pairs)}
    for name, pair in pairs.items():
        if problem := explain_reserved_name(name):
            raise locator.error(("pairs", name), f"'{name}' cannot be a pair's name: {problem}")
        for alias in pair.aliases:
            if problem := explain_reserved_name(alias):
                problem = f"'{alias}' cannot be a pair's other name: {problem}"
            elif owner.setdefault(alias, name) != name:
                problem = f"'{alias}' already means '{owner[alias]}'"
            if problem:
                raise locator.error(("pairs", name, "aliases"), problem)


def reload_catalogue(user: Path, last: Catalogue | None = None) -> Catalogue:
    """Return the catalogue of the files as they are now.

    After a broken edit the last valid catalogue stays in use, and its `problem` describes the mistake.
    """
    try:
        return load_catalogue(user)
    except CatalogueError as error:
        if last is not None:
            return replace(last, problem=f"{error.message} The last good catalogue stays in use.")
        # There is no earlier valid catalogue yet. The shipped file alone keeps its pairs usable.
        shipped = load_catalogue(shipped_catalogue_path())
        problem = f"{error.message} Your file is ignored until it is corrected."
        return replace(shipped, problem=problem)
