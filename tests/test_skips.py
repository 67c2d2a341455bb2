"""A test is left out for what this machine cannot do, never for want of a file that is not carried here.

Whoever clones the project runs every test: what models' own files would show is learnt or written beside
the tests (tests/support/vocabularies.py, tests/support/templates.py), and those files are used in addition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import templates, vocabularies

TESTS = Path(__file__).parent

# Reasons for which a test may be left out. A new one needs a line here.
MACHINE = (
    r"only Linux ",
    r"this machine does not let us ",
    r"this machine has no openssl ",
    r"this machine has no \w* among its (shells|editors)",
    r"reads /proc|counts pages through /proc",
    r"root may write everywhere",
    r"on a device: $",  # tests.support.running.skip_on, whose reasons are in DEVICE
    r"AMX is x86-64|this compiler does not know AMX",
    r"this llama.cpp was built without GGML_RPC",
    r"this Python's standard library has other lines ",
    r"\S* is another version than the recorded one",  # a model's own template, beside its stand-in
)

# Reasons for which a test may be left out where the targets are on a device. That a device rounds
# otherwise is none of them: it is a tolerance, or a defect.
DEVICE = (
    "what is kept of a pair is for its machines, and each engine has another worker",
    "a CPU alone is asked on the way through a pass",
    "a CPU alone attends without flash attention to a few long texts",
    "a worker is the only device of this engine",
)


def text_of(node: ast.expr) -> str:
    """A literal's text; what is put into it is left out."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr():
            return "".join(text_of(part) for part in node.values)
        case _:
            return ""


def reason(call: ast.Call) -> str:
    return "".join(text_of(each.value) for each in call.keywords if each.arg == "reason")


def skips(source: str) -> Iterator[tuple[int, str]]:
    """Where a file leaves out tests, and why it says it does."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="skipif" | "xfail")):
                yield node.lineno, reason(node)
            case ast.Call(func=ast.Attribute(attr="skip" | "importorskip")):
                yield node.lineno, text_of(node.args[0]) if node.args else reason(node)
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr="skip"):
                yield node.lineno, ""  # on every machine
            case ast.Name(id="collect_ignore" | "collect_ignore_glob"):
                yield node.lineno, ""


def device_skips(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of each test that is left out on a device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="skip_on")):
                why = [text_of(keyword.value) for keyword in node.keywords if keyword.arg == "why"]
                yield node.lineno, "".join(why)


def beside(source: str) -> Iterator[int]:
    """Where a file names the folder beside the checkout."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(op=ast.Div(), right=ast.Constant("shared")):
                yield node.lineno


def test_a_test_is_left_out_only_for_what_the_machine_cannot_do() -> None:
    wrong = [
        f"{path.relative_to(TESTS)}:{line}: {why!r}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, why in skips(path.read_text(encoding="utf-8"))
        if not any(re.match(each, why) for each in MACHINE)
    ]
    assert not wrong, "make what the test needs, or say in MACHINE what a machine may lack"


def test_a_test_is_left_out_on_a_device_only_for_a_listed_reason() -> None:
    reasons = [
        (path.relative_to(TESTS).as_posix(), line, why)
        for path in sorted(TESTS.rglob("*.py"))
        for line, why in device_skips(path.read_text(encoding="utf-8"))
    ]
    assert not [reason for reason in reasons if reason[2] not in DEVICE]
    assert {why for _, _, why in reasons} == set(DEVICE), "a reason that no test has any longer"


def test_files_beside_the_checkout_are_named_where_they_have_stand_ins() -> None:
    named = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if any(beside(path.read_text(encoding="utf-8")))
    }
    assert named == {"support/templates.py", "support/vocabularies.py"}


def test_the_stand_ins_are_here() -> None:
    assert vocabularies.SOURCES[0] == "learnt"
    carried = [file for file in templates.files().values() if file.parent == templates.FAMILIES]
    assert len(carried) >= 14


@pytest.mark.parametrize(
    "source",
    [
        "pytest.skip('no folder of real files beside this checkout')",
        "pytest.skip(f'{file} is absent')",
        "pytest.skip()",
        "pytest.skip(reason='absent')",
        "@pytest.mark.skip\ndef test(): ...",
        "collect_ignore = ['test_a.py']",
        "@pytest.mark.skipif(not FILE.exists(), reason='no such file')\ndef test(): ...",
        "@pytest.mark.skipif(not FILE.exists())\ndef test(): ...",
        "@pytest.mark.xfail(reason='some day')\ndef test(): ...",
        "transformers = pytest.importorskip('transformers')",
    ],
)
def test_another_reason_is_told(source: str) -> None:
    found = list(skips(source))
    assert found
    assert not any(re.match(each, why) for _, why in found for each in MACHINE)


@pytest.mark.parametrize(
    "source", ["@skip_on('cuda', why='it rounds')\ndef test(): ...", "MARK = skip_on('rpc')"]
)
def test_another_reason_on_a_device_is_found(source: str) -> None:
    assert [why for _, why in device_skips(source) if why not in DEVICE]


def test_a_path_beside_the_checkout_is_told() -> None:
    assert list(beside("A = 1\nREAL = ROOT.parent / 'shared' / 'models'")) == [2]
