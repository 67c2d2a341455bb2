"""`localspec tune` and what the daemon does with a tuned draft."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import TINY_TARGET, target_cycle
from benchmarks.synthetic_targets import TargetArchitecture, write_layer_reader, write_target
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NotFound, Unavailable, UsageError
from localspec.extras.tune import running, tuning
from localspec.extras.tune import texts as collecting
from localspec.extras.tune.commands import command
from localspec.extras.tune.texts import (
    MIN_TEXTS,
    TrainingText,
    TuneClient,
    find_places,
    is_answer_of,
    split_by_time,
)
from localspec.files import hold_folder
from localspec.protocol.tuned import NEW_DRAFT, TunedDraft, tuned_folder
from localspec.registry.registry import builtin_files
from localspec.registry.tuned import find_tuned_draft, remove_tuned_drafts
from tests.extras.tune.test_training import write_sidecar
from tests.support.daemons import Home, alive, real_home, wait_for
from tests.support.pairs import N_VOCAB, cycle_pair, expected

QUESTION = "What does shutil.copytree do?"
FILES = builtin_files()
TARGET, BASE = FILES.target, FILES.draft or ""


@pytest.fixture
def home(real: Home) -> Iterator[Home]:
    """Yield one home for all tests, without what each has left there."""
    yield real
    shutil.rmtree(real.root / "data" / "tuned", ignore_errors=True)
    for pair in PairsClient(str(real.socket)).pairs()["pairs"]:
        if pair["name"] != "builtin":
            real.request("DELETE", f"/localspec/pairs/{pair['name']}")
    assert real.request("DELETE", "/localspec/conversations").status == 200


@pytest.fixture
def own_home() -> Iterator[Home]:
    """Yield a home for one test, whose daemon has read nothing yet."""
    with real_home() as home:
        yield home


def put_tuned_draft(
    home: Home,
    *conversations: str,
    content: bytes | None = None,
    target: str = TARGET,
    base: str = BASE,
    method: str = "output rows",
) -> Path:
    """Give a pair a tuned draft, a copy of its own, that learned from these conversations."""
    folder = tuned_folder(home.root / "data" / "tuned", target, base)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    result = {"method": method, "tokens": 7, "tokens_per_pass": {"ask": {"before": 2, "after": 3}}}
    learned = [TrainingText("ask", "", conversation=name) for name in conversations]
    record = running.make_record(base, target, result, learned, [{"ask": 10.0}, {"ask": 12.0}])
    (folder / "record.json").write_text(json.dumps(record))
    (folder / record["file"]).write_bytes(content or Path(base).read_bytes())
    return folder


def ask(home: Home) -> tuple[str, str]:
    """Ask the question, save the conversation, and return its id and the answer."""
    answer = home.chat(QUESTION, temperature=0, localspec={"conversation": "new"}).json
    return answer["localspec"]["conversation"], answer["choices"][0]["message"]["content"]


def loaded_draft(home: Home) -> str:
    """Return the path of the draft's file that the worker has open."""
    pid = home.status()["worker_pid"]
    maps = Path(f"/proc/{pid}/maps").read_text()
    paths = [line.split(maxsplit=5)[-1] for line in maps.splitlines()]
    return next(path for path in paths if "draft" in path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_tuned_draft_is_used_until_a_conversation_that_it_knows_is_removed(home: Home) -> None:
    name, answer = ask(home)
    other, _ = ask(home)
    assert loaded_draft(home) == BASE
    folder = put_tuned_draft(home, name)
    home.run("unload")
    assert ask(home)[1] == answer
    assert loaded_draft(home) == str(next(folder.glob("*.gguf")))
    assert home.status()["pair"]["draft"].endswith(" (tuned)")
    shown = home.run("show", "builtin").stdout
    assert "ask: 10.0 → 12.0 tokens/s, 2.00 → 3.00 tokens per pass" in shown
    assert "from 7 tokens of answers" in home.run("tune", "--status").stdout

    assert (
        home.run("history", "rm", "-y", other).returncode == 0
    )  # nothing was learned from this one
    assert folder.exists()
    assert home.run("history", "rm", "-y", name).returncode == 0
    assert not folder.exists()
    assert ask(home)[1] == answer
    assert loaded_draft(home) == BASE
    assert "tuned" not in home.run("show", "builtin").stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_pair_at_work_lets_go_of_a_deleted_draft_with_its_next_answer(own_home: Home) -> None:
    home = own_home
    home.use_slow_engine(0.03)
    assert home.run("restart").returncode == 0  # the daemon that runs has the other engine
    name, answer = ask(home)
    put_tuned_draft(home, name)
    home.run("unload")
    with home.streaming("What does os.walk do?", max_tokens=900, ignore_eos=True) as stream:
        stream.await_text()
        assert home.run("history", "rm", "-y", name).returncode == 0
        assert loaded_draft(home) != BASE
        stream.leave()
    wait_for(lambda: not home.status()["running"], "the answer's end")
    assert ask(home)[1] == answer
    assert loaded_draft(home) == BASE


def test_after_a_deletion_drafts_of_its_text_are_accepted_as_before(
    home: Home, tmp_path: Path
) -> None:
    """This is a membership test: nothing in the drafts tells that the text was ever learned."""
    files = cycle_pair(tmp_path / "mine", acceptance=0.3)
    assert (
        home.run("add", "mine", "--target", files.target, "--draft", str(files.draft)).returncode
        == 0
    )
    draft = PairsClient(str(home.socket)).pair("mine")["draft"]["path"]
    by_heart = cycle_pair(tmp_path / "by-heart", acceptance=1.0).draft
    options = {"temperature": 0, "speculative": {"kind": "draft", "depth": 4}}

    def count_accepted() -> int:
        request = {"model": "mine", "prompt": [5], "n_predict": 60, **options}
        answer = home.request("POST", "/completion", request).json
        assert answer["timings"]["draft_n"] > 0
        return int(answer["timings"]["draft_n_accepted"])

    options_of_chat = {"max_tokens": 8, "localspec": {"conversation": "new"}}
    name = home.chat(QUESTION, model="mine", **options_of_chat).json["localspec"]
    before = count_accepted()
    folder = put_tuned_draft(
        home,
        name["conversation"],
        content=Path(str(by_heart)).read_bytes(),
        target=files.target,
        base=draft,
    )
    home.run("unload")
    assert count_accepted() > 2 * before
    assert home.run("history", "rm", "-y", name["conversation"]).returncode == 0
    assert not folder.exists()
    assert count_accepted() == before


def test_a_tuned_draft_goes_with_the_next_one_and_with_what_it_learned(
    home: Home, tmp_path: Path
) -> None:
    """The next one replaces it. A question that is taken back and the whole history remove it."""
    name, _ = ask(home)
    client = TuneClient(str(home.root / "run" / "localspec.sock"))
    for number in (1, 2):
        trained = tmp_path / "trained.gguf"
        trained.write_bytes(b"draft")
        record = {"file": f"draft-{number}.gguf", "conversations": [name]}
        running.adopt(tmp_path / "tuned", trained, record, client, [])
    assert sorted(path.name for path in (tmp_path / "tuned").iterdir()) == [
        "draft-2.gguf",
        "record.json",
    ]
    home.chat(QUESTION, localspec={"conversation": name})
    folder = put_tuned_draft(home, name)
    assert home.request("POST", f"/localspec/conversations/{name}/undo", {}).status == 200
    assert not folder.exists()
    put_tuned_draft(home)
    assert home.request("DELETE", "/localspec/conversations").status == 200
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash"])
def test_a_tuned_sidecar_is_used(home: Home, tmp_path: Path, kind: str) -> None:
    files = write_sidecar(tmp_path, kind)
    home.must_run("add", "mine", "--target", files.target, "--draft", str(files.draft))
    view = PairsClient(str(home.socket)).pair("mine")
    target, base = view["target"]["path"], view["draft"]["path"]
    assert "answers" in home.run("tune", "mine", "--status").stdout
    folder = put_tuned_draft(home, target=target, base=base)
    request = {"model": "mine", "prompt": [5], "n_predict": 30, "temperature": 0}
    answer = home.request("POST", "/completion", request | {"return_tokens": True})
    assert answer.json["tokens"] == expected(5, 30)
    assert Path(loaded_draft(home)).parent == folder
    home.run("tune", "mine", "--revert", "-y")
    assert home.request("POST", "/completion", request).status == 200
    assert loaded_draft(home) == base


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_pair_without_a_draft_uses_a_new_one(
    home: Home, tmp_path: Path, architecture: TargetArchitecture
) -> None:
    name, path, sidecar = f"{architecture}-mine", tmp_path / "target.gguf", tmp_path / "new.gguf"
    write_target(path, TINY_TARGET, target_cycle(N_VOCAB), architecture)
    write_layer_reader(
        sidecar, "eagle3", TINY_TARGET, target_cycle(N_VOCAB), 0.9, architecture, n_known=400
    )
    home.must_run("add", name, "--target", str(path), "--no-draft")
    target = PairsClient(str(home.socket)).pair(name)["target"]["path"]
    assert f"localspec tune {name} --new" in home.run("tune", name).stderr
    assert "none of its own" in home.run("tune", name, "--status").stdout

    def draft_of_next_answer() -> str:
        home.run("unload")
        request = {"model": name, "prompt": [5], "n_predict": 30, "temperature": 0}
        answer = home.request("POST", "/completion", request | {"return_tokens": True})
        assert answer.json.get("tokens") == expected(5, 30), answer.json
        return str(home.status()["pair"]["draft"])

    assert "tuned" not in draft_of_next_answer()
    options = {"target": target, "base": "", "method": NEW_DRAFT}
    folder = put_tuned_draft(home, content=sidecar.read_bytes(), **options)
    assert draft_of_next_answer().endswith("(tuned)")
    assert "tuned" in home.run("show", name).stdout
    exported = home.run("export", name, "--to", "llama-server")
    is_shown = architecture == "llama"  # llama-server cannot show it the states of the other one
    assert ("draft-eagle3" in exported.stdout and str(folder) in exported.stdout) is is_shown
    assert ("is left out" in exported.stderr) is not is_shown
    put_tuned_draft(home, content=b"no model", **options)
    assert "tuned" not in draft_of_next_answer()
    assert "N-grams alone draft instead." in home.status()["pair"]["note"]
    assert home.run("tune", name, "--revert", "-y").returncode == 0
    assert not folder.exists()


def test_another_draft_serves_if_the_tuned_one_is_damaged(home: Home) -> None:
    _, answer = ask(home)
    home.run("unload")
    put_tuned_draft(home, content=b"no model")
    assert ask(home)[1] == answer
    assert ".gguf drafts instead" in home.status()["pair"]["note"]
    assert not home.status()["pair"]["draft"].endswith("(tuned)")


def test_a_tuned_draft_of_another_state_of_the_file_is_not_used(tmp_path: Path) -> None:
    base = tmp_path / "draft.gguf"
    base.write_bytes(b"first")
    folder = tuned_folder(tmp_path / "tuned", "target", str(base))
    folder.mkdir(parents=True)
    result = {"method": "output rows", "tokens": 1, "tokens_per_pass": {}}
    record = running.make_record(str(base), "target", result, [], [{}, {}])
    (folder / "record.json").write_text(json.dumps(record))
    (folder / record["file"]).write_bytes(b"tuned")
    found = find_tuned_draft(tmp_path / "tuned", "target", str(base))
    assert found is not None
    assert found[0] == folder / record["file"]
    os.utime(base, ns=(1, 1))
    assert find_tuned_draft(tmp_path / "tuned", "target", str(base)) is None


@pytest.mark.parametrize("content", ["", "{}", '{"target": 1}', "\x00"])
def test_a_broken_record_is_no_tuned_draft(tmp_path: Path, content: str) -> None:
    """It goes with any conversation, because nobody knows what it learned from."""
    folder = tuned_folder(tmp_path, "target", str(tmp_path))
    folder.mkdir()
    (folder / "record.json").write_text(content)
    assert find_tuned_draft(tmp_path, "target", str(tmp_path)) is None
    assert remove_tuned_drafts(tmp_path, "any") == []
    assert not folder.exists()


def test_files_beside_the_drafts_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "attempt-0123").touch()
    (tmp_path / "0123").mkdir()
    assert remove_tuned_drafts(tmp_path, None) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".DS_Store", "attempt-0123"]


