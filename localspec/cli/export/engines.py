"""A pair as the arguments of another engine, with notes about what that engine cannot do.

Options and keys are those of vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.2 and llama.cpp of 2026-09.
Tests compare them with these engines' own lists.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from localspec import literals
from localspec.cli.export.pair import Model, Pair
from localspec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
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
class Served:
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

    def add(self, *arguments: str) -> None:
        self.command += arguments


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


def vllm(pair: Pair, place: Place) -> Served:
    """Return vLLM's command, for one machine or several (with Ray)."""
    program = ["vllm", "serve", _target_weights(pair, "vLLM")]
    served = Served("vLLM", "vllm", "vllm", place.port or 8000, 2, program, pair.called)
    served.add("--served-model-name", pair.called)
    served.add("--host", place.listen, "--port", str(served.port))
    if place.gpus > 1:
        served.add("--tensor-parallel-size", str(place.gpus))
    if place.nodes > 1:
        served.add("--pipeline-parallel-size", str(place.nodes))
        served.add("--distributed-executor-backend", "ray")
        ray = ["ray", "start"]
        served.first = [("on the first machine", [*ray, "--head", "--port=6379"])]
        served.rest = [
            ("on each of the others", [*ray, f"--address={_format_address(place.host, 6379)}"])
        ]
        served.notes.append("Drafts over several pipeline stages were not tried by us.")
    if place.context:
        served.add("--max-model-len", str(place.context))
    if speculation := _vllm_speculation(pair, served):
        served.add("--speculative-config", json.dumps(speculation, separators=(",", ":")))
        served.add("--per-request-spec-decode-metrics", "summary")
    tool_parser, reasoning_parser = _find_parsers(pair, 0)
    if tool_parser:
        served.add("--enable-auto-tool-choice", "--tool-call-parser", tool_parser)
    if reasoning_parser:
        served.add("--reasoning-parser", reasoning_parser)
    return _with_notes(served, pair)


def _vllm_speculation(pair: Pair, served: Served) -> dict[str, object]:
    depth = pair.depth
    if not depth:
        return {}
    depth_config: dict[str, object] = {"num_speculative_tokens": depth}
    if pair.kind == "model":
        config = {"method": "draft_model", "model": _draft_weights(pair, "vLLM"), **depth_config}
        if rows := _compare_vocabularies(pair):
            config["use_heterogeneous_vocab"] = True
            served.notes.append(
                f"The vocabularies have different sizes ({rows}): vLLM proposes the tokens both have."
            )
        return config
    if pair.kind == "mtp-sidecar":
        return {"method": "mtp", "model": _draft_weights(pair, "vLLM"), **depth_config}
    if pair.kind == "mtp-embedded":
        return {"method": "mtp", **depth_config}
    return {"method": "ngram", **depth_config, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def sglang(pair: Pair, place: Place) -> Served:
    """Return SGLang's command, for one machine or several."""
    program = ["python3", "-m", "sglang.launch_server"]
    served = Served("SGLang", "sglang", "sglang", place.port or 30000, 3, program, pair.called)
    served.add("--model-path", _target_weights(pair, "SGLang"), "--served-model-name", pair.called)
    served.add("--host", place.listen, "--port", str(served.port))
    if place.gpus * place.nodes > 1:
        served.add("--tp-size", str(place.gpus * place.nodes))
    if place.context:
        served.add("--context-length", str(place.context))
    _sglang_speculation(pair, served)
    tool_parser, reasoning_parser = _find_parsers(pair, 1)
    if tool_parser:
        served.add("--tool-call-parser", tool_parser)
    if reasoning_parser:
        served.add("--reasoning-parser", reasoning_parser)
    if place.nodes > 1:
        served.add(
            "--nnodes", str(place.nodes), "--dist-init-addr", _format_address(place.host, 5000)
        )
        served.rest = [
            (f"on machine {number + 1}", [*served.command, "--node-rank", str(number)])
            for number in range(1, place.nodes)
        ]
        served.add("--node-rank", "0")
    return _with_notes(served, pair)


def _sglang_speculation(pair: Pair, served: Served) -> None:
    depth = pair.depth
    if not depth:
        return
    rows = _compare_vocabularies(pair)
    if rows:
        served.notes.append(
            f"SGLang takes no draft model whose vocabulary has another size ({rows}): "
            "it drafts from the text itself (NGRAM) instead."
        )
    if rows or pair.kind == "ngram":
        served.add("--speculative-algorithm", "NGRAM")
        return
    served.add("--speculative-algorithm", "STANDALONE" if pair.kind == "model" else "NEXTN")
    if pair.kind != "mtp-embedded":
        served.add("--speculative-draft-model-path", _draft_weights(pair, "SGLang"))
    served.add("--speculative-num-steps", str(depth), "--speculative-eagle-topk", "1")
    served.add("--speculative-num-draft-tokens", str(depth + 1))


def trtllm(pair: Pair, place: Place) -> Served:
    """Return the command of TensorRT-LLM's PyTorch backend, for one machine."""
    _require_one_machine(
        place, "TensorRT-LLM", "its own launcher (Slurm or mpirun) starts it on several"
    )
    program = ["trtllm-serve", _target_weights(pair, "TensorRT-LLM")]
    served = Served("TensorRT-LLM", "tensorrt-llm", "trtllm", place.port or 8000, 1, program)
    served.add("--host", place.listen, "--port", str(served.port))
    if place.gpus > 1:
        served.add("--tp_size", str(place.gpus))
    if place.context:
        served.add("--max_seq_len", str(place.context))
    if speculation := _trtllm_speculation(pair, served):
        lines = [
            "speculative_config:",
            *(f"  {key}: {literals.yaml(speculation[key])}" for key in speculation),
        ]
        if speculation["decoding_type"] != "MTP":
            lines.append("disable_overlap_scheduler: true")
        served.files["trtllm.yaml"] = "\n".join(lines) + "\n"
        served.add("--config", "trtllm.yaml")
    return _with_notes(served, pair)


def _trtllm_speculation(pair: Pair, served: Served) -> dict[str, object]:
    depth = pair.depth
    if not depth:
        return {}
    if pair.kind == "model":
        if rows := _compare_vocabularies(pair):
            served.notes.append(
                f"The vocabularies have different sizes ({rows}); we do not know whether it takes that."
            )
        served.notes.append("Older releases spell the decoding_type DraftTarget.")
        draft = _draft_weights(pair, "TensorRT-LLM")
        return {
            "decoding_type": "Draft_Target",
            "max_draft_len": depth,
            "speculative_model": draft,
        }
    if pair.kind == "mtp-embedded" and pair.target.original.startswith("deepseek-ai/"):
        return {"decoding_type": "MTP", "num_nextn_predict_layers": depth}
    if pair.kind == "mtp-embedded":
        served.notes.append(
            "TensorRT-LLM documents heads (MTP) for DeepSeek's models alone: "
            "it drafts from the text itself (NGram) instead."
        )
    elif pair.kind == "mtp-sidecar":
        served.notes.append(
            "TensorRT-LLM knows no heads in a file of their own: "
            "it drafts from the text itself (NGram) instead."
        )
    return {"decoding_type": "NGram", "max_draft_len": depth, "max_matching_ngram_size": 4}


def llama_server(pair: Pair, place: Place) -> Served:
    """Return the command of llama.cpp's own server, which reads the same files."""
    _require_one_machine(
        place, "llama-server", "it reaches other machines by `--rpc` and rpc-server there"
    )
    served = Served("llama-server", "llama-server", "llama-server", place.port or 8080, 1, [])
    served.command, served.model = ["llama-server"], pair.served
    if pair.target.repo:
        served.add("--hf-repo", pair.target.repo, "--hf-file", pair.target.file)
    else:
        served.add("--model", pair.target.path)
    served.add("--alias", pair.served, "--host", place.listen, "--port", str(served.port))
    if place.context:
        served.add("--ctx-size", str(place.context))
    depth = pair.depth
    if depth and pair.kind == "ngram":
        served.add("--spec-type", "ngram-simple")
    elif depth:
        served.add("--spec-type", "draft-simple" if pair.kind == "model" else "draft-mtp")
        served.add("--spec-draft-n-max", str(depth))
        if pair.draft and pair.draft.repo:
            served.add("--spec-draft-hf", pair.draft.quantized)
        elif pair.draft:
            served.add("--spec-draft-model", pair.draft.path)
    if not pair.target.repo:
        served.notes.append("Copy the files to where it runs, and name them as they lie there.")
    served.notes.insert(0, pair.measured)
    return served


ENGINES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "llama-server": llama_server}


