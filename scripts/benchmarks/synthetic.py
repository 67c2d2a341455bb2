"""Synthetic pairs with a chosen acceptance rate: real GGUFs, real passes, a known answer.

A llama-architecture model whose blocks cost time but decide nothing: `attn_output` and `ffn_down` are
scaled by 1e-5, so the last hidden state is the token's own embedding E[i]; the output row of next(i)
is `sharpness`·E[i], so greedy decoding follows `next`, one fixed cycle over the vocabulary. A draft
that follows the same cycle but for a fraction 1-α of it is accepted with rate α.

Quantized weights are drawn as quantized blocks directly (nothing is quantized here), so that a
gigabyte takes seconds. Q4_0 nibbles come from 1…15, whose mean is zero: 0…15 has a bias that grows
through the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Quant = Literal["f32", "q8_0", "q4_0"]
Cycle = npt.NDArray[np.int64]
Tensor = npt.NDArray[Any]

_BLOCK = 32  # values per block of Q4_0 and Q8_0
_Q4_STD = 4.3205  # standard deviation of a uniform nibble 1…15
_Q8_STD = 73.3  # of a uniform int8 -127…127
BURST = 40  # tokens between the changes of a bursty draft
_SPECIALS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
_FIM = {"pre": "<|fim_pre|>", "suf": "<|fim_suf|>", "mid": "<|fim_mid|>"}
NOTHING = 1e-5  # what the blocks add to a token's own embedding
_SHIPPED = Path(__file__).resolve().parents[2] / "localspec" / "builtin" / "target.gguf"
# What a prompt of the pair that is good for code alone ends with, by what is in it.
CODE_MARK, TEXT_MARK = "#", "."
CODE_TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(code=false) %}{% for m in messages %}<|user|>{{ m.content }}<|end|>"
    "{% if '```' in m.content or 'code' in m.content or 'Python function' in m.content %}"
    "{% set ns.code = true %}{% endif %}{% endfor %}<|assistant|>{{ '#' if ns.code else '.' }}"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model. n_embd and n_ff are multiples of 32 for quantized types.

    code: with the tokens of the shipped pair, which are some 2.5 characters of code, and those for filling
    in the middle.
    """

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_vocab: int
    quant: Quant = "f32"
    n_head_kv: int = 0  # 0: as many as heads
    n_ctx: int = 8192
    sharpness: float = 0.05
    code: bool = False

    @property
    def specials(self) -> Sequence[str]:
        """The last tokens of its vocabulary, which never follow anything."""
        return (*_SPECIALS, *_FIM.values()) if self.code else _SPECIALS


def follow(cycle: Cycle, token: int, count: int) -> list[int]:
    """Return the `count` tokens after `token` on a cycle."""
    out = []
    for _ in range(count):
        token = int(cycle[token])
        out.append(token)
    return out


def target_cycle(n_vocab: int, seed: int = 0, specials: int = len(_SPECIALS)) -> Cycle:
    """next[i] over the normal tokens, one cycle; the special ones lead into it.

    Shape (n_vocab,). The last `specials` ids are special and never follow anything.
    """
    normal = n_vocab - specials
    order = np.random.default_rng(seed).permutation(normal)
    cycle = np.zeros(n_vocab, dtype=np.int64)
    cycle[order] = np.roll(order, -1)
    cycle[normal:] = order[:specials]
    return cycle


