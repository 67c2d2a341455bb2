"""Export a pair to another engine: its command there, as a shell script or a compose file.

Options and keys are those of vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.2 and llama.cpp of 2026-09. Tests
compare them with these engines' own lists.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from localspec import literals
from localspec.errors import UsageError

USUAL_DEPTH = 3  # the default of llama-server and SGLang, in tokens
_MAX_DEPTH = 10  # tokens
_MIN_DRAFTED_TOKENS = 500  # below which the acceptance rate is not used
# Costs of drafting one token, as fractions of a target pass: with a draft model of unknown size, with
# heads, and from the text. The last runs no model, but a wider pass is not quite free.
_DRAFT_MODEL_COST, _HEADS_COST, _NGRAM_COST = 0.1, 0.05, 0.02
_QUANT = re.compile(
    r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|MXFP4\w*))(?=[-.])"
)
_BILLIONS = re.compile(r"-(\d+(?:\.\d+)?)B\b")
_LAYER_READERS = ("eagle3", "dflash", "dspark")  # sidecars that read layers of their target


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A target or a draft.

    repo: of the file; empty for a file of this machine, at `path`. original: the same model in its makers'
    format, a repository or a folder. vocabulary, size: rows of token embeddings, and bytes; 0 if not known.
    """

    file: str
    repo: str = ""
    path: str = ""
    original: str = ""
    vocabulary: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class ExportedPair:
    """A pair to be exported.

    draft_kind: what drafts, as in the protocol. here: the pair's files are on this machine. drafted: drafted
    tokens in the history, of which `accepted` were accepted. projector: path of the file by which the target
    reads pictures; "": it has none on this machine. gpu_layers, cpu_moe_layers: layers on this machine's GPU
    (−1: all), and the first ones whose experts are not.
    """

    name: str
    draft_kind: str
    target: ExportedModel
    draft: ExportedModel | None = None
    roles: tuple[str, ...] = ("chat",)
    here: bool = False
    drafted: int = 0
    accepted: int = 0
    projector: str = ""
    gpu_layers: int = -1
    cpu_moe_layers: int = 0

    @property
    def served_name(self) -> str:
        """A name that every engine and `localspec add` accept."""
        name = re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-._")
        return name[-40:].lstrip("-._") or "model"

    @property
    def engine_name(self) -> str:
        """The model's name at the engine.

        A pair for fill-in-the-middle keeps its makers' name, by which the engine recognizes the markers.
        """
        return Path(self.target.original).name if "fim" in self.roles else self.served_name

    @property
    def depth(self) -> int:
        """Tokens to draft per round; 0: drafts do not pay.

        It maximizes the yield of a pass divided by its cost. The acceptance rate is measured here. The cost
        is that of an engine whose wide passes cost as much as narrow ones, as on a GPU with one answer at a
        time.
        """
        if self.drafted < _MIN_DRAFTED_TOKENS:
            return USUAL_DEPTH
        acceptance = min(self.accepted / self.drafted, 0.99)
        cost = _NGRAM_COST if self.draft_kind == "ngram" else _HEADS_COST
        if self.draft_kind == "model" and self.draft:
            known = self.draft.size and self.target.size
            cost = self.draft.size / self.target.size if known else _DRAFT_MODEL_COST

        def gain(depth: int) -> float:
            return (1 - acceptance ** (depth + 1)) / (1 - acceptance) / (1 + cost * depth)

        return max(range(_MAX_DEPTH + 1), key=gain)

    @property
    def depth_note(self) -> str:
        """A sentence about where the depth comes from."""
        if self.drafted < _MIN_DRAFTED_TOKENS:
            return f"No measurement for this pair; using draft depth {self.depth}."
        share = f"{self.accepted / self.drafted:.0%} of {self.drafted}"
        measured = f"{share} drafted tokens were accepted here."
        return f"Depth {self.depth}: {measured}" if self.depth else f"No drafts: only {measured}"


