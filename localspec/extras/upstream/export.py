"""Export a pair to another engine: its command there, as a shell script or a compose file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from localspec import literals
from localspec.errors import UsageError

_HEREDOC_END = "END_OF_FILE"


def render_script(pair: ExportedPair, place: Deployment, served: EngineCommand) -> str:
    """Return a shell script; with several machines, the first one's."""
    lines = [*comment_lines([f"{pair.name} on {served.title}.", *served.notes])]
    for name, text in served.files.items():
        # Each line has a key of ours and JSON, so that none of them ends the here-document.
        lines += [f"cat > {shlex.quote(name)} <<'{_HEREDOC_END}'", *text.splitlines(), _HEREDOC_END]
    for purpose, command in served.first:
        lines += [*comment_lines([f"{purpose[:1].upper()}{purpose[1:]}:"]), shlex.join(command)]
    for purpose, command in served.rest:
        lines += comment_lines([f"{purpose[:1].upper()}{purpose[1:]}:", shlex.join(command)])
    if served.first:
        lines += comment_lines(["Then here again, once `ray status` shows all of them:"])
    lines += [wrap_command(served.command, served.program), ""]
    return "\n".join([*lines, *comment_lines(connect_lines(pair, place, served)), ""])


def comment_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield one comment line for each text, even if a name contains a line break."""
    for text in texts:
        yield "# " + "".join(char if char.isprintable() else "?" for char in text)


def wrap_command(command: Sequence[str], program: int) -> str:
    """Return a command with one line for each option."""
    lines = [[*command[:program]]]
    for word in command[program:]:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    quoted = [shlex.join(words) for words in lines]
    return " \\\n  ".join(quoted)


IMAGES = {
    "vllm": "vllm/vllm-openai:latest",
    "sglang": "lmsysorg/sglang:latest",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:latest",
    "llama-server": "ghcr.io/ggml-org/llama.cpp:server-cuda",
}
# Programs that are not on the path of their image.
_PROGRAMS = {"llama-server": ["/app/llama-server"]}
_MAX_LIST_CHARACTERS = 100  # a longer list gets one line for each item
# Keys that need no quotes. In YAML, "0", "on" and "null" would not be strings.
_PLAIN_KEY = re.compile(r"(?!(?:on|off|yes|no|true|false|null)$)[a-z][a-z_]+")


def render_compose(pair: ExportedPair, place: Deployment, engine: str) -> str:
    """Return the compose file, whose strings are JSON, which is also valid YAML.

    Raises:
        UsageError: the place has several machines, or the engine cannot serve the pair.
    """
    if place.nodes > 1:
        raise UsageError(
            "A compose file is for one machine; for several: --to vllm or --to sglang."
        )
    mounts: list[dict[str, Any]] = []
    mounted = replace(
        pair,
        target=_mount(pair.target, "target", engine, mounts),
        draft=_mount(pair.draft, "draft", engine, mounts) if pair.draft else None,
        projector=_mount_projector(pair.projector, engine, mounts),
    )
    served = ENGINES[engine](mounted, replace(place, host="0.0.0.0"))
    program = [*_PROGRAMS.get(engine, served.command[: served.program])]
    service: dict[str, Any] = {
        "image": IMAGES[engine],
        "entrypoint": program,
        "command": served.command[served.program :],
        "ports": [f"{'' if place.host else '127.0.0.1:'}{served.port}:{served.port}"],
        "volumes": [{"type": "volume", "source": "weights", "target": "/root/.cache"}, *mounts],
        "environment": ["HF_TOKEN"],  # passed on from the shell, if it is set there
        "ipc": "host",
        "restart": "unless-stopped",
        "deploy": {"resources": {"reservations": {"devices": [_gpus(place)]}}},
    }
    document: dict[str, Any] = {"services": {pair.served_name: service}, "volumes": {"weights": {}}}
    if served.files:
        document["configs"] = {name: {"content": text} for name, text in served.files.items()}
        service["configs"] = [{"source": name, "target": f"/{name}"} for name in served.files]
        service["working_dir"] = "/"
    lines = [
        *comment_lines([f"{pair.name} on {served.title}: docker compose up", *served.notes]),
        *_yaml(document),
        *comment_lines(connect_lines(pair, place, served)),
    ]
    return "\n".join(lines) + "\n"


def _gpus(place: Deployment) -> dict[str, Any]:
    return {"driver": "nvidia", "count": place.gpus, "capabilities": ["gpu"]}


def _mount(
    model: ExportedModel, role: str, engine: str, mounts: list[dict[str, Any]]
) -> ExportedModel:
    """Return the model with its path in the container, and add a mount for it if necessary."""
    if engine == "llama-server":
        if model.repo:
            return model
        path, inside = PurePath(model.path), f"/models/{role}/{PurePath(model.path).name}"
        source, model = path.parent, replace(model, path=inside)
    elif model.original.startswith("/"):
        source, model = PurePath(model.original), replace(model, original=f"/models/{role}")
    else:
        return model
    bind = {"type": "bind", "source": str(source), "target": f"/models/{role}", "read_only": True}
    mounts.append(bind)
    return model


def _mount_projector(path: str, engine: str, mounts: list[dict[str, Any]]) -> str:
    """Return the path in the container of a file for pictures, and add a mount for it; "": there is none."""
    if not path or engine != "llama-server":
        return ""
    return _mount(ExportedModel(path, path=path), "projector", engine, mounts).path


def _yaml(value: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, item in value.items():
        key = name if _PLAIN_KEY.fullmatch(name) else _scalar(name)
        if isinstance(item, dict) and item:
            yield f"{indent}{key}:"
            yield from _yaml(item, indent + "  ")
        elif isinstance(item, list) and len(_scalar(item)) > _MAX_LIST_CHARACTERS:
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {_scalar(element)}" for element in item)
        else:
            yield f"{indent}{key}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    """Return a value as JSON, with dollar signs escaped, which compose would expand."""
    return literals.yaml(value).replace("$", "$$")


_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def connect_lines(pair: ExportedPair, place: Deployment, served: EngineCommand) -> Iterator[str]:
    """Yield the `localspec add` line, after what it requires."""
    if place.host:
        yield "Then, where you ask from (so can whoever reaches the port, unless a firewall closes it):"
    else:
        tunnel = f"ssh -N -L {served.port}:127.0.0.1:{served.port} HOST"
        yield f"Then, where you ask from (it listens on its own machine alone: {tunnel}):"
    yield shlex.join(add_command(pair, place, served))


def add_command(pair: ExportedPair, place: Deployment, served: EngineCommand) -> list[str]:
    """Return the words of the `localspec add` command."""
    host = f"[{place.host}]" if ":" in place.host else place.host or "127.0.0.1"
    name = f"{pair.served_name}-{served.short}"
    words = ["localspec", "add", name, "--upstream", f"http://{host}:{served.port}/v1"]
    words += ["--upstream-kind", served.kind]
    if served.model:
        words += ["--upstream-model", served.model]
    # Another server may have its own chat template for a base model, so that it can chat.
    roles = ["chat" if role == "text" else role for role in pair.roles]
    if roles != ["chat"]:
        for role in roles:
            words += ["--role", role]
    if pair.here and _NAME.fullmatch(pair.name):
        words += ["--fallback", pair.name]
    return words


# ------------------------------------------------------------------------ engines
# A pair as the arguments of another engine, with notes about what that engine cannot do.
#
# Options and keys are those of vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.2 and llama.cpp of 2026-09.
# Tests compare them with these engines' own lists.


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where the engine is to run."""

    # Address under which others reach it; empty: only its own loopback.
    host: str = ""
    # 0: the engine's usual port.
    port: int = 0
    # Number of machines.
    nodes: int = 1
    # GPUs of each machine.
    gpus: int = 1
    # Tokens; 0: as the model has it.
    context: int = 0

    @property
    def listen(self) -> str:
        return "0.0.0.0" if self.host else "127.0.0.1"


