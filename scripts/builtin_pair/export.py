"""Checkpoints written as GGUF, the way llama.cpp reads its llama architecture."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer

from .model import Llama
from .tokenizer import END, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, PAD, SPECIAL_TOKENS, load_tokenizer
from .train import load_model

CONTEXT = 1024
"""Declared context.  Rows of training are shorter (see the model card), so quality fades before it."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}<|end|>"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""System messages are left out: the pair never saw one and would only be thrown off."""


def export_pair(work: Path, out: Path, averaged: bool) -> None:
    tokenizer = load_tokenizer(work / "tokenizer.json")
    out.mkdir(parents=True, exist_ok=True)
    for role in ("target", "draft"):
        model = load_model(work / f"{role}.pt", averaged=averaged)
        path = out / f"{role}.gguf"
        write_gguf(model, tokenizer, role, path)
        print(f"{path.name}: {model.shape.parameters:,} parameters, {path.stat().st_size:,} bytes")


def write_gguf(model: Llama, tokenizer: Tokenizer, role: str, path: Path) -> None:
    """Write `path` whole or not at all."""
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _describe(writer, model, role)
    _add_tokenizer(writer, tokenizer)
    for name, parameter in model.named_parameters():
        _add_tensor(writer, name, parameter.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def _describe(writer: gguf.GGUFWriter, model: Llama, role: str) -> None:
    shape = model.shape
    writer.add_name(f"localspec builtin {role}")
    writer.add_description(
        f"The {role} of the small demonstration pair that ships with localspec; "
        "it knows Python's standard library."
    )
    writer.add_license("PSF-2.0 AND MIT")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocabulary)
    # llama.cpp reads this as the default of its samplers: facts are recalled best greedily.
    writer.add_float32("general.sampling.temp", 0.0)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocabulary]
    special = set(SPECIAL_TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if text in special else normal for text in tokens])
    writer.add_token_merges(_merges(tokenizer))
    ids = dict(vocabulary)
    writer.add_eos_token_id(ids[END])
    writer.add_eot_token_id(ids[END])
    # No token is put before a prompt; llama.cpp would assume its own id 11 if this were absent.
    writer.add_bos_token_id(ids[END])
    writer.add_pad_token_id(ids[PAD])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_uint32("tokenizer.ggml.fim_pre_token_id", ids[FIM_PREFIX])
    writer.add_uint32("tokenizer.ggml.fim_suf_token_id", ids[FIM_SUFFIX])
    writer.add_uint32("tokenizer.ggml.fim_mid_token_id", ids[FIM_MIDDLE])
    writer.add_chat_template(CHAT_TEMPLATE)


def _merges(tokenizer: Tokenizer) -> list[str]:
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    """Matrices as Q8_0 (blocks of 32 along the rows), norms as float32."""
    if values.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(values))
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