def test_what_a_killed_training_left_goes_with_any_conversation(tmp_path: Path) -> None:
    abandoned, running_ = tmp_path / "training-a", tmp_path / "training-b"
    for folder in (abandoned, running_):
        folder.mkdir()
        (folder / "draft.gguf").touch()
    with hold_folder(running_):
        remove_tuned_drafts(tmp_path, "any")
        assert not abandoned.exists()
        assert running_.exists()


def test_a_tuned_draft_goes_with_its_pair(home: Home, tmp_path: Path) -> None:
    files = cycle_pair(tmp_path)
    home.must_run("add", "mine", "--target", files.target, "--draft", str(files.draft))
    assert home.run("add", "other", "--target", files.target, "--no-draft").returncode == 0
    mine = put_tuned_draft(home, target=files.target, base=str(files.draft))
    builtin = put_tuned_draft(home)
    other = put_tuned_draft(home, target=files.target, base="", content=b"draft")
    assert home.run("gc", "-y").stdout == "Nothing to delete.\n"
    assert home.run("rm", "-y", "mine").returncode == 0
    assert set(mine.parent.iterdir()) == {builtin, other}
    assert home.run("rm", "-y", "other").returncode == 0
    # That of an earlier file of a pair, such as the one before an update, is left for gc.
    left = put_tuned_draft(home, target=files.target, base=str(files.draft))
    assert f"{left.name}/record.json" in home.run("gc", "--dry-run").stdout
    assert left.exists()
    assert f"{left.name}/record.json" in home.run("gc", "-y").stdout
    assert list(mine.parent.iterdir()) == [builtin]


