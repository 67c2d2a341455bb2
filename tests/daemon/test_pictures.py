"""Pictures in requests of every protocol, to a daemon with llama.cpp and a synthetic projector."""

from __future__ import annotations

import base64
import os
import signal
import struct
import subprocess
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_projector import PICTURE_TOKENS, png, png_of, write_projector
from localspec.daemon.completion.files import MAX_PICTURES
from tests.support.daemons import Answer, Home, RunningDaemon, alive, temporary_home, wait_for
from tests.support.pairs import CONTEXT_SHAPE, contextual_pair

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
QUESTION = "What is that?"
PLAIN = {"speculative": {"enabled": False}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    files = contextual_pair(folder)
    write_projector(folder / "mmproj-target-F16.gguf", CONTEXT_SHAPE.n_embd)
    return Path(files.target)


@pytest.fixture(scope="module")
def seeing(files: Path) -> Iterator[Home]:
    """Run one daemon with a pair that reads pictures, for tests that leave nothing behind."""
    with temporary_home() as home:
        home.environment["LOCALSPEC_PAIR"] = f"{files},{files.with_name('draft.gguf')}"
        home.environment["LOCALSPEC_EXACT"] = "true"  # so that equal questions have equal answers
        RunningDaemon(home)
        yield home


def to_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def parts(*pictures: bytes, text: str = QUESTION) -> list[dict[str, Any]]:
    """Return the parts of a message: pictures, and then a text."""
    images = [{"type": "image_url", "image_url": {"url": to_url(picture)}} for picture in pictures]
    return [*images, {"type": "text", "text": text}]


def asked(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*content]}]


def ask(home: Home, *pictures: bytes, text: str = QUESTION, **fields: Any) -> Answer:
    body = {"messages": asked(*parts(*pictures, text=text)), **GREEDY, **PLAIN, **fields}
    return home.request("POST", "/v1/chat/completions", body)


def refusal(home: Home, url: str) -> Any:
    """Return the error of a question with a picture at this URL."""
    picture = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": asked(picture, {"type": "text", "text": QUESTION}), **GREEDY}
    answer = home.request("POST", "/v1/chat/completions", body)
    assert answer.status == 400, answer.body
    return answer.error


def test_answers_depend_on_the_picture(seeing: Home) -> None:
    first, other = ask(seeing, png(1)), ask(seeing, png(2))
    assert first.status == other.status == 200
    assert first.text == ask(seeing, png(1)).text
    assert first.text != other.text != ask(seeing).text


def test_usage_counts_a_pictures_tokens(seeing: Home) -> None:
    with_picture = ask(seeing, png(3)).json["usage"]["prompt_tokens"]
    assert with_picture - ask(seeing).json["usage"]["prompt_tokens"] == PICTURE_TOKENS


def test_a_picture_is_read_once(seeing: Home) -> None:
    question = ask(seeing, png(4), text="One?", exact=False).json
    n_tokens = question["usage"]["prompt_tokens"]
    again = ask(seeing, png(4), text="Two? And why?", exact=False).json["timings"]
    other = ask(seeing, png(5), text="Two? And why?", exact=False).json["timings"]
    assert again["cache_n"] >= PICTURE_TOKENS
    assert again["prompt_n"] < n_tokens - PICTURE_TOKENS + len("Two? And why?")
    assert other["prompt_n"] == again["prompt_n"] + again["cache_n"] - other["cache_n"]
    assert other["cache_n"] <= again["cache_n"] - PICTURE_TOKENS


@pytest.mark.parametrize(
    "speculative",
    [{"depth": 3, "kind": "draft"}, {"kind": "ngram", "depth": 3}, {}],
    ids=["draft", "ngram", "auto"],
)
def test_drafts_change_no_greedy_answer(seeing: Home, speculative: dict[str, Any]) -> None:
    plain = ask(seeing, png(6), png(7), max_tokens=48)
    drafted = ask(seeing, png(6), png(7), max_tokens=48, speculative=speculative)
    assert drafted.text == plain.text
    if speculative.get("kind") == "draft":
        assert drafted.json["timings"]["draft_n"] > 0


