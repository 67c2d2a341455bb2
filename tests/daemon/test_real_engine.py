"""Requests to a daemon with llama.cpp: the builtin pair, and synthetic pairs with hostile templates."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import localspec
from benchmarks import synthetic
from benchmarks.synthetic_block import write_block
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_heads import write_heads_apart
from tests.support.daemons import Home, RunningDaemon, alive, real_home, wait_for
from tests.support.extras import needs
from tests.support.pairs import contextual_pair, cycle_pair

QUESTION = "What does shutil.copytree do?"
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def real() -> Iterator[Home]:
    """Run one daemon with the builtin pair for all tests that leave nothing behind."""
    with real_home(context=256) as home:  # filled quickly
        yield home


@pytest.fixture
def real_daemon(home: Home) -> RunningDaemon:
    return RunningDaemon(home)


LONG_ANSWER: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 900}


def test_ask_prints_an_answer_and_statistics(real: Home) -> None:
    run = real.run("ask", "-u", "--draft", "3", "--temperature", "0", "-n", "24", QUESTION)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert "drafted" in run.stderr


def test_drafts_are_made_and_accepted(real: Home) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
    # Without a depth, it depends on the machine whether drafts pay.
    body = real.chat(QUESTION, **fields, speculative={"depth": 3}).json
    assert body["usage"]["completion_tokens"] == 100
    assert body["timings"]["draft_n"] > 0
    assert body["localspec"]["speculation"]["accepted"] > 0


def test_a_system_message_reaches_a_model_without_that_role(real: Home) -> None:
    question = {"role": "user", "content": QUESTION}
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Answer in Latin."}, question]
        prompt = real.request("POST", "/apply-template", {"messages": messages}).json["prompt"]
        assert f"Answer in Latin.\n{QUESTION}" in prompt
    refused = real.request(
        "POST",
        "/v1/chat/completions",
        {"messages": [question, {"role": "critic", "content": "Bah."}]},
    )
    assert refused.status == 400
    assert "the role 'critic'" in refused.error["message"]


def test_a_last_message_of_the_assistant_is_continued(real: Home) -> None:
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "`shutil.copytree()` copies an entire"},
    ]
    prompt = real.request("POST", "/apply-template", {"messages": messages}).json["prompt"]
    assert prompt.endswith("copies an entire")
    plain = {"prompt": prompt, **GREEDY, "exact": True}
    answer = real.request(
        "POST", "/v1/chat/completions", {"messages": messages, **GREEDY, "exact": True}
    )
    assert answer.text == real.request("POST", "/completion", plain).json["content"]
    assert answer.text.startswith(" directory tree")


@needs("responses")
def test_responses_match_chats_and_can_be_continued(real: Home) -> None:
    def respond(**fields: Any) -> Any:
        limits = {"temperature": 0, "max_output_tokens": 24, "exact": True}
        return real.request("POST", "/v1/responses", {**limits, **fields}).json

    first = respond(input=QUESTION)
    text = first["output"][0]["content"][0]["text"]
    assert text == real.chat(QUESTION, **GREEDY, exact=True).text
    count = real.request("POST", "/v1/responses/input_tokens", {"input": QUESTION}).json
    assert count["input_tokens"] == first["usage"]["input_tokens"]
    second_tokens = respond(input="And rmtree?", previous_response_id=first["id"])["usage"][
        "input_tokens"
    ]
    assert second_tokens > count["input_tokens"] + first["usage"]["output_tokens"]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    text_of_schema = respond(input=QUESTION, text={"format": form})["output"][0]["content"][0][
        "text"
    ]
    assert json.loads(text_of_schema)["n"] in (1, 2)
    tool = {"type": "function", "name": "pick", "parameters": schema}
    [call] = respond(input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=60)[
        "output"
    ]
    assert json.loads(call["arguments"])["n"] in (1, 2)


def test_a_disconnect_frees_the_slot(home: Home) -> None:
    home.use_slow_engine()
    RunningDaemon(home)
    with home.streaming(QUESTION, **LONG_ANSWER) as stream:
        stream.readline()
    wait_for(lambda: home.status()["counts"]["cancelled"], "the cancellation")
    answer = home.chat(QUESTION, **GREEDY)
    assert answer.status == 200, answer.body


def test_an_endless_answer_ends_with_the_context(real: Home) -> None:
    answer = real.chat(QUESTION, temperature=0, ignore_eos=True, max_tokens=2**31 - 1)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["finish_reason"] == "length"


def test_a_prompt_beyond_the_context_is_refused_with_its_limit(real: Home) -> None:
    answer = real.chat("word " * 20_000)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"


def test_token_ids_out_of_range_are_refused(real: Home) -> None:
    for target, body in (
        ("/v1/completions", {"prompt": [2**31 - 1]}),
        ("/detokenize", {"tokens": [2**31 - 1]}),
    ):
        assert real.request("POST", target, body).status == 400
    answer = real.chat(QUESTION, **GREEDY)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "root ::= ["},
        {"grammar": "root ::= root"},
        {"grammar": 'x ::= "a"'},
        {"grammar": 'root ::= "a"{1000000000}'},
        {"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
        {"regex": "((((a*)*)*)*)*b"},
        {"regex": "(a{1000}){1000}"},
        {"json_schema": {"type": "string", "maxLength": 10**9, "minLength": 10**9}},
        {"json_schema": {"$ref": "#"}},
    ],
    ids=lambda fields: f"{fields}"[:40],
)
def test_a_hostile_grammar_is_refused_or_obeyed(real: Home, fields: dict[str, object]) -> None:
    before = real.status()["counts"]["worker_deaths"]
    answer = real.chat(QUESTION, temperature=0, max_tokens=4, **fields)
    assert answer.status in (200, 400), answer.body
    if answer.status == 400:
        assert answer.error["code"] == "invalid_grammar"
    assert real.status()["counts"]["worker_deaths"] == before
    assert real.chat(QUESTION, **GREEDY).status == 200


def test_tokenize_and_detokenize_are_inverse(real: Home) -> None:
    tokens = real.request("POST", "/tokenize", {"content": "def f(x):"}).json["tokens"]
    assert real.request("POST", "/detokenize", {"tokens": tokens}).json["content"] == "def f(x):"


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash"])
def test_a_sidecar_beside_a_target_drafts_for_it(home: Home, tmp_path: Path, kind: str) -> None:
    """It needs no name: a request for the target's file is enough. Another request may leave it out."""
    target, sidecar = tmp_path / "tiny-1b-F32.gguf", tmp_path / f"{kind}-tiny-1b-F32.gguf"
    if kind == "mtp":
        write_heads_apart(target, sidecar, acceptance=0.9)
    else:
        cycle = synthetic.target_cycle(synthetic.TINY_TARGET.n_vocab)
        synthetic.write_model(target, synthetic.TINY_TARGET, cycle)
        write = write_eagle if kind == "eagle3" else write_block
        write(sidecar, synthetic.TINY_TARGET, cycle, 0.9)
    RunningDaemon(home)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    model = str(target)
    drafted = home.chat("a b c", **fields, model=model, speculative={"depth": 3, "kind": kind})
    speculation = drafted.json["localspec"]["speculation"]
    assert (speculation["kind"], speculation["reason"]) == (kind, None)
    assert speculation["accepted"] > 30
    plain = home.chat("a b c", **fields, model=model, speculative={"enabled": False})
    assert plain.text == drafted.text


