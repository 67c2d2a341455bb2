"""What is known of clients: how they send answers back, and how often reading ahead for them was right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from localspec.daemon.worker.clients import Clients, name_client
from localspec.protocol.frames import SentBack


@pytest.mark.parametrize(
    ("agent", "is_ours", "name"),
    [
        ("claude-cli/2.1.332 (external, cli)", False, "claude-cli /v1/messages"),
        ("OpenAI/Python 3.57.0", False, "OpenAI /v1/messages"),
        ("", False, "unknown /v1/messages"),
        ("\x1b[2J", False, "unknown /v1/messages"),
        ("anything", True, "localspec"),
    ],
)
def test_a_client_is_named_after_its_program(agent: str, is_ours: bool, name: str) -> None:
    assert name_client(agent, "/v1/messages", is_ours=is_ours) == name


def test_the_last_form_counts_and_stays_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "clients.json"
    clients = Clients(file)
    assert clients.form("a") == ""
    for sent in (SentBack("whole"), SentBack("bare", True, saved_ms=2000.0), SentBack("")):
        clients.learn("a", sent)
    clients.learn("b", SentBack("other"))
    clients.save()
    for known in (clients, Clients(file)):
        assert (known.form("a"), known.form("b")) == ("bare", "other")
        (reading,) = known.report()
        assert (reading.client, reading.right, reading.wrong) == ("a", 1, 0)
        assert reading.saved_seconds == 2.0
    clients.forget()
    assert not file.exists()
    assert clients.form("a") == ""
    assert not clients.report()


def test_a_file_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "clients.json").write_text('{"a": 3}')
    assert not Clients(tmp_path / "clients.json").report()


@pytest.mark.parametrize("seed", range(5))
def test_wrong_readings_become_rare(tmp_path: Path, seed: int) -> None:
    """Of a client that is unlike what it seems, at most a dozen of a thousand turns are read in vain."""
    rng, clients, n_read = random.Random(seed), Clients(tmp_path / "clients.json"), 0
    for _ in range(1000):
        is_read = clients.form("a") != "other"
        n_read += is_read
        clients.learn("a", SentBack(rng.choice(["bare", "whole"]), False if is_read else None))
    assert n_read < 12
    while clients.form("a") == "other":
        clients.learn("a", SentBack("bare"))
    clients.learn("a", SentBack("bare", True))
    clients.learn("a", SentBack("bare", False))
    assert clients.form("a") == "bare"
