"""A test is skipped only for what this machine cannot do, never because a file is missing.

Everyone who clones the project runs every test: what models' own files would show is learnt or written beside
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

# Allowed reasons to skip a test. A new one needs a line here.
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
    r"this installation has no extra ",
    r"\S* is another version than the recorded one",  # a model's own template, beside its stand-in
)

# Allowed reasons to skip a test where the targets are on a device. Different rounding is not among them: it
# is a tolerance, or a defect.
DEVICE = (
    "what is kept of a pair is for its machines, and each engine has another worker",
    "a CPU alone is asked on the way through a pass",
    "a CPU alone attends without flash attention to a few long texts",
    "a worker is the only device of this engine",
)


def read_literal(node: ast.expr) -> str:
    """Return the text of a literal without its replacement fields."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr():
            return "".join(read_literal(part) for part in node.values)
        case _:
            return ""


def read_reason(call: ast.Call) -> str:
    return "".join(
        read_literal(keyword.value) for keyword in call.keywords if keyword.arg == "reason"
    )


def find_skips(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of each skipped test."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="skipif" | "xfail")):
                yield node.lineno, read_reason(node)
            case ast.Call(func=ast.Attribute(attr="skip" | "importorskip")):
                yield node.lineno, read_literal(node.args[0]) if node.args else read_reason(node)
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr="skip"):
                yield node.lineno, ""  # on every machine
            case ast.Name(id="collect_ignore" | "collect_ignore_glob"):
                yield node.lineno, ""


def find_device_skips(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of each test that is skipped on a device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="skip_on")):
                why = [
                    read_literal(keyword.value) for keyword in node.keywords if keyword.arg == "why"
                ]
                yield node.lineno, "".join(why)


def find_shared_paths(source: str) -> Iterator[int]:
    """Yield the lines that name the folder beside the checkout."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(op=ast.Div(), right=ast.Constant("shared")):
                yield node.lineno


def test_a_test_is_skipped_only_for_what_the_machine_cannot_do() -> None:
    wrong = [
        f"{path.relative_to(TESTS)}:{line}: {skip_reason!r}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, skip_reason in find_skips(path.read_text(encoding="utf-8"))
        if not any(re.match(pattern, skip_reason) for pattern in MACHINE)
    ]
    assert not wrong, "make what the test needs, or say in MACHINE what a machine may lack"


def test_a_test_is_skipped_on_a_device_only_for_a_listed_reason() -> None:
    reasons = [
        (path.relative_to(TESTS).as_posix(), line, skip_reason)
        for path in sorted(TESTS.rglob("*.py"))
        for line, skip_reason in find_device_skips(path.read_text(encoding="utf-8"))
    ]
    assert not [reason for reason in reasons if reason[2] not in DEVICE]
    # Without the tests of the extras, some reasons are not used.
    if (TESTS / "extras").is_dir():
        assert {skip_reason for _, _, skip_reason in reasons} == set(DEVICE), (
            "a reason that no test has any longer"
        )


def test_files_beside_the_checkout_are_used_only_with_stand_ins() -> None:
    files = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if any(find_shared_paths(path.read_text(encoding="utf-8")))
    }
    assert files == {"support/templates.py", "support/vocabularies.py"}


def test_the_stand_ins_are_present() -> None:
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
def test_another_reason_is_found(source: str) -> None:
    found_skips = list(find_skips(source))
    assert found_skips
    assert not any(
        re.match(pattern, skip_reason) for _, skip_reason in found_skips for pattern in MACHINE
    )


@pytest.mark.parametrize(
    "source", ["@skip_on('cuda', why='it rounds')\ndef test(): ...", "MARK = skip_on('rpc')"]
)
def test_another_reason_on_a_device_is_found(source: str) -> None:
    assert [
        skip_reason for _, skip_reason in find_device_skips(source) if skip_reason not in DEVICE
    ]


def test_a_path_beside_the_checkout_is_found() -> None:
    assert list(find_shared_paths("A = 1\nREAL = ROOT.parent / 'shared' / 'models'")) == [2]
