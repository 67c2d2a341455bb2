"""The native endpoints of llama-server that editor plug-ins use, with the scripted engine."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_two_editors import SHORT_TIMEOUT_DAEMON
from tests.support.daemons import Home, RunningDaemon, UnixConnection, wait_for

RECORDED = [
    (file.stem, name, case)
    for file in sorted((Path(__file__).parent / "requests").glob("*.json"))
    for name, case in json.loads(file.read_text()).items()
]


def infill(home: Home, command: str = "say x", **fields: Any) -> Any:
    body = {"input_prefix": "", "input_suffix": "", "prompt": f"!{command}", **fields}
    answer = home.request("POST", "/infill", body)
    assert answer.status == 200, answer.body
    return answer.json


def read_frame(home: Home, **fields: Any) -> Any:
    """Return the frame that the engine gets for an /infill."""
    return json.loads(infill(home, "echo", **fields)["content"])


def get_field(answer: Any, path: str) -> Any:
    """Return a value from the place where a plug-in reads it: a flat key, or nested."""
    if path in answer:
        return answer[path]
    for name in path.split("."):
        answer = answer[name]
    return answer


@pytest.mark.parametrize(("plugin", "name", "case"), RECORDED)
def test_recorded_requests_get_the_fields_that_the_plugin_reads(
    api: Home, plugin: str, name: str, case: Any
) -> None:
    answer = api.request("POST", "/infill", case["request"])
    assert answer.status == 200, answer.body
    for path in case["reads"]:
        assert isinstance(
            get_field(answer.json, path), str if path == "content" else (int, float)
        ), path
    if case["request"].get("response_fields"):
        assert sorted(answer.json) == sorted(case["reads"])


def test_infill_fields_reach_the_engine(api: Home) -> None:
    frame = read_frame(
        api,
        input_prefix="above",
        input_suffix="below",
        input_extra=[{"text": "x", "filename": "a.py", "time": 1}, {"text": "y"}],
        n_predict=7,
        n_indent=4,
        t_max_prompt_ms=500,
        t_max_predict_ms=250.4,
        cache_prompt=False,
        id_slot=3,
    )
    assert frame["prompt"] == {
        **{"type": "infill", "prefix": "above", "suffix": "below", "prompt": "!echo"},
        **{"extra": [["a.py", "x"], ["tmp", "y"]], "n_predict": 7},
    }
    assert frame["max_tokens"] == 7
    assert frame["single_line_indent"] == 4
    assert frame["max_predict_ms"] == 250
    assert frame["priority"] == "editor"
    assert frame["cache_prompt"] is False


@pytest.mark.parametrize(
    ("samplers", "expected"),
    [
        (["top_k", "top_p", "infill"], {"temperature": 0.0, "top_k": 40, "min_p": 0.0}),
        (["temperature"], {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        ([], {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repeat_penalty": 1.0}),
        ("kt", {"temperature": 0.7, "top_k": 40, "top_p": 1.0}),
        (None, {"temperature": 0.7, "top_k": 40}),
    ],
)
def test_samplers_that_are_not_listed_are_off(
    api: Home, samplers: Any, expected: dict[str, float]
) -> None:
    fields = {} if samplers is None else {"samplers": samplers}
    frame = read_frame(api, temperature=0.7, top_k=40, top_p=0.9 if samplers else 1.0, **fields)
    assert expected.items() <= frame["sampling"].items()
    assert frame["sampling"].get("infill", False) == ("infill" in (samplers or ()))


def test_response_fields_select_by_path(api: Home) -> None:
    response_fields = ["content", "timings/predicted_ms", "timings", "no/such", "content/below"]
    answer = infill(api, "say a b", response_fields=response_fields)
    assert list(answer) == ["content", "timings/predicted_ms", "timings"]
    assert answer["timings"]["predicted_ms"] == answer["timings/predicted_ms"]


def test_a_stream_ends_without_a_done_event(api: Home) -> None:
    body = {"prompt": "say a b", "stream": True, "n_predict": 5}
    events = [json.loads(e) for e in api.request("POST", "/completion", body).events]
    assert [event["stop"] for event in events] == [False, False, True]
    assert "".join(event["content"] for event in events) == "a b"
    assert events[-1]["stop_type"] == "eos"
    assert events[-1]["generation_settings"]["n_predict"] == 5


def test_completion_has_llama_servers_fields(api: Home) -> None:
    body = {"prompt": "say a b c", "n_predict": 2, "n_probs": 1, "return_tokens": True}
    answer = api.request("POST", "/completion", body).json
    assert answer["content"] == "a b"
    assert answer["stop_type"] == "limit"
    assert answer["tokens"] == [7, 7]
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (4, 2)
    assert answer["tokens_cached"] == 4 + 2 - 1  # the last token was sampled, but not decoded
    assert answer["prompt"] == "say a b c"
    assert answer["completion_probabilities"][0]["top_logprobs"][0]["logprob"] == -0.5


def test_several_prompts_get_a_list_of_answers(api: Home) -> None:
    body = {"prompt": ["say a", "say b"]}
    answer = api.request("POST", "/completion", body).json
    assert [item["content"] for item in answer] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"n_indent": -1}, "n_indent"),
        ({"n_probs": 21}, "n_probs"),
        ({"samplers": 3}, "samplers"),
    ],
)
def test_a_bad_field_is_named(api: Home, fields: Any, param: str) -> None:
    answer = api.request("POST", "/infill", {"prompt": "", **fields})
    assert answer.status == 400
    assert answer.error["param"] == param


class Pending:
    """An /infill that runs until it is cancelled."""

    def __init__(self, home: Home, **fields: Any) -> None:
        self._connection = UnixConnection(home.socket)
        body = {"input_prefix": "p", "input_suffix": "s", "prompt": "!forever", **fields}
        self._connection.request("POST", "/infill", json.dumps(body))
        self._response: http.client.HTTPResponse | None = None
        self._beginning = b""

    def await_text(self) -> None:
        """Wait for the first line of a stream. Before it, a cancellation is an answer without a stream."""
        self._response = self._connection.getresponse()
        self._beginning = self._response.readline()

    def read(self) -> tuple[int, str]:
        response = self._response or self._connection.getresponse()
        text = (self._beginning + response.read()).decode()
        self.leave()
        return response.status, text

    def leave(self) -> None:
        self._connection.close()


def running(home: Home) -> int:
    count: int = home.status()["running"]
    return count


@pytest.mark.parametrize(
    "other",
    [{"input_prefix": "elsewhere"}, {"id_slot": 1}, {"user": "me"}, {"n_predict": 0}],
    ids=["another place", "another slot", "another user", "a warm-up"],
)
def test_a_newer_completion_cancels_no_other_request(
    home: Home, daemon: RunningDaemon, other: dict[str, Any]
) -> None:
    older = Pending(home, input_prefix="p")
    wait_for(lambda: running(home) == 1, "the older completion")
    infill(home, "say new", **{"input_prefix": "p", **other})
    assert running(home) == 1
    older.leave()
    wait_for(lambda: running(home) == 0, "its end")


def test_a_cancelled_stream_ends_with_an_error(home: Home) -> None:
    home.start(program=SHORT_TIMEOUT_DAEMON)
    older = Pending(home, stream=True, id_slot=0)
    older.await_text()
    assert running(home) == 1
    with ThreadPoolExecutor(1) as pool:
        body = pool.submit(older.read)
        infill(home, "say new", id_slot=0)
        events = [json.loads(e[6:]) for e in body.result()[1].split("\n\n") if e]
    assert events[0]["content"] == "0 "
    assert events[-1]["error"]["code"] == "cancelled"
    assert home.chat("running").text == "0"


def test_an_editor_does_not_wait_for_chats(home: Home) -> None:
    home.start(parallel=1)
    with home.streaming("forever") as chat, ThreadPoolExecutor(1) as pool:
        chat.readline()
        waiting = pool.submit(home.chat, "say waited")
        wait_for(lambda: home.status()["waiting"], "the other chat's place in the queue")
        assert infill(home, "say x")["content"] == "x"
        assert (home.status()["running"], home.status()["waiting"]) == (1, 1)
        chat.leave()
        assert waiting.result().text == "waited"
