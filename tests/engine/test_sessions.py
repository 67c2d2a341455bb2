"""Conversation states on disk: what is saved, what is refused, and that no damage reaches llama.cpp."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.cache import sessions as states_module
from localspec.engine.cache.prefixes import Prefix
from localspec.engine.cache.sessions import DISK_BYTES_PER_S, MIN_TOKENS, VERSION, SessionStore
from localspec.engine.cache.slot import Mark
from localspec.protocol.frames import ANONYMOUS_CLIENTS, PairFiles
from tests.support.patience import PATIENCE
from tests.support.rescoring import assert_alike
from tests.support.running import Load, Running, drafting, skip_on

MIB = 1 << 20
TEXT = list(range(1, MIN_TOKENS + 44))


class Disk:
    """A store of states in a folder, and the messages it logged."""

    def __init__(self, folder: Path, identity: str = "pair", limit: int = MIB) -> None:
        self.folder = folder
        self.messages: list[str] = []
        self.states = SessionStore(folder, identity, limit, self.messages.append)

    def save(self, conversation: str, tokens: list[int] = TEXT, size: int = 1000) -> None:
        body = np.arange(size, dtype=np.uint8)
        marks = [Mark(3, body[:9]), Mark(4, body[5:25])]
        draft = body[: size // 4], 7
        prefix = Prefix(tokens, body, *draft, 5, conversation=conversation, marks=marks)
        self.states.save_all([prefix], 10.0)

    def load(self, tokens: list[int] = TEXT, held: int = 0) -> Prefix | None:
        return self.states.load(tokens, held)

    def file(self, conversation: str) -> Path:
        [path] = (self.folder / conversation).glob("*")
        return path

    def names(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("*/*"))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "states")


def test_saved_state_is_found_by_the_next_process(disk: Disk) -> None:
    disk.save("ab12")
    prefix = Disk(disk.folder).load()
    assert prefix is not None
    assert (list(prefix.tokens), prefix.n_draft, prefix.source) == (TEXT, 7, "disk")
    assert prefix.least == 5
    marks = {mark.tokens: mark.state.tolist() for mark in prefix.marks}
    assert marks == {3: list(range(9)), 4: list(range(5, 25))}
    assert prefix.target.tobytes() == bytes(np.arange(1000, dtype=np.uint8))
    assert prefix.draft is not None
    assert prefix.draft.nbytes == 250
    assert stat.S_IMODE(disk.file("ab12").stat().st_mode) == 0o600
    assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700
    assert not disk.messages


def test_state_in_memory_is_not_read_from_disk(disk: Disk) -> None:
    disk.save("ab12")
    assert disk.load([*TEXT, 7], held=len(TEXT) - MIN_TOKENS + 1) is None
    prefix = disk.load([*TEXT, 7], held=len(TEXT) - MIN_TOKENS)
    assert prefix is not None
    assert disk.load([*TEXT, 8]) is prefix  # a second reader shares the copy
    costly = disk.states.load(TEXT, pays=lambda tokens, size: tokens > len(TEXT) or size < 999)
    assert costly is prefix
    assert disk.load([9, *TEXT]) is None
    assert disk.states.load(TEXT, exact=True) is None


def test_anonymous_text_is_found_by_its_tokens(disk: Disk) -> None:
    other_text = [*TEXT[:100], *range(5000, 5300)]
    disk.save(ANONYMOUS_CLIENTS)
    disk.save(ANONYMOUS_CLIENTS, other_text)
    reader = Disk(disk.folder)
    for text in (TEXT, other_text):
        loaded = reader.load([*text, 3, 4])
        assert loaded is not None
        assert list(loaded.tokens) == text
    longer = [*TEXT, *range(6000, 6300)]
    disk.save(ANONYMOUS_CLIENTS, longer)
    assert len(disk.names()) == 2  # it replaced its prefix
    loaded_now = disk.load(TEXT), disk.load(other_text)
    assert [len(prefix.tokens) for prefix in loaded_now if prefix] == [599, 400]
    disk.save(ANONYMOUS_CLIENTS, TEXT)
    assert len(disk.names()) == 2


def test_forgotten_anonymous_text_is_not_saved_until_allowed(disk: Disk) -> None:
    disk.save(ANONYMOUS_CLIENTS)
    disk.states.forget(None)
    disk.save(ANONYMOUS_CLIENTS)
    assert not disk.names()
    assert disk.load() is None
    disk.states.allow_saving()
    disk.states._writer.submit(int).result()
    disk.save(ANONYMOUS_CLIENTS)
    assert disk.names() == [ANONYMOUS_CLIENTS]
    disk.states.forget("ab12")
    assert disk.load() is not None


def test_short_texts_and_small_growth_spare_the_disk(disk: Disk) -> None:
    disk.save("ab12", TEXT[: MIN_TOKENS - 1])
    assert not disk.names()
    disk.save("ab12")
    inode = disk.file("ab12").stat().st_ino
    disk.save("ab12", [*TEXT, *TEXT[:100]])
    assert disk.file("ab12").stat().st_ino == inode
    disk.save("ab12", [*TEXT, *TEXT])
    assert disk.file("ab12").stat().st_ino != inode
    long = Disk(disk.folder.parent / "long")
    long.save("cd", TEXT * 20)
    assert not long.states.is_worth_saving("cd", TEXT * 22)
    assert long.states.is_worth_saving("cd", TEXT * 23)


@given(grown=st.integers(0, 60), token_s=st.floats(1e-9, 1e-3), size=st.integers(2_000, 200_000))
def test_unloading_saves_what_is_read_slowly(grown: int, token_s: float, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        disk.save("ab12", size=size)
        text = [*TEXT, *range(grown)]
        write_s = disk.file("ab12").stat().st_size * len(text) / len(TEXT) / DISK_BYTES_PER_S
        is_worth = partial(disk.states.is_worth_saving, "ab12", text)
        worth_saving = is_worth(reading_time=lambda a, b: (b - a) * token_s)
        assert worth_saving == (grown * token_s > write_s)
        assert not disk.states.is_worth_saving("ab12", text)


def test_least_recently_used_state_is_evicted(disk: Disk) -> None:
    texts = {name: [at, *TEXT] for at, name in enumerate(("aa", "bb", "cc", "dd", "ee"))}
    for at, name in enumerate(("aa", "bb", "cc")):
        disk.save(name, texts[name], size=300_000)
        os.utime(disk.file(name), (at, at)) if name != "cc" else None
    assert disk.names() == ["bb", "cc"]  # 375 000 bytes each, of 1 048 576
    assert Disk(disk.folder).load(texts["bb"]) is not None  # used just now
    os.utime(disk.file("cc"), (5, 5))
    disk.save("dd", texts["dd"], size=300_000)
    assert disk.names() == ["bb", "dd"]
    assert disk.load(texts["cc"]) is None
    disk.save("ee", texts["ee"], size=2 * MIB)
    assert disk.names() == ["bb", "dd"]


def test_state_of_other_files_or_settings_is_not_found(disk: Disk) -> None:
    disk.save("ab12")
    assert Disk(disk.folder, "other").load() is None
    path = disk.file("ab12")
    path.rename(path.with_name("other.state"))
    other_disk = Disk(disk.folder, "other")
    assert other_disk.load() is None
    assert "other files or settings" in other_disk.messages[0]


def read_error(disk: Disk, content: bytes) -> str:
    """Return the message about a file with this content, which stays unchanged."""
    path = disk.file("ab12")
    path.write_bytes(content)
    reader = Disk(disk.folder)
    assert reader.load() is None
    assert path.read_bytes() == content
    return "".join(reader.messages)


def test_a_newer_file_and_one_with_invalid_utf_8_are_refused_and_left_alone(disk: Disk) -> None:
    """The name is read before the hash, to see whose text the file holds."""
    disk.save("ab12")
    content = disk.file("ab12").read_bytes()
    newer = content[:8] + struct.pack("<I", VERSION + 1) + content[12:]
    assert "newer" in read_error(disk, newer)
    assert "damaged" in read_error(disk, content.replace(b"pair", b"\xf0air", 1))


@given(st.data())
def test_a_file_with_any_byte_changed_or_cut_off_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    disk = Disk(tmp_path_factory.mktemp("states"))
    disk.save("ab12")
    content = bytearray(disk.file("ab12").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    read_error(disk, bytes(content))


def test_a_link_is_not_followed(disk: Disk, tmp_path: Path) -> None:
    disk.save("ab12")
    path = disk.file("ab12")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert Disk(disk.folder).load() is None


@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_pipe_is_not_waited_for(disk: Disk, place: str) -> None:
    disk.save("ab12")
    path = disk.file("ab12")
    path.unlink()
    if place == "folder":
        path = path.parent
        path.rmdir()
    os.mkfifo(path)
    reader = Disk(disk.folder)
    assert reader.load() is None
    assert reader.messages or place == "folder"
    gone = threading.Event()
    reader.states.forget(None, gone.set)
    assert gone.wait(PATIENCE)
    assert not list(disk.folder.iterdir())


@pytest.mark.parametrize("name", ["", "..", "../../etc", "ab/cd", "AB", "a" * 65])
def test_only_an_id_becomes_a_path(disk: Disk, name: str) -> None:
    disk.save(name)
    assert disk.load() is None
    disk.states.forget(name)
    disk.states.close()
    assert not disk.folder.exists()


def test_full_disk_leaves_no_partial_file(disk: Disk) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        disk.save("ab12", size=500_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not disk.names()
    assert "is not saved" in disk.messages[0]
    disk.save("ab12", size=500_000)
    assert disk.names() == ["ab12"]


def test_nothing_is_saved_on_an_all_but_full_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = Prefix(TEXT, np.zeros(100, np.uint8), conversation="ab12")
    disk.states.save_all([prefix], 0.0)  # nor without time
    usage = shutil.disk_usage(disk.folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
    disk.save("ab12")
    assert not disk.names()


def test_partial_file_of_a_dead_process_is_removed(disk: Disk) -> None:
    disk.save("ab12")
    complete = disk.file("ab12")
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    pids = dead.pid, os.getppid()
    partial_files = [complete.with_name(f".{complete.name}.{pid}.2.tmp") for pid in pids]
    for part in partial_files:
        part.write_bytes(b"half")
    Disk(disk.folder)
    assert [part.exists() for part in (complete, *partial_files)] == [True, False, True]


def test_forgotten_state_is_deleted_even_while_it_is_written(disk: Disk) -> None:
    disk.states.save_dropped(Prefix(TEXT, np.zeros(1000, np.uint8), conversation="ab12"))
    disk.states.forget("ab12")
    disk.save("cd34")
    disk.states.forget(None)
    disk.states.close()
    assert not disk.names()


on_the_same_machines = skip_on(
    "rpc", why="what is kept of a pair is for its machines, and each engine has another worker"
)


def load_with_states(load: Load, files: PairFiles, folder: Path, **settings: int) -> Running:
    room = {"states_bytes": 64 * MIB, "prefix_bytes": 64 * MIB}
    engine = load(files, states_dir=str(folder), **{**room, **settings})
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    return engine


@on_the_same_machines
def test_a_conversation_goes_on_after_a_restart_without_reading_it_again(
    load: Load, contextual_files: PairFiles, tmp_path: Path
) -> None:
    engine = load_with_states(load, contextual_files, tmp_path)
    opening = engine.ask(TEXT, 24, speculative=drafting(3), conversation="ab12").all_tokens
    engine.ask([9, 8, 7], 4)
    engine.pair.close()

    engine = load_with_states(load, contextual_files, tmp_path)
    prompt = [*opening, 5, 6, 7]
    answer = engine.ask(prompt, 24, speculative=drafting(3), conversation="ab12")
    assert answer.started is not None
    assert answer.started.cache == "disk"
    assert answer.done.timings.prompt_n <= 4
    assert answer.done.speculation.accepted > 0
    anew = engine.ask(prompt, 24, cache_prompt=False).tokens
    assert_alike(contextual_files.target, prompt, answer.tokens, anew)
    # A different text reuses nothing.
    assert engine.ask([400, *prompt], 4, conversation="ff").done.timings.cache_n == 0


@on_the_same_machines
def test_an_earlier_answer_is_drafted_after_a_restart_until_it_is_forgotten(
    load: Load, contextual_files: PairFiles, tmp_path: Path
) -> None:
    answers = []
    for conversation in ("ab12", "c1", "c2"):
        engine = load_with_states(load, contextual_files, tmp_path)
        speculative = drafting(None, "ngram")
        answers.append(engine.ask(TEXT, 60, speculative=speculative, conversation=conversation))
        if conversation == "c1":
            engine.engine.forget("ab12")
            engine.engine.forget("c1")
        engine.pair.close()
    unknown, remembered, forgotten = (answer.done.speculation.rounds for answer in answers)
    assert remembered < min(unknown, forgotten)
    for answer in answers[1:]:
        assert_alike(contextual_files.target, TEXT, answer.tokens, answers[0].tokens)


def test_conversation_evicted_from_memory_is_found_on_disk(
    load: Load, contextual_files: PairFiles, tmp_path: Path
) -> None:
    engine = load_with_states(load, contextual_files, tmp_path, parallel=1, prefix_bytes=1000)
    engine.ask(TEXT, 4, conversation="ab12")
    engine.ask([400, 401], 4)
    engine.pair.sessions._writer.submit(int).result()  # the evicted state is written
    answer = engine.ask([*TEXT, 5], 4, conversation="ab12")
    assert answer.started is not None
    assert answer.started.cache == "disk"


def test_forgotten_conversation_is_gone_from_memory_and_disk(
    load: Load, contextual_files: PairFiles, tmp_path: Path
) -> None:
    engine = load_with_states(load, contextual_files, tmp_path)
    engine.ask(TEXT, 4, conversation="ab12")
    engine.pair.forget("ab12")
    assert engine.ask(TEXT, 4, private=True).done.timings.cache_n == 0
    engine.pair.close()
    assert not list(tmp_path.glob("*/*"))


def find_tokens(root: object, tokens: list[int]) -> list[str]:
    """Return the types of the objects reachable from another in which these tokens follow each other."""
    needle = np.array(tokens, np.int32).tobytes()
    skipped = (type, types.ModuleType, types.FunctionType)
    seen, waiting, found = {id(root)}, [root], []
    while waiting:
        each = waiting.pop()
        if isinstance(each, (list, tuple)) and all(isinstance(part, int) for part in each[:2]):
            each_bytes = b""
            if all(isinstance(part, int) and -(1 << 31) <= part < 1 << 31 for part in each):
                each_bytes = np.array(each, np.int32).tobytes()
        elif isinstance(each, np.ndarray) and each.dtype.kind == "i":
            each_bytes = each.astype(np.int32).tobytes()
        else:
            each_bytes = b""
        if needle in each_bytes:
            found.append(type(each).__name__)
        for part in gc.get_referents(each):
            if id(part) not in seen and not isinstance(part, skipped):
                seen.add(id(part))
                waiting.append(part)
    return found


@pytest.mark.parametrize("how", ["private", None])
def test_no_object_holds_a_token_sequence_of_a_forgotten_private_request(
    load: Load, contextual_files: PairFiles, tmp_path: Path, how: str | None
) -> None:
    """It was read by drafts and n-grams, and moved to the memory for prompts by other texts."""
    engine = load_with_states(load, contextual_files, tmp_path, parallel=1)
    marker = [41, 77, 12, 93, 58, 26, 81, 64]
    secret = [*TEXT[:40], *marker, *TEXT[40:]]
    answer = engine.ask(secret, 24, speculative=drafting(3), private=True).all_tokens
    engine.ask([*answer, 5, 6], 8, private=True)
    for first in (401, 402, 403):
        engine.ask([first, *TEXT[:-90]], 8)
    for lane in engine.pair.lanes:  # as when the context is full
        while lane.slots.evict():
            pass
    assert find_tokens(engine, marker)
    engine.engine.forget(how)
    engine.answers.clear()  # the test's own
    assert find_tokens(engine.engine, marker) == []
    engine.pair.close()
    assert not any(
        np.array(marker, np.int32).tobytes() in path.read_bytes() for path in tmp_path.rglob("*.*")
    )


@on_the_same_machines
def test_anonymous_prompt_is_not_read_again_after_a_restart(
    load: Load, contextual_files: PairFiles, tmp_path: Path
) -> None:
    """A second prompt with the same beginning is not read again either.

    Private requests, those of editors and those without a cache leave nothing on disk.
    """
    engine = load_with_states(load, contextual_files, tmp_path, parallel=4)
    engine.ask(TEXT, 4)
    engine.ask([401, *TEXT[:-90]], 4, private=True)
    engine.ask([402, *TEXT[:-90]], 4, priority="editor")
    engine.ask([403, *TEXT[:-90]], 4, cache_prompt=False)
    engine.pair.close()
    assert [path.parent.name for path in tmp_path.glob("*/*.state")] == [ANONYMOUS_CLIENTS]

    engine = load_with_states(load, contextual_files, tmp_path, parallel=2)
    assert {len(tokens) for _, tokens in engine.pair.memory.texts} == {len(TEXT) + 4}
    longer = [*TEXT, 5, 6, 7]
    started = [engine.start(prompt, 8) for prompt in (longer, [*TEXT, 8, 9])]
    engine.finish()
    for request in started:
        answer = engine.answers[request]
        assert answer.done.timings.cache_n >= len(TEXT)
        prompt = answer.all_tokens[: answer.done.prompt_tokens]
        anew = engine.ask(prompt, 8, cache_prompt=False).tokens
        assert_alike(contextual_files.target, prompt, answer.tokens, anew)
    engine.engine.forget(None)
    engine.pair.close()
    assert not list(tmp_path.glob("*/*"))


conversations = st.sampled_from(["aa", "bb", ANONYMOUS_CLIENTS, None, "../x"])
remembered = st.lists(
    st.tuples(conversations, st.lists(st.integers(0, 9), min_size=1, max_size=2 * MIN_TOKENS)),
    max_size=8,
)


@given(st.lists(remembered, min_size=1, max_size=3), st.integers(0, 5 * MIN_TOKENS))
def test_texts_to_draft_from_are_those_of_the_last_save(
    saves: list[list[tuple[str | None, list[int]]]], limit: int
) -> None:
    """They are those of long conversations, in order of their latest text; a limit leaves the latest."""
    with tempfile.TemporaryDirectory() as folder:
        for texts in saves:
            Disk(Path(folder)).states.save_texts(texts)
        held: dict[str, list[list[int]]] = {}
        for name, text in saves[-1]:
            if name is not None and name != "../x":
                held[name] = [*held.pop(name, []), text]
        long = {n: k for n, k in held.items() if sum(map(len, k)) + len(k) - 1 >= MIN_TOKENS}
        loaded = Disk(Path(folder)).states.load_texts(1 << 20, 10)
        assert loaded == [(name, text) for name, kept in long.items() for text in kept]
        latest = Disk(Path(folder)).states.load_texts(limit, 10)
        assert latest == loaded[len(loaded) - len(latest) :]
        assert sum(len(text) for _, text in latest) <= limit
        for _, text in Disk(Path(folder)).states.load_texts(1 << 20, 9):  # a smaller vocabulary
            assert 9 not in text


@given(st.data())
def test_damaged_texts_are_not_used(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        disk.states.save_texts([("aa", TEXT), ("bb", TEXT)])
        [path] = (Path(folder) / "aa").glob("*")
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        assert Disk(Path(folder)).states.load_texts(1 << 20, 1 << 20) == [("bb", TEXT)]


def test_queue_for_a_slow_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "MAX_QUEUED_BYTES", 5000)
    disk = Disk(tmp_path / "states")
    released, write_file = threading.Event(), disk.states._write_file

    def write_when_released(*arguments: object) -> None:
        released.wait(PATIENCE)
        write_file(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.states, "_write_file", write_when_released)
    alive = []
    for number in range(20):
        body = np.zeros(2000, np.uint8)
        alive.append(weakref.ref(body))
        disk.states.save_dropped(Prefix([number, *TEXT], body, conversation=f"{number:04x}"))
        del body
    assert sum(reference() is not None for reference in alive) <= 3
    released.set()
    disk.states.close()
    assert disk.names() == ["0000", "0001"]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("forgotten", "remaining"), [("ab12", ["cd34"]), (None, [])])
def test_queued_request_of_a_forgotten_conversation_is_not_saved(
    load: Load,
    contextual_files: PairFiles,
    tmp_path: Path,
    forgotten: str | None,
    remaining: list[str],
    cached: bool,
) -> None:
    """The request is answered nevertheless."""
    engine = load_with_states(load, contextual_files, tmp_path, parallel=1)
    requests = ("ab12", TEXT), ("cd34", TEXT[::-1]), ("ab12", TEXT)
    ids = [engine.start(t, 4, conversation=name, cache_prompt=cached) for name, t in requests]
    engine.admit()  # the first one runs, the others wait
    engine.engine.forget(forgotten)
    engine.finish()
    assert all(engine.answers[request].done.completion_tokens == 4 for request in ids)
    engine.pair.close()
    assert sorted({file.parent.name for file in tmp_path.glob("*/*")}) == remaining