def test_a_killed_engine_is_explained_and_replaced(home: Home) -> None:
    home.use_slow_engine()
    daemon = RunningDaemon(home)
    with home.streaming(QUESTION, **LONG_ANSWER) as stream:
        stream.readline()
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        assert b'"worker_died"' in stream.read()
    answer = home.chat(QUESTION, **GREEDY)
    assert answer.status == 200, answer.body


def test_unused_prefix_memory_moves_between_pairs(home: Home) -> None:
    budget = 900  # MiB, of which the first pair keeps nearly half for prompts
    home.environment["LOCALSPEC_MEMORY"] = str(budget)
    RunningDaemon(home)
    builtin = Path(localspec.__file__).parent / "builtin"
    names = ["builtin"]
    for number in range(3):
        files = [home.root / f"{number}-{name}.gguf" for name in ("target", "draft")]
        for file in files:
            file.symlink_to(builtin / file.name.partition("-")[2])  # whose passes are known
        names.append(",".join(map(str, files)))
    prefix_bytes = []
    for name in names:
        assert home.chat(QUESTION, model=name, **GREEDY).status == 200
        pairs = {pair["name"]: pair for pair in home.status()["pairs"]}
        assert [*pairs] == names[len(pairs) - 1 :: -1]  # no pair was evicted
        assert sum(pair["memory"] for pair in pairs.values()) <= budget << 20
        prefix_bytes.append(pairs["builtin"]["plan"]["prefixes"])
    assert prefix_bytes[-1] < prefix_bytes[0]
    for name in names[1:]:
        home.request("POST", "/localspec/unload", {"model": name})
    wait_for(
        lambda: home.status()["pair"]["plan"]["prefixes"] == prefix_bytes[0],
        "the return of the memory",
    )