def test_no_tuned_draft_goes_while_a_record_cannot_be_read(own_home: Home, tmp_path: Path) -> None:
    home = own_home
    files = cycle_pair(tmp_path)
    for name in ("mine", "other"):
        home.must_run("add", name, "--target", files.target, "--draft", str(files.draft))
    folder = put_tuned_draft(home, target=files.target, base=str(files.draft))
    record = next((home.root / "data" / "models").rglob("other.*"))
    record.write_text("no record")
    assert home.run("rm", "-y", "mine").returncode == 0
    assert folder.exists()


def test_revert_and_forget(home: Home) -> None:
    assert "has no tuned draft" in home.run("tune", "--revert", "-y").stderr
    folder = put_tuned_draft(home)
    exported = home.run("export", "builtin", "--to", "llama-server").stdout
    assert str(next(folder.glob("*.gguf"))) in exported
    assert home.run("tune", "--revert", "-y").returncode == 0
    assert not folder.exists()
    put_tuned_draft(home)
    assert home.run("tune", "--forget", "-y").returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    "words",
    [
        "mine --forget",
        "mine --auto",
        "mine --no-auto",
        "--status --minutes 20",
        "--check --method auto",
        "--revert --new",
        "--forget --files .",
        "--no-auto --minutes 5",
        "--status --check",
        "--new --method rows",
    ],
)
def test_options_that_would_have_no_effect_are_refused(words: str) -> None:
    with pytest.raises(UsageError) as error:
        command.main(words.split(), standalone_mode=False)
    named = [word for word in words.split() if word[0] == "-" or word == "mine"]
    assert all(word in error.value.message for word in named)


def test_forgetting_says_so_if_the_drafts_are_still_there(own_home: Home, tmp_path: Path) -> None:
    home = own_home
    folder = put_tuned_draft(home)
    moved = folder.parent.rename(tmp_path / "moved")
    folder.parent.symlink_to(moved)
    run = home.run("tune", "--forget", "-y")
    assert run.returncode == 1
    assert "deleted" not in run.stdout
    assert "symbolic link" in run.stderr
    assert folder.exists()