def _require_one_machine(place: Place, engine: str, alternative: str) -> None:
    if place.nodes > 1:
        raise UsageError(
            f"--nodes is for vllm and sglang. {engine} is exported for one machine; {alternative}."
        )


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _target_weights(pair: Pair, engine: str) -> str:
    return _original_weights(pair.target, "--weights", f"of '{pair.name}'", engine)


def _draft_weights(pair: Pair, engine: str) -> str:
    assert pair.draft is not None, "what drafts has a file of its own"
    return _original_weights(
        pair.draft, "--draft-weights", f"of the draft of '{pair.name}'", engine
    )


def _original_weights(model: Model, option: str, whose: str, engine: str) -> str:
    if model.original:
        return model.original
    raise UsageError(
        f"{engine} is given original weights, no GGUF, and the catalogue names none {whose}; "
        f"give them: {option} OWNER/REPO, or a folder."
    )


def _compare_vocabularies(pair: Pair) -> str:
    """Return both sizes if a draft model's vocabulary differs from its target's; else ""."""
    rows = (pair.target.vocabulary, pair.draft.vocabulary) if pair.draft else (0, 0)
    differ = pair.kind == "model" and all(rows) and rows[0] != rows[1]
    return f"{rows[0]} and {rows[1]}" if differ else ""


def _find_parsers(pair: Pair, engine_index: int) -> tuple[str, str]:
    for pattern, *names in _PARSERS:
        if re.match(pattern, pair.target.original):
            return names[engine_index]
    return "", ""


def _with_notes(served: Served, pair: Pair) -> Served:
    """Add what has to be said about original weights, after the note about the depth."""
    notes = [pair.measured]
    if size := 2 * sum(model.billions for model in (pair.target, pair.draft) if model):
        notes.append(f"The original weights have 16 bits: about {size:.0f} GB, without the cache.")
    originals = [model.original for model in (pair.target, pair.draft) if model]
    if any(name.startswith(_GATED) for name in originals):
        notes.append("Their licence is accepted on the hub first; HF_TOKEN names the account.")
    served.notes = notes + served.notes
    return served
