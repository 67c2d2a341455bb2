"""Zed's own edit predictions by an OpenAI-compatible server: requests as its source makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localspec.extras.next_edit.routes import FORMS
from localspec.extras.next_edit.wire import NextEditRequest, RecentEdit
from tests.support.daemons import Home, real_home

ABOVE, WINDOW = "import os\n\n\n", "def size(path):\n    return os.path.getsize(path)\n"
BELOW = "\n\nprint(size('x'))\n"
# What send_custom_server_request of Zed's crate edit_prediction sends as `stop` for each prompt_format.
STOPS = {
    "zeta1": ["<|editable_region_end|>" + "\n" * count for count in range(4)],
    "zeta2": [">>>>>>> UPDATED\n"],
    "sweep": ["<|file_sep|>", "</s>"],
    "qwen": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
}


@pytest.fixture(scope="module")
def real() -> Iterator[Home]:
    with real_home() as home:
        yield home


def make_prompt(name: str) -> str:
    if name == "qwen":
        return f"<|fim_prefix|>{ABOVE}{WINDOW[:20]}<|fim_suffix|>{WINDOW[20:]}{BELOW}<|fim_middle|>"
    edit = RecentEdit("a.py", old="def size(p):\n", new="def size(path):\n", line=4)
    request = NextEditRequest(
        WINDOW[:20], WINDOW[20:], path="a.py", above=ABOVE, below=BELOW, edits=[edit]
    )
    return next(form for form in FORMS if form.name == name).render(request).text


def ask(home: Home, name: str, **fields: Any) -> Any:
    model = home.request("GET", "/v1/models").json["data"][0]["id"]
    body = {"model": model, "prompt": make_prompt(name), "max_tokens": 64, "stop": STOPS[name]}
    answer = home.request("POST", "/v1/completions", {**body, **fields})
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("name", STOPS)
def test_zeds_requests_get_what_it_reads(real: Home, name: str) -> None:
    """Zed reads these fields strictly. The text never has what it asked the answer to stop at."""
    answer = ask(real, name)
    for field, kind in (("id", str), ("object", str), ("created", int), ("model", str)):
        assert isinstance(answer[field], kind)
    (choice, *_) = answer["choices"]
    assert isinstance(choice["text"], str)
    assert isinstance(choice["finish_reason"], str)
    assert not any(stop in choice["text"] for stop in STOPS[name])
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert isinstance(answer["usage"][count], int)
    assert "ignored" not in answer.get("localspec", {})


def test_the_old_window_within_a_raw_prompt_is_drafted(real: Home) -> None:
    """An answer that repeats the window is drafted from the prompt, without a prediction."""
    answer = ask(real, "sweep", regex=_escaped(WINDOW), speculative={"depth": 8, "kind": "ngram"})
    assert answer["choices"][0]["text"] == WINDOW
    assert answer["localspec"]["speculation"]["accepted"] > 0


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "().[]'" else char for char in text)
