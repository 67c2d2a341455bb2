"""The forms of requests that clients of llama-server send, with the scripted engine."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.daemons import Home, RunningDaemon, scripted_home, temporary_home, wait_for

CHAT = {"messages": [{"role": "user", "content": "echo"}]}


def read_frame(api: Home, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    """Send a request and return the frame that the scripted engine echoes."""
    body = {**CHAT, **fields} if "chat" in path else fields
    answer = api.request("POST", path, body)
    assert answer.status == 200, answer.body
    if "choices" in answer.json:
        return json.loads(answer.text)
    return json.loads(answer.json["content"])


def read_refusal(api: Home, path: str, **fields: Any) -> tuple[str, str]:
    answer = api.request("POST", path, fields)
    assert answer.status == 400, answer.body
    return answer.error["param"], answer.error["message"]


BIASES: list[tuple[Any, dict[str, Any]]] = [
    ({"7": -100, "8": 1.5}, {"logit_bias": {"7": -100.0, "8": 1.5}}),
    ([[7, -100], ["8", 1]], {"logit_bias": {"7": -100.0, "8": 1.0}}),
    ([[7, 1], [7, 2]], {"logit_bias": {"7": 3.0}}),
    ({" the ": -100, "9999999999": 2}, {"text_bias": {" the ": -100.0, "9999999999": 2.0}}),
    ([[" the ", 5], ["", 1]], {"text_bias": {" the ": 5.0, "": 1.0}}),
    ({"7": False, "the": False}, {"logit_bias": {"7": None}, "text_bias": {"the": None}}),
    # None stands for minus infinity, which JSON cannot express.
    ([[7, False]], {"logit_bias": {"7": None}}),
    ([], {}),
    (None, {}),
]


@pytest.mark.parametrize(("logit_bias", "expected"), BIASES)
def test_logit_bias_takes_tokens_and_texts_in_every_form(
    api: Home, logit_bias: Any, expected: dict[str, Any]
) -> None:
    sampling = read_frame(api, logit_bias=logit_bias).get("sampling", {})
    assert {k: v for k, v in sampling.items() if k in ("logit_bias", "text_bias")} == expected


@pytest.mark.parametrize(
    ("logit_bias", "param"),
    [
        ({"x": True}, 'logit_bias["x"]'),
        ([[7, True]], "logit_bias[7]"),
        ({"4": 1, "5": 101}, 'logit_bias["5"]'),
        ({'a"b': "1"}, 'logit_bias["a\\"b"]'),
        ([[1, 2], [3, 101]], "logit_bias[1][1]"),
        ([[1, 2, 3]], "logit_bias[0]"),
        ([["a"]], "logit_bias[0]"),
        ("x", "logit_bias"),
    ],
)
def test_an_invalid_logit_bias_is_named_by_its_key(api: Home, logit_bias: Any, param: str) -> None:
    for path in ("/v1/chat/completions", "/completion"):
        actual_param, message = read_refusal(api, path, **CHAT, prompt="x", logit_bias=logit_bias)
        assert actual_param == param
        assert message.startswith(f"'{param}'")


PROMPTS: list[tuple[Any, list[str]]] = [
    ({"prompt_string": "say a"}, ["a"]),
    ({"prompt_string": [1, "b"], "multimodal_data": []}, ["1 b"]),
    ([1, "a", 2, "b"], ["1 a 2 b"]),
    ([1, 2], ["1 2"]),
    ([[1, "a"], "say c", [3], {"prompt_string": "say d"}], ["1 a", "c", "3", "d"]),
]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
@pytest.mark.parametrize(("prompt", "answers"), PROMPTS)
def test_prompts_mix_texts_and_token_ids(
    api: Home, path: str, prompt: Any, answers: list[str]
) -> None:
    response = api.request("POST", path, {"prompt": prompt}).json
    if "choices" in response:
        assert [choice["text"] for choice in response["choices"]] == answers
    else:
        listed = response if isinstance(response, list) else [response]
        assert [answer["content"] for answer in listed] == answers


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ({"prompt_string": "x", "multimodal_data": ["iVBO"]}, "prompt.multimodal_data"),
        (["a", {"prompt_string": "x", "multimodal_data": [1]}], "prompt[1].multimodal_data"),
        ([1, [2]], "prompt"),
        ([["a", -1]], "prompt[0]"),
        ([1, "a", 1 << 40], "prompt"),
        ({"prompt_string": [-1]}, "prompt.prompt_string"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ({}, "prompt.prompt_string"),
    ],
)
def test_an_invalid_prompt_is_named(api: Home, prompt: Any, param: str) -> None:
    for path in ("/completion", "/v1/completions"):
        actual_param, message = read_refusal(api, path, prompt=prompt)
        assert actual_param == param
        assert message.startswith(f"'{param}'")


def test_tokens_are_in_streams_and_in_answers_on_request(api: Home) -> None:
    body = {"prompt": "say a b", "stream": True}
    events = [json.loads(event) for event in api.request("POST", "/completion", body).events]
    assert [event["tokens"] for event in events] == [[7], [7], []]
    for return_tokens, tokens in ((False, []), (True, [7, 7])):
        body = {"prompt": "say a b", "return_tokens": return_tokens}
        assert api.request("POST", "/completion", body).json["tokens"] == tokens


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_timings_per_token_on_request(api: Home, path: str) -> None:
    words = {"prompt": "say a b c", "messages": [{"role": "user", "content": "say a b c"}]}
    for timings_per_token in (False, True):
        body = {**words, "stream": True, "timings_per_token": timings_per_token}
        events = [e for e in api.request("POST", path, body).events if e != "[DONE]"]
        timed = [e["timings"]["predicted_n"] for e in map(json.loads, events) if "timings" in e]
        assert timed == ([1, 2, 3, 3] if timings_per_token else [3])


def test_the_usage_chunk_has_timings(api: Home) -> None:
    events = api.chat("say a b", stream=True, stream_options={"include_usage": True}).events
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["timings"]["predicted_n"] == last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", ["/chat/completions/input_tokens"])
def test_the_tokens_of_a_chat_are_counted(api: Home, path: str) -> None:
    for place in (path, f"/v1{path}"):
        body = {"messages": [{"role": "user", "content": "one two three"}]}
        assert api.request("POST", place, body).json == {"input_tokens": 3}
        assert read_refusal(api, place, messages=[])[0] == "messages"


def test_generation_settings_are_returned(api: Home) -> None:
    body = {"prompt": "x", "temperature": 0.5, "n_predict": 3}
    settings = api.request("POST", "/completion", body).json["generation_settings"]
    assert settings["temperature"] == 0.5
    assert settings["max_tokens"] == settings["n_predict"] == 3
    assert settings["logit_bias"] == []
    assert settings["mirostat"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply-template", CHAT),
        ("/chat/completions/input_tokens", CHAT),
    ],
)
def test_token_requests_use_the_named_pair(path: str, body: Any) -> None:
    with temporary_home() as home:
        home.use_fake()
        other = home.root / "other.gguf"
        other.touch()
        RunningDaemon(home)
        assert home.request("POST", path, {**body, "model": str(other)}).status == 200
        assert home.status()["pair"]["name"] == str(other)
        assert home.request("POST", path, {**body, "model": None}).status == 200
        assert home.status()["pair"]["name"] == str(home.model)
        assert home.request("POST", path, {**body, "model": "nobody"}).status == 404


def test_slots_show_how_many_requests_run(api: Home) -> None:
    def busy() -> list[bool]:
        return [slot["is_processing"] for slot in api.request("GET", "/slots").json]

    assert busy() == [False] * 4
    with api.streaming("forever") as stream:
        stream.readline()
        assert busy() == [True, False, False, False]
        assert api.request("GET", "/slots?fail_on_no_slot=1").status == 200
    wait_for(lambda: not any(busy()), "the end of the answer")
    assert api.request("GET", "/props").json["total_slots"] == 4


def test_slot_actions_are_refused(api: Home) -> None:
    for action in ("save", "restore", "erase"):
        answer = api.request("POST", f"/slots/0?action={action}", {"filename": "x"})
        assert answer.status == 501
        assert answer.error["code"] == "not_offered"
        assert action in answer.error["message"]
    assert api.request("POST", "/slots/0?action=polish").error["param"] == "action"


@pytest.mark.parametrize("path", ["/completion", "/infill", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value", "off"),
    [("mirostat", 2, 0), ("adaptive_target", 0.5, -1), ("lora", [{"id": 0, "scale": 1.0}], [])],
)
def test_unsupported_sampling_fields_are_refused_by_name(
    api: Home, path: str, field: str, value: Any, off: Any
) -> None:
    param, message = read_refusal(api, path, prompt="x", **{field: value})
    assert param == field
    assert message == f"'{field}' is not supported; leave it out."
    assert api.request("POST", path, {"prompt": "!x", field: off}).status == 200


def test_post_sampling_probabilities(api: Home) -> None:
    body = {"prompt": "say a", "n_probs": 2, "post_sampling_probs": True}
    [entry] = api.request("POST", "/completion", body).json["completion_probabilities"]
    assert entry["prob"] == pytest.approx(math.exp(-0.5))
    expected = [math.exp(-0.5), math.exp(-1.5)]
    assert [top["prob"] for top in entry["top_probs"]] == pytest.approx(expected)
    assert "logprob" not in entry
    assert read_frame(api, post_sampling_probs=True, logprobs=True)["post_sampling"] is True


SAMPLERS: dict[str, Any] = {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2}
SAMPLERS |= {"dynatemp_range": 0.3, "dynatemp_exponent": 2.0, "min_keep": 3}


def test_samplers_that_are_not_listed_are_off(api: Home) -> None:
    assert SAMPLERS.items() <= read_frame(api, **SAMPLERS)["sampling"].items()
    frame = read_frame(api, "/completion", prompt="echo", samplers=["top_k"], **SAMPLERS)
    sampling = frame["sampling"]
    assert sampling["top_n_sigma"] == -1.0
    assert sampling["xtc_probability"] == sampling["dynatemp_range"] == 0.0
    sampling = read_frame(api, "/completion", prompt="echo", samplers="sxt", **SAMPLERS)["sampling"]
    assert SAMPLERS.items() <= sampling.items()


def test_props_do_not_load_an_unloaded_pair() -> None:
    with scripted_home() as home:
        awake = home.request("GET", "/props").json
        assert awake.pop("is_sleeping") is False
        assert home.request("POST", "/localspec/unload", {}).status == 200
        resting = home.request("GET", "/props").json
        assert resting.pop("is_sleeping") is True
        assert resting == awake
        assert home.status()["pair"]["state"] == "unloaded"
        assert home.request("POST", "/tokenize", {"content": "x"}).status == 200
        assert home.request("GET", "/props").json["is_sleeping"] is False
