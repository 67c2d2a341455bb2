"""Log-probabilities, token ids and stop strings through every protocol, from the builtin pair."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.daemons import Home, RunningDaemon

QUESTION = "What does shutil.copytree do?"
BEGINNING = "import os\nfor root, dirs, files in os.walk("
DEPTHS = (0, 1, 8)
Tokens = list[tuple[str, float]]


def read_events(home: Home, path: str, body: dict[str, Any]) -> list[Any]:
    response = home.request("POST", path, {**body, "stream": True})
    assert response.status == 200, response.body
    return [json.loads(event) for event in response.events if event != "[DONE]"]


def chat(home: Home, stream: bool, **fields: Any) -> tuple[str, Tokens]:
    path, messages = "/v1/chat/completions", [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "logprobs": True, **fields}
    if stream:
        choices = [c for event in read_events(home, path, body) for c in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        parts = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
        entries = [entry for part in parts for entry in part]
    else:
        choice = home.request("POST", path, body).json["choices"][0]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    return text, [(entry["token"], entry["logprob"]) for entry in entries]


def completions(home: Home, stream: bool, **fields: Any) -> tuple[str, Tokens]:
    path, body = "/v1/completions", {"prompt": BEGINNING, "logprobs": 1, **fields}
    if stream:
        choices = [c for event in read_events(home, path, body) for c in event["choices"]]
    else:
        choices = home.request("POST", path, body).json["choices"]
    text = "".join(choice["text"] for choice in choices)
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    tokens = [token for part in parts for token in part["tokens"]]
    for token, offset in zip(tokens, offsets, strict=True):
        assert offset < len(text)
        assert "\ufffd" in token or (text[offset:] + token).startswith(token[: len(text) - offset])
    values = [value for part in parts for value in part["token_logprobs"]]
    return text, list(zip(tokens, values, strict=True))


def completion(home: Home, stream: bool, **fields: Any) -> tuple[str, Tokens]:
    path = "/completion"
    body = {"prompt": BEGINNING, "n_probs": 1, "return_tokens": True, **fields}
    parts = read_events(home, path, body) if stream else [home.request("POST", path, body).json]
    text = "".join(part["content"] for part in parts)
    ids = [token for part in parts for token in part["tokens"]]
    assert len(ids) == parts[-1]["tokens_predicted"]  # all of them, also of a stop string
    entries = [entry for part in parts for entry in part.get("completion_probabilities", [])]
    assert [entry["id"] for entry in entries] == ids[: len(entries)]
    return text, [(entry["token"], entry["logprob"]) for entry in entries]


def responses(home: Home, stream: bool, **fields: Any) -> tuple[str, Tokens]:
    path = "/v1/responses"
    limit = fields.pop("max_tokens")
    include = ["message.output_text.logprobs"]
    body = {"input": QUESTION, "include": include, "store": False, "max_output_tokens": limit}
    body |= fields
    if stream:
        events = read_events(home, path, body)
        deltas = [each for each in events if each["type"] == "response.output_text.delta"]
        text = "".join(delta["delta"] for delta in deltas)
        entries = [entry for delta in deltas for entry in delta["logprobs"]]
    else:
        part = home.request("POST", path, body).json["output"][0]["content"][0]
        text, entries = part["text"], part["logprobs"]
    return text, [(entry["token"], entry["logprob"]) for entry in entries]


PROTOCOLS = [chat, completions, completion, responses]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_reported_tokens_do_not_depend_on_drafts_or_streaming(real: Home, protocol: Any) -> None:
    shared = {"temperature": 0, "max_tokens": 14, "exact": True}
    text, _ = protocol(real, False, **shared)
    assert len(text) > 30
    for stops in ([], [text[9:14]], [text[15:17], text[22:30]], [text[-3:]]):
        results = [
            protocol(real, stream, **shared, stop=stops, speculative={"depth": depth})
            for depth in DEPTHS
            for stream in (False, True)
        ]
        end = min((text.find(stop) for stop in stops), default=len(text))
        assert results[0][0] == text[:end]
        assert all(result == results[0] for result in results)
        assert "".join(token for token, _ in results[0][1]).startswith(text[:end])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_reported_tokens_match_the_text_without_exact(real: Home, protocol: Any) -> None:
    for depth in DEPTHS:
        fields = {"temperature": 0, "max_tokens": 14, "speculative": {"depth": depth}}
        text, tokens = protocol(real, False, **fields)
        assert "".join(token for token, _ in tokens) == text
        cut, tokens = protocol(real, False, **fields, stop=[text[9:14]])
        assert cut == text[: text.find(text[9:14])]
        joined = "".join(token for token, _ in tokens)
        assert joined.startswith(cut)
        assert len("".join(token for token, _ in tokens[:-1])) < max(len(cut), 1)


def test_ollama_reports_the_same_tokens_with_and_without_streaming(real: Home) -> None:
    for path, fields in (
        ("/api/chat", {"messages": [{"role": "user", "content": QUESTION}]}),
        ("/api/generate", {"prompt": QUESTION}),
    ):
        body: dict[str, Any] = {"model": "builtin", "logprobs": True, "stream": False, **fields}
        body["options"] = {"temperature": 0, "num_predict": 24}
        complete = real.request("POST", path, body).json
        text = complete.get("response") or complete["message"]["content"]
        body["options"]["stop"] = [text[9:14]]
        complete = real.request("POST", path, body).json
        lines = real.request("POST", path, {**body, "stream": True}).body.decode().splitlines()
        streamed = [e for line in lines for e in json.loads(line).get("logprobs") or []]
        assert [e["token"] for e in streamed] == [e["token"] for e in complete["logprobs"]]
        cut = complete.get("response") or complete["message"]["content"]
        assert "".join(e["token"] for e in streamed).startswith(cut)


ROOM = {"type": "object", "properties": {"room": {"enum": ["kitchen"]}}, "required": ["room"]}
LED = {"name": "led_on", "description": "Switch the LED on.", "parameters": ROOM}


@pytest.mark.parametrize("stop", ["led", '"', "{", "kitchen", "name", "<tool_call>", "_"])
def test_a_stop_string_inside_a_tool_call_is_ignored(real: Home, stop: str) -> None:
    messages = [{"role": "user", "content": "Switch on the LED."}]
    shared = {"messages": messages, "temperature": 0, "max_tokens": 120}
    tool = {"type": "function", "function": LED}
    for depth in (0, 4):
        body = {**shared, "tools": [tool], "tool_choice": "required", "stop": [stop]}
        body["speculative"] = {"depth": depth}
        choice = real.request("POST", "/v1/chat/completions", body).json["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "led_on"
        assert json.loads(call["function"]["arguments"]) == {"room": "kitchen"}
        assert choice["finish_reason"] == "tool_calls"
        chunks = read_events(real, "/v1/chat/completions", body)
        parts = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", [])]
        arguments = "".join(part["function"]["arguments"] for part in parts)
        assert json.loads(arguments) == {"room": "kitchen"}
    anthropic = {**shared, "model": "builtin", "stop_sequences": [stop]}
    anthropic["tools"] = [{"name": "led_on", "input_schema": ROOM}]
    anthropic["tool_choice"] = {"type": "any"}
    answer = real.request("POST", "/v1/messages", anthropic).json
    assert answer["stop_reason"] == "tool_use"
    [block] = answer["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"room": "kitchen"})


THINKING_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}<think>\n"
)


@pytest.fixture
def thinking(home: Home) -> Home:
    """Run a daemon with the builtin pair and a template that opens the thoughts."""
    folder = home.root / "config"
    folder.mkdir()
    (folder / "think.jinja").write_text(THINKING_TEMPLATE)
    (folder / "models.toml").write_text('[pairs.builtin]\nchat_template = "think.jinja"\n')
    RunningDaemon(home)
    return home


def test_a_stop_string_inside_thoughts_is_ignored(thinking: Home) -> None:
    path = "/v1/chat/completions"
    shared: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "exact": True}
    shared |= {"temperature": 0, "max_tokens": 32, "reasoning_budget_tokens": 16}

    def ask(**more: Any) -> tuple[str, str]:
        message = thinking.request("POST", path, {**shared, **more}).json["choices"][0]["message"]
        deltas = [c["choices"][0]["delta"] for c in read_events(thinking, path, {**shared, **more})]
        for key in ("content", "reasoning_content"):
            streamed = "".join(delta.get(key) or "" for delta in deltas)
            assert streamed == (message.get(key) or "")
        return message.get("reasoning_content") or "", message.get("content") or ""

    thoughts, content = ask()
    assert len(thoughts) > 12 < len(content)
    for depth in (0, 4):
        drafts = {"speculative": {"depth": depth}}
        for start in range(0, len(thoughts) - 3, 9):
            stop = thoughts[start : start + 3]
            end = content.find(stop)
            expected = content if end < 0 else content[:end]
            assert ask(**drafts, stop=[stop]) == (thoughts, expected)
        stop = content[6:9]
        expected = content[: content.find(stop)]
        assert ask(**drafts, stop=[stop]) == (thoughts, expected)
        assert ask(**drafts, stop=["</think>", "\n\n\n\n\n"]) == (thoughts, content)
    body = {k: v for k, v in shared.items() if k != "reasoning_budget_tokens"}
    body |= {"model": "builtin", "stop_sequences": [content[6:9], thoughts[3:6]]}
    body["thinking"] = {"type": "enabled", "budget_tokens": 16}
    answer = thinking.request("POST", "/v1/messages", body).json
    assert answer["content"][0]["type"] == "thinking"
    assert answer["content"][0]["thinking"].strip() == thoughts.strip()
    # With this format the thoughts are part of the text, so that the stop string counts.
    body = {**shared, "reasoning_format": "none", "stop": [thoughts[3:6]]}
    text = thinking.request("POST", path, body).json["choices"][0]["message"]["content"]
    assert thoughts[3:6] not in text


CONTEXT = "Question: What does shutil.copytree do?\nAnswer:"
CHOICES = [" It copies a folder.", " banana", " äöü ☃", " It"]


def tokenize(home: Home, text: str, *, first: bool = True) -> list[int]:
    body = {"content": text, "add_special": first}
    tokens: list[int] = home.request("POST", "/tokenize", body).json["tokens"]
    return tokens


def request_loglikelihoods(home: Home, prompts: list[list[int]], **more: Any) -> Any:
    """Send lm-eval's request for the log-likelihood of continuations (`local-completions`)."""
    body = {"model": "", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = home.request("POST", "/v1/completions", {**body, "seed": 1234, "echo": True, **more})
    assert answer.status == 200, answer.body
    return answer.json


def parse_logprobs(out: Any, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """Parse the answer like lm-eval's openai_completions.py."""
    results = []
    choices = sorted(out["choices"], key=lambda choice: choice["index"])
    for choice, ctxlen in zip(choices, ctxlens, strict=True):
        tokens_logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        pairs = zip(tokens_logprobs, top_logprobs, strict=True)
        is_greedy = all(value == max(top.values()) for value, top in pairs)
        results.append((sum(tokens_logprobs), is_greedy))
    return results


def test_lm_eval_multiple_choice(real: Home) -> None:
    context = tokenize(real, CONTEXT)
    prompts = [context + tokenize(real, choice, first=False) for choice in CHOICES]
    together = request_loglikelihoods(real, prompts, exact=True)
    alone = [request_loglikelihoods(real, [prompt], exact=True)["choices"][0] for prompt in prompts]
    assert [choice["index"] for choice in together["choices"]] == [*range(len(CHOICES))]
    for choice, single, tokens in zip(together["choices"], alone, prompts, strict=True):
        for logprobs in (choice["logprobs"], single["logprobs"]):
            assert len(logprobs["tokens"]) == len(tokens) + 1
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
        assert choice["logprobs"] == single["logprobs"]
    likelihoods = parse_logprobs(together, [len(context)] * len(prompts))
    assert all(-1000 < likelihood < 0 for likelihood, _ in likelihoods)
    # The context's own values are the same before every choice.
    values = [choice["logprobs"]["token_logprobs"] for choice in together["choices"]]
    scored = [each[1 : len(context)] for each in values]
    # Batches of other widths round differently.
    assert all(each == pytest.approx(scored[0], abs=0.4) for each in scored)


def test_generated_tokens_are_greedy_for_lm_eval(real: Home) -> None:
    context = tokenize(real, CONTEXT)
    body = {"prompt": context, "n_predict": 6, "temperature": 0, "return_tokens": True}
    generated = real.request("POST", "/completion", body).json["tokens"]
    response = request_loglikelihoods(real, [context + generated[:1], [*context, generated[0] + 1]])
    likelihoods = parse_logprobs(response, [len(context)] * 2)
    assert likelihoods[0][1]
    assert not likelihoods[1][1]
    assert likelihoods[0][0] > likelihoods[1][0]


@pytest.mark.parametrize("text", [CONTEXT, "äöü ☃ 😀", "x"])
@pytest.mark.parametrize("limit", [0, 1, 8])
def test_an_echoed_prompt_and_its_completion_are_one_text(
    real: Home, text: str, limit: int
) -> None:
    body = {"prompt": text, "echo": True, "logprobs": 2, "temperature": 0, "max_tokens": limit}
    choice = real.request("POST", "/v1/completions", body).json["choices"][0]
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    lists = ("tokens", "text_offset", "token_logprobs")
    assert len({len(logprobs[name]) for name in lists}) == 1
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"].startswith(token, offset) or offset == 0
    chunks = [c for event in read_events(real, "/v1/completions", body) for c in event["choices"]]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for key in ("tokens", "text_offset"):
        parts = [chunk["logprobs"][key] for chunk in chunks if chunk["logprobs"]]
        assert [item for part in parts for item in part] == logprobs[key]


def test_prompt_logprobs_have_the_shape_of_vllm(real: Home) -> None:
    tokens = tokenize(real, CONTEXT)
    body = {"prompt": [tokens, tokens[:3]], "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    choices = real.request("POST", "/v1/completions", body).json["choices"]
    for choice, prompt in zip(choices, (tokens, tokens[:3]), strict=True):
        first, *entries = choice["prompt_logprobs"]
        assert first is None
        assert choice["logprobs"] is None
        for entry, token in zip(entries, prompt[1:], strict=True):
            assert 2 <= len(entry) <= 3
            ranked = sorted(entry.values(), key=lambda logprob: logprob["rank"])
            values = [logprob["logprob"] for logprob in ranked]
            assert values == sorted(values, reverse=True)
            assert str(token) in entry
    refused = {"prompt": "x", "suffix": "y", "echo": True, "logprobs": 1}
    assert real.request("POST", "/v1/completions", refused).error["param"] == "suffix"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_timings_in_a_stream_are_numbers_from_the_first_event(real: Home, path: str) -> None:
    body: dict[str, Any] = {"return_progress": True, "timings_per_token": True, "max_tokens": 4}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": QUESTION}]
    else:
        body["prompt"] = QUESTION
    times = [event["timings"] for event in read_events(real, path, body) if "timings" in event]
    assert len(times) > 2
    for timings in times:
        assert all(isinstance(value, int | float) for value in timings.values())
        assert "cache_exact_n" in timings
    batch = real.request("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}).json
    assert isinstance(batch["timings"]["cache_exact_n"], int)
