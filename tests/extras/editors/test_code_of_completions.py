"""Test that `localspec complete` prints code without a closing fence and the text after it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from localspec.extras.editors.commands import code_of
from tests.support.daemons import Home

CODE = st.lists(st.text("abc (){}=:#`'", max_size=20).filter(lambda s: "```" not in s), min_size=1)
CODE = CODE.filter(lambda lines: bool("".join(lines).strip()))


@given(code=CODE, chatter=st.text(max_size=60), opened=st.booleans())
def test_text_after_the_closing_fence_is_removed(
    code: list[str], chatter: str, opened: bool
) -> None:
    text = "\n".join(code)
    answer = f"{'```python' + chr(10) if opened else ''}{text}\n```\n\n{chatter}"
    assert code_of(answer) == text
    assert code_of(text) == text


def test_chatter_is_not_printed(warm: Home, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n!raw return 1~~~")
    run = warm.run("complete", f"{file}:2")
    assert run.stdout.startswith("return 1")
    request = warm.root / "stop.py"
    request.write_text("!echo")
    assert '"\\n```"' in warm.run("complete", f"{request}:1").stdout
    request.write_text("!echo ```")
    assert '"\\n```"' not in warm.run("complete", f"{request}:1").stdout
