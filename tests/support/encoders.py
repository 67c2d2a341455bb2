"""BERT models: written as GGUF files, and computed independently in numpy to compare with.

Either a small one with random weights, or one of Hugging Face's, from its folder (config.json, vocab.txt,
model.safetensors): `python -m tests.support.encoders FOLDER FILE.gguf`.
"""

from __future__ import annotations

import json
import math
import re
import string
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

Weights = dict[str, npt.NDArray[np.float32]]
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
POOLINGS = {"mean": 1, "cls": 2, "rank": 4}
# The parts of a layer: Hugging Face's names and llama.cpp's.
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_EMBEDDINGS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
    "classifier.weight": "cls.output.weight",
    "classifier.bias": "cls.output.bias",
}


@dataclass(frozen=True)
class Bert:
    """Weights by Hugging Face's names, and the rest of a model."""

    weights: Weights
    words: list[str]
    layers: int
    heads: int
    epsilon: float = 1e-12

    # Ways to get a model.

    @classmethod
    def random(
        cls, *, width: int = 128, layers: int = 2, heads: int = 4, context: int = 64, seed: int = 0
    ) -> Bert:
        """Return a small model; its words are letters, alone and within a word, and some words."""
        words = [*SPECIALS, *string.ascii_lowercase, *string.punctuation, *string.digits]
        words += [f"##{letter}" for letter in string.ascii_lowercase + string.digits]
        words += ["the", "cat", "sat", "##ting", "hello", "world"]
        noise = np.random.default_rng(seed)

        def random_values(*shape: int, scale: float = 0.1) -> npt.NDArray[np.float32]:
            return noise.normal(0, scale, shape).astype(np.float16).astype(np.float32)

        weights: Weights = {
            "embeddings.word_embeddings.weight": random_values(len(words), width),
            "embeddings.position_embeddings.weight": random_values(context, width),
            "embeddings.token_type_embeddings.weight": random_values(2, width),
            "classifier.weight": random_values(1, width),
            "classifier.bias": random_values(1),
        }
        shapes = {"intermediate.dense": (4 * width, width), "output.dense": (width, 4 * width)}
        names = ["embeddings.LayerNorm"]
        for layer in range(layers):
            names += [f"encoder.layer.{layer}.{part}" for part in _LAYER]
        for name in names:
            shape = shapes.get(name.split(".", 3)[-1], (width, width))
            norm = name.endswith("LayerNorm")
            weights[f"{name}.weight"] = random_values(width) + 1 if norm else random_values(*shape)
            weights[f"{name}.bias"] = random_values(width if norm else shape[0], scale=0.1)
        return cls(weights, words, layers, heads)

    @classmethod
    def of_folder(cls, folder: Path) -> Bert:
        """Read one of Hugging Face's models."""
        config = json.loads((folder / "config.json").read_text())
        raw = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        weights: Weights = {}
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] == "F32":
                data = np.frombuffer(body[slice(*entry["data_offsets"])], np.float32)
                weights[name.removeprefix("bert.")] = data.reshape(entry["shape"])
        words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        return cls(weights, words, layers, heads, config["layer_norm_eps"])

    # Writing it to a file.

    def write(self, file: Path, *, pooling: str = "mean") -> Path:
        """Write a file as llama.cpp's converter does. Only a reranker ("rank") has the classifier."""
        rows, width = self.weights["embeddings.position_embeddings.weight"].shape
        writer = GGUFWriter(file, "bert")
        writer.add_block_count(self.layers)
        writer.add_context_length(rows)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(len(self.weights["encoder.layer.0.intermediate.dense.bias"]))
        writer.add_head_count(self.heads)
        writer.add_layer_norm_eps(self.epsilon)
        writer.add_causal_attention(False)
        writer.add_uint32("bert.pooling_type", POOLINGS[pooling])
        self._write_words(writer)
        for name, tensor in self.weights.items():
            if own := _own_name(name):
                if own.startswith("cls.") and pooling != "rank":
                    continue
                matrix = tensor.ndim == 2 and own not in (
                    "position_embd.weight",
                    "token_types.weight",
                )
                writer.add_tensor(own, tensor.astype(np.float16) if matrix else tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    def _write_words(self, writer: GGUFWriter) -> None:
        """Write the words: llama.cpp marks where a word begins, BERT where it continues."""
        marked = [
            word if word in SPECIALS or word.startswith("[unused") else f"▁{word}"
            for word in self.words
        ]
        marked = [piece.removeprefix("▁##") for piece in marked]
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(2)
        writer.add_token_list(marked)
        writer.add_token_types([3 if word in SPECIALS else 1 for word in self.words])
        ids = [self.words.index(word_piece) for word_piece in SPECIALS]
        writer.add_pad_token_id(ids[0])
        writer.add_unk_token_id(ids[1])
        writer.add_bos_token_id(ids[2])
        writer.add_sep_token_id(ids[3])
        writer.add_mask_token_id(ids[4])

    # The computation in numpy.

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of an ASCII text in which every letter is a word (WordPiece)."""
        ids = {word: at for at, word in enumerate(self.words)}
        tokens = [ids["[CLS]"]]
        for word in re.findall(rf"[{re.escape(string.punctuation)}]|[a-z0-9]+", text.lower()):
            tokens += _pieces(word, ids)
        return [*tokens, ids["[SEP]"]]

    def vector(self, tokens: list[int], pooling: str = "mean") -> npt.NDArray[np.float64]:
        """Return the embedding, of length 1; for a reranker the score."""
        rows = self._rows(tokens)
        if pooling == "rank":
            weight, bias = self._part("classifier")
            return np.asarray(rows[0] @ weight.T + bias)
        pooled = rows.mean(axis=0) if pooling == "mean" else rows[0]
        return np.asarray(pooled / np.linalg.norm(pooled))

    def _part(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        weight, bias = (
            self.weights[f"{name}.{kind}"].astype(np.float64) for kind in ("weight", "bias")
        )
        return weight, bias

    def _norm(self, rows: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        weight, bias = self._part(name)
        centred = rows - rows.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return np.asarray(centred / spread * weight + bias)

    def _dense(self, rows: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        weight, bias = self._part(name)
        return np.asarray(rows @ weight.T + bias)

    def _rows(self, tokens: list[int]) -> npt.NDArray[np.float64]:
        words, places, kinds = (
            self.weights[f"embeddings.{table}_embeddings.weight"].astype(np.float64)
            for table in ("word", "position", "token_type")
        )
        rows = words[tokens] + places[: len(tokens)] + kinds[0]
        rows = self._norm(rows, "embeddings.LayerNorm")
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}"
            attended = self._dense(self._attention(rows, at), f"{at}.attention.output.dense")
            rows = self._norm(rows + attended, f"{at}.attention.output.LayerNorm")
            wide = _gelu(self._dense(rows, f"{at}.intermediate.dense"))
            rows = self._norm(
                rows + self._dense(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm"
            )
        return rows

    def _attention(self, rows: npt.NDArray[np.float64], at: str) -> npt.NDArray[np.float64]:
        count, width = rows.shape
        query, key, value = (
            self._dense(rows, f"{at}.attention.self.{projection}")
            .reshape(count, self.heads, -1)
            .transpose(1, 0, 2)
            for projection in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(width / self.heads)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        return np.asarray((shares @ value).transpose(1, 0, 2).reshape(count, width))


def _gelu(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(rows * 0.5 * (1 + np.vectorize(math.erf)(rows / math.sqrt(2))))


def _pieces(word: str, ids: dict[str, int]) -> list[int]:
    """Split a word into the longest known beginnings."""
    pieces: list[int] = []
    while word:
        mark = "##" if pieces else ""
        size = next((n for n in range(len(word), 0, -1) if mark + word[:n] in ids), 0)
        if not size:
            return [ids["[UNK]"]]
        pieces.append(ids[mark + word[:size]])
        word = word[size:]
    return pieces


def _own_name(name: str) -> str:
    """Return llama.cpp's name of a tensor, or "" if it does not use it."""
    if name in _EMBEDDINGS:
        return _EMBEDDINGS[name]
    match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
    part = _LAYER.get(match[2]) if match else None
    return f"blk.{match[1]}.{part}.{match[3]}" if match and part else ""


if __name__ == "__main__":
    Bert.of_folder(Path(sys.argv[1])).write(Path(sys.argv[2]))
