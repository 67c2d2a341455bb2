"""A pair as the arguments of another engine, with what that cannot do with it.

Options and keys are spelled as in vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.2 and llama.cpp of 2026-09;
tests hold them against these engines' own lists.
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
    """Where the engine is to run: `host` as others reach it (empty: its own loopback alone), its `port`
    (0: the usual one), machines, GPUs of each, and tokens of context (0: as the model has them).
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
class Served:
    """How an engine serves a pair. command: of its words the first `program` are the program's own.

    kind: as `localspec add --upstream-kind` has it. model: the name it answers to, "" its only one. files:
    what has to be written first, by name. first: commands on the first machine before it, rest: on each of
    the others, each with what it is for.
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

    def add(self, *arguments: str) -> None:
        self.command += arguments


_GATED = ("meta-llama/", "google/gemma-3-")
# By the original's name: the parsers of tool calls and of thoughts, vLLM's and SGLang's.
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
    """vLLM, on one machine or several (Ray)."""
    program = ["vllm", "serve", _original(pair, "vLLM")]
    made = Served("vLLM", "vllm", "vllm", place.port or 8000, 2, program, pair.called)
    made.add("--served-model-name", pair.called)
    made.add("--host", place.listen, "--port", str(made.port))
    if place.gpus > 1:
        made.add("--tensor-parallel-size", str(place.gpus))
    if place.nodes > 1:
        made.add("--pipeline-parallel-size", str(place.nodes))
        made.add("--distributed-executor-backend", "ray")
        ray = ["ray", "start"]
        made.first = [("on the first machine", [*ray, "--head", "--port=6379"])]
        made.rest = [("on each of the others", [*ray, f"--address={_address(place.host, 6379)}"])]
        made.notes.append("Drafts over several pipeline stages were not tried by us.")
    if place.context:
        made.add("--max-model-len", str(place.context))
    if told := _vllm_speculation(pair, made):
        made.add("--speculative-config", json.dumps(told, separators=(",", ":")))
        made.add("--per-request-spec-decode-metrics", "summary")
    tools, thoughts = _parsers(pair, 0)
    if tools:
        made.add("--enable-auto-tool-choice", "--tool-call-parser", tools)
    if thoughts:
        made.add("--reasoning-parser", thoughts)
    return _with_notes(made, pair)


def _vllm_speculation(pair: Pair, made: Served) -> dict[str, object]:
    depth = pair.depth
    if not depth:
        return {}
    counted: dict[str, object] = {"num_speculative_tokens": depth}
    if pair.kind == "model":
        told = {"method": "draft_model", "model": _draft(pair, "vLLM"), **counted}
        if rows := _rows_differ(pair):
            told["use_heterogeneous_vocab"] = True
            made.notes.append(
                f"The vocabularies have different sizes ({rows}): vLLM proposes the tokens both have."
            )
        return told
    if pair.kind == "mtp-sidecar":
        return {"method": "mtp", "model": _draft(pair, "vLLM"), **counted}
    if pair.kind == "mtp-embedded":
        return {"method": "mtp", **counted}
    return {"method": "ngram", **counted, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def sglang(pair: Pair, place: Place) -> Served:
    """SGLang, on one machine or several."""
    program = ["python3", "-m", "sglang.launch_server"]
    made = Served("SGLang", "sglang", "sglang", place.port or 30000, 3, program, pair.called)
    made.add("--model-path", _original(pair, "SGLang"), "--served-model-name", pair.called)
    made.add("--host", place.listen, "--port", str(made.port))
    if place.gpus * place.nodes > 1:
        made.add("--tp-size", str(place.gpus * place.nodes))
    if place.context:
        made.add("--context-length", str(place.context))
    _sglang_speculation(pair, made)
    tools, thoughts = _parsers(pair, 1)
    if tools:
        made.add("--tool-call-parser", tools)
    if thoughts:
        made.add("--reasoning-parser", thoughts)
    if place.nodes > 1:
        made.add("--nnodes", str(place.nodes), "--dist-init-addr", _address(place.host, 5000))
        made.rest = [
            (f"on machine {number + 1}", [*made.command, "--node-rank", str(number)])
            for number in range(1, place.nodes)
        ]
        made.add("--node-rank", "0")
    return _with_notes(made, pair)


def _sglang_speculation(pair: Pair, made: Served) -> None:
    depth = pair.depth
    if not depth:
        return
    rows = _rows_differ(pair)
    if rows:
        made.notes.append(
            f"SGLang takes no draft model whose vocabulary has another size ({rows}): "
            "it drafts from the text itself (NGRAM) instead."
        )
    if rows or pair.kind == "ngram":
        made.add("--speculative-algorithm", "NGRAM")
        return
    made.add("--speculative-algorithm", "STANDALONE" if pair.kind == "model" else "NEXTN")
    if pair.kind != "mtp-embedded":
        made.add("--speculative-draft-model-path", _draft(pair, "SGLang"))
    made.add("--speculative-num-steps", str(depth), "--speculative-eagle-topk", "1")
    made.add("--speculative-num-draft-tokens", str(depth + 1))


def trtllm(pair: Pair, place: Place) -> Served:
    """TensorRT-LLM's PyTorch backend, on one machine."""
    _one_machine(place, "TensorRT-LLM", "its own launcher (Slurm or mpirun) starts it on several")
    program = ["trtllm-serve", _original(pair, "TensorRT-LLM")]
    made = Served("TensorRT-LLM", "tensorrt-llm", "trtllm", place.port or 8000, 1, program)
    made.add("--host", place.listen, "--port", str(made.port))
    if place.gpus > 1:
        made.add("--tp_size", str(place.gpus))
    if place.context:
        made.add("--max_seq_len", str(place.context))
    if told := _trtllm_speculation(pair, made):
        lines = ["speculative_config:", *(f"  {key}: {literals.yaml(told[key])}" for key in told)]
        if told["decoding_type"] != "MTP":
            lines.append("disable_overlap_scheduler: true")
        made.files["trtllm.yaml"] = "\n".join(lines) + "\n"
        made.add("--config", "trtllm.yaml")
    return _with_notes(made, pair)