def read_pair(
    name: str, entry: Mapping[str, Any], view: Mapping[str, Any] | None, total: Mapping[str, Any]
) -> ExportedPair:
    """Return the pair of an entry of the list.

    entry: empty for files that are no pair. view: the pair's own view if it is on this machine.
    total: the history's counts for its answers.

    Raises:
        UsageError: the pair cannot be served by an engine of another machine.
    """
    known = view or entry
    kind = str(known["kind"])
    if kind == "upstream":
        raise UsageError(f"'{name}' is served by another server already.")
    if kind == "none":
        raise UsageError(f"'{name}' turns texts into numbers; only pairs that write are exported.")

    def read_model(role: str, index: int) -> ExportedModel:
        if view:
            file, repo, path = (str(view[role][key]) for key in ("file", "repo", "path"))
            rows, size = (int(view[role][key]) for key in ("vocabulary", "size"))
            model = ExportedModel(file, repo, path, vocabulary=rows, size=size)
        else:
            owner, repo, file = entry[role].split("/", 2)
            model = ExportedModel(file, f"{owner}/{repo}")
        if not entry.get("originals"):
            return model
        original = entry["originals"][index]
        rows = int(original["vocabulary"]) or model.vocabulary
        return replace(model, original=str(original["repo"]), vocabulary=rows)

    has_draft = kind in ("model", "mtp-sidecar", *_LAYER_READERS)
    fit = (view or {}).get("fit") or {}
    return ExportedPair(
        str(known["name"]),
        kind,
        read_model("target", 0),
        read_model("draft", 1) if has_draft else None,
        tuple(known["roles"]),
        bool(view),
        int(total.get("drafted") or 0),
        int(total.get("accepted") or 0),
        str(((view or {}).get("projector") or {}).get("path", "")),
        int(fit.get("gpu_layers") or -1),
        int(fit.get("cpu_moe_layers") or 0),
    )


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where the engine is to run.

    host: under which others reach it; empty: only its own loopback. port: 0: the engine's usual one. nodes,
    gpus: machines, and GPUs of each. context: tokens; 0: as the model has it.
    """

    host: str = ""
    port: int = 0
    nodes: int = 1
    gpus: int = 1
    context: int = 0

    @property
    def listen(self) -> str:
        return "0.0.0.0" if self.host else "127.0.0.1"


@dataclass(slots=True)
class EngineCommand:
    """How an engine serves a pair.

    kind: of the engine for `localspec add --upstream-kind`, and `short` the suffix of the pair's name there.
    program: number of leading words of `command` that are the program itself. model: the name that requests
    have to use; "": any. files: which have to be written first, by name. first: commands on the first machine
    before `command`, each with its purpose. rest: the same on each of the other machines.
    """

    title: str
    kind: str
    short: str
    port: int
    program: int
    command: list[str]
    model: str = ""
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    first: list[tuple[str, list[str]]] = field(default_factory=list)
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
# Methods of vLLM, and types of llama-server, by the kind of draft.
_VLLM_METHODS = {
    **{"model": "draft_model", "mtp-sidecar": "mtp", "mtp-embedded": "mtp"},
    **{kind: kind for kind in _LAYER_READERS},
}
_LLAMA_SERVER_TYPES = {
    **{"model": "draft-simple", "ngram": "ngram-simple"},
    **{kind: f"draft-{kind}" for kind in _LAYER_READERS},
}
_TRTLLM_WITHOUT = {
    "mtp-embedded": "TensorRT-LLM documents heads (MTP) for DeepSeek's models alone: ",
    "mtp-sidecar": "TensorRT-LLM knows no heads in a file of their own: ",
}


def vllm(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return vLLM's command, for one machine or several (with Ray)."""
    command = ["vllm", "serve", _find_weights(pair, "vLLM")]
    served = EngineCommand("vLLM", "vllm", "vllm", place.port or 8000, 2, command, pair.engine_name)
    served.notes = _describe_weights(pair)
    is_shared = place.nodes > 1
    if is_shared:
        served.first = [("on the first machine", ["ray", "start", "--head", "--port=6379"])]
        join = ["ray", "start", f"--address={_format_address(place.host, 6379)}"]
        served.rest = [("on each of the others", join)]
        served.notes.append("Drafts over several pipeline stages were not tried by us.")
    speculation: dict[str, object] = {}
    depth, method = {"num_speculative_tokens": pair.depth}, _VLLM_METHODS.get(pair.draft_kind)
    if pair.depth and method is None:
        speculation = {"method": "ngram", **depth, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    elif pair.depth:
        has_file = pair.draft_kind != "mtp-embedded"
        model = {"model": _find_weights(pair, "vLLM", draft=True)} if has_file else {}
        speculation = {"method": method, **model, **depth}
        if rows := _compare_vocabularies(pair):
            speculation["use_heterogeneous_vocab"] = True
            served.notes.append(
                f"The vocabularies have different sizes ({rows}): vLLM proposes the tokens both have."
            )
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
    return served


def sglang(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return SGLang's command, for one machine or several."""
    command, port = ["python3", "-m", "sglang.launch_server"], place.port or 30000
    served = EngineCommand("SGLang", "sglang", "sglang", port, 3, command, pair.engine_name)
    served.notes = _describe_weights(pair)
    target, gpus, is_shared = (
        _find_weights(pair, "SGLang"),
        place.gpus * place.nodes,
        place.nodes > 1,
    )
    speculation: dict[str, object] = {}
    rows = _compare_vocabularies(pair) if pair.depth else ""
    if rows:
        served.notes.append(
            f"SGLang takes no draft model whose vocabulary has another size ({rows}): "
            "it drafts from the text itself (NGRAM) instead."
        )
    if pair.depth and (rows or pair.draft_kind == "ngram"):
        speculation = {"--speculative-algorithm": "NGRAM"}
    elif pair.depth:
        has_file = pair.draft_kind != "mtp-embedded"
        speculation = {
            "--speculative-algorithm": "STANDALONE" if pair.draft_kind == "model" else "NEXTN",
            "--speculative-draft-model-path": has_file
            and _find_weights(pair, "SGLang", draft=True),
            "--speculative-num-steps": pair.depth,
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": pair.depth + 1,
        }
    tool_parser, reasoning_parser = _find_parsers(pair, 1)
    served.add(
        {
            "--model-path": target,
            "--served-model-name": pair.engine_name,
            "--host": place.listen,
            "--port": served.port,
            "--tp-size": gpus > 1 and str(gpus),
            "--context-length": place.context,
            **speculation,
            "--tool-call-parser": tool_parser,
            "--reasoning-parser": reasoning_parser,
            "--nnodes": is_shared and str(place.nodes),
            "--dist-init-addr": is_shared and _format_address(place.host, 5000),
        }
    )
    if is_shared:
        ranked = [[*served.command, "--node-rank", str(number)] for number in range(place.nodes)]
        served.command, *others = ranked
        served.rest = [(f"on machine {number}", words) for number, words in enumerate(others, 2)]
    return served


def trtllm(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return the command of TensorRT-LLM's PyTorch backend, for one machine."""
    name, depth, kind, config = "TensorRT-LLM", pair.depth, pair.draft_kind, "trtllm.yaml"
    _require_one_machine(place, name, "its own launcher (Slurm or mpirun) starts it on several")
    command = ["trtllm-serve", _find_weights(pair, name)]
    served = EngineCommand(name, "tensorrt-llm", "trtllm", place.port or 8000, 1, command)
    served.notes = _describe_weights(pair)
    if depth:
        speculation: dict[str, object] = {"decoding_type": "NGram", "max_draft_len": depth}
        if kind == "model":
            if rows := _compare_vocabularies(pair):
                served.notes.append(
                    f"The vocabularies have different sizes ({rows}); we do not know whether it takes that."
                )
            served.notes.append("Older releases spell the decoding_type DraftTarget.")
            draft = _find_weights(pair, name, draft=True)
            speculation |= {"decoding_type": "Draft_Target", "speculative_model": draft}
        elif kind == "mtp-embedded" and pair.target.original.startswith("deepseek-ai/"):
            speculation = {"decoding_type": "MTP", "num_nextn_predict_layers": depth}
        else:
            speculation["max_matching_ngram_size"] = 4
            if reason := _TRTLLM_WITHOUT.get(kind):
                served.notes.append(f"{reason}it drafts from the text itself (NGram) instead.")
        lines = [f"  {key}: {literals.yaml(value)}" for key, value in speculation.items()]
        if speculation["decoding_type"] != "MTP":
            lines.append("disable_overlap_scheduler: true")
        served.files[config] = "\n".join(["speculative_config:", *lines, ""])
    served.add(
        {
            "--host": place.listen,
            "--port": served.port,
            "--tp_size": place.gpus > 1 and str(place.gpus),
            "--max_seq_len": place.context,
            "--config": depth and config,
        }
    )
    return served


def llama_server(pair: ExportedPair, place: Deployment) -> EngineCommand:
    """Return the command of llama.cpp's own server, which reads the same files."""
    name, target, draft, depth = "llama-server", pair.target, pair.draft, pair.depth
    _require_one_machine(place, name, "it reaches other machines by `--rpc` and rpc-server there")
    served = EngineCommand(name, name, name, place.port or 8080, 1, [name], pair.served_name)
    has_draft = depth and pair.draft_kind != "ngram"
    quant = _QUANT.search(draft.file) if draft and draft.repo else None
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
            "--gpu-layers": pair.gpu_layers > 0 and str(pair.gpu_layers),
            "--n-cpu-moe": pair.cpu_moe_layers,
            "--spec-type": depth and _LLAMA_SERVER_TYPES.get(pair.draft_kind, "draft-mtp"),
            "--spec-draft-n-max": has_draft and str(depth),
            # With the quantization, by which llama.cpp finds the file.
            "--spec-draft-hf": has_draft
            and draft
            and draft.repo + (f":{quant[1].upper()}" if quant else ""),
            "--spec-draft-model": has_draft and draft and not draft.repo and draft.path,
        }
    )
    served.notes.append(pair.depth_note)
    if pair.gpu_layers > 0 or pair.cpu_moe_layers:
        served.notes.append("What lies on the GPU is what localspec would put on this machine's.")
    if pair.projector or not target.repo or (draft and not draft.repo):
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


def _find_weights(pair: ExportedPair, engine: str, *, draft: bool = False) -> str:
    """Return the original weights of the target or the draft. Raises UsageError if none are known."""
    model, option, whose = pair.target, "--weights", f"of '{pair.name}'"
    if draft:
        assert pair.draft is not None, "what drafts has a file of its own"
        model, option, whose = pair.draft, "--draft-weights", f"of the draft of '{pair.name}'"
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


def _describe_weights(pair: ExportedPair) -> list[str]:
    """Return notes on the depth and on the size and licence of original weights."""
    notes, originals = [pair.depth_note], [m.original for m in (pair.target, pair.draft) if m]
    # Parameters are known where an original's name says how many billions it has.
    billions = sum(float(match[1]) for name in originals if (match := _BILLIONS.search(name)))
    if billions:
        size = f"{2 * billions:.0f} GB"
        notes.append(f"The original weights have 16 bits: about {size}, without the cache.")
    if any(name.startswith(_GATED) for name in originals):
        notes.append("Their licence is accepted on the hub first; HF_TOKEN names the account.")
    return notes


_HEREDOC_END = "END_OF_FILE"
_PAIR_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def render_script(pair: ExportedPair, place: Deployment, served: EngineCommand) -> str:
    """Return a shell script; with several machines, the first one's."""
    lines = [*_comment(f"{pair.name} on {served.title}.", *served.notes)]
    for name, text in served.files.items():
        # Each line has a key of ours and JSON, so that none of them ends the here-document.
        lines += [f"cat > {shlex.quote(name)} <<'{_HEREDOC_END}'", *text.splitlines(), _HEREDOC_END]
    for purpose, command in served.first:
        lines += [*_comment(f"{purpose[:1].upper()}{purpose[1:]}:"), shlex.join(command)]
    for purpose, command in served.rest:
        lines += _comment(f"{purpose[:1].upper()}{purpose[1:]}:", shlex.join(command))
    if served.first:
        lines += _comment("Then here again, once `ray status` shows all of them:")
    # One line for each option.
    words = [[*served.command[: served.program]]]
    for word in served.command[served.program :]:
        if word.startswith("--"):
            words.append([])
        words[-1].append(word)
    lines += [" \\\n  ".join(map(shlex.join, words)), ""]
    return "\n".join([*lines, *_comment(*_connect_lines(pair, place, served)), ""])


def _comment(*texts: str) -> Iterator[str]:
    """Yield one comment line for each text, even if a name contains a line break."""
    for text in texts:
        yield "# " + "".join(char if char.isprintable() else "?" for char in text)


def _connect_lines(pair: ExportedPair, place: Deployment, served: EngineCommand) -> Iterator[str]:
    """Yield the `localspec add` line, after what it requires."""
    if place.host:
        yield "Then, where you ask from (so can whoever reaches the port, unless a firewall closes it):"
    else:
        tunnel = f"ssh -N -L {served.port}:127.0.0.1:{served.port} HOST"
        yield f"Then, where you ask from (it listens on its own machine alone: {tunnel}):"
    yield shlex.join(add_command(pair, place, served))


def add_command(pair: ExportedPair, place: Deployment, served: EngineCommand) -> list[str]:
    """Return the words of the `localspec add` command."""
    address = _format_address(place.host or "127.0.0.1", served.port)
    words = ["localspec", "add", f"{pair.served_name}-{served.short}"]
    words += ["--upstream", f"http://{address}/v1", "--upstream-kind", served.kind]
    if served.model:
        words += ["--upstream-model", served.model]
    # Another server may have its own chat template for a base model, so that it can chat.
    roles = ["chat" if role == "text" else role for role in pair.roles]
    for role in roles if roles != ["chat"] else ():
        words += ["--role", role]
    if pair.here and _PAIR_NAME.fullmatch(pair.name):
        words += ["--fallback", pair.name]
    return words


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
    mount = partial(_mount, engine, mounts)
    target, draft = mount(pair.target, "target"), pair.draft and mount(pair.draft, "draft")
    projector = pair.projector if engine == "llama-server" else ""
    if projector:
        projector = mount(ExportedModel(projector, path=projector), "projector").path
    mounted = replace(pair, target=target, draft=draft, projector=projector)
    served = ENGINES[engine](mounted, replace(place, host="0.0.0.0"))
    gpus = {"driver": "nvidia", "count": place.gpus, "capabilities": ["gpu"]}
    service: dict[str, Any] = {
        "image": IMAGES[engine],
        "entrypoint": _PROGRAMS.get(engine, served.command[: served.program]),
        "command": served.command[served.program :],
        "ports": [f"{'' if place.host else '127.0.0.1:'}{served.port}:{served.port}"],
        "volumes": [{"type": "volume", "source": "weights", "target": "/root/.cache"}, *mounts],
        "environment": ["HF_TOKEN"],  # passed on from the shell, if it is set there
        "ipc": "host",
        "restart": "unless-stopped",
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
    }
    document: dict[str, Any] = {"services": {pair.served_name: service}, "volumes": {"weights": {}}}
    if served.files:
        document["configs"] = {name: {"content": text} for name, text in served.files.items()}
        service["configs"] = [{"source": name, "target": f"/{name}"} for name in served.files]
        service["working_dir"] = "/"
    lines = [
        *_comment(f"{pair.name} on {served.title}: docker compose up", *served.notes),
        *_yaml(document),
        *_comment(*_connect_lines(pair, place, served)),
    ]
    return "\n".join(lines) + "\n"


def _mount(
    engine: str, mounts: list[dict[str, Any]], model: ExportedModel, role: str
) -> ExportedModel:
    """Return the model with its path in the container, and add a mount for it if necessary."""
    if engine == "llama-server" and not model.repo:
        source = PurePath(model.path).parent
        model = replace(model, path=f"/models/{role}/{PurePath(model.path).name}")
    elif engine != "llama-server" and model.original.startswith("/"):
        source, model = PurePath(model.original), replace(model, original=f"/models/{role}")
    else:
        return model
    inside = {"target": f"/models/{role}", "read_only": True}
    mounts.append({"type": "bind", "source": str(source), **inside})
    return model


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