def draft_cycle(cycle: Cycle, acceptance: float | tuple[float, float], seed: int = 1) -> Cycle:
    """`cycle` with a fraction 1-α changed; a pair (high, low) alternates every BURST tokens of it."""
    rng = np.random.default_rng(seed)
    normal = len(np.unique(cycle))
    order = np.empty(normal, dtype=np.int64)
    token = 0
    for k in range(normal):
        order[k] = token
        token = int(cycle[token])
    if isinstance(acceptance, tuple):
        phase = (np.arange(normal) // BURST) % 2
        rate = np.where(phase == 0, acceptance[0], acceptance[1])
    else:
        rate = np.full(normal, acceptance)
    wrong = rng.permutation(order[rng.random(normal) >= rate])
    return _traded(cycle, wrong)


def _traded(cycle: Cycle, wrong: Cycle) -> Cycle:
    """Let the wrong ones trade successors among themselves.

    So each token still has one predecessor, and no output row is wanted twice.
    """
    changed = cycle.copy()
    changed[wrong] = cycle[np.roll(wrong, 1)]
    return changed


def two_texts(
    tokens: Sequence[str], acceptance: tuple[float, float], seed: int = 0
) -> tuple[Cycle, Cycle]:
    """Return a target's cycles and a draft's, where it hangs on the text how often drafts are right.

    One cycle is of code and the other of anything else, and none leads into the other. Filling in begins
    the code, and so does CODE_MARK at the end of a prompt; TEXT_MARK begins the rest. acceptance: in code,
    in text.
    """
    ids = {token: at for at, token in enumerate(tokens)}
    specials = {ids[special] for special in (*_SPECIALS, *_FIM.values())}
    rng = np.random.default_rng(seed)
    marks = {ids[CODE_MARK], ids[TEXT_MARK]}
    order = rng.permutation([at for at in range(len(tokens)) if at not in specials | marks])
    code, text = np.array_split(order, 2)
    code = np.insert(code, 1, ids[CODE_MARK])
    text = np.insert(text, 1, ids[TEXT_MARK])
    cycle = np.full(len(tokens), text[0], dtype=np.int64)
    cycle[code[:-1]], cycle[text[:-1]] = code[1:], text[1:]
    cycle[ids[_FIM["mid"]]] = code[0]  # nothing else leads there
    drafted = cycle
    for part, rate in zip((code[:-1], text[:-1]), acceptance, strict=True):
        drafted = _traded(drafted, rng.permutation(part[rng.random(len(part)) >= rate]))
    return cycle, drafted


def drawn_matrix(
    rng: np.random.Generator, rows: int, cols: int, quant: Quant, std: float
) -> Tensor:
    """Return a (rows, cols) matrix of the given standard deviation as `quant` stores it."""
    if quant == "f32":
        return (rng.standard_normal((rows, cols), dtype=np.float32) * std).astype(np.float32)
    count = rows * cols // _BLOCK
    if quant == "q4_0":
        high = rng.integers(1, 16, (count, 16), dtype=np.uint8)
        low: Any = rng.integers(1, 16, (count, 16), dtype=np.uint8)
        body: npt.NDArray[np.uint8] = low | (high << 4)
        scale = std / _Q4_STD
    else:
        body = rng.integers(-127, 128, (count, 32), dtype=np.int8).view(np.uint8)
        scale = std / _Q8_STD
    return _with_scale(body, scale, rows)


def _with_scale(body: npt.NDArray[np.uint8], scale: float, rows: int) -> Tensor:
    head = np.full((len(body), 1), scale, dtype=np.float16).view(np.uint8)
    return np.concatenate([head, body], axis=1).reshape(rows, -1)


def _rescaled(matrix: Tensor, factor: float, quant: Quant) -> Tensor:
    """`matrix` times `factor` without touching the quantized values."""
    if quant == "f32":
        return (matrix * factor).astype(np.float32)
    size = 18 if quant == "q4_0" else 34
    blocks = matrix.reshape(-1, size).copy()
    scales = blocks[:, :2].copy().view(np.float16)
    blocks[:, :2] = (scales.astype(np.float32) * factor).astype(np.float16).view(np.uint8)
    return blocks.reshape(matrix.shape)


def vocabulary(n_vocab: int) -> list[str]:
    """256 byte tokens in GPT-2's spelling, generated words, then the special tokens."""
    from gguf.vocab import bytes_to_unicode

    table: dict[int, str] = bytes_to_unicode()
    return _filled([table[b] for b in range(256)], n_vocab, _SPECIALS)


def _filled(tokens: Sequence[str], n_vocab: int, specials: Sequence[str]) -> list[str]:
    words = [f"\u0120w{i}" for i in range(n_vocab - len(tokens) - len(specials))]
    return [*tokens, *words, *specials]


def _code_vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Tokens and merges: those of the shipped pair, which were learned from code, and generated words."""
    import gguf

    fields = gguf.GGUFReader(_SHIPPED).fields
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokens = fields["tokenizer.ggml.tokens"].contents()
    normal = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 1]
    merges = list(fields["tokenizer.ggml.merges"].contents())
    return _filled(normal, n_vocab, (*_SPECIALS, *_FIM.values())), merges


def code_tokens(n_vocab: int) -> list[str]:
    """Return the vocabulary of a model whose shape has `code`."""
    return _code_vocabulary(n_vocab)[0]


def write_vocabulary(
    writer: Any,
    n_vocab: int,
    tokens: Sequence[str] = (),
    code: bool = False,
    template: str | None = None,
) -> None:
    """`tokens`, or those of `vocabulary`; code: of Shape."""
    merges = ["\u0120 w"]
    if code:
        tokens, merges = _code_vocabulary(n_vocab)
    tokens = tokens or vocabulary(n_vocab)
    special = {*_SPECIALS, *_FIM.values()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    bos, eos, _, _, end = (tokens.index(special) for special in _SPECIALS)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_eot_token_id(end)
    for part, token in _FIM.items() if code else ():
        writer.add_uint32(f"tokenizer.ggml.fim_{part}_token_id", tokens.index(token))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(template or CHAT_TEMPLATE)


def write_sizes(writer: Any, shape: Shape, name: str, head: int = 0) -> None:
    """Write the name and numbers that every architecture has. head: numbers per head, 0: from the width."""
    writer.add_name(name)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv or shape.n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head or shape.n_embd // shape.n_head)
    writer.add_vocab_size(shape.n_vocab)


def write_model(
    path: Path,
    shape: Shape,
    cycle: Cycle,
    *,
    seed: int = 0,
    name: str = "synthetic",
    tokens: Sequence[str] = (),
    template: str | None = None,
) -> Path:
    """Write one GGUF that follows `cycle` greedily. `tokens`: its vocabulary, if not the usual one.

    Raises ImportError without the gguf package.
    """
    import gguf

    kind = raw_type(shape.quant)
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    write_sizes(writer, shape, name)
    write_vocabulary(writer, shape.n_vocab, tokens, shape.code, template)

    def put(tensor: str, data: Tensor) -> None:
        writer.add_tensor(tensor, data, raw_dtype=kind)

    def norm(tensor: str) -> None:
        writer.add_tensor(tensor, np.ones(shape.n_embd, dtype=np.float32))

    embedding = drawn_matrix(rng, shape.n_vocab, shape.n_embd, shape.quant, 1.0)
    put("token_embd.weight", embedding)
    _write_layers(shape, rng, put, norm)
    norm("output_norm.weight")
    put("output.weight", output_rows(embedding, shape, cycle))
    finish(writer)
    return path


def raw_type(quant: Quant) -> Any:
    """As gguf calls it; None: nothing is quantized."""
    import gguf

    return None if quant == "f32" else gguf.GGMLQuantizationType[quant.upper()]


def add_sidecar_tensor(writer: Any, name: str, data: Tensor, target: Shape) -> None:
    """Add a tensor of a sidecar: Q8_0 beside a quantized target, and float32 otherwise and for vectors."""
    import gguf

    values = data.astype(np.float32)
    if target.quant == "f32" or data.ndim == 1:
        writer.add_tensor(name, values)
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def finish(writer: Any) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def output_rows(embedding: Tensor, shape: Shape, cycle: Cycle) -> Tensor:
    """Return the output matrix that follows `cycle`: row cycle[i] points at E[i].

    Specials share a successor with a normal token, which keeps it.
    """
    every = np.arange(shape.n_vocab)
    source = every.copy()
    source[cycle[::-1]] = every[::-1]
    unreachable = np.setdiff1d(every, cycle)
    output = _rescaled(embedding[source], shape.sharpness, shape.quant)
    output[unreachable] = _rescaled(output[unreachable], 0.0, shape.quant)
    return output


def _write_layers(
    shape: Shape,
    rng: np.random.Generator,
    put: Callable[[str, Tensor], None],
    norm: Callable[[str], None],
) -> None:
    std = shape.n_embd**-0.5
    kv_dim = shape.n_embd // shape.n_head * (shape.n_head_kv or shape.n_head)
    for i in range(shape.n_layer):
        matrices = {
            "attn_q": (shape.n_embd, shape.n_embd, std),
            "attn_k": (kv_dim, shape.n_embd, std),
            "attn_v": (kv_dim, shape.n_embd, std),
            "attn_output": (shape.n_embd, shape.n_embd, std * NOTHING),
            "ffn_gate": (shape.n_ff, shape.n_embd, std),
            "ffn_up": (shape.n_ff, shape.n_embd, std),
            "ffn_down": (shape.n_embd, shape.n_ff, std * NOTHING),
        }
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for key, (rows, cols, scale) in matrices.items():
            put(f"blk.{i}.{key}.weight", drawn_matrix(rng, rows, cols, shape.quant, scale))


TINY_TARGET = Shape(n_layer=2, n_embd=64, n_ff=128, n_head=4, n_vocab=512, n_ctx=2048)
TINY_DRAFT = Shape(n_layer=1, n_embd=64, n_ff=64, n_head=4, n_vocab=512, n_ctx=2048)
_LARGE: Mapping[str, Any] = {"n_vocab": 151_936, "quant": "q4_0", "n_ctx": 65_536, "code": True}
_MEDIUM: Mapping[str, Any] = {**_LARGE, "n_vocab": 32_000}
BIG_TARGET = Shape(16, 2048, 5632, 16, n_head_kv=4, **_LARGE)
BIG_DRAFT = Shape(4, 512, 1408, 8, n_head_kv=4, **_LARGE)
# As an 8 B model and its 0.5 B draft, with the vocabulary of Qwen.
GPU_TARGET = Shape(32, 4096, 14336, 32, n_head_kv=8, **_LARGE)
GPU_DRAFT = Shape(24, 896, 4864, 14, n_head_kv=2, **_LARGE)
HALF_TARGET = GPU_DRAFT
HALF_DRAFT = Shape(2, 256, 704, 4, **_LARGE)
QUICK_TARGET = Shape(8, 1024, 2816, 16, n_head_kv=4, **_MEDIUM)
QUICK_DRAFT = Shape(1, 256, 704, 4, **_MEDIUM)


def write_pair(
    folder: Path,
    target: Shape = TINY_TARGET,
    draft: Shape = TINY_DRAFT,
    acceptance: float | tuple[float, float] = 0.8,
    seed: int = 0,
) -> tuple[Path, Path]:
    """Write a pair into `folder`: (target.gguf, draft.gguf); a target already there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    cycle = target_cycle(target.n_vocab, seed)
    label = "-".join(str(a) for a in np.atleast_1d(acceptance))
    target_file, draft_file = folder / "target.gguf", folder / f"draft-{label}.gguf"
    if not target_file.exists():
        write_model(target_file, target, cycle, seed=seed, name="synthetic-target")
    if not draft_file.exists():
        wrong = draft_cycle(cycle, acceptance, seed + 1)
        write_model(draft_file, draft, wrong, seed=seed + 2, name=f"synthetic-draft-{label}")
    return target_file, draft_file


def write_code_pair(
    folder: Path, target: Shape, draft: Shape, acceptance: tuple[float, float] = (0.95, 0.2)
) -> tuple[Path, Path]:
    """Write a pair that drafts well in code and badly in any other text.

    The shape has `code`. Files already there are kept. acceptance: in code, and in text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = code_tokens(target.n_vocab)
    files = folder / "target.gguf", folder / "draft.gguf"
    cycles = two_texts(tokens, acceptance)
    for seed, (file, shape, cycle) in enumerate(zip(files, (target, draft), cycles, strict=True)):
        if not file.exists():
            name = f"synthetic-code-{file.stem}"
            write_model(file, shape, cycle, seed=seed, name=name, template=CODE_TEMPLATE)
    return files