MOMENTS = ("loading", "reading", "drafting", "sampling", "saving", "idle")


def test_killing_a_worker_does_not_change_answers_of_another(real: Home, tmp_path: Path) -> None:
    files = contextual_pair(tmp_path / "victim")
    name, rng = f"{files.target},{files.draft}", random.Random(1)
    options = {"temperature": 0, "max_tokens": 80, "ignore_eos": True, "exact": True}
    expected = real.chat(QUESTION, **options)
    builtin_pid = find_pid(real, "builtin")
    deaths, stopped = real.status()["counts"]["worker_deaths"], threading.Event()

    def repeat_question() -> list[str]:
        texts = [real.chat(QUESTION, **options).text]
        while not stopped.is_set():
            texts.append(real.chat(QUESTION, **options).text)
        return texts

    def body(moment: str) -> dict[str, Any]:
        text = "".join(rng.choices("abc def\n", k=150 if moment == "reading" else 9))
        temperature = 1.0 if moment == "sampling" else 0.0
        fields = {"ignore_eos": True, "speculative": {"depth": 3}, "temperature": temperature}
        return {"model": name, "prompt": text, "max_tokens": 90, **fields}

    def kill(moment: str) -> None:
        real.request("POST", "/localspec/reset", {})
        if moment != "loading":
            real.request("POST", "/v1/completions", {**body(moment), "max_tokens": 1})
        completion = None if moment in ("saving", "idle") else pool.submit(ask, body(moment))
        unload = {"model": name}
        unload_request = (
            pool.submit(ask, unload, "/localspec/unload") if moment == "saving" else None
        )
        if moment == "loading":
            wait_for(lambda: find_pid(real, name), "a worker that loads")
        time.sleep(rng.uniform(0, 0.04))
        if victim := find_pid(real, name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        for request in filter(None, (completion, unload_request)):
            request.result()

    def ask(body: dict[str, Any], path: str = "/v1/completions") -> int:
        return real.request("POST", path, body).status

    with ThreadPoolExecutor(3) as pool:
        undisturbed = pool.submit(repeat_question)
        try:
            for moment in rng.sample(MOMENTS, len(MOMENTS)):
                kill(moment)
        finally:
            stopped.set()
        assert set(undisturbed.result()) == {expected.text}
    assert find_pid(real, "builtin") == builtin_pid
    assert real.status()["counts"]["worker_deaths"] > deaths
    real.request("POST", "/localspec/reset", {})
    assert ask(body("idle")) == 200


def find_pid(home: Home, name: str) -> int | None:
    return next((pair["pid"] for pair in home.status()["pairs"] if pair["name"] == name), None)


def test_a_killed_daemon_ends_its_engine(home: Home) -> None:
    home.use_slow_engine()
    daemon = RunningDaemon(home)
    with home.streaming(QUESTION, **LONG_ANSWER) as stream:
        stream.readline()
        worker = daemon.worker_pid()
        daemon.process.kill()
        daemon.process.communicate()
    wait_for(lambda: not alive(worker), "the engine's end")


def test_a_drained_daemon_finishes_its_answer(home: Home, real_daemon: RunningDaemon) -> None:
    fields = {**GREEDY, "ignore_eos": True, "max_tokens": 200}
    with home.streaming(QUESTION, **fields) as stream:
        stream.readline()
        real_daemon.process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert real_daemon.stop() == 0


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param(
            "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}", "sandbox", id="code-execution"
        ),
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "longer than 2 seconds",
            id="endless-loops",
        ),
        pytest.param("{% if %}", "line 1", id="syntax-error"),
    ],
)
def test_a_hostile_template_fails_only_chats(
    template: str, reason: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "CHAT_TEMPLATE", template)
    files = cycle_pair(tmp_path / "evil")
    home.environment["LOCALSPEC_PAIR"] = f"{files.target},{files.draft}"
    RunningDaemon(home)
    answer = home.chat("hello")
    assert answer.status == 400
    assert answer.error["code"] == "chat_template_error"
    assert re.search(reason, answer.error["message"])
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    assert home.request("POST", "/v1/completions", body).status == 200
    assert home.status()["counts"]["worker_deaths"] == 0


