"""The store: records, sharing, damage, own files, and the description of a pair."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.errors import (
    BadGguf,
    Conflict,
    Damaged,
    DiskFull,
    InvalidRequest,
    ModelNotFound,
    NotMatched,
    RecordTooNew,
    StoreError,
    UnsafeModel,
    UnsafePath,
)
from localspec.protocol.pairs import CollectedView, TemplateView
from localspec.registry.header.fit import FreeMemory, LoadOptions
from localspec.registry.header.gguf import FileSource, read_header
from localspec.registry.header.model import Traits, read_local_model, read_traits
from localspec.registry.store import files, integrity
from localspec.registry.store.local import (
    add_own_pair,
    describe_pair,
    recall_record,
    refresh_own_pair,
)
from localspec.registry.store.store import Part, Record, Store, StoredModel
from tests.registry.pulling import flip_byte
from tests.support.gguf_files import BOOL, STRING, U32, Gguf, model, sha256

TARGET = model(layers=4, seed=1)
DRAFT = model(layers=1, seed=2)
FREE = FreeMemory(1 << 40)


def put_blob(store: Store, data: bytes, file: str) -> StoredModel:
    store.prepare()
    path = store.blob(sha256(data))
    path.write_bytes(data)
    mtime = path.stat().st_mtime_ns
    part = Part(file=file, size=len(data), sha256=sha256(data), checked=mtime)
    return StoredModel(parts=(part,), architecture="llama", repo="own/x")


def put_pair(store: Store, name: str, target: bytes, draft: bytes) -> Record:
    record = Record(
        name=name,
        target=put_blob(store, target, "target.gguf"),
        draft=put_blob(store, draft, "draft.gguf"),
    )
    store.put(record)
    return record


@pytest.fixture
def record(store: Store) -> Record:
    return put_pair(store, "p", TARGET.data(), DRAFT.data())


def test_a_record_comes_back(store: Store, record: Record) -> None:
    assert store.get("p") == record
    assert store.listing().records == (record,)
    assert integrity.ensure_ready(store, "p") == record
    target, draft = store.model_paths(record)
    assert target.read_bytes() == TARGET.data()
    assert draft is not None
    assert draft.read_bytes() == DRAFT.data()
    assert record.size == len(TARGET.data()) + len(DRAFT.data())


def test_reading_an_empty_store_does_not_create_it(store: Store) -> None:
    assert store.listing().records == ()
    with pytest.raises(ModelNotFound, match="localspec pull p"):
        store.get("p")
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["../x", "", "A", "a/b", "a" * 65, ".hidden"])
def test_a_path_is_no_valid_name(store: Store, name: str) -> None:
    with pytest.raises(ModelNotFound):
        store.get(name)


def test_the_description_of_a_pair_is_complete(store: Store, record: Record) -> None:
    details = describe_pair(store, store.get("p"), FREE, LoadOptions(1024))
    assert details.target.architecture == "llama"
    assert details.target.layers == 4
    assert details.draft is not None
    assert details.draft.cache == 1024 * (4 + 4) * 2
    assert details.matched
    views = (details.target, details.draft)
    assert details.needed > sum(view.weights + view.cache + view.compute for view in views)
    assert describe_pair(store, store.get("p"), FREE, LoadOptions(10**6)).context == 4096, (
        "the longest context of the target"
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the paths of all files that are read from now on, once for each piece."""
    paths: list[Path] = []
    read = FileSource.read

    def counted(self: FileSource, offset: int, size: int) -> bytes:
        paths.append(self.path)
        return read(self, offset, size)

    monkeypatch.setattr(FileSource, "read", counted)
    return paths


def test_a_pair_is_read_again_only_after_its_files_have_changed(
    store: Store, tmp_path: Path, reads: list[Path]
) -> None:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    target.write_bytes(TARGET.data())
    draft.write_bytes(DRAFT.data())
    add_own_pair(store, "mine", target, draft)

    def describe() -> tuple[int, int]:
        details = describe_pair(store, store.get("mine"), FREE, LoadOptions())
        assert details.draft is not None
        assert details.matched
        return details.target.layers, details.draft.layers

    assert describe() == (4, 1)
    reads.clear()
    for _ in range(3):
        assert describe() == (4, 1)
    assert reads == []
    replaced = tmp_path / "other.gguf"
    replaced.write_bytes(model(layers=6, seed=1).data())
    state = target.stat()
    os.utime(replaced, ns=(state.st_atime_ns, state.st_mtime_ns))
    replaced.rename(target)  # a file of the same time
    assert describe() == (6, 1)
    assert target in reads
    draft.write_bytes(model(layers=2, seed=2).data())
    assert describe() == (6, 2)
    draft.unlink()
    with pytest.raises(BadGguf, match=r"draft\.gguf"):
        describe()


