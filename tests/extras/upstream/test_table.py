"""The pairs of servers in models.toml: a change leaves everything else in the file as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from localspec.extras.upstream.catalogue import add_upstream, remove_upstream
from localspec.protocol.settings import Upstream

comments = st.lists(st.sampled_from(["# why", "  # [not.a.table]", ""]), max_size=3)
other_tables = st.lists(
    st.tuples(comments, st.sampled_from(["[defaults]\nx = 1", '[pairs.other]\ntarget = "a.gguf"'])),
    max_size=2,
    unique_by=lambda table: table[1],
)


def join_tables(tables: list[tuple[list[str], str]]) -> str:
    return "".join("".join(f"{line}\n" for line in [*lines, table]) for lines, table in tables)


@given(other_tables, other_tables, comments)
def test_a_removed_pair_takes_nothing_with_it(
    before: list[tuple[list[str], str]], after: list[tuple[list[str], str]], last: list[str]
) -> None:
    taken = {table for _, table in before}
    after = [table for table in after if table[1] not in taken]
    end = "".join(f"{line}\n" for line in last)
    head, tail = join_tables(before), join_tables(after) + end
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text(f'{head}[pairs.big]\nupstream = "http://127.0.0.1:9/v1"\n{tail}')
        remove_upstream(file, "big")
        assert [line for line in file.read_text().split("\n") if line] == [
            line for line in f"{head}{tail}".split("\n") if line
        ]


@given(other_tables, comments)
def test_an_added_pair_can_be_removed_again(
    tables: list[tuple[list[str], str]], last: list[str]
) -> None:
    text = join_tables(tables) + "".join(f"{line}\n" for line in last)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text(text)
        for port in (9, 10):
            entry = Upstream(upstream=f"http://127.0.0.1:{port}/v1")
            add_upstream(file, "big", entry, replace=port == 10)
        remove_upstream(file, "big")
        assert file.read_text().rstrip("\n") == text.rstrip("\n")