def test_an_editors_completion_ends_with_its_indentation(real: Home) -> None:
    body: dict[str, Any] = {
        "input_prefix": "import os\n",
        "input_suffix": "",
        "prompt": "def walk(path):\n    ",
    }
    body |= {"n_predict": 60, "ignore_eos": True, "samplers": ["top_k"], "top_k": 1}
    free = real.request("POST", "/infill", body).json["content"]
    assert any(line[:1].strip() for line in free.split("\n")[1:]), "the function never ended"
    body |= {"n_indent": 4}
    for _ in range(2):  # once prefilled and once from the cache, which may differ in the text
        answer = real.request("POST", "/infill", body).json
        lines = answer["content"].split("\n")
        assert lines[0].strip()
        assert all(line.startswith("    ") or not line.strip() for line in lines[1:])
    assert answer["timings"]["cache_n"] == answer["tokens_evaluated"] - 1


def rests(process: int) -> bool:
    """Return whether a process uses no time of a processor for a second, as an engine between requests."""

    def ticks() -> list[str]:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = ticks()
    time.sleep(1)
    return ticks() == before


def test_truncating_a_mapped_file_does_not_harm_the_daemon(home: Home) -> None:
    builtin = Path(__file__).resolve().parents[2] / "localspec" / "builtin"
    original = (builtin / "target.gguf").read_bytes()
    file = home.root / "cut.gguf"
    file.write_bytes(original)
    home.environment["LOCALSPEC_PAIR"] = str(file)
    daemon = RunningDaemon(home)
    try:
        before = home.chat(QUESTION, **GREEDY)
        assert before.status == 200, before.body
        # A pass of idle time would end the engine before the next request.
        wait_for(lambda: rests(daemon.worker_pid()), "an idle engine")
        os.truncate(file, 1 << 20)
        # Kernels that have copies of the weights answer all the same.
        answer = home.chat("Something else, so that it is read.", **GREEDY)
        if answer.status != 200:
            assert f"{file} was changed" in answer.error["message"]
        file.write_bytes(original)
        home.run("unload")
        after = home.chat(QUESTION, **GREEDY)
        assert (after.status, after.text) == (200, before.text)
        assert "Safe mode" not in str(home.status())
    finally:
        daemon.stop()


def start_with_template(home: Home, template: str) -> None:
    """Start a daemon that renders chats of the built-in pair by this template."""
    folder = home.root / "config"
    folder.mkdir()
    (folder / "mine.jinja").write_text(template)
    (folder / "models.toml").write_text('[pairs.builtin]\nchat_template = "mine.jinja"\n')
    RunningDaemon(home)


def test_a_next_turn_is_read_while_nobody_waits(home: Home) -> None:
    """The template drops thoughts. The longer the pause before the next question, the more is read."""
    start_with_template(
        home,
        "{% for m in messages %}|{{ m.role }}|{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}|assistant|<think>\n{% endif %}",
    )
    fields: dict[str, Any] = {"reasoning_budget_tokens": 16, "max_tokens": 100, "ignore_eos": True}
    for attempt in range(10):
        chat: list[dict[str, str]] = [{"role": "user", "content": f"Question {attempt}?"}]
        message = home.request("POST", "/v1/chat/completions", {"messages": chat, **fields}).json[
            "choices"
        ][0]["message"]
        assert message["reasoning_content"]
        time.sleep(0.1 * 2**attempt)
        chat += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": "And?"},
        ]
        timings = home.request("POST", "/v1/chat/completions", {"messages": chat, **fields}).json[
            "timings"
        ]
        if ahead := timings.get("cache_ahead_n", 0):
            break
    assert 32 < ahead <= timings["cache_n"]
    assert timings["prompt_n"] < 24


