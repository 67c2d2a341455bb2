"""Test text that is not UTF-8: files are refused with a cure, and stdin is accepted with a count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localspec.cli import inputs
from localspec.errors import UsageError
from tests.support.daemons import Home

LETTERS = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_categories=["Cc"]), min_size=8
)


@pytest.mark.parametrize(
    ("data", "replaced"),
    [(b"Gr\xfc\xdfe", 2), (b"caf\xe9 \xe9", 2), (b"\x93quoted\x94 and \x80", 3), (b"a\xff", 1)],
)
def test_standard_input_is_taken_and_replaced_bytes_are_counted(
    warm: Home, tmp_path: Path, data: bytes, replaced: int
) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"say " + data)
    run = warm.run("ask", stdin=os.fsdecode(b"say " + data))
    assert run.returncode == 0
    assert run.stdout.count("\ufffd") == replaced
    were = "1 byte was" if replaced == 1 else f"{replaced} bytes were"
    assert run.stderr.count("\n") == 1
    assert f"Standard input is not UTF-8: {were} replaced." in run.stderr
    assert "iconv -f latin1 -t utf8" in run.stderr
    run = warm.run("ask", "-f", str(file))
    assert (run.returncode, run.stdout) == (2, "")
    assert f"iconv -f latin1 -t utf8 {file} | localspec ask" in run.stderr


def test_utf8_causes_no_message(warm: Home) -> None:
    run = warm.run("ask", stdin="say Grüße 漢字 🦙")
    assert (run.stdout, run.stderr) == ("Grüße 漢字 🦙\n", "")


@pytest.mark.parametrize("encoding", ["utf-16le", "utf-16be"])
def test_utf16_without_a_mark_is_refused_with_the_cure(
    warm: Home, tmp_path: Path, encoding: str
) -> None:
    file = tmp_path / "w x.txt"
    file.write_bytes("say hello to the world".encode(encoding))
    assert f"iconv -f {encoding} -t utf8 '{file}' | localspec ask" in warm.refused(
        "ask", "-f", str(file), "what?", code=2
    )
    assert f"iconv -f {encoding} -t utf8" in warm.refused(
        "ask", stdin=os.fsdecode(file.read_bytes()), code=2
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_byte_order_mark_is_understood(warm: Home, encoding: str) -> None:
    run = warm.run("ask", stdin=os.fsdecode("say Grüße".encode(encoding)))
    assert (run.stdout, run.stderr) == ("Grüße\n", "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=LETTERS, encoding=st.sampled_from(["latin-1", "utf-16le", "utf-16be"]))
def test_a_file_in_another_encoding_is_never_misread(
    tmp_path: Path, text: str, encoding: str
) -> None:
    file = tmp_path / "a.txt"
    data = text.encode(encoding)
    file.write_bytes(data)
    text_read = refused = ""
    try:
        text_read = inputs.read_text(str(file))
    except UsageError as error:
        refused = error.message
    # A few texts in Latin-1 are valid UTF-8 too, and cannot be told apart.
    assert ("iconv" in refused) if refused else text_read == data.decode("utf-8")