def test_a_pair_of_plain_files_is_read_again_only_after_they_have_changed(
    tmp_path: Path, reads: list[Path]
) -> None:
    target = tmp_path / "target.gguf"
    target.write_bytes(TARGET.data())
    first = recall_record("files", target, None)
    reads.clear()
    assert recall_record("files", target, None) == first
    assert reads == []
    target.write_bytes(model(layers=5, seed=1).data())
    assert recall_record("files", target, None).target.parts != first.target.parts
    assert reads


def test_the_description_has_the_metadata_of_the_file(store: Store, tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.role }}{% endfor %}"
    file = (
        model(layers=2)
        .put("general.file_type", U32, 15)
        .put("general.license", STRING, "other")
        .put("general.license.name", STRING, "A Licence")
        .put("general.license.link", STRING, "https://example.org/licence")
        .put("tokenizer.chat_template", STRING, template)
        .put("llama.context_length", U32, 10_000)
    )
    for index, text in enumerate(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), start=5):
        assert not file_traits(file, tmp_path).fim
        file = file.token(index, text)
    traits = file_traits(file, tmp_path)
    assert traits.quantization == "Q4_K_M"
    assert traits.licence == "other, A Licence, https://example.org/licence"
    assert traits.fim
    assert traits.types.keys() == {"F16", "F32"}
    assert sum(traits.types.values()) == read_local_model(tmp_path / "m.gguf").weights
    assert traits.template == template_of(template, tools=True, system=True)
    add_own_pair(store, "mine", tmp_path / "m.gguf")
    mine = store.get("mine")
    by_context = {
        estimate.context: estimate.needed
        for estimate in describe_pair(store, mine, FREE, LoadOptions()).contexts
    }
    assert list(by_context) == [4096, 8192, 10_000]
    assert list(by_context.values()) == sorted(set(by_context.values()))
    assert by_context[8192] == describe_pair(store, mine, FREE, LoadOptions(8192)).needed
    bare = file_traits(model(), tmp_path)
    assert (bare.quantization, bare.licence, bare.template, bare.fim) == ("F16", "", None, False)


@pytest.mark.parametrize(
    ("text", "tools", "system"),
    [
        ("{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{% endfor %}", False, True),
        ("{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}", False, True),
        ("{{ raise_exception('System role not supported') }}{{ m.role }}", False, False),
        ("{% if m['role'] == 'user' %}{{ m.content }}{% endif %}{{ tools }}", True, False),
    ],
)
def test_the_features_of_a_template_are_detected(
    text: str, tools: bool, system: bool, tmp_path: Path
) -> None:
    template = file_traits(model().put("tokenizer.chat_template", STRING, text), tmp_path).template
    assert template == template_of(text, tools=tools, system=system)


def template_of(text: str, *, tools: bool, system: bool) -> TemplateView:
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return TemplateView(sha256, len(text), tools, system, text)


def file_traits(file: Gguf, folder: Path) -> Traits:
    return read_traits([read_header(FileSource(file.write(folder / "m.gguf")))])


# Removing pairs.


def test_remove_frees_the_files(store: Store, record: Record) -> None:
    removed = integrity.remove_pair(store, "p")
    assert removed.freed == record.size
    assert not list(store.blobs.iterdir())
    assert not store.listing().records


def test_remove_keeps_what_another_pair_needs(store: Store, record: Record) -> None:
    put_pair(store, "q", model(seed=9).data(), DRAFT.data())
    removed = integrity.remove_pair(store, "p")
    assert removed.freed == len(TARGET.data())
    assert removed.kept == ("draft.gguf (used by q)",)
    assert integrity.ensure_ready(store, "q").draft is not None


def test_a_pair_in_use_is_not_removed(store: Store, record: Record) -> None:
    with pytest.raises(Conflict, match="in use"):
        integrity.remove_pair(store, "p", in_use=lambda name: name == "p")
    assert integrity.ensure_ready(store, "p") == record


