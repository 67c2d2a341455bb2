"""Embeddings and reranking through a running daemon, in each protocol that has them."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import numpy as np
import ollama
import openai
import pytest

from tests.support.daemons import Home, real_home, wait_for
from tests.support.encoders import Bert
from tests.support.official_clients import openai_client
from tests.support.pairs import contextual_pair

BERT = Bert.random()
TEXTS = ["the cat sat", "hello, world 42!", "x"]
CHAT = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "exact": True}
QUESTION = "What does shutil.copytree do?"
MESSAGES = [{"role": "user", "content": QUESTION}]


def add_pair(home: Home, name: str, target: Path) -> None:
    added = home.request("POST", "/localspec/pairs", {"name": name, "target": str(target)})
    assert added.status == 201, added.body


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    """Run a daemon with an embedding model and a reranker beside the builtin pair."""
    with real_home() as home:
        add_pair(home, "tiny-embed", BERT.write(home.root / "mean.gguf"))
        add_pair(home, "tiny-rank", BERT.write(home.root / "rank.gguf", pooling="rank"))
        yield home


@pytest.fixture(scope="module")
def client(served: Home) -> Iterator[openai.OpenAI]:
    with openai_client(served) as client:
        yield client


def expected_vector(text: str) -> Any:
    return BERT.vector(BERT.tokens(text))


def is_close(actual: Any, expected: Any, within: float = 1e-3) -> bool:
    return bool(np.abs(np.asarray(actual) - np.asarray(expected)).max() < within)


def have_vectors_of(vectors: Any, texts: list[str]) -> bool:
    return all(is_close(v, expected_vector(t)) for v, t in zip(vectors, texts, strict=True))


def test_the_official_client_gets_the_same_vectors_in_both_formats(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="tiny-embed", input=TEXTS, encoding_format="float")
    coded = client.embeddings.create(model="tiny-embed", input=TEXTS)  # asks for base64 by itself
    tokens = sum(len(BERT.tokens(text)) for text in TEXTS)
    assert (plain.model, plain.object) == ("tiny-embed", "list")
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (tokens, tokens)
    assert [item.index for item in plain.data] == [0, 1, 2]
    for text, plain_item, coded_item in zip(TEXTS, plain.data, coded.data, strict=True):
        assert is_close(plain_item.embedding, expected_vector(text))
        assert is_close(plain_item.embedding, coded_item.embedding, 1e-7)
    ids = client.embeddings.create(model="tiny-embed", input=BERT.tokens(TEXTS[0]), dimensions=16)
    prefix = np.array(plain.data[0].embedding[:16])
    assert is_close(ids.data[0].embedding, prefix / np.linalg.norm(prefix), 1e-4)
    lists = client.embeddings.create(model="tiny-embed", input=[BERT.tokens(t) for t in TEXTS])
    assert [item.embedding for item in lists.data] == [item.embedding for item in coded.data]


def test_embeddings_in_the_shapes_of_llama_server_and_ollama(served: Home) -> None:
    native = served.request("POST", "/embedding", {"content": TEXTS[0]}).json
    assert native == served.request("POST", "/embeddings", {"input": [TEXTS[0]]}).json
    assert [list(item) for item in native] == [["index", "embedding"]]
    assert is_close(native[0]["embedding"][0], expected_vector(TEXTS[0]))
    raw = served.request("POST", "/embedding", {"content": "x", "embd_normalize": -1}).json
    length = np.linalg.norm(raw[0]["embedding"][0])
    assert length > 1.1
    transport = httpx.HTTPTransport(uds=str(served.socket), verify=False)
    with ollama.Client("http://localhost", transport=transport) as ollama_client:
        batch = ollama_client.embed("tiny-embed:latest", TEXTS)
        assert have_vectors_of(batch["embeddings"], TEXTS)
        assert batch["prompt_eval_count"] == sum(len(BERT.tokens(text)) for text in TEXTS)
        single = ollama_client.embeddings("tiny-embed", "x")["embedding"]
        assert is_close(single, raw[0]["embedding"][0], 1e-6)
        truncated = ollama_client.embed("tiny-embed", "a " * 100)  # by default in Ollama
        assert len(truncated["embeddings"][0]) == 128
        assert ollama_client.show("tiny-embed").capabilities == ["embedding"]


def test_input_objects_of_llama_server_are_accepted(served: Home) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat sat"}]
    for value, texts in (
        ({"prompt_string": "the cat sat"}, ["the cat sat"]),
        ({"content": parts}, ["the cat sat"]),
        ({"content": "x"}, ["x"]),
        (["x", {"prompt_string": "the cat sat"}, {"content": parts}], ["x", *["the cat sat"] * 2]),
    ):
        for field in ("input", "content"):
            body = {"model": "tiny-embed", field: value}
            data = served.request("POST", "/v1/embeddings", body).json["data"]
            assert have_vectors_of([entry["embedding"] for entry in data], texts)


def test_objects_without_text_are_refused(served: Home) -> None:
    values: tuple[Any, ...] = (
        {},
        {"content": []},
        {"content": [{"type": "image_url", "text": "x"}]},
        {"content": [{"type": "text"}]},
        {"prompt_string": "x", "multimodal_data": ["AAAA"]},
        {"prompt_string": []},
        [{"content": [{"type": "input_audio"}]}],
    )
    for value in values:
        answer = served.request("POST", "/v1/embeddings", {"model": "tiny-embed", "input": value})
        assert answer.status == 400, value
        assert answer.error["param"].startswith("input")


def test_inputs_and_documents_can_be_truncated(served: Home) -> None:
    long = "a " * 100
    body: dict[str, Any] = {"model": "tiny-embed", "input": long}
    refused = served.request("POST", "/v1/embeddings", body)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "exceeds the available context size" in refused.error["message"]
    for limit, expected in ((5, 5), (-1, 64), (64, 64)):
        limited = {**body, "truncate_prompt_tokens": limit}
        response = served.request("POST", "/v1/embeddings", limited)
        assert response.json["usage"]["prompt_tokens"] == expected
    body = {"model": "tiny-rank", "query": "cat", "documents": ["the cat", long]}
    assert served.request("POST", "/v1/rerank", body).status == 400
    cut = served.request("POST", "/v1/rerank", {**body, "max_tokens_per_doc": 3}).json
    n_alone = 0
    for text in ("the cat", "a a a"):
        alone = served.request("POST", "/v1/rerank", {**body, "documents": [text]}).json
        n_alone += alone["usage"]["prompt_tokens"]
    assert cut["usage"]["prompt_tokens"] <= n_alone


def test_documents_are_ranked_in_the_shapes_of_jina_and_tei(served: Home) -> None:
    documents = ["hello world", "the cat", "x y z"]
    body = {"query": "cat", "documents": documents, "top_n": 2, "return_documents": True}
    ranking = served.request("POST", "/v1/rerank", body).json
    assert (ranking["model"], ranking["object"]) == ("tiny-rank", "list")
    assert ranking["usage"]["prompt_tokens"] == ranking["usage"]["total_tokens"] > 10
    scores = [result["relevance_score"] for result in ranking["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    order = [result["index"] for result in ranking["results"]]
    shown = [result["document"] for result in ranking["results"]]
    assert shown == [{"text": documents[index]} for index in order]
    for path in ("/rerank", "/reranking", "/v1/reranking"):
        tei = served.request("POST", path, {"query": "cat", "texts": documents}).json
        assert [item["index"] for item in tei[:2]] == order
        assert list(tei[0]) == ["index", "score"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/embeddings", {"input": ["x", "a " * 100]}, 400, "Input 2 has 102 tokens"),
        ("/v1/embeddings", {"input": []}, 400, "'input'"),
        ("/v1/embeddings", {}, 400, "'input' is missing"),
        ("/v1/embeddings", {"input": [1, [2]]}, 400, "'input' mixes token ids"),
        ("/v1/embeddings", {"input": [10**6]}, 400, "outside the vocabulary"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, 400, "2049 inputs"),
        ("/v1/embeddings", {"input": "x", "dimensions": 129}, 400, "gives 128 numbers"),
        ("/v1/embeddings", {"input": "x", "model": "builtin"}, 400, "'builtin' writes text"),
        ("/v1/embeddings", {"input": "x", "model": "tiny-rank"}, 400, "is a reranker"),
        ("/v1/rerank", {"query": "x", "documents": []}, 400, "'documents'"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "model": "tiny-embed"}, 400, "ranks no"),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "tiny-embed"}, 400, "no text"),
        ("/v1/completions", {"prompt": "x", "model": "tiny-rank"}, 400, "a reranker and writes no"),
        ("/api/embed", {"input": "a " * 100, "truncate": False}, 400, "at most 64"),
    ],
)
def test_invalid_requests_are_refused_with_a_message(
    served: Home, path: str, body: Any, status: int, message: str
) -> None:
    answer = served.request("POST", path, body)
    assert answer.status == status, answer.body
    error = answer.error if isinstance(answer.error, str) else answer.error["message"]
    assert message in error


def test_embeddings_and_rankings_are_counted(served: Home) -> None:
    def read_metrics() -> dict[str, str]:
        lines = served.request("GET", "/metrics").body.decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    def read_counts() -> list[int]:
        values = read_metrics()
        counts = served.status()["counts"]
        totals = [counts[key] for key in ("embeddings", "embedded_texts", "embedded_tokens")]
        names = ("embedding_requests", "embedded_texts", "embedded_tokens")
        assert [int(values[f"localspec_{name}_total"]) for name in names] == totals
        return totals

    def processed() -> int:
        return int(read_metrics()["llamacpp:prompt_tokens_total"])

    prompts = processed()
    before, requests = read_counts(), served.status()["counts"]["requests"]
    body = {"model": "tiny-embed", "input": TEXTS}
    tokens = served.request("POST", "/v1/embeddings", body).json["usage"]["total_tokens"]
    body = {"model": "tiny-rank", "query": "cat", "documents": TEXTS[:2]}
    tokens += served.request("POST", "/v1/rerank", body).json["usage"]["total_tokens"]
    refused = served.request("POST", "/v1/embeddings", {"input": "x", "model": "builtin"})
    assert refused.status == 400
    assert [b - a for a, b in zip(before, read_counts(), strict=True)] == [2, 5, tokens]
    assert processed() - prompts == tokens > 0
    assert served.status()["counts"]["requests"] == requests
    assert re.search(r"^embeddings +\d+ total, [\d,]+ texts, [\d,]+ tokens$",
                     served.run("status", "-v").stdout, re.MULTILINE)  # fmt: skip


def test_a_chat_is_unchanged_beside_embeddings(served: Home, client: openai.OpenAI) -> None:
    expected_text = served.chat(QUESTION, **CHAT).text
    texts = [f"the cat {number}" for number in range(200)]
    with served.streaming(QUESTION, **CHAT) as stream:
        assert stream.readline()
        response = client.embeddings.create(model="tiny-embed", input=texts)
        rest = stream.read().decode()
    assert is_close(response.data[199].embedding, expected_vector(texts[199]))
    chunks = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")]
    streamed_text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert expected_text.endswith(streamed_text)
    assert len(streamed_text) > len(expected_text) - 20


def test_commands_work_with_embedding_models(served: Home) -> None:
    (served.root / "note.txt").write_text("the cat sat")
    output = served.must_run("embed", "--json", str(served.root / "note.txt"), "-", stdin="x\n")
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["file"] for line in lines] == [str(served.root / "note.txt"), "-"]
    assert is_close(lines[0]["embedding"], expected_vector("the cat sat"))
    assert "128 numbers" in served.run("embed", stdin="x").stdout
    assert "reads at most 64 at once; shorten it, or use --truncate" in served.refused(
        "embed", stdin="a " * 100, code=2
    )
    description = served.run("show", "tiny-embed").stdout
    assert "embeddings of 128 numbers" in description
    assert "draft" not in description
    listed = {item["id"]: item for item in served.request("GET", "/v1/models").json["data"]}
    assert listed["tiny-embed"]["capabilities"] == ["embedding"]


@pytest.mark.parametrize("text", ["What is this?", "word", "long " * 99])
def test_a_text_as_an_argument_is_refused_with_the_way_to_embed_it(served: Home, text: str) -> None:
    error = served.refused("embed", text, code=2)
    assert f"There is no file '{text}'" in error
    assert f"echo {shlex.quote(text)} | localspec embed" in error
    assert "No file matches 'no*'" in served.refused("embed", "no*", code=2)


def test_a_text_model_can_embed_with_a_chosen_pooling(served: Home, client: openai.OpenAI) -> None:
    target = contextual_pair(served.root / "decoder").target
    added = served.run("add", "decoder", "--target", target, "--pooling", "last")
    assert "localspec embed -m decoder" in added.stdout, added.stderr
    words = [[5, 6, 7], [7, 6, 5]]
    first, second = client.embeddings.create(model="decoder", input=words).data
    assert not is_close(first.embedding, second.embedding, 1e-2)
    unnamed = served.request("POST", "/v1/embeddings", {"input": "x"})
    assert unnamed.status == 404
    assert "decoder, tiny-embed. Name one" in unnamed.error["message"]
    assert served.request("GET", "/localspec/pairs/decoder").json["target"]["pooling"] == "last"
    refused = served.run("add", "two", "--target", target, "--draft", target, "--pooling", "last")
    assert refused.returncode == 1
    assert served.run("rm", "-y", "decoder").returncode == 0


def test_a_disconnect_ends_an_embedding_request(served: Home) -> None:
    texts = ["the cat sat " * 15] * 2000
    data = json.dumps({"input": texts, "model": "tiny-embed"}).encode()
    transport = httpx2.HTTPTransport(uds=str(served.socket), verify=False)
    with httpx2.Client(transport=transport) as http, pytest.raises(httpx2.ReadTimeout):
        http.post("http://localhost/v1/embeddings", content=data, timeout=0.2)
    answer = served.request("POST", "/v1/embeddings", {"input": "x", "encoding_format": "base64"})
    embedding = np.frombuffer(base64.b64decode(answer.json["data"][0]["embedding"]), "<f4")
    assert is_close(embedding, expected_vector("x"))
    wait_for(lambda: not served.status()["running"], "the end of what was left")