def test_all_protocols_give_the_same_answer(seeing: Home) -> None:
    picture = png(8)
    expected = ask(seeing, picture).text
    data = base64.encodebytes(picture).decode()  # in lines, as the command base64 writes it

    def send(path: str, **body: Any) -> Any:
        return seeing.request("POST", path, body).json

    image = {"type": "input_image", "image_url": to_url(picture)}
    question = asked(image, {"type": "input_text", "text": QUESTION})
    limits = {"temperature": 0, "max_output_tokens": GREEDY["max_tokens"], **PLAIN}
    responses = send("/v1/responses", input=question, **limits)
    assert responses["output"][-1]["content"][0]["text"] == expected
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = asked({"type": "image", "source": source}, {"type": "text", "text": QUESTION})
    message = send("/v1/messages", messages=blocks, **GREEDY, **PLAIN)
    assert message["content"][-1]["text"] == expected
    options = {"temperature": 0, "num_predict": GREEDY["max_tokens"]}
    whole: dict[str, Any] = {"options": options, "stream": False}
    messages = [{"role": "user", "content": QUESTION, "images": [data]}]
    assert send("/api/chat", messages=messages, **whole)["message"]["content"] == expected
    generated = send("/api/generate", prompt=QUESTION, images=[to_url(picture)], **whole)
    assert generated["response"] == expected


def test_results_of_tools_have_pictures(seeing: Home) -> None:
    call = {"type": "tool_use", "id": "a1", "name": "shot", "input": {}}

    def content_after(picture: bytes) -> Any:
        data = base64.b64encode(picture).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        shown = [{"type": "image", "source": source}]
        messages = [
            {"role": "user", "content": "Take a screenshot."},
            {"role": "assistant", "content": [call]},
            *asked({"type": "tool_result", "tool_use_id": "a1", "content": shown}),
        ]
        body = {"messages": messages, **GREEDY}
        return seeing.request("POST", "/v1/messages", body).json["content"]

    assert content_after(png(9)) == content_after(png(9)) != content_after(png(10))


def test_ask_reads_a_picture_file(seeing: Home, tmp_path: Path) -> None:
    for name, seed in (("a.png", 11), ("b.png", 12)):
        (tmp_path / name).write_bytes(png(seed))
    options = ("--temperature", "0", "-n", "16", "--no-log", "--draft", "0", "--plain")
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    runs = [seeing.run("ask", *options, "-f", path, QUESTION) for path in paths]
    assert [run.returncode for run in runs] == [0, 0], runs
    assert runs[0].stdout.strip() == ask(seeing, png(11)).text.strip()
    assert runs[0].stdout != runs[1].stdout


def test_counting_tokens_counts_pictures(seeing: Home) -> None:
    messages = asked(*parts(png(13)))
    counted = seeing.request("POST", "/v1/chat/completions/input_tokens", {"messages": messages})
    assert counted.json["input_tokens"] == ask(seeing, png(13)).json["usage"]["prompt_tokens"]


def test_the_template_shows_where_a_picture_is(seeing: Home) -> None:
    messages = asked(*parts(png(14)))
    prompt = seeing.request("POST", "/apply-template", {"messages": messages}).json["prompt"]
    assert f"<__media__>{QUESTION}" in prompt


