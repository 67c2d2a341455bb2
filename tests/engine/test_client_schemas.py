"""The schemas that client libraries generate for their usual types are enforced.

`client_schemas.json` was written by the libraries themselves. Each line has a schema, its library, version
and type, valid and invalid values, and the keywords that cannot be enforced. Run this file to print the
table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from localspec.engine.sampling.grammars.sources import constraint_source, note_of
from localspec.errors import GrammarRejected
from tests.engine.test_enforced import make_constraint
from tests.engine.test_schemas import tokenizer

ENTRIES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("client_schemas.json").read_text(encoding="utf-8")
)
LIBRARIES = sorted({entry["library"] for entry in ENTRIES})


def accepts(matcher: LLMatcher, value: Any) -> bool:
    """Return whether an answer may be this value, token by token of single bytes."""
    walk, data = matcher.deep_copy(), list(json.dumps(value, ensure_ascii=False).encode())
    for token in data:
        if not walk.compute_logit_bias()[token]:
            return False
        walk.consume_token(token)
    return bool(walk.is_accepting())


def check_entry(entry: dict[str, Any]) -> str:
    """Return "ok", the keywords without which a schema is enforced, or what is wrong."""
    try:
        matcher = LLMatcher(
            tokenizer(), constraint_source(make_constraint(entry["schema"])), log_level=0
        )
    except GrammarRejected as error:
        return f"400: {error.message}"
    if matcher.is_error():
        return f"400: {matcher.get_error().splitlines()[0]}"
    wrong = [f"refuses {v}" for v in entry["valid"] if not accepts(matcher, v)]
    wrong += [f"accepts {v}" for v in entry["invalid"] if accepts(matcher, v)]
    if wrong:
        return ", ".join(wrong)
    note = note_of(make_constraint(entry["schema"]))
    return f"ok, without {note.partition(': ')[2].rstrip('.')}" if note else "ok"


@pytest.mark.parametrize("library", LIBRARIES)
def test_schemas_of_a_library_are_enforced(library: str) -> None:
    entries = [entry for entry in ENTRIES if entry["library"] == library]
    outcomes = {entry["type"]: check_entry(entry) for entry in entries}
    assert outcomes == {
        entry["type"]: f"ok, without {entry['without']}" if entry.get("without") else "ok"
        for entry in entries
    }


def test_strict_refuses_only_unenforceable_schemas() -> None:
    for entry in ENTRIES:
        message = ""
        try:
            constraint_source(make_constraint(entry["schema"], strict=True))
        except GrammarRejected as error:
            message = error.message
        assert bool(message) == bool(entry.get("without")), entry["type"]
        assert entry.get("without", "") in message
        assert "coerce" not in message


def test_every_library_has_values_of_both_kinds() -> None:
    for library in LIBRARIES:
        entries = [entry for entry in ENTRIES if entry["library"] == library]
        assert any(entry["valid"] for entry in entries), library
        assert any(entry["invalid"] for entry in entries), library


if __name__ == "__main__":
    for row in ENTRIES:
        print(row["library"], row["version"], row["type"], check_entry(row), sep=" | ")