def test_how_a_client_sends_answers_back_is_learned(home: Home) -> None:
    """The template keeps the thoughts that come back, and this client sends none."""
    start_with_template(
        home,
        "{% for m in messages %}|{{ m.role }}|{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}|assistant|<think>\n{% endif %}",
    )
    fields: dict[str, Any] = {"reasoning_budget_tokens": 16, "max_tokens": 100, "ignore_eos": True}
    chat: list[dict[str, str]] = []
    for turn in range(10):
        chat.append({"role": "user", "content": f"Question {turn}?"})
        body = {"messages": chat, **fields}
        answer = home.request("POST", "/v1/chat/completions", body).json
        assert turn or not answer["timings"].get("cache_ahead_n")
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"]
        chat.append({"role": "assistant", "content": message["content"]})
        if answer["timings"].get("cache_ahead_n", 0) > 32:
            break
        time.sleep(0.1 * 2**turn)
    assert turn >= 2  # the second question has shown how answers come back
    (client,) = home.request("GET", "/localspec/statistics").json["read_ahead"]
    assert client["client"].endswith(" /v1/chat/completions")
    assert client["right"]
    assert not client["wrong"]
    assert client["saved_seconds"] > 0
    private = {"localspec": {"private": True}, **fields}
    for _ in range(2):
        chat.append({"role": "user", "content": "And?"})
        answer = home.request("POST", "/v1/chat/completions", {"messages": chat, **private}).json
        chat.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert home.request("GET", "/localspec/statistics").json["read_ahead"] == [client]
    home.request("DELETE", "/localspec/conversations")
    assert not home.request("GET", "/localspec/statistics").json["read_ahead"]


def test_the_beginning_of_an_agents_session_is_read_while_it_starts(home: Home) -> None:
    start_with_template(
        home,
        "{% for m in messages %}|{{ m.role }}|{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}|assistant|{% endif %}",
    )
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    announced = {"ahead": True, "agent": "pi"}

    def announce() -> int:
        messages = [{"role": "user", "content": ""}]
        body = {"messages": messages, "localspec": announced}
        return home.request("POST", "/v1/chat/completions", body).status

    def begin_session(task: str, **options: Any) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": "You may use tools, or write a text. " * 9},
            {"role": "user", "content": task},
        ]
        body = {"messages": messages, "tools": [tool], "max_tokens": 4, **options}
        answer = home.request("POST", "/v1/chat/completions", body)
        timings: dict[str, Any] = answer.json["timings"]
        return timings

    begin_session("One?")  # nobody knows yet that this process is an agent
    assert announce() == 404
    begin_session("Two?", localspec={"private": True})
    assert announce() == 404
    begin_session("Three?")
    home.run("unload")
    assert announce() == 409
    home.run("load")
    assert announce() == 200
    assert begin_session("Four?")["cache_ahead_n"] > 100
    home.request("DELETE", "/localspec/conversations")
    assert announce() == 404


def test_a_custom_template_and_defaults_override_the_file(home: Home) -> None:
    """An edit takes effect with the next question."""
    folder = home.root / "config"
    folder.mkdir()
    (folder / "mine.jinja").write_text(
        "{% for m in messages %}|{{ m.content }}{% for c in m.tool_calls or [] %}<do>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}</do>{% endfor %}{% endfor %}{{ tools | tojson if tools }}"
    )
    models = folder / "models.toml"
    models.write_text('[pairs.builtin]\nchat_template = "mine.jinja"\nsampling = { top_k = 1 }\n')
    RunningDaemon(home)

    def prompt() -> str:
        messages = [{"role": "user", "content": "What?"}]
        rendered: str = home.request("POST", "/apply-template", {"messages": messages}).json[
            "prompt"
        ]
        return rendered

    assert prompt() == "|What?"
    props = home.request("GET", "/props").json
    assert props["chat_template"].startswith("{% for m in messages %}|")
    assert props["default_generation_settings"]["params"]["top_k"] == 1
    texts = {home.chat(QUESTION, max_tokens=8, seed=seed).text for seed in range(4)}
    assert len(texts) == 1
    description = home.run("show", "builtin").stdout
    assert "chat template is the one that models.toml names" in description
    assert "as seen in the template: <do>NAME {…}</do>" in description
    schema = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    request_fields = {
        "temperature": 0,
        "max_tokens": 80,
        "tools": [tool],
        "tool_choice": "required",
    }
    answer = home.chat(QUESTION, **request_fields).json
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["n"] in (7, 8)
    assert "note" not in answer["localspec"]
    models.write_text("")
    wait_for(lambda: prompt() != "|What?", "the effect of the edit")
