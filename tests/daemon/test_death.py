"""The interpretation of a worker's end: error messages, blame and crash limits."""

from __future__ import annotations

import signal

import pytest

from localspec.daemon.worker.death import MAX_CAUSES, CrashHistory, Death, blame
from localspec.errors import PairSetAside, WorkerDied, WorkerOutOfMemory, WorkerTimeout
from localspec.protocol.frames import PairFiles


@pytest.mark.parametrize(
    ("death", "kind", "words"),
    [
        (Death("crash", -signal.SIGSEGV), WorkerDied, "signal SIGSEGV"),
        (Death("crash", 3, "GGML_ASSERT failed"), WorkerDied, "exit status 3); the next"),
        (Death("crash", 3, "GGML_ASSERT failed"), WorkerDied, "last message: GGML_ASSERT failed"),
        (Death("crash", 0), WorkerDied, "exit status 0"),
        (Death("crash", -250), WorkerDied, "exit status -250"),
        (Death("crash", -signal.SIGKILL), WorkerDied, "signal SIGKILL"),
        (Death("crash", -signal.SIGKILL, "", False), WorkerDied, "signal SIGKILL"),
        (Death("crash", -signal.SIGKILL, "", True), WorkerOutOfMemory, "smaller"),
        (Death("crash", -signal.SIGABRT, "std::bad_alloc"), WorkerOutOfMemory, "bad_alloc"),
        (Death("watchdog", -signal.SIGKILL, "", True), WorkerTimeout, "60 s"),
    ],
)
def test_a_death_becomes_an_error_that_names_the_cause(
    death: Death, kind: type[Exception], words: str
) -> None:
    error = death.error(60.0)
    assert type(error) is kind
    assert words in error.message


def test_only_faults_of_the_processor_point_to_the_kernels() -> None:
    for name in ("SIGSEGV", "SIGILL", "SIGBUS"):
        assert Death("crash", -signal.Signals[name]).may_be_from_kernels
    for death in (Death("crash", -signal.SIGABRT), Death("crash", 11), Death("unload", -11)):
        assert not death.may_be_from_kernels


SEGFAULT, ABORTED = Death("crash", -signal.SIGSEGV), Death("crash", -signal.SIGABRT)


@pytest.mark.parametrize(
    ("death", "facts", "cause"),
    [
        (SEGFAULT, {}, "kernels"),
        (SEGFAULT, {"safe_mode"}, "pair"),
        (SEGFAULT, {"drafting"}, "kernels"),
        (SEGFAULT, {"drafting", "safe_mode"}, "draft"),
        (SEGFAULT, {"drafting", "decoded"}, "draft"),
        (SEGFAULT, {"drafting", "preparing"}, "text"),
        (SEGFAULT, {"drafting", "file_changed"}, "file"),
        (ABORTED, {"drafting"}, "draft"),
        (Death("crash", -signal.SIGKILL), {"drafting"}, "pair"),
        (Death("crash", -signal.SIGABRT, "std::bad_alloc"), {"drafting"}, "pair"),
        (Death("crash", 3), {"drafting"}, "pair"),
        (Death("watchdog", -signal.SIGKILL), {"drafting"}, "pair"),
        (SEGFAULT, {"decoded"}, "pair"),
        (SEGFAULT, {"preparing"}, "text"),
        (SEGFAULT, {"preparing", "decoded", "safe_mode"}, "text"),
        (SEGFAULT, {"file_changed", "preparing"}, "file"),
        (ABORTED, {}, "pair"),
        (ABORTED, {"preparing"}, "text"),
        (ABORTED, {"file_changed"}, "pair"),
        (Death("crash", -signal.SIGILL), {"preparing"}, "kernels"),
        (Death("crash", -signal.SIGABRT, "std::bad_alloc"), {"preparing"}, "pair"),
        (Death("crash", 3), {"preparing"}, "pair"),
        (Death("watchdog", -signal.SIGKILL), {"preparing"}, "pair"),
    ],
)
def test_a_death_is_blamed_on_what_can_have_caused_it(
    death: Death, facts: set[str], cause: str
) -> None:
    names = ("file_changed", "preparing", "decoded", "safe_mode", "drafting")
    assert blame(death, **{name: name in facts for name in names}) == cause


def test_three_crashes_within_ten_minutes_set_a_cause_aside() -> None:
    history = CrashHistory()
    pair = PairFiles("a", "/a.gguf")
    for now in (0.0, 300.0, 601.0):  # the first no longer counts at 601 s
        history.record(pair, b"1", now, "why")
        history.check(b"1")
    history.record(pair, b"2", 650.0, "why")  # other settings count for themselves
    history.check(b"2")
    history.record(pair, b"1", 700.0, "why")
    with pytest.raises(PairSetAside, match=r"'a' is set aside.*why.*start --reset"):
        history.check(b"1")
    history.check(b"2")
    assert history.causes_set_aside("a") == [(b"1", pair)]
    assert history.causes_set_aside("b") == []
    history.reset()
    history.check(b"1")


def test_the_oldest_of_many_causes_is_set_aside_too() -> None:
    history = CrashHistory()
    pair = PairFiles("a", "/a.gguf")
    causes = [bytes(str(number), "ascii") for number in range(MAX_CAUSES)]
    for cause in causes:
        history.record(pair, cause, 0.0, "why")
    for now in (1.0, 2.0):
        history.record(pair, causes[0], now, "why")
    with pytest.raises(PairSetAside):
        history.check(causes[0])
    for now in (1.0, 2.0):  # none was forgotten for it
        history.record(pair, causes[1], now, "why")
    with pytest.raises(PairSetAside):
        history.check(causes[1])


def test_no_more_causes_are_remembered_than_anybody_has() -> None:
    history = CrashHistory()
    for number in range(1000):
        for now in range(3):
            history.record(PairFiles("a", "/a.gguf"), bytes(str(number), "ascii"), now, "why")
    assert len(history.causes_set_aside("a")) == MAX_CAUSES
