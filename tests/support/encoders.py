"""BERT models: written as GGUF files, and computed apart, in numpy, to compare with.

A small one with random weights, or one of Hugging Face's, from its folder (config.json, vocab.txt,
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
# Hugging Face's names of a layer's parts, and llama.cpp's.
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
    """Weights by Hugging Face's names, and what else makes up a model."""

    weights: Weights
    words: list[str]
    layers: int
    heads: int
    epsilon: float = 1e-12

    # ------------------------------------------------------------------------ where they come from

    @classmethod
    def random(
        cls, *, width: int = 128, layers: int = 2, heads: int = 4, context: int = 64, seed: int = 0
    ) -> Bert:
        """A small one; its words are letters, alone and within a word, and some words."""
        words = [*SPECIALS, *string.ascii_lowercase, *string.punctuation, *string.digits]
        words += [f"##{letter}" for letter in string.ascii_lowercase + string.digits]
        words += ["the", "cat", "sat", "##ting", "hello", "world"]
        noise = np.random.default_rng(seed)

        def some(*shape: int, scale: float = 0.1) -> npt.NDArray[np.float32]:
            return noise.normal(0, scale, shape).astype(np.float16).astype(np.float32)

        found: Weights = {
            "embeddings.word_embeddings.weight": some(len(words), width),
            "embeddings.position_embeddings.weight": some(context, width),
            "embeddings.token_type_embeddings.weight": some(2, width),
            "classifier.weight": some(1, width),
            "classifier.bias": some(1),
        }
        shapes = {"intermediate.dense": (4 * width, width), "output.dense": (width, 4 * width)}
        names = ["embeddings.LayerNorm"]
        for layer in range(layers):
            names += [f"encoder.layer.{layer}.{part}" for part in _LAYER]
        for name in names:
            shape = shapes.get(name.split(".", 3)[-1], (width, width))
            norm = name.endswith("LayerNorm")
            found[f"{name}.weight"] = some(width) + 1 if norm else some(*shape)
            found[f"{name}.bias"] = some(width if norm else shape[0], scale=0.1)
        return cls(found, words, layers, heads)

    @classmethod
    def of_folder(cls, folder: Path) -> Bert:
        """One of Hugging Face's."""
        config = json.loads((folder / "config.json").read_text())
        raw = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        found: Weights = {}
        for name, each in header.items():
            if name != "__metadata__" and each["dtype"] == "F32":
                data = np.frombuffer(body[slice(*each["data_offsets"])], np.float32)
                found[name.removeprefix("bert.")] = data.reshape(each["shape"])
        words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        return cls(found, words, layers, heads, config["layer_norm_eps"])

    # ------------------------------------------------------------------------ a file of it

    def write(self, file: Path, *, pooling: str = "mean") -> Path:
        """As llama.cpp's converter does. A reranker ("rank") has the classifier, the others have none."""
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
        """llama.cpp marks where a word begins, where BERT marks where it goes on."""
        marked = [
            word if word in SPECIALS or word.startswith("[unused") else f"▁{word}"
            for word in self.words
        ]
        marked = [each.removeprefix("▁##") for each in marked]
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(2)
        writer.add_token_list(marked)
        writer.add_token_types([3 if word in SPECIALS else 1 for word in self.words])
        ids = [self.words.index(each) for each in SPECIALS]
        writer.add_pad_token_id(ids[0])
        writer.add_unk_token_id(ids[1])
        writer.add_bos_token_id(ids[2])
        writer.add_sep_token_id(ids[3])
        writer.add_mask_token_id(ids[4])

    # ------------------------------------------------------------------------ computed apart

    def tokens(self, text: str) -> list[int]:
        """WordPiece, of ASCII in which every letter is a word."""
        known = {word: at for at, word in enumerate(self.words)}
        found = [known["[CLS]"]]
        for word in re.findall(rf"[{re.escape(string.punctuation)}]|[a-z0-9]+", text.lower()):
            found += _pieces(word, known)
        return [*found, known["[SEP]"]]

    def vector(self, tokens: list[int], pooling: str = "mean") -> npt.NDArray[np.float64]:
        """Of length 1; of a reranker the score alone."""
        rows = self._rows(tokens)
        if pooling == "rank":
            weight, bias = self._part("classifier")
            return np.asarray(rows[0] @ weight.T + bias)
        found = rows.mean(axis=0) if pooling == "mean" else rows[0]
        return np.asarray(found / np.linalg.norm(found))

    def _part(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        weight, bias = (
            self.weights[f"{name}.{each}"].astype(np.float64) for each in ("weight", "bias")
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
            self.weights[f"embeddings.{each}_embeddings.weight"].astype(np.float64)
            for each in ("word", "position", "token_type")
        )
        rows = words[tokens] + places[: len(tokens)] + kinds[0]
        rows = self._norm(rows, "embeddings.LayerNorm")
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}"
            seen = self._dense(self._attention(rows, at), f"{at}.attention.output.dense")
            rows = self._norm(rows + seen, f"{at}.attention.output.LayerNorm")
            wide = _gelu(self._dense(rows, f"{at}.intermediate.dense"))
            rows = self._norm(
                rows + self._dense(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm"
            )
        return rows

    def _attention(self, rows: npt.NDArray[np.float64], at: str) -> npt.NDArray[np.float64]:
        count, width = rows.shape
        query, key, value = (
            self._dense(rows, f"{at}.attention.self.{each}")
            .reshape(count, self.heads, -1)
            .transpose(1, 0, 2)
            for each in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(width / self.heads)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        return np.asarray((shares @ value).transpose(1, 0, 2).reshape(count, width))


def _gelu(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(rows * 0.5 * (1 + np.vectorize(math.erf)(rows / math.sqrt(2))))


def _pieces(word: str, known: dict[str, int]) -> list[int]:
    """The longest beginnings that are known."""
    found: list[int] = []
    while word:
        mark = "##" if found else ""
        size = next((n for n in range(len(word), 0, -1) if mark + word[:n] in known), 0)
        if not size:
            return [known["[UNK]"]]
        found.append(known[mark + word[:size]])
        word = word[size:]
    return found


def _own_name(name: str) -> str:
    """llama.cpp's name of a tensor; nothing of what it has no use for."""
    if name in _EMBEDDINGS:
        return _EMBEDDINGS[name]
    found = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
    part = _LAYER.get(found[2]) if found else None
    return f"blk.{found[1]}.{part}.{found[3]}" if found and part else ""


if __name__ == "__main__":
    Bert.of_folder(Path(sys.argv[1])).write(Path(sys.argv[2]))