@dataclass(slots=True)
class EngineCommand:
    """How an engine serves a pair."""

    title: str
    # The engine's kind for `localspec add --upstream-kind`.
    kind: str
    # Suffix of the pair's name in `localspec add`.
    short: str
    port: int
    # Number of leading words of `command` that are the program itself.
    program: int
    command: list[str]
    # The name that requests have to use; "": any.
    model: str = ""
    notes: list[str] = field(default_factory=list)
    # Files that have to be written first, by name.
    files: dict[str, str] = field(default_factory=dict)
    # Commands on the first machine before `command`, each with its purpose.
    first: list[tuple[str, list[str]]] = field(default_factory=list)
    # Commands on each of the other machines, each with its purpose.
    rest: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, options: Mapping[str, object]) -> None:
        """Add options with their values; True has none, and an option that is False, 0 or "" is left out."""
        for option, value in options.items():
            if value:
                self.command += [option] if value is True else [option, str(value)]


# Repositories whose licence has to be accepted on the hub before a download.
_GATED = ("meta-llama/", "google/gemma-3-")
# Parsers of tool calls and of thoughts, first vLLM's and then SGLang's, by the name of the original.
_PARSERS = (
    (r"Qwen/Qwen3\.\d", ("qwen3_coder", "qwen3"), ("qwen3_coder", "qwen3")),
    (r"Qwen/Qwen3-", ("hermes", "qwen3"), ("qwen25", "qwen3")),
    (r"Qwen/Qwen2\.5-", ("hermes", ""), ("qwen25", "")),
    (r"meta-llama/Llama-3", ("llama3_json", ""), ("llama3", "")),
    (r"mistralai/", ("mistral", ""), ("mistral", "")),
    (r"ibm-granite/granite-3", ("granite", ""), ("", "")),
    (r"ibm-granite/granite-4", ("granite4", ""), ("", "")),
    (r"google/gemma-4-", ("gemma4", "gemma4"), ("gemma4", "gemma4")),
    (r"deepseek-ai/DeepSeek-R1-", ("", "deepseek_r1"), ("", "deepseek-r1")),
)