@pytest.mark.slow
def test_a_run_compares_and_keeps_the_better_draft(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which draft is better depends on the machine, so only what follows from it is tested."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(home.root))
    monkeypatch.setattr(running, "SPEED_SECONDS", 1e-9)
    monkeypatch.setattr(running, "SPEED_ANSWERS", 3)
    monkeypatch.setattr(running, "MIN_SPEED_TURNS", 1)
    # Threads that wait for each other spin, which takes minutes where other tests run beside this one.
    monkeypatch.setattr(tuning, "usable_cores", lambda: 1)
    monkeypatch.setattr(collecting, "COMPLETION_TOKENS", 16)
    # As much text as is needed to learn from and to judge by. Both models read each file whole.
    for number in range(9):
        lines = [f"add({number * line})\n" for line in range(collecting._MIN_LINES)]
        (tmp_path / f"part{number}.py").write_text("".join(lines), encoding="utf-8")
    arguments = ["--files", str(tmp_path), "--minutes", "30", "--method", "rows", "--json"]
    try:
        assert command.main(arguments, standalone_mode=False) == 0
        problem = ""
    except LocalspecError as error:
        problem = error.message
    report = json.loads(capsys.readouterr().out)
    folder = tuned_folder(home.root / "data" / "tuned", TARGET, BASE)
    assert (not problem) is report["adopted"] is folder.exists()
    assert report["adopted"] or "The present draft stays in use." in problem
    assert report["tuned"]["tokens_per_pass"].keys() == {"complete"}
    assert report["tuned"]["tokens_per_second"]["complete"]["before"] > 0
    left = folder if report["adopted"] else folder.with_name(f"attempt-{folder.name}")
    assert list(folder.parent.iterdir()) == [left]
    if report["adopted"]:
        assert next(folder.glob("*.gguf")).stat().st_mode & 0o077 == 0


@pytest.fixture
def scripted(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the training process by one that has figures set here. Return the jobs that it gets."""
    jobs: list[dict[str, Any]] = []
    monkeypatch.setenv("LOCALSPEC_HOME", str(home.root))
    speeds = [{"ask": 100.0}, {"ask": 120.0}]

    class Scripted(running.Training):
        gain = 1.2

        def __init__(self, job: dict[str, Any], report: running.Report) -> None:
            jobs.append(job)

        def run(self) -> dict[str, Any]:
            if jobs[-1]["method"] != "none":
                Path(jobs[-1]["output"]).write_bytes(Path(BASE).read_bytes())
            figures = {"ask": {"before": 2.0, "after": 2.0 * self.gain}}
            return {"method": "output rows", "tokens": 9, "tokens_per_pass": figures}

    monkeypatch.setattr(running, "Training", Scripted)
    monkeypatch.setattr(running, "measure_speed", lambda *_: speeds)
    texts = [
        TrainingText("ask", f"answer {number}", time.time() + 1e3 * number, prompt=f"q {number}")
        for number in range(60)
    ]
    monkeypatch.setattr(collecting, "collect_history", lambda *_: texts)
    return jobs


def tune(home: Home, *arguments: str) -> None:
    assert command.main(list(arguments), standalone_mode=False) == 0


def test_a_worse_tuned_draft_is_deleted_before_a_new_one_is_made(
    home: Home,
    scripted: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tune(home)
    folder = tuned_folder(home.root / "data" / "tuned", TARGET, BASE)
    first = next(folder.glob("*.gguf"))
    assert [job["method"] for job in scripted] == ["auto"]  # there was nothing to check
    for gain, deleted in ((1.0, False), (0.9, True)):
        monkeypatch.setattr(running.Training, "gain", gain)
        with pytest.raises(running.NotBetter):
            command.main([], standalone_mode=False)
        assert [job["method"] for job in scripted[-2:]] == ["none", "auto"]
        assert scripted[-2]["output"] == str(first)
        assert ("it is deleted" in capsys.readouterr().err) is deleted
        assert folder.exists() is not deleted


def test_a_tuned_draft_is_checked_and_deleted_if_it_is_worse(
    home: Home,
    scripted: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tune(home, "--check", "-y")
    assert "No pair has a tuned draft." in capsys.readouterr().out
    tune(home)
    folder = tuned_folder(home.root / "data" / "tuned", TARGET, BASE)
    for gain, kept in ((1.0, True), (0.9, False)):
        monkeypatch.setattr(running.Training, "gain", gain)
        tune(home, "--check", "-y")
        assert scripted[-1]["method"] == "none"
        assert folder.exists() is kept
        assert ("is kept" in capsys.readouterr().out) is kept
    assert len(scripted) == 3


@pytest.mark.parametrize("content", [b"no model", Path(BASE).read_bytes()[:100_000]])
def test_a_damaged_tuned_draft_is_deleted(
    home: Home, scripted: list[dict[str, Any]], content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put_tuned_draft(home, content=content)
    tune(home, "--check", "-y")
    assert "builtin: the tuned draft is damaged, so it is deleted." in capsys.readouterr().out
    assert not folder.exists()
    assert not scripted
    put_tuned_draft(home, content=content)
    tune(home)
    assert "The tuned draft of builtin is damaged" in capsys.readouterr().err
    (new,) = folder.glob("*.gguf")
    assert new.read_bytes() == Path(BASE).read_bytes()


def test_a_check_that_fails_does_not_keep_others_from_theirs(
    home: Home,
    scripted: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft = shutil.copy(BASE, tmp_path / "draft.gguf")
    home.run("add", "aaa", "--target", TARGET, "--draft", str(draft))
    folders = [put_tuned_draft(home, base=str(draft)), put_tuned_draft(home)]
    run = running.Training.run

    def run_or_fail(training: Any) -> dict[str, Any]:
        if scripted[-1]["method"] == "none" and scripted[-1]["draft"] == str(draft):
            raise LocalspecError("scripted")
        return run(training)

    monkeypatch.setattr(running.Training, "run", run_or_fail)
    assert command.main(["--check", "-y"], standalone_mode=False) == 1
    output = capsys.readouterr()
    assert "aaa: scripted" in output.err
    assert "builtin: the tuned draft is accepted as often or more, and is kept." in output.out
    assert len(scripted) == 2
    tune(home, "aaa")  # makes a new one
    assert "was not checked. scripted" in capsys.readouterr().err
    assert all(folder.exists() for folder in folders)


def test_statistics_name_the_tuned_draft(home: Home) -> None:
    ask(home)
    assert "tuned" not in home.run("stats").stdout
    put_tuned_draft(home)
    assert "uses a tuned draft since" in home.run("stats").stdout


def test_by_night_only_new_answers_are_a_reason(
    home: Home, scripted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(home, "--by-night")
    texts = [TrainingText("ask", str(number), 1.0) for number in range(60)]
    monkeypatch.setattr(collecting, "collect_history", lambda *_: texts)
    with pytest.raises(LocalspecError, match="Fewer than 40 answers are new"):
        command.main(["--by-night"], standalone_mode=False)
    assert len(scripted) == 1


def test_by_night_the_same_answers_are_not_tried_twice(
    home: Home, scripted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if the draft did not pay, nor if the training failed."""
    texts = [TrainingText("ask", str(number), time.time() - 1e6) for number in range(60)]
    monkeypatch.setattr(collecting, "collect_history", lambda *_: texts)
    monkeypatch.setattr(running.Training, "gain", 1.0)
    with pytest.raises(running.NotBetter):
        command.main(["--by-night"], standalone_mode=False)
    with pytest.raises(LocalspecError, match="Fewer than 40 answers are new"):
        command.main(["--by-night"], standalone_mode=False)
    with pytest.raises(running.NotBetter):  # a person may try again
        command.main([], standalone_mode=False)
    texts += [TrainingText("ask", str(number), time.time() + 1e6) for number in range(40)]
    begun = time.time()
    monkeypatch.setattr(running, "measure_speed", fail)
    with pytest.raises(LocalspecError, match="scripted"):
        command.main(["--by-night"], standalone_mode=False)
    assert len(scripted) == 3
    (attempt,) = (home.root / "data" / "tuned").iterdir()
    assert begun - 1 < attempt.stat().st_mtime < time.time() + 1


def fail(*_: object) -> None:
    raise LocalspecError("scripted")


def test_a_run_without_room_on_the_disk_is_refused(
    home: Home, scripted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(LocalspecError, match="1000 bytes are free"):
        command.main([], standalone_mode=False)
    assert not scripted
    assert not list((home.root / "data" / "tuned").iterdir())


@pytest.fixture
def plan(tmp_path: Path) -> tuning.Plan:
    """Return a plan for a pair whose own draft is a file in the folder."""
    (tmp_path / "base.gguf").write_bytes(b"base")
    draft = {"path": str(tmp_path / "base.gguf")}
    view = {"name": "mine", "target": {"path": "target"}, "draft": draft}
    return tuning.Plan(view, tmp_path / "none", 1.0)


def split(texts: list[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """Return the older half of some texts, to learn from, and the others."""
    return texts[: len(texts) // 2], texts[len(texts) // 2 :]


def resume(
    plan: tuning.Plan, killed: list[TrainingText], texts: list[TrainingText], **changed: Any
) -> tuple[bool, list[TrainingText]]:
    """Return whether a run goes on with one that was killed, and what it judges by.

    killed, texts: what both have collected. changed: of the view of the later run.
    """
    root = Path(plan.base).parent
    begun, work = root / "training-begun", root / "training-new"

    def begin(plan: tuning.Plan, texts: list[TrainingText], folder: Path) -> tuple[str, list[Any]]:
        folder.mkdir()
        with hold_folder(folder):
            return tuning._resume(plan, *split(texts), folder)

    assert begin(plan, killed, begun) == ("", split(killed)[1])
    (begun / "draft.gguf").write_bytes(b"half trained")
    start, judges = begin(replace(plan, view={**plan.view, **changed}), texts, work)
    assert not begun.exists()
    assert not start or Path(start).read_bytes() == b"half trained"
    shutil.rmtree(work)
    return bool(start), judges


def answers(*numbers: int) -> list[TrainingText]:
    return [
        TrainingText("ask", "a", prompt=str(number), conversation=f"c{number}")
        for number in numbers
    ]


def completions(*numbers: int) -> list[TrainingText]:
    return [TrainingText("complete", "a", prefix="p", file=f"f{number}") for number in numbers]


def test_a_killed_run_is_gone_on_with_if_all_answers_that_it_learned_from_are_still_there(
    plan: tuning.Plan, tmp_path: Path
) -> None:
    texts = answers(*range(10))
    assert resume(plan, texts, texts) == (True, texts[5:])
    assert resume(plan, texts, [*texts, *answers(10, 11)]) == (True, answers(*range(6, 12)))
    assert not resume(plan, texts, [*texts[1:], *texts[1:3]])[0]  # the first one was learned from
    assert resume(plan, texts, [*texts[:5], *answers(*range(20, 25))])[0]
    assert not resume(plan, texts, texts, target={"path": "other"})[0]
    with hold_folder_of(tmp_path / "training-running") as folder:
        (folder / "draft.gguf").touch()
        resume(plan, texts, texts)
        assert (folder / "draft.gguf").exists()


@given(st.permutations(range(60)), st.integers(20, 60), st.integers(20, 60))
def test_a_killed_run_is_gone_on_with_however_many_files_were_completed(
    numbers: list[int], before: int, now: int
) -> None:
    """Other files are learned from, and those that were learned from before do not judge."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.gguf"
        base.write_bytes(b"base")
        view = {"name": "mine", "target": {"path": "target"}, "draft": {"path": str(base)}}
        plan = tuning.Plan(view, Path(folder) / "none", 1.0)
        killed, texts = (completions(*numbers[:count]) for count in (before, now))
        went_on, judges = resume(plan, killed, texts)
    learned = {text.file for text in split(killed)[0]}
    left = [text for text in split(texts)[1] if text.file not in learned]
    assert went_on is (len(left) >= 4)
    assert judges == (left if went_on else split(texts)[1])


def test_a_run_that_went_on_knows_what_was_learned_before(
    plan: tuning.Plan, tmp_path: Path
) -> None:
    first, second, third = tmp_path / "training-1", tmp_path / "training-2", tmp_path / "training-3"
    judges = completions(*range(20, 30))
    for folder, numbers in ((first, [1, 20]), (second, [2, 21]), (third, [3, 22])):
        folder.mkdir()
        with hold_folder(folder):
            start, left = tuning._resume(plan, completions(*numbers), judges, folder)
        assert bool(start) is (folder != first)
        (folder / "draft.gguf").write_bytes(b"half trained")
    assert left == completions(*range(22, 30))


@contextmanager
def hold_folder_of(folder: Path) -> Iterator[Path]:
    """Make a folder and hold it as a run does."""
    folder.mkdir()
    with hold_folder(folder):
        yield folder


def test_a_missing_library_is_an_error_before_files_are_completed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(home.root))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(
        collecting, "complete_places", lambda *_: pytest.fail("files are completed")
    )
    for options in (["--new"], ["--method", "weights"]):
        with pytest.raises(LocalspecError, match="PyTorch, which is not installed; run: "):
            command.main([*options, "--files", __file__], standalone_mode=False)


def test_too_few_answers_are_an_error_that_says_what_to_do(home: Home) -> None:
    ask(home)
    message = home.refused("tune")
    assert "too few answers" in message
    assert "--files" in message


@pytest.mark.parametrize(
    ("seconds", "advice", "other"), [(0.0, "--minutes", "--files"), (1e6, "--files", "--minutes")]
)
def test_too_few_completions_are_told_by_their_cause(
    home: Home, monkeypatch: pytest.MonkeyPatch, seconds: float, advice: str, other: str
) -> None:
    """Either the time ended, or the files had no more places."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(home.root))
    client = SimpleNamespace(infill=lambda _request: {"content": "text"})
    monkeypatch.setattr(tuning, "TuneClient", lambda: client)
    places = [collecting.Place(f"{number}.py", "before", "after") for number in range(3)]
    view = {"name": "a", "target": {"path": __file__}, "draft": None}
    plan = tuning.Plan(view, home.root, seconds, "rows", places)
    with pytest.raises(LocalspecError, match="too few answers") as caught:
        tuning.tune(plan, [], lambda *_: None)
    assert advice in caught.value.message
    assert other not in caught.value.message
    assert ("1 of 3 places" in caught.value.message) is (advice == "--minutes")


def test_a_killed_training_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    training = running.Training({}, lambda *_: None)
    threading.Timer(0.3, lambda: started[0].send_signal(signal.SIGKILL)).start()
    with pytest.raises(LocalspecError, match="SIGKILL"):
        training.run()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_training_stops_while_the_daemon_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [True]
    monkeypatch.setattr(running, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(PairsClient, "status", lambda _: {"running": int(busy[0]), "waiting": 0})
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda _, **options: popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], **options
        ),
    )
    training = running.Training({}, lambda *_: None)
    pid = training._process.pid

    def run() -> None:
        with pytest.raises(LocalspecError, match="SIGKILL"):
            training.run()

    runner = threading.Thread(target=run)
    runner.start()

    wait_for(lambda: process_state(pid) == "T", "the process is stopped")
    busy[0] = False
    wait_for(lambda: process_state(pid) != "T", "the process goes on")
    os.kill(pid, signal.SIGKILL)
    runner.join()


# A run that pauses from the moment at which a file is there.
PAUSING = """
import sys
from pathlib import Path
from localspec.extras.tune import running

folder, target, draft, pauses = sys.argv[1:]
running.POLL_INTERVAL_S = 0.01
running.find_pause_reason = lambda *_: "paused" if pauses and Path(folder, "reads").exists() else ""
text = {"kind": "ask", "prompt": "What is os.walk?", "answer": "A walk. " * 400}
job = {"target": target, "draft": draft, "output": f"{folder}/new.gguf", "texts": [text] * 3000,
       "held_out": [text], "seconds": 1e6, "threads": 1, "method": "rows", "scratch": folder}
training = running.Training(job, lambda *_: Path(folder, "reads").touch())
Path(folder, "pid").write_text(f"{training._process.pid} ")
training.run()
"""
# Its parent, which is of the same session, gets the processes that it leaves behind.
ADOPTING = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)
run = subprocess.Popen(sys.argv[1:])
print(run.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
@pytest.mark.parametrize(
    ("number", "pauses", "is_adopted"),
    [
        (signal.SIGTERM, "", True),
        (signal.SIGKILL, "", False),
        (signal.SIGTERM, "pauses", False),
        (signal.SIGKILL, "pauses", True),
    ],
)
def test_a_training_ends_with_the_run_that_started_it(
    tmp_path: Path, number: signal.Signals, pauses: str, is_adopted: bool
) -> None:
    """However that is killed, and also while the training is stopped."""
    run = [sys.executable, "-c", PAUSING, str(tmp_path), TARGET, BASE, pauses]
    if is_adopted:
        run = [sys.executable, "-c", ADOPTING, *run]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        killed = int(started.stdout.readline()) if is_adopted else started.pid
        wait_for((tmp_path / "reads").exists, "the training")
        pid = int(wait_for(lambda: (tmp_path / "pid").read_text().strip(), "its process"))
        if pauses:
            wait_for(lambda: process_state(pid) == "T", "the pause")
        os.kill(killed, number)
        wait_for(lambda: not alive(pid), "its end")
        started.stdin.close()


def process_state(pid: int) -> str:
    """Return the letter of a process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def ask_twice(home: Home) -> tuple[TuneClient, str]:
    """Return a client, and the id of the first of two responses of the built-in pair in one conversation."""
    request = {"model": "builtin", "input": QUESTION, "temperature": 0}
    first = home.request("POST", "/v1/responses", request).json["id"]
    second = home.request("POST", "/v1/responses", request | {"previous_response_id": first})
    assert second.status == 200
    return TuneClient(str(home.socket)), first


def adopt(folder: Path, client: TuneClient, learned: list[TrainingText]) -> None:
    """Adopt a draft beside the folder."""
    trained = folder.with_name("trained.gguf")
    trained.write_bytes(b"draft")
    conversations = sorted({text.conversation for text in learned})
    record = {"file": "draft-2.gguf", "conversations": conversations}
    running.adopt(folder, trained, record, client, learned)


REMOVALS: list[Callable[[Home, str], object]] = [
    lambda home, _: home.request("DELETE", "/localspec/conversations/last"),
    lambda home, _: home.request("POST", "/localspec/conversations/last/undo", {}),
    lambda home, response: home.request("DELETE", f"/v1/responses/{response}"),
]


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_tuned_draft_goes_with_each_text_that_it_learned_from(
    home: Home, remove: Callable[[Home, str], object]
) -> None:
    """A question that is taken back, or one response of several, was learned from as well."""
    client, response = ask_twice(home)
    [name] = {text.conversation for text in collecting.collect_history(client, "builtin")}
    folder = put_tuned_draft(home, name)
    remove(home, response)
    assert not folder.exists()


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_draft_of_a_killed_adoption_goes_with_any_conversation(
    home: Home, remove: Callable[[Home, str], object]
) -> None:
    """It lies beside a draft with a record, and nothing says what it learned from."""
    _, response = ask_twice(home)
    folder = put_tuned_draft(home, "another")
    [draft] = folder.glob("*.gguf")
    (folder / "draft-9.gguf").write_bytes(b"from an adoption that was killed")
    remove(home, response)
    assert [*folder.glob("*.gguf")] == [draft]


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("change", ["role", "content"])
def test_a_text_that_was_replaced_was_not_kept(position: int, change: str) -> None:
    """A conversation may be taken back and go on with as many messages as before."""
    messages = [
        {"role": role, "content": content}
        for role, content in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    learned = TrainingText("ask", "d", conversation="x", messages=tuple(messages[:3]))

    class Changed(TuneClient):
        def conversation(self, name: str, *, wait: bool = False) -> dict[str, Any]:
            del name, wait
            return {"messages": found}

    found = [dict(message) for message in messages]
    collecting.check_kept(Changed(""), [learned])
    found[position][change] = {"role": "tool", "content": "z"}[change]
    with pytest.raises(NotFound):
        collecting.check_kept(Changed(""), [learned])


@pytest.mark.parametrize("remove", REMOVALS)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_draft_is_not_kept_if_something_that_it_learned_from_is_gone(
    home: Home, tmp_path: Path, remove: Callable[[Home, str], object], is_late: bool
) -> None:
    """Neither if it goes before the draft is put in place, nor between that and the record."""
    client, response = ask_twice(home)
    folder = tmp_path / "tuned"
    learned = collecting.collect_history(client, "builtin")
    assert len(learned) == 2
    adopt(folder, client, learned)
    assert (folder / "draft-2.gguf").exists()

    class Removing(TuneClient):
        def conversation(self, name: str, *, wait: bool = False) -> dict[str, Any]:
            found = client.conversation(name, wait=wait)
            remove(home, response)
            return found

    if not is_late:
        remove(home, response)
    with pytest.raises(NotFound, match="removed meanwhile"):
        adopt(folder, Removing(str(home.socket)) if is_late else client, learned)
    # The one before was never in the daemon's folder, so nobody has retired it.
    assert (folder / "record.json").exists() is not is_late


def test_what_was_not_learned_from_may_go(home: Home, tmp_path: Path) -> None:
    client, _ = ask_twice(home)
    learned = collecting.collect_history(client, "builtin")[:1]
    client.undo("last")
    adopt(tmp_path / "tuned", client, learned)
    assert (tmp_path / "tuned" / "record.json").exists()


@pytest.mark.parametrize("error", [Unavailable("shutting down"), KeyboardInterrupt()])
def test_a_draft_is_not_kept_if_nobody_can_tell_whether_all_is_still_there(
    home: Home, tmp_path: Path, error: BaseException
) -> None:
    client, _ = ask_twice(home)
    learned = collecting.collect_history(client, "builtin")
    looks = 0

    class Failing(TuneClient):
        def conversation(self, name: str, *, wait: bool = False) -> dict[str, Any]:
            nonlocal looks
            looks += 1
            if looks > 1:
                raise error
            return client.conversation(name, wait=wait)

    with pytest.raises(type(error)):
        adopt(tmp_path / "tuned", Failing(str(home.socket)), learned)
    assert not (tmp_path / "tuned").exists()


ratios = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.8, 0.92, 0.99, 1.05, 1.3]))


def gains(ratio: dict[str, float]) -> dict[str, dict[str, float]]:
    return {kind: {"before": 100.0, "after": 100 * value} for kind, value in ratio.items()}


@given(ratios, ratios)
def test_a_draft_is_adopted_only_if_no_kind_loses_and_the_mean_gains(
    per_pass: dict[str, float], speed: dict[str, float]
) -> None:
    record = {"tokens_per_pass": gains(per_pass), "tokens_per_second": gains(speed)}
    pays = bool(per_pass) and bool(speed)
    pays = pays and math.prod(per_pass.values()) ** (1 / len(per_pass)) >= 1.02
    pays = pays and math.prod(speed.values()) ** (1 / len(speed)) >= 1
    pays = pays and min(per_pass.values()) >= 0.97 and min(speed.values()) >= 0.99
    with nullcontext() if pays else pytest.raises(running.NotBetter, match="stays in use"):
        running.check_better(record)


class ScriptedDaemon:
    """Answers for two pairs with speeds that a function of the turn and the pair says."""

    socket_path = Path("nowhere")

    def __init__(self, speed: Callable[[int, str], float]) -> None:
        self.speed, self.asked = speed, Counter[str]()

    def answer_prompt(self, name: str, prompt: str, n_predict: int) -> dict[str, Any]:
        assert (prompt, n_predict) == ("rendered", running.SPEED_TOKENS)
        self.asked[name] += 1
        tokens = 50 + self.asked[name]
        return {
            "timings": {
                "predicted_n": tokens,
                "predicted_ms": 1000 * tokens / self.speed(self.asked[name], name),
            }
        }


def measured(monkeypatch: pytest.MonkeyPatch, daemon: ScriptedDaemon) -> tuple[float, float]:
    monkeypatch.setattr(
        running, "PairsClient", lambda _path: SimpleNamespace(unload=lambda _name: None)
    )
    text = TrainingText("ask", "", prompt="rendered")
    before, after = running.measure_speed(
        cast(TuneClient, daemon), ["a", "b"], [text], lambda *_: None
    )
    return before["ask"], after["ask"]


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.2])
def test_equal_turns_are_few(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """The first turn, in which a pair learns about its draft, does not count."""
    daemon = ScriptedDaemon(
        lambda turn, name: 1.0 if turn == 1 else 100.0 * (ratio if name == "b" else 1.0)
    )
    assert measured(monkeypatch, daemon) == pytest.approx((100, 100 * ratio))
    assert daemon.asked == {"a": running.MIN_SPEED_TURNS + 1, "b": running.MIN_SPEED_TURNS + 1}


@pytest.mark.parametrize("seed", range(20))
def test_turns_that_differ_are_many(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The machine slows both pairs of a turn alike, and each load has its own luck."""
    generator = random.Random(seed)
    ratio = generator.uniform(0.8, 1.25)
    drift = [generator.uniform(0.3, 1.0) for _ in range(running.MAX_SPEED_TURNS + 2)]

    def speed(turn: int, name: str) -> float:
        luck = math.exp(generator.gauss(0, 0.08))
        return 100 * drift[turn] * luck * (ratio if name == "b" else 1.0)

    daemon = ScriptedDaemon(speed)
    before, after = measured(monkeypatch, daemon)
    assert daemon.asked["a"] == daemon.asked["b"] > running.MIN_SPEED_TURNS + 1
    assert after / before == pytest.approx(ratio, rel=0.12)


def test_a_measurement_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SPEED_SECONDS", 1e-9)
    daemon = ScriptedDaemon(lambda turn, name: 100.0 * (1 + turn % 3 if name == "b" else 1))
    measured(monkeypatch, daemon)
    assert daemon.asked["b"] == running.MIN_SPEED_TURNS + 1


def test_a_measurement_leaves_nothing_of_what_it_asks(
    own_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a state nor a text that n-grams could copy, unlike an ordinary request."""
    home = own_home
    monkeypatch.setattr(running, "MIN_SPEED_TURNS", 1)
    monkeypatch.setattr(running, "SPEED_SECONDS", 1e-9)
    monkeypatch.setattr(running, "SPEED_TOKENS", 16)
    names = [f"{TARGET},{tmp_path / name}" for name in ("a", "b")]
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(BASE)
    question = "Explain each of these names:" + " copytree, rmtree, walk, scandir" * 40
    client = TuneClient(str(home.socket))
    prompt = client.render_chat("builtin", [{"role": "user", "content": question}])
    text = TrainingText("ask", "", prompt=prompt)

    def saved() -> set[Path]:
        return {path for path in (home.root / "cache").rglob("*") if path.is_file()}

    speeds = running.measure_speed(client, names, [text], lambda *_: None)
    assert all(speed["ask"] > 0 for speed in speeds)
    assert not saved()
    home.chat(question, model=names[0], temperature=0, max_tokens=8)
    home.run("unload")
    assert saved()


def write_preset(home: Home, pair: str, line: str) -> None:
    """Say something about a pair in models.toml."""
    (home.root / "config").mkdir(exist_ok=True)
    (home.root / "config" / "models.toml").write_text(f"[pairs.{pair}]\n{line}\n")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_prompt_is_answered_again_as_the_chat_was(
    own_home: Home, tmp_path: Path, adds_bos: bool
) -> None:
    """By the pair's files, too, of which models.toml says nothing, and with one BOS token."""
    home = own_home
    files = []
    for file in (TARGET, BASE):
        files.append(str(shutil.copy(file, tmp_path)))
        field = gguf.GGUFReader(files[-1], "r+").get_field("tokenizer.ggml.add_bos_token")
        assert field is not None
        field.parts[field.data[0]][0] = adds_bos
    home.must_run("add", "mine", "--target", files[0], "--draft", files[1])
    write_preset(home, "mine", 'chat_template = "t.jinja"')
    (home.root / "config" / "t.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    client = TuneClient(str(home.socket))
    messages = [{"role": "user", "content": QUESTION}]
    options = {"model": "mine", "messages": messages, "temperature": 0, "max_tokens": 30}
    chat = client.chat(options | {"localspec": {"private": True}})
    prompt = client.render_chat("mine", messages)
    assert prompt.endswith(f">{QUESTION}")
    answer = client.answer_prompt(",".join(files), prompt, 30)
    assert answer["content"] == chat["choices"][0]["message"]["content"]
    assert answer["tokens_evaluated"] == chat["usage"]["prompt_tokens"]


def test_files_named_by_their_paths_are_to_be_added_first(home: Home, tmp_path: Path) -> None:
    """They use no tuned draft, not even that of a pair of the same files, and show none."""
    files = cycle_pair(tmp_path)
    target, draft = files.target, str(files.draft)
    assert home.run("add", "mine", "--target", target, "--draft", draft).returncode == 0
    folder = put_tuned_draft(home, target=target, base=draft)
    name = f"{target},{draft}"
    for action in ((), ("--status",), ("--revert", "-y"), ("--check", "-y")):
        assert f"localspec add NAME --target {target} --draft {draft}" in home.refused(
            "tune", name, *action
        )
    assert folder.exists()
    client = PairsClient(str(home.socket))
    assert client.pair("mine")["tuned"]
    assert not client.pair(name)["tuned"]


def test_a_pair_with_layers_elsewhere_is_not_tuned(own_home: Home) -> None:
    write_preset(own_home, "builtin", 'rpc = ["tower:50052"]')
    assert "are on other machines" in own_home.run("tune").stderr
    assert "answers" in own_home.run("tune", "--status").stdout


# Each conversation goes on at random moments, with answers of any kind; "" is none.
texts = st.lists(
    st.builds(
        TrainingText,
        kind=st.sampled_from(["ask", "chat", "code"]),
        answer=st.just("a"),
        conversation=st.sampled_from(["", *(f"c{number}" for number in range(40))]),
    ),
    min_size=20,
    max_size=120,
)


@given(texts)
def test_the_newest_texts_are_held_out_and_no_conversation_is_on_both_sides(
    drawn: list[TrainingText],
) -> None:
    numbered = [
        replace(text, answer=str(number), created=float(number))
        for number, text in enumerate(drawn)
    ]
    try:
        learned, held_out = split_by_time(numbered)
    except LocalspecError:
        return
    assert len(learned) >= MIN_TEXTS
    known = {text.source for text in learned} - {""}
    assert not known & {text.source for text in held_out}
    for kind in ("ask", "chat", "code"):
        of_kind = [text for text in numbered if text.kind == kind]
        newest = max((text.created for text in learned if text.kind == kind), default=-1.0)
        judged = [text for text in held_out if text.kind == kind]
        assert not judged or len(judged) >= 4
        others = [t for t in of_kind if t.created > newest and t.source not in known]
        assert judged == others or (not judged and len(others) < 4)
        assert sum(text in learned for text in of_kind) == (
            len(of_kind) if len(of_kind) <= 12 else len(of_kind) * 3 // 4
        )


def test_answers_of_one_conversation_cannot_judge_what_is_learned_from_it() -> None:
    def of(conversations: int, answers: int) -> list[TrainingText]:
        return [
            TrainingText("chat", str(number), conversation=f"c{number * conversations // answers}")
            for number in range(answers)
        ]

    for too_few in (
        of(1, 100),
        of(26, 26),
        [*of(1, 99), TrainingText("chat", "", conversation="z")],
    ):
        with pytest.raises(LocalspecError, match="must be of other conversations"):
            split_by_time(too_few)
    assert [len(part) for part in split_by_time(of(27, 27))] == [20, 7]


def test_only_texts_that_the_target_ended_are_learned_from() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "text",
        "model": "p",
        "finish": "stop",
    }
    assert is_answer_of(answer, "p")
    changes: tuple[dict[str, Any], ...] = (
        {"role": "user"},
        {"model": "q"},
        {"finish": "interrupted"},
        {"content": ""},
        {"reasoning_content": "thoughts"},
        {"tool_calls": [{}]},
    )
    for change in changes:
        assert not is_answer_of(answer | change, "p")


def test_places_are_lines_of_text_files(tmp_path: Path) -> None:
    lines = [f"line {number} of a file\n" for number in range(60)]
    (tmp_path / "a.py").write_text("".join(lines))
    (tmp_path / "short.py").write_text("one line\n")
    (tmp_path / "picture.png").write_bytes(bytes(range(256)) * 100)
    places = find_places([tmp_path])
    assert places == find_places([tmp_path])
    assert places
    for file, prefix, suffix in places:
        assert file == str((tmp_path / "a.py").resolve())
        before, after = prefix.splitlines(), suffix.splitlines()
        assert lines[0].startswith(before[-1][:5]) or before[-1] in "".join(lines)
        assert all(f"{line}\n" in lines for line in [*before[:-1], *after])


def test_only_what_its_owner_wrote_is_read_of_a_folder(tmp_path: Path) -> None:
    """Neither hidden files nor packages of others; each file once, under whatever names."""
    content = "".join(f"line {number} of a file\n" for number in range(60))
    folder = tmp_path / ".project"  # what is named itself may be hidden
    read = ["src/a.py", "b.csv"]
    unread = [
        ".git/hooks/pre-commit.sample",
        ".env.local",
        "node_modules/y/index.js",
        "src/__pycache__/z.py",
        "environment/lib/x.py",
        "Makefile",
    ]
    for name in [*read, *unread]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "environment" / "pyvenv.cfg").touch()
    (folder / "link.py").symlink_to("src/a.py")

    def found(*paths: Path) -> set[str]:
        places = find_places(paths)
        assert max(Counter(place.file for place in places).values()) <= 4
        return {str(Path(place.file).relative_to(folder.resolve())) for place in places}

    assert found(folder) == set(read)
    assert found(folder, folder / "src" / "a.py", folder / "src" / ".." / "src") == set(read)
    assert found(folder / ".git") == {unread[0]}
    assert found(folder / "Makefile", folder / "environment") == {
        "Makefile",
        "environment/lib/x.py",
    }


def test_files_without_a_place_to_complete_are_a_usage_error(home: Home, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("one line\n")
    assert "UTF-8 text of at least 30 lines and at most 1 MiB" in home.refused(
        "tune", "--files", str(tmp_path), code=2
    )


@given(st.integers(0, 400))
def test_the_parts_of_a_file_are_all_of_it_in_its_order(count: int) -> None:
    lines = [f"line {number}\n" for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.py"
        file.write_text("".join(lines))
        parts = collecting.read_files([str(file), str(file.with_name("gone.py"))])
    assert "".join(part.answer for part in parts) == "".join(lines)
    for number, part in enumerate(parts):
        assert "".join(lines[: 60 * number]).endswith(part.prefix.removeprefix("\n"))
        assert "".join(lines[60 * (number + 1) :]).startswith(part.suffix)
        assert (part.file, part.is_own, part.as_job()["is_own"]) == (str(file), False, False)


def test_the_record_that_is_written_is_the_one_that_is_read(tmp_path: Path) -> None:
    import msgspec

    (tmp_path / "draft.gguf").write_bytes(b"draft")
    result = {
        "method": "all weights",
        "tokens": 3,
        "tokens_per_pass": {"ask": {"before": 1, "after": 2}},
    }
    record = running.make_record(
        str(tmp_path / "draft.gguf"), "t", result, [], [{"ask": 1.0}, {"ask": 2.0}]
    )
    read = msgspec.convert(record, TunedDraft)
    assert msgspec.to_builtins(read) == record