def test_no_file_is_deleted_while_a_pull_runs(store: Store, record: Record) -> None:
    with store.pulling():
        with pytest.raises(Conflict, match="A pull is running"):
            integrity.collect_garbage(store)
        assert integrity.remove_pair(store, "p").freed == 0
    assert integrity.collect_garbage(store).freed > 0
    assert not list(store.blobs.iterdir())


def test_collect_deletes_what_no_pair_needs(store: Store, record: Record) -> None:
    put_blob(store, b"orphan" * 1000, "o.gguf")
    (store.parts / "x.part").write_bytes(b"x" * 5000)
    (store.parts / "x.journal").write_bytes(b"x")
    (store.pairs / ".p.json.1.2.tmp").write_bytes(b"x")
    planned = integrity.collect_garbage(store, dry_run=True)
    assert len(planned.files) == 4
    assert len(list(store.parts.iterdir())) == 3
    assert integrity.collect_garbage(store) == CollectedView(
        planned.freed, planned.files, dry_run=False
    )
    assert integrity.ensure_ready(store, "p") == record
    assert integrity.collect_garbage(store).files == ()


def test_collect_deletes_nothing_while_a_record_is_unreadable(store: Store, record: Record) -> None:
    (store.pairs / "p.json").write_text('{"version": 99}')
    with pytest.raises(Conflict, match="Nothing was deleted"):
        integrity.collect_garbage(store)


# Damaged files.


def test_a_flipped_byte_fails_verify_and_refuses_the_load(store: Store, record: Record) -> None:
    """The next load notices the changed modification time, and the damage is remembered."""
    flip_byte(store.blob(record.target.parts[0].sha256))
    with pytest.raises(Damaged, match=r"damaged.* Run: localspec pull p$"):
        integrity.ensure_ready(store, "p")
    reports = integrity.verify(store, "p")
    assert [bool(report.problem) for report in reports] == [True, False]
    assert "SHA-256" in reports[0].problem


def test_damage_found_by_verify_is_remembered(store: Store, record: Record) -> None:
    """This holds even if the modification time did not change, as with a failing disk."""
    path = store.blob(record.target.parts[0].sha256)
    mtime_before = path.stat().st_mtime_ns
    flip_byte(path)
    os.utime(path, ns=(mtime_before, mtime_before))
    integrity.verify(store, "p")
    with pytest.raises(Damaged):
        integrity.ensure_ready(store, "p")


def test_a_cut_or_missing_file_refuses_the_load(store: Store, record: Record) -> None:
    path = store.blob(record.target.parts[0].sha256)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"has \d+ bytes but should have"):
        integrity.ensure_ready(store, "p")
    path.unlink()
    with pytest.raises(Damaged, match="is missing"):
        integrity.ensure_ready(store, "p")
    assert "is missing" in integrity.verify(store, "p")[0].problem


def test_a_link_in_place_of_a_file_is_refused(store: Store, record: Record, tmp_path: Path) -> None:
    path = store.blob(record.target.parts[0].sha256)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="not a file"):
        integrity.ensure_ready(store, "p")
    where = store.pairs / "p.json"
    where.rename(tmp_path / "p.json")
    where.symlink_to(tmp_path / "p.json")
    with pytest.raises(UnsafePath):
        store.get("p")
    assert store.listing().problems


def test_progress_of_verify_runs_from_nothing_to_all(store: Store, record: Record) -> None:
    updates: list[tuple[int, int]] = []
    integrity.verify(store, "p", lambda checked, total: updates.append((checked, total)))
    assert updates[-1] == (record.size, record.size)
    assert updates == sorted(updates)