def vllm(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return vLLM's command, for one machine or several (with Ray)."""
    program = ["vllm", "serve", _target_weights(pair, "vLLM")]
    served = EngineCommand("vLLM", "vllm", "vllm", place.port or 8000, 2, program, pair.engine_name)
    is_shared = place.nodes > 1
    if is_shared:
        served.first = [("on the first machine", ["ray", "start", "--head", "--port=6379"])]
        join = ["ray", "start", f"--address={_format_address(place.host, 6379)}"]
        served.rest = [("on each of the others", join)]
        served.notes.append("Drafts over several pipeline stages were not tried by us.")
    speculation = _vllm_speculation(pair, served)
    tool_parser, reasoning_parser = _find_parsers(pair, 0)
    served.add(
        {
            "--served-model-name": pair.engine_name,
            "--host": place.listen,
            "--port": served.port,
            "--tensor-parallel-size": place.gpus > 1 and str(place.gpus),
            "--pipeline-parallel-size": is_shared and str(place.nodes),
            "--distributed-executor-backend": is_shared and "ray",
            "--max-model-len": place.context,
            "--speculative-config": speculation and json.dumps(speculation, separators=(",", ":")),
            "--per-request-spec-decode-metrics": speculation and "summary",
            "--enable-auto-tool-choice": bool(tool_parser),
            "--tool-call-parser": tool_parser,
            "--reasoning-parser": reasoning_parser,
        }
    )
    return _with_notes(served, pair)


_LAYER_READERS = ("eagle3", "dflash", "dspark")  # sidecars that read layers of their target
# vLLM's method of each kind of draft.
_VLLM_METHODS = {"model": "draft_model", "mtp-sidecar": "mtp", "mtp-embedded": "mtp"}
_VLLM_METHODS |= {kind: kind for kind in _LAYER_READERS}


def _vllm_speculation(pair: ExportedPair, served: EngineCommand) -> dict[str, object]:
    if not pair.depth:
        return {}
    depth = {"num_speculative_tokens": pair.depth}
    method = _VLLM_METHODS.get(pair.draft_kind)
    if method is None:
        return {"method": "ngram", **depth, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    config: dict[str, object] = {"method": method}
    if pair.draft_kind != "mtp-embedded":
        config["model"] = _draft_weights(pair, "vLLM")
    config |= depth
    if rows := _compare_vocabularies(pair):
        config["use_heterogeneous_vocab"] = True
        served.notes.append(
            f"The vocabularies have different sizes ({rows}): vLLM proposes the tokens both have."
        )
    return config


def sglang(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return SGLang's command, for one machine or several."""
    program = ["python3", "-m", "sglang.launch_server"]
    served = EngineCommand(
        "SGLang", "sglang", "sglang", place.port or 30000, 3, program, pair.engine_name
    )
    gpus, is_shared = place.gpus * place.nodes, place.nodes > 1
    target, tool_parser, reasoning_parser = _target_weights(pair, "SGLang"), *_find_parsers(pair, 1)
    served.add(
        {
            "--model-path": target,
            "--served-model-name": pair.engine_name,
            "--host": place.listen,
            "--port": served.port,
            "--tp-size": gpus > 1 and str(gpus),
            "--context-length": place.context,
            **_sglang_speculation(pair, served),
            "--tool-call-parser": tool_parser,
            "--reasoning-parser": reasoning_parser,
            "--nnodes": is_shared and str(place.nodes),
            "--dist-init-addr": is_shared and _format_address(place.host, 5000),
        }
    )
    if is_shared:
        served.rest = [
            (f"on machine {number + 1}", [*served.command, "--node-rank", str(number)])
            for number in range(1, place.nodes)
        ]
        served.add({"--node-rank": "0"})
    return _with_notes(served, pair)


def _sglang_speculation(pair: ExportedPair, served: EngineCommand) -> dict[str, object]:
    if not pair.depth:
        return {}
    rows = _compare_vocabularies(pair)
    if rows:
        served.notes.append(
            f"SGLang takes no draft model whose vocabulary has another size ({rows}): "
            "it drafts from the text itself (NGRAM) instead."
        )
    if rows or pair.draft_kind == "ngram":
        return {"--speculative-algorithm": "NGRAM"}
    has_file = pair.draft_kind != "mtp-embedded"
    return {
        "--speculative-algorithm": "STANDALONE" if pair.draft_kind == "model" else "NEXTN",
        "--speculative-draft-model-path": has_file and _draft_weights(pair, "SGLang"),
        "--speculative-num-steps": pair.depth,
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": pair.depth + 1,
    }


def trtllm(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return the command of TensorRT-LLM's PyTorch backend, for one machine."""
    _require_one_machine(
        place, "TensorRT-LLM", "its own launcher (Slurm or mpirun) starts it on several"
    )
    program = ["trtllm-serve", _target_weights(pair, "TensorRT-LLM")]
    served = EngineCommand("TensorRT-LLM", "tensorrt-llm", "trtllm", place.port or 8000, 1, program)
    if speculation := _trtllm_speculation(pair, served):
        lines = [f"  {key}: {literals.yaml(value)}" for key, value in speculation.items()]
        if speculation["decoding_type"] != "MTP":
            lines.append("disable_overlap_scheduler: true")
        served.files["trtllm.yaml"] = "\n".join(["speculative_config:", *lines]) + "\n"
    served.add(
        {
            "--host": place.listen,
            "--port": served.port,
            "--tp_size": place.gpus > 1 and str(place.gpus),
            "--max_seq_len": place.context,
            "--config": speculation and "trtllm.yaml",
        }
    )
    return _with_notes(served, pair)


_TRTLLM_WITHOUT = {
    "mtp-embedded": "TensorRT-LLM documents heads (MTP) for DeepSeek's models alone: ",
    "mtp-sidecar": "TensorRT-LLM knows no heads in a file of their own: ",
}


def _trtllm_speculation(pair: ExportedPair, served: EngineCommand) -> dict[str, object]:
    depth, kind = pair.depth, pair.draft_kind
    if not depth:
        return {}
    if kind == "model":
        if rows := _compare_vocabularies(pair):
            served.notes.append(
                f"The vocabularies have different sizes ({rows}); we do not know whether it takes that."
            )
        served.notes.append("Older releases spell the decoding_type DraftTarget.")
        draft = _draft_weights(pair, "TensorRT-LLM")
        method: dict[str, object] = {"decoding_type": "Draft_Target", "max_draft_len": depth}
        return {**method, "speculative_model": draft}
    if kind == "mtp-embedded" and pair.target.original.startswith("deepseek-ai/"):
        return {"decoding_type": "MTP", "num_nextn_predict_layers": depth}
    if reason := _TRTLLM_WITHOUT.get(kind):
        served.notes.append(f"{reason}it drafts from the text itself (NGram) instead.")
    return {"decoding_type": "NGram", "max_draft_len": depth, "max_matching_ngram_size": 4}


_LLAMA_SERVER_TYPES = {"model": "draft-simple", "ngram": "ngram-simple"}
_LLAMA_SERVER_TYPES |= {kind: f"draft-{kind}" for kind in _LAYER_READERS}


def llama_server(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return the command of llama.cpp's own server, which reads the same files."""
    _require_one_machine(
        place, "llama-server", "it reaches other machines by `--rpc` and rpc-server there"
    )
    name, target, draft, depth = "llama-server", pair.target, pair.draft, pair.depth
    served = EngineCommand(name, name, name, place.port or 8080, 1, [name], pair.served_name)
    has_draft = depth and pair.draft_kind != "ngram"
    served.add(
        {
            "--hf-repo": target.repo,
            "--hf-file": target.repo and target.file,
            "--model": not target.repo and target.path,
            "--mmproj": pair.projector,
            "--alias": pair.served_name,
            "--host": place.listen,
            "--port": served.port,
            "--ctx-size": place.context,
            "--spec-type": depth and _LLAMA_SERVER_TYPES.get(pair.draft_kind, "draft-mtp"),
            "--spec-draft-n-max": has_draft and str(depth),
            "--spec-draft-hf": has_draft and draft and draft.repo and draft.quantized,
            "--spec-draft-model": has_draft and draft and not draft.repo and draft.path,
        }
    )
    served.notes.append(pair.depth_note)
    is_downloaded = target.repo and (draft is None or draft.repo)
    if pair.projector or not is_downloaded:
        served.notes.append("Copy the files to where it runs, and name them as they lie there.")
    return served


ENGINES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "llama-server": llama_server}


def _require_one_machine(place: Deployment, engine: str, alternative: str) -> None:
    if place.nodes > 1:
        raise UsageError(
            f"--nodes is for vllm and sglang. {engine} is exported for one machine; {alternative}."
        )


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _target_weights(pair: ExportedPair, engine: str) -> str:
    return _original_weights(pair.target, "--weights", f"of '{pair.name}'", engine)


def _draft_weights(pair: ExportedPair, engine: str) -> str:
    assert pair.draft is not None, "what drafts has a file of its own"
    return _original_weights(
        pair.draft, "--draft-weights", f"of the draft of '{pair.name}'", engine
    )


def _original_weights(model: ExportedModel, option: str, whose: str, engine: str) -> str:
    if model.original:
        return model.original
    raise UsageError(
        f"{engine} is given original weights, no GGUF, and the catalogue names none {whose}; "
        f"give them: {option} OWNER/REPO, or a folder."
    )


def _compare_vocabularies(pair: ExportedPair) -> str:
    """Return both sizes if a draft model's vocabulary differs from its target's; else ""."""
    rows = (pair.target.vocabulary, pair.draft.vocabulary) if pair.draft else (0, 0)
    differ = pair.draft_kind == "model" and all(rows) and rows[0] != rows[1]
    return f"{rows[0]} and {rows[1]}" if differ else ""


def _find_parsers(pair: ExportedPair, engine_index: int) -> tuple[str, str]:
    for pattern, *names in _PARSERS:
        if re.match(pattern, pair.target.original):
            return names[engine_index]
    return "", ""


def _with_notes(served: EngineCommand, pair: ExportedPair) -> EngineCommand:
    """Add what has to be said about original weights, after the note about the depth."""
    notes = [pair.depth_note]
    if size := 2 * sum(model.billions for model in (pair.target, pair.draft) if model):
        notes.append(f"The original weights have 16 bits: about {size:.0f} GB, without the cache.")
    originals = [model.original for model in (pair.target, pair.draft) if model]
    if any(name.startswith(_GATED) for name in originals):
        notes.append("Their licence is accepted on the hub first; HF_TOKEN names the account.")
    served.notes = notes + served.notes
    return served


# ------------------------------------------------------------------------ pair
# What an engine needs to know about a pair, read from the daemon's answers.


USUAL_DEPTH = 3  # the default of llama-server and SGLang, in tokens
_MAX_DEPTH = 10  # tokens
_MIN_DRAFTED_TOKENS = 500  # below which the acceptance rate is not used
# Costs of drafting one token, as fractions of a target pass: with a draft model of unknown size, with
# heads, and from the text. The last runs no model, but a wider pass is not quite free.
_DRAFT_MODEL_COST = 0.1
_HEADS_COST = 0.05
_NGRAM_COST = 0.02
_QUANT = re.compile(
    r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|MXFP4\w*))(?=[-.])"
)
_BILLIONS = re.compile(r"-(\d+(?:\.\d+)?)B\b")


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A target or a draft."""

    file: str
    # The repository of the file; empty for a file of this machine, at `path`.
    repo: str = ""
    path: str = ""
    # The same model in its makers' format: a repository or a folder.
    original: str = ""
    # Rows of token embeddings; 0 if not known.
    vocabulary: int = 0
    # Bytes; 0 if not known.
    size: int = 0

    @property
    def quantized(self) -> str:
        """The repository with the quantization, in the form that llama.cpp expects."""
        match = _QUANT.search(self.file)
        return f"{self.repo}:{match[1].upper()}" if match else self.repo

    @property
    def billions(self) -> float:
        """Parameters in billions, from the original's name; 0 if it does not say."""
        match = _BILLIONS.search(self.original)
        return float(match[1]) if match else 0.0


@dataclass(frozen=True, slots=True)
class ExportedPair:
    """A pair to be exported."""

    name: str
    # What drafts, as in the protocol.
    draft_kind: str
    target: ExportedModel
    draft: ExportedModel | None = None
    roles: tuple[str, ...] = ("chat",)
    # The pair's files are on this machine.
    here: bool = False
    # Drafted tokens in the history, of which `accepted` were accepted.
    drafted: int = 0
    accepted: int = 0
    # Path of the file by which the target reads pictures; "": it has none on this machine.
    projector: str = ""

    @property
    def served_name(self) -> str:
        """A name that every engine and `localspec add` accept."""
        name = re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-._")
        return name[-40:].lstrip("-._") or "model"

    @property
    def engine_name(self) -> str:
        """The model's name at the engine.

        A pair for fill-in-the-middle keeps its makers' name, by which the engine recognizes the
        markers.
        """
        return Path(self.target.original).name if "fim" in self.roles else self.served_name

    @property
    def depth(self) -> int:
        """Tokens to draft per round; 0: drafts do not pay.

        It maximizes the yield of a pass divided by its cost. The acceptance rate is measured here.
        The cost is that of an engine whose wide passes cost as much as narrow ones, as on a GPU
        with one answer at a time.
        """
        if self.drafted < _MIN_DRAFTED_TOKENS:
            return USUAL_DEPTH
        acceptance, cost = min(self.accepted / self.drafted, 0.99), self._cost

        def gain(depth: int) -> float:
            return (1 - acceptance ** (depth + 1)) / (1 - acceptance) / (1 + cost * depth)

        return max(range(_MAX_DEPTH + 1), key=gain)

    @property
    def _cost(self) -> float:
        if self.draft_kind == "ngram":
            return _NGRAM_COST
        if self.draft_kind != "model" or self.draft is None:
            return _HEADS_COST
        known = self.draft.size and self.target.size
        return self.draft.size / self.target.size if known else _DRAFT_MODEL_COST

    @property
    def depth_note(self) -> str:
        """A sentence about where the depth comes from."""
        if self.drafted < _MIN_DRAFTED_TOKENS:
            return f"No measurement for this pair; using draft depth {self.depth}."
        acceptance = f"{self.accepted / self.drafted:.0%} of {self.drafted} drafted tokens were accepted here"
        return (
            f"Depth {self.depth}: {acceptance}." if self.depth else f"No drafts: only {acceptance}."
        )


def read_pair(
    name: str, entry: Mapping[str, Any], view: Mapping[str, Any] | None, total: Mapping[str, Any]
) -> ExportedPair:
    """Return the pair of an entry of the list.

    entry: empty for files that are no pair. view: the pair's own view if it is on this machine.
    total: the history's counts for its answers.

    Raises:
        UsageError: the pair cannot be served by an engine of another machine.
    """
    kind = str((view or entry)["kind"])
    if kind == "upstream":
        raise UsageError(f"'{name}' is served by another server already.")
    if kind == "none":
        raise UsageError(f"'{name}' turns texts into numbers; only pairs that write are exported.")
    drafts = kind in ("model", "mtp-sidecar", *_LAYER_READERS)
    if view:
        target, draft = _from_view(view["target"]), _from_view(view["draft"]) if drafts else None
    else:
        target, draft = (
            _from_catalogue(entry["target"]),
            _from_catalogue(entry["draft"]) if drafts else None,
        )
    originals = [*entry.get("originals", ())]
    if originals:
        target = _with_original(target, originals[0])
        draft = _with_original(draft, originals[1]) if draft else None
    pair_name = str((view or entry)["name"])
    counts = {key: int(total.get(key) or 0) for key in ("drafted", "accepted")}
    projector = (view or {}).get("projector") or {}
    return ExportedPair(
        pair_name,
        kind,
        target,
        draft,
        tuple((view or entry)["roles"]),
        bool(view),
        projector=str(projector.get("path", "")),
        **counts,
    )


def _with_original(model: ExportedModel, original: Mapping[str, Any]) -> ExportedModel:
    rows = int(original["vocabulary"]) or model.vocabulary
    return replace(model, original=str(original["repo"]), vocabulary=rows)


def _from_view(model: Mapping[str, Any]) -> ExportedModel:
    return ExportedModel(
        str(model["file"]),
        str(model["repo"]),
        str(model["path"]),
        vocabulary=int(model["vocabulary"]),
        size=int(model["size"]),
    )


def _from_catalogue(named: str) -> ExportedModel:
    owner, repo, file = named.split("/", 2)
    return ExportedModel(file, f"{owner}/{repo}")