def _trtllm_speculation(pair: Pair, made: Served) -> dict[str, object]:
    depth = pair.depth
    if not depth:
        return {}
    if pair.kind == "model":
        if rows := _rows_differ(pair):
            made.notes.append(
                f"The vocabularies have different sizes ({rows}); we do not know whether it takes that."
            )
        made.notes.append("Older releases spell the decoding_type DraftTarget.")
        draft = _draft(pair, "TensorRT-LLM")
        return {
            "decoding_type": "Draft_Target",
            "max_draft_len": depth,
            "speculative_model": draft,
        }
    if pair.kind == "mtp-embedded" and pair.target.original.startswith("deepseek-ai/"):
        return {"decoding_type": "MTP", "num_nextn_predict_layers": depth}
    if pair.kind == "mtp-embedded":
        made.notes.append(
            "TensorRT-LLM documents heads (MTP) for DeepSeek's models alone: "
            "it drafts from the text itself (NGram) instead."
        )
    elif pair.kind == "mtp-sidecar":
        made.notes.append(
            "TensorRT-LLM knows no heads in a file of their own: "
            "it drafts from the text itself (NGram) instead."
        )
    return {"decoding_type": "NGram", "max_draft_len": depth, "max_matching_ngram_size": 4}


def llama_server(pair: Pair, place: Place) -> Served:
    """llama.cpp's own server, which reads the same files."""
    _one_machine(place, "llama-server", "it reaches other machines by `--rpc` and rpc-server there")
    made = Served("llama-server", "llama-server", "llama-server", place.port or 8080, 1, [])
    made.command, made.model = ["llama-server"], pair.served
    if pair.target.repo:
        made.add("--hf-repo", pair.target.repo, "--hf-file", pair.target.file)
    else:
        made.add("--model", pair.target.path)
    made.add("--alias", pair.served, "--host", place.listen, "--port", str(made.port))
    if place.context:
        made.add("--ctx-size", str(place.context))
    depth = pair.depth
    if depth and pair.kind == "ngram":
        made.add("--spec-type", "ngram-simple")
    elif depth:
        made.add("--spec-type", "draft-simple" if pair.kind == "model" else "draft-mtp")
        made.add("--spec-draft-n-max", str(depth))
        if pair.draft and pair.draft.repo:
            made.add("--spec-draft-hf", pair.draft.quantized)
        elif pair.draft:
            made.add("--spec-draft-model", pair.draft.path)
    if not pair.target.repo:
        made.notes.append("Copy the files to where it runs, and name them as they lie there.")
    made.notes.insert(0, pair.measured)
    return made


ENGINES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "llama-server": llama_server}


def _one_machine(place: Place, engine: str, how: str) -> None:
    if place.nodes > 1:
        raise UsageError(
            f"--nodes is for vllm and sglang. {engine} is exported for one machine; {how}."
        )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _original(pair: Pair, engine: str) -> str:
    return _named(pair.target, "--weights", f"of '{pair.name}'", engine)


def _draft(pair: Pair, engine: str) -> str:
    assert pair.draft is not None, "what drafts has a file of its own"
    return _named(pair.draft, "--draft-weights", f"of the draft of '{pair.name}'", engine)


def _named(model: Model, option: str, whose: str, engine: str) -> str:
    if model.original:
        return model.original
    raise UsageError(
        f"{engine} is given original weights, no GGUF, and the catalogue names none {whose}; "
        f"give them: {option} OWNER/REPO, or a folder."
    )


def _rows_differ(pair: Pair) -> str:
    """Both numbers of rows, where a draft model has others than its target; else empty."""
    rows = (pair.target.vocabulary, pair.draft.vocabulary) if pair.draft else (0, 0)
    differ = pair.kind == "model" and all(rows) and rows[0] != rows[1]
    return f"{rows[0]} and {rows[1]}" if differ else ""


def _parsers(pair: Pair, which: int) -> tuple[str, str]:
    for pattern, *names in _PARSERS:
        if re.match(pattern, pair.target.original):
            return names[which]
    return "", ""


def _with_notes(made: Served, pair: Pair) -> Served:
    """What is to be said of original weights, after where the depth is from."""
    said = [pair.measured]
    if size := 2 * sum(each.billions for each in (pair.target, pair.draft) if each):
        said.append(f"The original weights have 16 bits: about {size:.0f} GB, without the cache.")
    named = [each.original for each in (pair.target, pair.draft) if each]
    if any(name.startswith(_GATED) for name in named):
        said.append("Their licence is accepted on the hub first; HF_TOKEN names the account.")
    made.notes = said + made.notes
    return made