def test_a_power_cut_before_the_rename_leaves_nothing(
    store: Store, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        put_pair(store, "q", TARGET.data(), DRAFT.data())
    assert [stored.name for stored in store.listing().records] == ["p"]
    assert not store.listing().problems


def test_a_full_disk_keeps_the_old_record(
    store: Store, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        store.put(record)
    monkeypatch.undo()
    assert integrity.ensure_ready(store, "p") == record
    assert [path.name for path in store.pairs.iterdir()] == ["p.json"]


# Versions of records.


def test_a_newer_record_is_refused_and_untouched(store: Store, record: Record) -> None:
    path = store.pairs / "p.json"
    text = json.dumps({"version": 2, "name": "p", "new": ["shape"]})
    path.write_text(text)
    for action in (Store.get, integrity.ensure_ready, integrity.verify, integrity.remove_pair):
        with pytest.raises(RecordTooNew, match="newer localspec"):
            action(store, "p")
    with pytest.raises(RecordTooNew):
        store.put_new(record)
    assert "newer localspec" in store.listing().problems[0]
    assert path.read_text() == text


BROKEN = [b"", b"{", b"[]", b'{"version": 1}', b'{"version": "x"}', b'{"\xf0air": 1}']


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_record_is_reported_and_can_be_replaced(
    store: Store, record: Record, content: bytes
) -> None:
    (store.pairs / "p.json").write_bytes(content)
    with pytest.raises(StoreError, match="is broken"):
        store.get("p")
    assert len(store.listing().problems) == 1
    store.put_new(record)
    assert integrity.ensure_ready(store, "p") == record


def test_a_record_without_a_hash_is_verified_again(store: Store, tmp_path: Path) -> None:
    path = TARGET.write(tmp_path / "t.gguf")
    added = add_own_pair(store, "p", path, hash_now=False)
    assert added.target.parts[0].sha256 == ""
    ready = integrity.ensure_ready(store, "p")
    assert ready.target.parts[0].sha256 == sha256(TARGET.data())
    assert ready.target.parts[0].checked == path.stat().st_mtime_ns
    assert store.get("p") == ready


# Own files.


def test_own_files_are_used_in_place(store: Store, tmp_path: Path) -> None:
    target, draft = TARGET.write(tmp_path / "t.gguf"), DRAFT.write(tmp_path / "d.gguf")
    record = add_own_pair(store, "mine", target, draft)
    assert record.draft is not None
    assert record.source == "own"
    assert store.model_path(integrity.ensure_ready(store, "mine").target) == target
    assert not list(store.blobs.iterdir())
    with pytest.raises(Conflict, match="already"):
        add_own_pair(store, "mine", target)
    removed = integrity.remove_pair(store, "mine")
    assert removed.freed == 0
    assert target.exists()
    assert draft.exists()


def test_own_files_that_changed_are_hashed_again(store: Store, tmp_path: Path) -> None:
    target = TARGET.write(tmp_path / "t.gguf")
    add_own_pair(store, "mine", target)
    target.touch()
    assert (
        integrity.ensure_ready(store, "mine").target.parts[0].checked == target.stat().st_mtime_ns
    )
    flip_byte(target)
    with pytest.raises(Damaged, match="Restore it, or accept it as it is: localspec add mine"):
        integrity.ensure_ready(store, "mine")


def test_a_replaced_own_file_is_read_again_with_a_note(store: Store, tmp_path: Path) -> None:
    """The user has put a newer version there; nothing is damaged."""
    target, draft = TARGET.write(tmp_path / "t.gguf"), DRAFT.write(tmp_path / "d.gguf")
    added = add_own_pair(store, "mine", target, draft, roles=("fim",))
    assert (integrity.find_quick_problem(store, added), refresh_own_pair(store, added)) == (
        "",
        (added, ""),
    )
    for newer in (model(layers=3, seed=7), model(layers=3, seed=8)):
        newer.write(target)  # first another size, then the same size
        assert "t.gguf has changed" in integrity.find_quick_problem(store, store.get("mine"))
        record, news = refresh_own_pair(store, store.get("mine"))
        assert news == "t.gguf has changed since the pair was added or last used."
        assert (record.roles, record.created) == (("fim",), added.created)
        ready = integrity.ensure_ready(store, "mine")
        assert ready.target.parts[0].sha256 == sha256(newer.data())
        assert (integrity.find_quick_problem(store, ready), refresh_own_pair(store, ready)) == (
            "",
            (ready, ""),
        )
    target.touch()  # the same content
    assert refresh_own_pair(store, store.get("mine"))[1] == ""
    model().put("tokenizer.ggml.add_bos_token", BOOL, True).write(target)
    with pytest.raises(NotMatched):
        refresh_own_pair(store, store.get("mine"))
    target.write_bytes(newer.data()[:-4000])
    with pytest.raises(BadGguf, match="is truncated"):
        refresh_own_pair(store, store.get("mine"))
    target.unlink()
    target.mkdir()
    assert "is not a file" in integrity.find_quick_problem(store, store.get("mine"))
    target.rmdir()
    target.symlink_to(target)  # the same kind of error as a folder without permission
    assert "t.gguf is missing" in integrity.find_quick_problem(store, store.get("mine"))
    target.unlink()
    with pytest.raises(Damaged, match="is missing"):
        integrity.ensure_ready(store, refresh_own_pair(store, store.get("mine"))[0].name)


def test_the_quick_check_finds_missing_and_known_damaged_files(
    store: Store, record: Record
) -> None:
    assert integrity.find_quick_problem(store, record) == ""
    path = store.blob(record.target.parts[0].sha256)
    mtime_before = path.stat().st_mtime_ns
    flip_byte(path)
    os.utime(path, ns=(mtime_before, mtime_before))
    integrity.verify(store, "p")
    assert integrity.find_quick_problem(store, store.get("p")).endswith(
        "was found damaged. Run: localspec pull p"
    )
    path.unlink()
    assert "is missing" in integrity.find_quick_problem(store, store.get("p"))


def test_one_file_twice_is_refused_and_a_larger_draft_is_noted(
    store: Store, tmp_path: Path
) -> None:
    target, draft = TARGET.write(tmp_path / "t.gguf"), DRAFT.write(tmp_path / "d.gguf")
    link, copy = tmp_path / "link.gguf", tmp_path / "copy.gguf"
    link.symlink_to(target)
    copy.write_bytes(target.read_bytes())
    for same in (target, link, copy):
        with pytest.raises(InvalidRequest, match="the same file"):
            add_own_pair(store, "mine", target, same)
    assert not store.listing().records
    small, large = sorted((target, draft), key=lambda path: path.stat().st_size)
    assert not any("swapped" in note for note in add_own_pair(store, "right", large, small).notes)
    (note,) = (note for note in add_own_pair(store, "mine", small, large).notes if "larger" in note)
    command = f"localspec add mine --target {large} --draft {small} --replace"
    assert note.endswith(f"If the two are swapped: {command}")


def test_own_files_get_the_same_checks(store: Store, tmp_path: Path) -> None:
    target = TARGET.write(tmp_path / "t.gguf")
    foreign = DRAFT.put("tokenizer.ggml.add_bos_token", BOOL, True).write(tmp_path / "d.gguf")
    with pytest.raises(NotMatched, match="add_bos_token is false in the target and true"):
        add_own_pair(store, "mine", target, foreign)
    with pytest.raises(InvalidRequest):
        add_own_pair(store, "My Pair", target)
    with pytest.raises(BadGguf, match="does not exist"):
        add_own_pair(store, "mine", tmp_path / "absent.gguf")
    data = target.read_bytes()
    target.write_bytes(data[:-300] + bytes(300))
    with pytest.raises(UnsafeModel, match="ends in zeros"):
        add_own_pair(store, "mine", target)
    assert not store.listing().records


HASH = "5" * 64


@given(
    sha256=st.one_of(
        st.sampled_from(
            ["../../mine", "/mine", "..", ".", "", HASH.upper().replace("5", "A"), HASH + "\n",
             HASH[:-1], f"{HASH}/..", f"../blobs/{HASH}", "٥" * 64, "\0"]
        ),
        st.text(max_size=70),
    ),
    path=st.sampled_from(["", "mine", "../mine/a", "/nowhere/a\0"]),
    file=st.sampled_from(["a.gguf", "..", "", "a\0"]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_record_never_reaches_files_outside_the_store(
    tmp_path_factory: pytest.TempPathFactory, sha256: str, path: str, file: str
) -> None:
    root = tmp_path_factory.mktemp("store")
    mine = root / "mine"
    mine.mkdir()
    (mine / "a").touch()
    (root / "mine.gguf").touch()
    store = Store(root / "models")
    store.prepare()
    part = Part(file=file, size=0, sha256=sha256, path=path)
    model = StoredModel(parts=(part,), architecture="llama")
    (store.pairs / "p.json").write_bytes(msgspec.json.encode(Record(name="p", target=model)))
    try:
        integrity.remove_pair(store, "p")
    except StoreError:
        assert (store.pairs / "p.json").exists()
    else:
        assert re.fullmatch(r"[0-9a-f]{64}", sha256)
        assert not path
    assert (mine / "a").exists()
    assert (root / "mine.gguf").exists()
    assert store.blobs.is_dir()


def test_hashing_a_pipe_fails_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no file"):
        files.sha256_of(tmp_path / "pipe")
