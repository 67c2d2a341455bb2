"""The forms of prompts: what models were trained on, and answers without any marker."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.extras.next_edit.form import Form
from localspec.extras.next_edit.routes import FORMS, TRAINED, changed_lines
from localspec.extras.next_edit.wire import NextEditRequest, RecentEdit

BY_NAME: dict[str, Form] = {form.name: form for form in FORMS}
ASKED: dict[str, Any] = {
    "path": "shop.py",
    "language": "python",
    "above": "import os\n\n",
    "before": "def total(cart):\n    re",
    "after": "turn sum(cart)\n",
    "below": "\n\nmain()\n",
    "first_line": 3,
    "edits": [{"path": "shop.py", "old": "a\nb\n", "new": "a\nc\n", "line": 7}],
    "diagnostics": [{"line": 4, "message": "wrong"}],
    "files": [{"path": "other.py", "text": "x = 1"}],
}
lines = st.lists(st.text("ab <>|[]=`\t{}é日", max_size=12), min_size=1, max_size=9)


def asked(**fields: Any) -> NextEditRequest:
    return msgspec.convert({**ASKED, **fields}, NextEditRequest)


PROMPTS = {
    "zeta1": """### Instruction:
You are a code completion assistant and your task is to analyze user edits and then rewrite an excerpt \
that the user provides, suggesting the appropriate edits within the excerpt, taking into account the cursor \
location.

### User Edits:

User edited shop.py:
```diff
@@ -7,2 +7,2 @@
 a
-b
+c

```

### User Excerpt:

```shop.py
<|start_of_file|>
import os

<|editable_region_start|>
def total(cart):
    re<|user_cursor_is_here|>turn sum(cart)
<|editable_region_end|>


main()
```

### Response:
<|editable_region_start|>
""",
    "zeta2": """<[fim-suffix]>

main()
<[fim-prefix]><filename>other.py
x = 1

<filename>edit_history
--- a/shop.py
+++ b/shop.py
@@ -7,2 +7,2 @@
 a
-b
+c

<filename>shop.py
import os

<<<<<<< CURRENT
def total(cart):
    re<|user_cursor|>turn sum(cart)
=======
<[fim-middle]>""",
    "sweep": """<|file_sep|>other.py
x = 1
<|file_sep|>shop.py.diff
original:
a
b
updated:
a
c
<|file_sep|>original/shop.py
def total(cart):
    return sum(cart)
<|file_sep|>current/shop.py
def total(cart):
    return sum(cart)
<|file_sep|>updated/shop.py
""",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_as_the_models_were_trained(name: str) -> None:
    prompt = BY_NAME[name].render(asked())
    assert prompt.text + prompt.opening == PROMPTS[name]


def test_a_plain_prompt_ends_with_the_window_and_a_longer_fence() -> None:
    prompt = BY_NAME["chat"].render(asked(before="```\nx", after="\n```"))
    assert "line 4: error: wrong" in prompt.text
    assert "````python\n```\nx\n```\n````\n\nWrite these 3 lines again" in prompt.text
    assert (prompt.opening, prompt.stops) == ("````python\n", ["````"])


def test_the_window_before_the_last_change_is_shown_to_sweep() -> None:
    edit = {"path": "shop.py", "diff": "@@ -1 +1 @@\n-def total():\n+def total(cart):\n"}
    text = BY_NAME["sweep"].render(asked(edits=[edit])).text
    assert "original/shop.py\ndef total():\n    return" in text


def test_diffs_and_lines_say_the_same() -> None:
    old, new = "a\nb\nc\n", "a\nB\nc\n"
    by_lines = RecentEdit("x", old=old, new=new, line=5)
    by_diff = RecentEdit("x", diff=f"--- a/x\n+++ b/x\n{by_lines.diff}")
    assert by_lines.diff == "@@ -5,3 +5,3 @@\n a\n-b\n+B\n c\n"
    assert (by_diff.old, by_diff.new, by_diff.diff) == (old, new, by_lines.diff)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("zeta", "zeta1"), ("zed-industries_zeta-Q4_K_M.gguf", "zeta1"), ("zeta-2", "zeta2")),
        *(("zed_zeta2-Q8.gguf", "zeta2"), ("zeta-2.1-Q8.gguf", None), ("betazeta", None)),
        *(("sweep-next-edit-1.5b.q8_0.v2.gguf", "sweep"), ("qwen2.5-coder", None)),
    ],
)
def test_a_form_is_found_by_the_models_name(name: str, form: str | None) -> None:
    found = [each.name for each in TRAINED if re.search(each.models, name, re.IGNORECASE)]
    assert found == ([form] if form else [])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@given(window=lines)
def test_an_answer_of_the_form_is_the_window_that_it_was_written_for(
    form: Form, window: list[str]
) -> None:
    text = "".join(f"{line}\n" for line in window)
    request = asked(before=text, after="")
    if text.strip() and form.find_marker(request) is None and not text.startswith("NO_EDITS"):
        stops = form.render(request).stops
        answer = text + (form.end if form in TRAINED else stops[0])
        ends = [answer.find(stop) for stop in stops if stop in answer]
        assert form.parse(answer[: min(ends)]) == text


@pytest.mark.parametrize("form", TRAINED, ids=lambda form: form.name)
def test_no_marker_is_in_any_of_2000_random_answers(form: Form) -> None:
    """Markers come whole, cut, inside of each other, and at the end without their last characters."""
    rng, markers = random.Random(70), (*form.marks, *form.sentinels)
    for _ in range(2000):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            marker = rng.choice(markers)
            cut = rng.randrange(len(marker) + 1)
            inner = marker[:cut] + rng.choice(markers) + marker[cut:]
            parts.append(
                rng.choice([marker, marker[:cut], marker[cut:], inner, "x = 1\n", "\n", " "])
            )
        parsed = form.parse("".join(parts))
        assert not any(marker in parsed for marker in markers), parts
        assert parsed in ("", "\n") or parsed.endswith("\n")
    for marker in markers:
        for size in range(2, len(marker) + 1):
            assert form.parse(f"x = 1\n{marker[:size]}") == "x = 1\n"


def test_a_text_with_a_marker_is_refused() -> None:
    for form in TRAINED:
        for marker in (*form.marks, *form.sentinels):
            for field in ("above", "below", "after"):
                assert form.find_marker(asked(**{field: f"x {marker}\n"})) is not None
        assert form.find_marker(asked()) is None


@given(lines, lines)
def test_changed_lines_make_the_new_window(old: list[str], new: list[str]) -> None:
    texts = ["".join(f"{line}\n" for line in each) for each in (old, new)]
    result, moved = list(old), 0
    for change in changed_lines(*texts):
        assert old[change.start : change.end] == change.old
        result[change.start + moved : change.end + moved] = change.new
        moved += len(change.new) - len(change.old)
    assert result == new
