"""Every field of the published requests of five servers is served, refused by its name, or named as ignored.

The lists in `published/` say where they come from. A field counts as served where the answer of the scripted
engine, which repeats the frame that it was sent, differs from the answer without it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_projector import png
from tests.support.daemons import Answer, Home, real_home
from tests.support.encoders import Bert
from tests.support.error_shapes import read_error

PUBLISHED = Path(__file__).parent / "published"
LISTS = {path.stem: json.loads(path.read_text("utf-8")) for path in PUBLISHED.glob("*.json")}
FIELDS = [
    (name, endpoint, field)
    for name, published in sorted(LISTS.items())
    for endpoint, fields in published["endpoints"].items()
    for field in fields
]

MESSAGES = [{"role": "user", "content": "echo"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "echo"},
    "/v1/responses": {"input": "echo", "store": False},
    "/v1/responses/input_tokens": {"input": "echo"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "echo", "stream": False},
    "/api/show": {"model": "builtin"},
    "/completion": {"prompt": "echo"},
    "/infill": {"prompt": "!echo", "input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "abc"},
    "/detokenize": {"tokens": [97]},
    "/apply-template": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "the cat", "model": "tiny-embed"},
    "/embedding": {"content": "the cat", "model": "tiny-embed"},
    "/api/embed": {"input": "the cat", "model": "tiny-embed"},
    "/api/embeddings": {"prompt": "the cat", "model": "tiny-embed"},
    "/v1/rerank": {"query": "cat", "documents": ["the cat sat", "x"], "model": "tiny-rank"},
}
VECTORS = {"/v1/embeddings", "/embedding", "/api/embed", "/api/embeddings", "/v1/rerank"}
TEXT_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}

# A valid value of each field that asks for something, by name, or by endpoint and name.
VALUES: dict[str, Any] = {
    "access_programs": {"cyber": "x"},
    "activation": True,
    "adaptive_decay": 0.5,
    "adaptive_target": 0.5,
    "add_generation_prompt": False,
    "add_special": True,
    "add_special_tokens": True,
    "/v1/completions add_special_tokens": False,
    "/v1/embeddings add_special_tokens": False,
    "allowed_token_ids": [1],
    "audio": {"format": "mp3", "voice": "alloy"},
    "background": True,
    "background_options": {"completion_window": "24h"},
    "backend_sampling": True,
    "bad_words": ["x"],
    "best_of": 2,
    "billing_policy": {"type": "x"},
    "cache_control": {"type": "ephemeral"},
    "cache_prompt": False,
    "cache_salt": "x" * 43,
    "chat_format": 3,
    "chat_parser": "x",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"x": 1},
    "compaction": {"type": "x"},
    "container": "x",
    "context": [1, 2],
    "context_management": {"edits": [{"type": "x"}]},
    "/v1/responses context_management": [{"type": "compaction"}],
    "content": "other",
    "continue_final_message": True,
    "conversation": "conv_1",
    "diagnostics": {"previous_message_id": "msg_1"},
    "dimensions": 16,
    "documents": [{"title": "t", "text": "x"}],
    "/v1/rerank documents": ["a", "b", "c"],
    "dry_allowed_length": 3,
    "dry_base": 1.5,
    "dry_multiplier": 0.5,
    "dry_penalty_last_n": 9,
    "dry_sequence_breakers": ["x"],
    "dynatemp_exponent": 2.0,
    "dynatemp_range": 0.5,
    "ec_transfer_params": {"x": 1},
    "echo": True,
    "embd_normalize": -1,
    "enable_response_messages": True,
    "encoding_format": "base64",
    "fallback_credit_token": "x",
    "fallbacks": "default",
    "format": "json",
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f", "parameters": {"type": "object"}}],
    "generation_prompt": "x",
    "grammar": 'root ::= "a"',
    "grammar_lazy": True,
    "grammar_triggers": [{"type": 1, "value": "x"}],
    "grammar_type": "tool_calls",
    "guided_choice": ["a", "b"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": 'root ::= "a"',
    "guided_json": SCHEMA,
    "guided_regex": "[a-z]+",
    "guided_whitespace_pattern": " ?",
    "height": 64,
    "id_slot": 1,
    "ignore_eos": True,
    "image": {"context_compression": "x"},
    "images": [base64.b64encode(png(1, 4, 4)).decode()],
    "include": ["reasoning.encrypted_content"],
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "inference_geo": "us",
    "input": "echo other",
    "/v1/embeddings input": ["a", "b"],
    "/embedding input": ["a", "b"],
    "/api/embed input": ["a", "b"],
    "input_extra": [{"text": "x", "filename": "y"}],
    "input_prefix": "other",
    "input_suffix": "other",
    "instructions": "be brief",
    "json_schema": SCHEMA,
    "keep_alive": "5m",
    "kv_transfer_params": {"x": 1},
    "length_penalty": 0.5,
    "logit_bias": {"5": 1},
    "logits_processors": ["x"],
    "logprob_token_ids": [1],
    "logprobs": True,
    "/v1/completions logprobs": 2,
    "/completion logprobs": 2,
    "/infill logprobs": 2,
    "lora": [{"id": 0, "scale": 1.0}],
    "max_completion_tokens": 7,
    "max_output_tokens": 17,
    "max_tokens": 8,
    "max_tokens_per_doc": 2,
    "max_tool_calls": 3,
    "mcp_servers": [{"name": "x", "type": "url", "url": "http://x"}],
    "media_io_kwargs": {"x": {}},
    "message_delimiters": ["x"],
    "messages": [{"role": "user", "content": "echo other"}],
    "metadata": {"user_id": "x"},
    "min_keep": 2,
    "min_p": 0.25,
    "min_tokens": 3,
    "mirostat": 1,
    "mirostat_eta": 0.25,
    "mirostat_tau": 4.0,
    "mm_processor_kwargs": {"x": 1},
    "modalities": ["text", "audio"],
    "model": "builtin",
    "moderation": {"model": "x"},
    "n": 2,
    "n_cache_reuse": 9,
    "n_cmpl": 2,
    "n_discard": 5,
    "n_indent": 2,
    "n_keep": 5,
    "n_predict": 6,
    "n_probs": 2,
    "name": "builtin",
    "normalize": False,
    "options": {"num_gpu": 1},
    "options.draft_num_predict": 4,
    "options.embedding_only": True,
    "options.f16_kv": True,
    "options.logits_all": True,
    "options.low_vram": True,
    "options.main_gpu": 1,
    "options.mirostat": 1,
    "options.num_batch": 64,
    "options.num_ctx": 1 << 20,
    "options.num_gpu": 1,
    "options.num_keep": 4,
    "options.num_predict": 5,
    "options.num_thread": 2,
    "options.numa": True,
    "options.penalize_newline": True,
    "options.seed": 5,
    "options.stop": ["x"],
    "options.tfs_z": 0.5,
    "options.top_k": 5,
    "options.use_mlock": True,
    "options.use_mmap": False,
    "options.vocab_only": True,
    "output_config": {"effort": "low"},
    "output_config.effort": "low",
    "output_config.format": {"type": "json_schema", "schema": SCHEMA},
    "output_config.task_budget": {"type": "tokens", "total": 9},
    "parallel_tool_calls": False,
    "parse_special": False,
    "parse_tool_calls": False,
    "personality": "friendly",
    "post_sampling_probs": True,
    "prediction": {"type": "content", "content": "x"},
    "prediction.content": "x",
    "prediction.type": "content",
    "presence_penalty": 0.5,
    "preserved_tokens": ["x"],
    "previous_input_messages": [{"role": "user", "content": "x"}],
    "previous_response": {"id": "resp_1"},
    "previous_response_id": "resp_1",
    "priority": 5,
    "prompt": "echo other",
    "/infill prompt": "!echo other",
    "/v1/responses prompt": {"id": "pmpt_1"},
    "/api/embeddings prompt": "hello",
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "x"},
    "prompt_cache_retention": "24h",
    "prompt_embeds": "aGVsbG8=",
    "prompt_logprobs": 1,
    "query": "other",
    "raw": True,
    "reasoning": {"effort": "low"},
    "reasoning.context": "x",
    "reasoning.effort": "low",
    "reasoning.generate_summary": "auto",
    "reasoning.mode": "x",
    "reasoning.summary": "auto",
    "reasoning_budget_end_tag": "</x>",
    "reasoning_budget_end_tags": ["</x>"],
    "reasoning_budget_message": "x",
    "reasoning_budget_start_tag": "<x>",
    "reasoning_budget_tokens": 5,
    "reasoning_control": True,
    "reasoning_effort": "low",
    "reasoning_format": "none",
    "repeat_last_n": 7,
    "repeat_penalty": 1.5,
    "repetition_detection": {"max_pattern_size": 9},
    "repetition_penalty": 1.5,
    "request_id": "x",
    "response_fields": ["content"],
    "response_format": {"type": "json_object"},
    "response_format.json_schema": {"name": "x", "schema": SCHEMA},
    "response_format.type": "json_object",
    "return_documents": True,
    "return_mm_kwargs": False,
    "return_progress": True,
    "return_prompt_text": True,
    "return_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "safety_identifier": "x",
    "samplers": ["top_k"],
    "seed": 5,
    "service_tier": "flex",
    "session_id": "x",
    "shift": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "speculative": {"enabled": False},
    "speed": "fast",
    "sse_ping_interval": 5,
    "steps": 5,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "stop_token_ids": [5],
    "store": True,
    "stream": True,
    "/api/chat stream": True,
    "stream_interval": 5,
    "stream_options": {"include_usage": True},
    "stream_options.continuous_usage_stats": True,
    "stream_options.include_obfuscation": True,
    "stream_options.include_usage": True,
    "structural_tag": "{}",
    "structured_outputs": {"regex": "[a-z]+"},
    "structured_outputs.choice": ["a", "b"],
    "structured_outputs.disable_additional_properties": True,
    "structured_outputs.disable_any_whitespace": True,
    "structured_outputs.grammar": 'root ::= "a"',
    "structured_outputs.json": SCHEMA,
    "structured_outputs.json_object": True,
    "structured_outputs.regex": "[a-z]+",
    "structured_outputs.structural_tag": "{}",
    "structured_outputs.whitespace_pattern": " ?",
    "suffix": "x",
    "system": "be brief",
    "t_max_predict_ms": 500,
    "t_max_prompt_ms": 500,
    "temperature": 0.25,
    "template": "x",
    "text": {"format": TEXT_FORMAT},
    "text.format": TEXT_FORMAT,
    "text.verbosity": "low",
    "texts": ["a", "b"],
    "think": True,
    "thread": {"type": "create"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "thinking.block_binding": "x",
    "thinking.budget_tokens": 5,
    "thinking.display": "omitted",
    "thinking.type": "enabled",
    "thinking_budget_tokens": 5,
    "thinking_token_budget": 5,
    "timings_per_token": True,
    "tokens": [98],
    "tool_choice": "required",
    "/v1/messages tool_choice": {"type": "any"},
    "/v1/messages/count_tokens tool_choice": {"type": "any"},
    "tool_choice.disable_parallel_tool_use": True,
    "tool_choice.name": "f",
    "tool_choice.type": "any",
    "tools": [TOOL],
    "/v1/messages tools": [CLAUDE_TOOL],
    "/v1/messages/count_tokens tools": [CLAUDE_TOOL],
    "/v1/responses tools": [RESPONSES_TOOL],
    "/v1/responses/input_tokens tools": [RESPONSES_TOOL],
    "top_k": 5,
    "top_logprobs": 2,
    "top_n": 1,
    "top_n_sigma": 1.0,
    "top_p": 0.5,
    "truncate": False,
    "truncate_prompt_tokens": 3,
    "truncation": "auto",
    "truncation_side": "left",
    "typical_p": 0.5,
    "use_beam_search": True,
    "user": "x",
    "user_profile_id": "x",
    "verbose": True,
    "verbosity": "low",
    "vllm_xargs": {"x": 1},
    "watermarking": True,
    "web_search_options": {"search_context_size": "low"},
    "width": 64,
    "with_pieces": True,
    "workspace_id": "x",
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
}  # fmt: skip

# Other fields that a field needs to have an effect.
BESIDE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
    "/v1/responses tool_choice": {"tools": [RESPONSES_TOOL]},
    "/v1/responses/input_tokens tool_choice": {"tools": [RESPONSES_TOOL]},
    "/v1/responses parallel_tool_calls": {"tools": [RESPONSES_TOOL]},
    "/v1/responses/input_tokens parallel_tool_calls": {"tools": [RESPONSES_TOOL]},
    "/v1/responses background": {"store": True},
    "return_text": {"texts": ["a", "b"]},
    "return_documents": {"documents": ["a", "b"]},
    "/v1/messages tool_choice": {"tools": [CLAUDE_TOOL]},
    "/v1/messages/count_tokens tool_choice": {"tools": [CLAUDE_TOOL]},
    "tool_choice.type": {"tools": [CLAUDE_TOOL]},
    "tool_choice.name": {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool"}},
    "tool_choice.disable_parallel_tool_use": {
        "tools": [CLAUDE_TOOL],
        "tool_choice": {"type": "auto"},
    },
    "thinking.block_binding": {"thinking": {"type": "adaptive"}},
    "thinking.budget_tokens": {"thinking": {"type": "enabled"}},
    "thinking.display": {"thinking": {"type": "adaptive"}},
    "output_config": {"thinking": {"type": "adaptive"}},
    "output_config.effort": {"thinking": {"type": "adaptive"}},
    "top_logprobs": {"logprobs": True},
    "function_call": {"functions": VALUES["functions"]},
    "prediction.content": {"prediction": {"content": "y"}},
    "prediction.type": {"prediction": {"content": "y"}},
    "response_format.json_schema": {"response_format": {"type": "json_schema"}},
    "stream_options": {"stream": True},
    "stream_options.include_usage": {"stream": True},
    "stream_options.include_obfuscation": {"stream": True},
    "stream_options.continuous_usage_stats": {"stream": True},
    "continue_final_message": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "echo"}],
        "add_generation_prompt": False,
    },
    "post_sampling_probs": {"n_probs": 2, "logprobs": True},
    "return_progress": {"stream": True},
    "timings_per_token": {"stream": True},
}  # fmt: skip
# Fields without which the request is invalid.
LEFT_OUT = {
    "/v1/rerank texts": "documents",
    "/v1/rerank return_text": "documents",
    "/embedding input": "content",
    "/v1/embeddings content": "input",
}

# Fields that are served although the scripted engine's answer is the same, and what they do or where that is
# tested. By endpoint and name, or by name for all endpoints.
SERVED = {
    "model": "it chooses the pair, of which there is one here",
    "name": "as 'model'",
    "reasoning_control": "thoughts can be ended in any case: test_loops.py",
    "sse_ping_interval": "a stream that is silent has pings: test_progress.py",
    "stream_options": "its own fields are in the list",
    "tool_choice": "the engine's echo is no call: test_tools.py, test_messages.py",
    "tool_choice.type": "as 'tool_choice'",
    "tool_choice.disable_parallel_tool_use": "as 'tool_choice'",
    "parallel_tool_calls": "as 'tool_choice'",
    "function_call": "as 'tool_choice': test_functions.py",
    "prediction.type": "there is one type",
    "thinking.display": "thoughts are shown or not: test_messages.py",
    "continue_final_message": "true is the default where the last message is the assistant's",
    "/v1/responses include": "reasoning is repeated in an opaque form: test_responses.py",
    "/v1/responses previous_response_id": "test_responses.py",
    "/infill id_slot": "it tells editors apart: test_two_editors.py",
    "/api/embed truncate": "an input that is too long is cut, or refused: test_embeddings.py",
}
# What the scripted engine shows of these is a count, or a text of its own: what is not named as ignored is a
# field that the request declares.
COUNTS = {"/v1/responses/input_tokens", "/v1/messages/count_tokens", "/apply-template", "/tokenize"}


@pytest.fixture(scope="module")
def vectors() -> Iterator[Home]:
    """Run a daemon with random models for embeddings and ranks."""
    with real_home() as home:
        for name, pooling in (("tiny-embed", "mean"), ("tiny-rank", "rank")):
            target = Bert.random().write(home.root / f"{name}.gguf", pooling=pooling)
            added = home.request("POST", "/localspec/pairs", {"name": name, "target": str(target)})
            assert added.status == 201, added.body
        yield home


def lookup(table: dict[str, Any], endpoint: str, field: str) -> Any:
    own = table.get(f"{endpoint} {field}")
    if own is not None:
        return own
    value = table.get(field)
    return table.get(field.removeprefix("options.")) if value is None else value


def with_field(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    name, _, inner = field.partition(".")
    if not inner:
        return {**body, name: value}
    return {**body, name: {**body.get(name, {}), inner: value}}


def normalize_answer(answer: Answer) -> str:
    """Return the answer without the parts that differ from one answer to the next."""
    text = answer.body.decode()
    text = re.sub(r'\\*"(id|item_id|response_id)\\*": ?\\*"?[\w-]+\\*"?', "", text)
    text = re.sub(r'"(created_at|modified_at)": ?"[^"]+"', "", text)
    text = re.sub(r'"(created|created_at|completed_at)": ?[\d.]+', "", text)
    return re.sub(r'"\w*(_ms|_duration|per_second|per_token)": ?[\d.e+-]+', "", text)


def list_ignored(answer: Answer) -> list[str]:
    """Return the fields that an answer of any shape names as ignored."""
    text, notes = answer.body.decode(), []
    for match in re.finditer(r'"ignored": ?(?=\[)', text):
        notes += json.JSONDecoder().raw_decode(text, match.end())[0]
    return notes


def names_field(entries: list[str], field: str) -> bool:
    return any(entry == field or entry.startswith(f"'{field}'") for entry in entries)


def test_a_published_field_is_served_refused_or_named(
    api: Home, vectors: Home, subtests: pytest.Subtests
) -> None:
    for source, endpoint, field in FIELDS:
        with subtests.test(source=source, endpoint=endpoint, field=field):
            check_field(vectors if endpoint in VECTORS else api, endpoint, field)


def check_field(home: Home, endpoint: str, field: str) -> None:
    value = lookup(VALUES, endpoint, field)
    assert value is not None, f"give {field} a value"
    base = {**BASE[endpoint], **(lookup(BESIDE, endpoint, field) or {})}
    base.pop(LEFT_OUT.get(f"{endpoint} {field}", ""), None)
    if field == "model":
        value = base.get("model", "")
    answer = home.request("POST", endpoint, with_field(base, field, value))
    if answer.status == 400:
        message, _ = read_error(endpoint, answer.json)
        assert message.startswith(f"'{field}"), message
        assert re.search(
            "not supported|leave it out|greater than 'n'|there is no|text only", message
        )
        return
    assert answer.status == 200, answer.body
    entries = list_ignored(answer)
    if names_field(entries, field) or (
        field == "options" and names_field(entries, "options.num_gpu")
    ):
        return
    changed = normalize_answer(answer) != answer_without_field(home, endpoint, base)
    served = {field, f"{endpoint} {field}"} & SERVED.keys() or endpoint in COUNTS
    assert changed or served, "neither served, refused nor named"


_WITHOUT: dict[str, str] = {}


def answer_without_field(home: Home, endpoint: str, body: dict[str, Any]) -> str:
    """Return the answer to the same request without the field, even if that is an error."""
    key = f"{endpoint} {json.dumps(body)}"
    if key not in _WITHOUT:
        _WITHOUT[key] = normalize_answer(home.request("POST", endpoint, body))
    return _WITHOUT[key]


def test_an_unknown_field_is_named_in_every_protocol(
    api: Home, vectors: Home, subtests: pytest.Subtests
) -> None:
    for endpoint in BASE:
        for value in [1, False, "x", [], {"a": 1}]:
            with subtests.test(endpoint=str(endpoint), value=str(value)):
                home = vectors if endpoint in VECTORS else api
                answer = home.request("POST", endpoint, {**BASE[endpoint], "nonsense_field": value})
                assert answer.status == 200
                assert list_ignored(answer) == ["nonsense_field"]
                if "stream" not in BASE[endpoint]:
                    body = {**BASE[endpoint], "nonsense_field": None}
                    again = home.request("POST", endpoint, body)
                    assert list_ignored(again) == []


@pytest.mark.parametrize(
    "endpoint",
    ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/completion"],
)
def test_a_stream_names_an_unknown_field_too(api: Home, endpoint: str) -> None:
    body = {**BASE[endpoint], "stream": True, "nonsense_field": 1}
    assert set(list_ignored(api.request("POST", endpoint, body))) == {"nonsense_field"}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/localspec/load"), ("POST", "/localspec/gc"), ("DELETE", "/api/delete")],
)
def test_administrative_requests_refuse_unknown_fields(api: Home, method: str, path: str) -> None:
    answer = api.request(method, path, {"model": "builtin", "nonsense": 1})
    assert answer.status == 400
    assert "is not a field of this request" in answer.body.decode()
