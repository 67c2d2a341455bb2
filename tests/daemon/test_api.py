"""The HTTP API of a running daemon, with the scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import localspec
from tests.support.daemons import Home, RunningDaemon, UnixConnection, wait_for
from tests.support.official_clients import openai_client


@pytest.fixture
def client(api: Home) -> Iterator[openai.OpenAI]:
    with openai_client(api) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_completion_has_openais_shape_and_our_statistics(api: Home) -> None:
    body = api.chat("say hello world").json
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == str(api.model)
    assert body["system_fingerprint"] == f"localspec-{localspec.__version__}"
    message = {"role": "assistant", "content": "hello world", "refusal": None}
    assert body["choices"] == [
        {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    ]
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert body["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 1}}
    assert body["timings"]["draft_n_accepted"] == 3
    assert body["localspec"]["speculation"]["speed_up"] == 1.8


def test_the_official_client_gets_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="", messages=user("say a b"), n=2, logprobs=True, top_logprobs=2, max_tokens=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "a"
    assert logprobs.content[0].bytes == [97]
    assert logprobs.content[0].top_logprobs[1].bytes == [255]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)


def test_the_official_client_completes_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="", prompt=["say a b", "say c"], n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["a b", "a b", "c", "c"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1]
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.5}, {" b": -0.5}]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_a_streamed_completion_counts_its_offsets_on(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="", prompt="say ab cd", stream=True, logprobs=0)
    chunks = [chunk.choices[0] for chunk in stream]
    assert [c.logprobs.text_offset for c in chunks if c.logprobs] == [[0], [2]]
    assert chunks[-1].finish_reason == "stop"


def test_prediction_is_counted_only_when_it_was_sent(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="", messages=user("say a"), prediction={"type": "content", "content": "a"}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 2


def test_nan_is_refused_with_the_fields_name(api: Home) -> None:
    answer = api.request("POST", "/v1/chat/completions", b'{"temperature": NaN}')
    assert answer.status == 400
    assert answer.error["message"] == "'temperature' must be a finite number, not nan."


def test_a_number_that_no_frame_can_hold_is_refused(api: Home) -> None:
    body = {"messages": user("say x"), "chat_template_kwargs": {"a": [10**30]}}
    for target in ("/v1/chat/completions", "/apply-template"):
        answer = api.request("POST", target, body)
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        assert "more than 64 bits" in answer.error["message"]
    assert api.chat("say x").text == "x"


def test_an_error_of_the_engine_before_the_first_word_has_a_status(api: Home) -> None:
    answer = api.chat("refuse context_length_exceeded", stream=True)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"


def test_unknown_paths_and_methods_get_openais_error_body(api: Home) -> None:
    assert api.request("GET", "/nothing").error["code"] == "not_found"
    answer = api.request("DELETE", "/v1/models")
    assert answer.status == 405
    assert answer.error["code"] == "method_not_allowed"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(api: Home) -> None:
    connection = UnixConnection(api.socket)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "request_too_large"
    connection.close()


def test_a_client_that_leaves_frees_its_place_and_stops_the_engine(home: Home) -> None:
    home.start(parallel=1)
    with home.streaming("forever") as response:
        response.readline()
    assert home.chat("running").text == "0"
    assert home.status()["counts"]["cancelled"] == 1


def test_a_client_that_leaves_before_the_first_word_is_noticed(home: Home) -> None:
    home.start(parallel=1)
    connection = UnixConnection(home.socket)
    body = {"messages": [{"role": "user", "content": "forever"}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    wait_for(lambda: home.status()["running"], "the request")
    connection.close()
    wait_for(lambda: home.status()["counts"]["cancelled"], "its cancellation")
    assert home.chat("running").text == "0"


def test_tokenize_detokenize_and_templates_have_llama_servers_shapes(api: Home) -> None:
    tokens = api.request("POST", "/tokenize", {"content": "hé"}).json["tokens"]
    assert tokens == [104, 195, 169]
    assert api.request("POST", "/detokenize", {"tokens": tokens}).json == {"content": "hé"}
    pieces = api.request("POST", "/tokenize", {"content": "é", "with_pieces": True}).json["tokens"]
    assert pieces == [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    answer = api.request("POST", "/apply-template", {"messages": user("hi")})
    assert answer.json == {"prompt": "<user>hi"}


def test_props_describe_the_loaded_pair(api: Home) -> None:
    props = api.request("GET", "/props").json
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["model_path"] == str(api.model)
    assert props["total_slots"] == 4  # beyond the place that is kept for editors
    assert props["is_sleeping"] is False


def test_status_counts(home: Home, daemon: RunningDaemon) -> None:
    assert home.status()["pair"]["state"] == "unloaded"
    assert home.chat("say hello", temperature=-1).status == 400
    assert home.status()["worker_pid"] is None  # refused before anything was loaded
    home.chat("say hello")
    status = home.status()
    assert status["pair"]["state"] == "ready"
    assert status["counts"]["requests"] == 1
    assert status["counts"]["tokens"] == 1
    assert status["safe_mode"] is False


def test_the_log_holds_no_prompt(api: Home) -> None:
    api.chat("say sesame")
    assert "sesame" not in Path(api.log).read_text()


def test_nothing_heavy_is_imported_by_the_daemon(api: Home) -> None:
    run = api.run_python(
        "import sys, localspec.daemon.__main__, localspec.daemon.lifecycle;"
        "print([m for m in ('llama_cpp', 'numpy', 'jinja2', 'rich') if m in sys.modules])"
    )
    assert run.stdout == "[]\n"