def test_what_reads_pictures_says_so(seeing: Home, files: Path) -> None:
    assert seeing.request("GET", "/props").json["modalities"]["vision"] is True


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/cat.png", "works offline"),
        ("file:///etc/passwd", "works offline"),
        ("data:image/png,abc", "must be in base64"),
        ("data:image/png;base64,?", "not valid base64"),
        ("data:image/png;base64,", "is empty"),
        (to_url(b"RIFF\0\0\0\0WEBPVP8 "), "the picture is damaged"),
        (to_url(b"\0\0\0\x20ftypavif"), "the picture is damaged"),
        (to_url(b"II*\0"), "the picture is damaged"),
        (to_url(b"\0\0\0\x20ftypheic"), "a HEIC picture or a film; PNG, JPEG, GIF"),
        (to_url(b"%PDF-1.7"), "a PDF document, which is sent as a file"),
        (to_url(b"hello"), "no picture"),
        (to_url(b"RIFF\0\0\0\0WAVEfmt "), "no picture"),
        (to_url(b"\xff\xd8\xff\xe0"), "states no size"),
        (to_url(b"GIF89a"), "states no size"),
        (to_url(png(1)[:20]), "states no size"),
        (to_url(png(1)[:60]), "is damaged"),
        (to_url(png_of(30_000, 30_000, b"")), "30000 × 30000 pixels"),
        (to_url(png_of(2**31 - 1, 1, b"")), "pixels"),
        (to_url(png_of(16, 16, b"no deflated data")), "is damaged"),
        (to_url(png_of(16, 16, zlib.compress(bytes(1 << 28)))), "more pixels than it states"),
        (to_url(b"GIF89a" + struct.pack("<HH", 100, 100) + bytes(20)), "is damaged"),
        (to_url(b"BM" + bytes(12) + struct.pack("<Iii", 40, 50, 50) + bytes(40)), "is damaged"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_bad_picture_is_refused(seeing: Home, url: str, message: str) -> None:
    deaths = seeing.status()["counts"]["worker_deaths"]
    assert message in refusal(seeing, url)["message"]
    assert ask(seeing, png(1)).status == 200
    assert seeing.status()["counts"]["worker_deaths"] == deaths


def test_too_many_pictures_are_refused(seeing: Home) -> None:
    answer = ask(seeing, *([png(1, 8, 8)] * (MAX_PICTURES + 1)))
    assert answer.status == 400
    assert f"at most {MAX_PICTURES} pictures" in answer.error["message"]


def test_bystanders_answer_the_same_beside_bad_pictures(seeing: Home) -> None:
    text = "Count from one to ten."
    expected = ask(seeing, text=text, max_tokens=64, exact=True).text
    bad = [png(1)[:70], png_of(16, 16, b"x"), png_of(16, 16, zlib.compress(bytes(1 << 26)))]
    with ThreadPoolExecutor(5) as pool:
        hostile = [pool.submit(ask, seeing, picture) for picture in bad * 3]
        answers = [pool.submit(ask, seeing, text=text, max_tokens=64, exact=True) for _ in range(3)]
        assert [answer.result().text for answer in answers] == [expected] * 3
        assert {answer.result().status for answer in hostile} == {400}


def picture_process(worker: int) -> int:
    """Return the process that encodes pictures for a worker."""
    command = ["ps", "-A", "-ww", "-o", "pid=,ppid=,command="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    [pid] = [row[0] for row in rows if int(row[1]) == worker and "picture_child" in row[2]]
    return int(pid)


def test_the_death_of_the_pictures_process_fails_one_request_at_most(seeing: Home) -> None:
    expected = ask(seeing, png(20)).text
    worker = seeing.status()["worker_pid"]
    victim = picture_process(worker)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not alive(victim), "its end")
    first = ask(seeing, png(21))
    assert first.status in (200, 400), first.body
    assert ask(seeing, png(22)).status == 200
    assert ask(seeing, png(20)).text == expected
    assert seeing.status()["worker_pid"] == worker


def test_the_history_keeps_a_placeholder(seeing: Home) -> None:
    answer = ask(seeing, png(30), localspec={"conversation": "new"})
    name = answer.json["localspec"]["conversation"]
    [question, _] = seeing.request("GET", f"/localspec/conversations/{name}").json["messages"]
    assert question["content"] == f"[picture]{QUESTION}"
    follow_up = seeing.chat("And now?", **GREEDY, localspec={"conversation": name})
    assert follow_up.status == 200


def test_a_pair_without_a_projector_refuses_and_says_what_to_do(home: Home, tmp_path: Path) -> None:
    pair = contextual_pair(tmp_path / "blind")
    RunningDaemon(home)
    run = home.run("add", "blind", "--target", pair.target, "--draft", str(pair.draft))
    assert run.returncode == 0, run.stderr
    refused = ask(home, png(1), model="blind")
    assert refused.status == 400
    assert "The pair 'blind' reads text and no pictures." in refused.error["message"]
    assert f"localspec add blind --target {pair.target}" in refused.error["message"]
    assert ask(home, model="blind").status == 200
    write_projector(tmp_path / "blind" / "mmproj-F16.gguf", CONTEXT_SHAPE.n_embd)
    home.run("unload")
    run = home.run("add", "blind", "--target", pair.target, "--replace")
    assert "mmproj-F16.gguf, which lies beside the target, lets it read pictures." in run.stdout
    assert "pictures" in home.run("show", "blind").stdout
    assert ask(home, png(1), model="blind").status == 200


def test_a_projector_that_cannot_be_used_costs_pictures_alone(home: Home, tmp_path: Path) -> None:
    pair = contextual_pair(tmp_path / "broken")
    file = write_projector(tmp_path / "broken" / "mmproj-F16.gguf", CONTEXT_SHAPE.n_embd)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"v.blk.0.ffn_up.weight", b"v.blk.0.ffn_ux.weight"))
    home.environment["LOCALSPEC_PAIR"] = pair.target
    RunningDaemon(home)
    refused = ask(home, png(1))
    assert (refused.status, ask(home).status) == (400, 200)
    assert "Its projector cannot be used" in refused.error["message"]
