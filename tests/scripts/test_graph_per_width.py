"""The edit of llama.cpp's source that keeps a graph for each of eight widths."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import graph_per_width
import setup_venv
from graph_per_width import EDITS, FOLDER

NAMES = sorted({name for name, _, _ in EDITS})


def write_source(root: Path) -> dict[str, str]:
    """Write files that have the lines to be replaced between others. Return the texts by name."""
    folder = root / FOLDER
    folder.mkdir(parents=True)
    texts = dict.fromkeys(NAMES, "// begin\n")
    for name, old, _ in EDITS:
        texts[name] += f"{old}// end\n"
        (folder / name).write_text(texts[name])
    return texts


def read_source(root: Path) -> dict[str, str]:
    return {name: (root / FOLDER / name).read_text() for name in NAMES}


def test_the_lines_are_replaced_and_all_others_stay(tmp_path: Path) -> None:
    expected = write_source(tmp_path)
    assert graph_per_width.edit(tmp_path) is None
    for name, old, new in EDITS:
        expected[name] = expected[name].replace(old, new)
    assert read_source(tmp_path) == expected
    # What was edited is not edited again.
    assert graph_per_width.edit(tmp_path) is not None
    assert read_source(tmp_path) == expected


@pytest.mark.parametrize("changed", NAMES)
@pytest.mark.parametrize("how", ["differs", "twice", "missing"])
def test_another_source_is_left_as_it_is(tmp_path: Path, changed: str, how: str) -> None:
    texts = write_source(tmp_path)
    path = tmp_path / FOLDER / changed
    *_, line = [old for name, old, _ in EDITS if name == changed]
    if how == "missing":
        path.unlink()
        del texts[changed]
    else:
        other = line * 2 if how == "twice" else line.replace("gf_res_prev", "gf_res")
        texts[changed] = texts[changed].replace(line, other)
        path.write_text(texts[changed])
    reason = graph_per_width.edit(tmp_path)
    assert reason is not None
    assert reason.startswith(changed)
    assert {name: (tmp_path / FOLDER / name).read_text() for name in texts} == texts


@pytest.mark.parametrize("fits", [True, False])
def test_setup_builds_from_a_source_that_does_not_fit_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fits: bool
) -> None:
    name, source = "llama_cpp_python-1.2.3", tmp_path / "source"
    texts = write_source(source)
    if not fits:
        (source / FOLDER / NAMES[0]).write_text("")
    with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(source, name)
    assert setup_venv.unpack_edited(tmp_path) == tmp_path / name
    assert (read_source(tmp_path / name)[NAMES[1]] != texts[NAMES[1]]) == fits
    message = capsys.readouterr().err
    assert message == "" if fits else NAMES[0] in message
