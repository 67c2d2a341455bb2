"""Layers on another machine, for which a local process stands in, and machines that are missing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp
import msgspec
import pytest

from benchmarks.synthetic import Shape, write_pair
from localspec.engine.llama import gpus, rpc
from localspec.engine.llama.rpc import VERSION, find_problem, has_rpc_backend
from localspec.engine.pair.load import load_pair
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles, SpeculationSettings
from localspec.relay import is_other_user
from tests.support.heads import cycle_heads
from tests.support.pairs import expected
from tests.support.rpc import free_port, rpc_worker
from tests.support.running import Running, drafting, running, skip_on

pytestmark = pytest.mark.skipif(
    not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC"
)
PLAIN, DRAFTED = SpeculationSettings(enabled=False), SpeculationSettings(depth=4)
TIMEOUT = socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", 0)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with rpc_worker() as (endpoint, _):
        yield endpoint


# Flash attention rounds by the width of a pass, which depends on measured costs, and the tokens of this
# model have nearly equal probabilities.
SAME_ROUNDING = {"flash_attention": "off"}


@pytest.fixture(scope="module")
def remote(contextual_files: PairFiles, endpoint: str) -> Iterator[Running]:
    files = msgspec.structs.replace(contextual_files, rpc=(endpoint,))
    with running(files, **SAME_ROUNDING) as engine:
        yield engine


@pytest.fixture(scope="module")
def local(contextual_files: PairFiles) -> Iterator[Running]:
    with running(contextual_files, **SAME_ROUNDING) as engine:
        yield engine


@contextlib.contextmanager
def own_worker(files: PairFiles, **settings: Any) -> Iterator[Running]:
    """Load a pair with its target on a worker of its own, which therefore does not refuse it."""
    with (
        rpc_worker() as (endpoint, _),
        mock.patch.object(rpc, "GREETING_S", 60.0),  # this machine may be busy
        running(msgspec.structs.replace(files, rpc=(endpoint,)), **settings) as engine,
    ):
        assert not engine.pair.notes
        yield engine


def test_remote_layers_give_the_same_text(local: Running, remote: Running) -> None:
    for prompt in PROMPTS:
        for speculative in (PLAIN, DRAFTED):
            local_answer = local.ask(prompt, max_tokens=24, speculative=speculative)
            remote_answer = remote.ask(prompt, max_tokens=24, speculative=speculative)
            assert remote_answer.tokens == local_answer.tokens
    assert remote_answer.done.speculation.drafted > 0  # the draft stays on this machine


@skip_on("cuda", why="a worker is the only device of this engine")
def test_engine_with_remote_layers_counts_as_on_a_device(remote: Running) -> None:
    assert not gpus()  # this machine has none
    assert remote.pair.shared._on_gpu
    assert not remote.pair.chooses_on_device  # each row's token would need a round trip of its own
    assert not remote.pair.notes


def test_busy_worker_is_left(
    remote: Running, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.engine.llama.rpc.GREETING_S", 0.2)
    assert "one pair at a time" in find_problem(endpoint)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has all of these")
def test_cut_link_ends_the_connection(remote: Running, endpoint: str) -> None:
    """The options of the socket show it, without cutting a connection."""
    options = (socket.SOL_SOCKET, socket.SO_KEEPALIVE), TIMEOUT
    peer, values = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1])), []
    for entry in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        with socket.socket(fileno=os.dup(int(entry.name))) as link, contextlib.suppress(OSError):
            if link.getpeername() == peer:
                values.append([link.getsockopt(*option) for option in options])
    assert values
    assert all(keeps_alive and 0 < timeout <= 30_000 for keeps_alive, timeout in values), values
    assert not remote.pair.notes


def test_worker_serves_one_pair_after_the_other(cycle_files: PairFiles) -> None:
    with rpc_worker() as (endpoint, worker):
        files = msgspec.structs.replace(cycle_files, rpc=(endpoint,))
        for _ in range(2):
            with running(files) as engine:
                assert not engine.pair.notes
        worker.kill()
        worker.wait()
        with running(files) as engine:  # llama.cpp alone would end this process
            assert endpoint in engine.pair.notes[0]


def test_missing_machine_is_an_error_only_if_needed(cycle_files: PairFiles) -> None:
    missing = f"127.0.0.1:{free_port()}"
    files = msgspec.structs.replace(cycle_files, rpc=(missing,))
    with running(files) as engine:
        assert [note for note in engine.pair.notes if missing in note]
        assert engine.ask(PROMPTS[0], max_tokens=4).tokens
    settings = EngineSettings(n_ctx=512, n_threads=1, rpc_needed=True)
    with pytest.raises(LoadFailed, match=f"{missing} cannot be reached.*localspec rpc-worker"):
        load_pair(files, settings, lambda _stage, _fraction: None)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ((), "is no worker of this kind"),
        ((8, 0, 0), "speaks version 8.0.0 of the protocol"),
        ((6, 0, 0), "speaks version 6.0.0 of the protocol"),
        ((0, 0, 0), "speaks version 0.0.0 of the protocol"),
        ((7, 1, 0), "speaks version 7.1.0 of the protocol"),
        ((7, 0, 1), ""),
    ],
)
def test_other_greetings_are_reported(version: tuple[int, ...], why: str) -> None:
    answer = struct.pack("<Q4B24x", 28, *version, 0) if version else b""

    def greet() -> None:
        with server.accept()[0] as client:
            client.recv(33, socket.MSG_WAITALL)
            with contextlib.suppress(OSError):  # the reader may have closed the connection
                for at in range(len(answer)):  # as slowly as a network may deliver it
                    client.sendall(answer[at : at + 1])
                    time.sleep(0.001)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet)
        thread.start()
        problem = find_problem(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert why in problem
    assert bool(why) == bool(problem)


GREETER = """
import os, socket, sys
"".encode("idna")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    with server.accept()[0] as client:
        client.recv(33, socket.MSG_WAITALL)
        client.sendall(bytes.fromhex(sys.argv[1]))
        client.recv(1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows whose it is")
def test_a_worker_of_another_user_is_not_used() -> None:
    assert is_other_user(os.getuid() + 1)
    assert not any(map(is_other_user, (os.getuid(), 0, None)))
    answer = struct.pack("<Q4B24x", 28, *VERSION, 0, 0)
    if os.getuid() == 0:
        command = [sys.executable, "-c", GREETER, answer.hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as greeter:
            assert greeter.stdout
            problem = find_problem(f"127.0.0.1:{greeter.stdout.readline().strip()}")
        assert problem == "belongs to another user of this machine (uid 65534)"


def test_protocol_version_is_that_of_this_llama_cpp() -> None:
    header = Path(llama_cpp.__file__).parents[1] / "include" / "ggml-rpc.h"
    versions = dict(re.findall(r"define RPC_PROTO_(M\w+)_VERSION +(\d+)", header.read_text()))
    assert (int(versions["MAJOR"]), int(versions["MINOR"])) == VERSION


def test_sidecar_is_on_the_machine_of_the_targets_cache(models: Path) -> None:
    """llama.cpp would end the process if the sidecar were elsewhere."""
    files = cycle_heads(models / "heads", 0.8, "gemma4")
    with own_worker(files) as engine:
        answer = engine.ask([5], 60, speculative=drafting(3, "mtp"))
    assert answer.tokens == expected(5, 60)
    assert answer.done.speculation.accepted > 0


@pytest.mark.parametrize(("device", "served"), [("any", [7, 8]), ("cpu", [1])])
def test_worker_serves_the_configured_devices(
    monkeypatch: pytest.MonkeyPatch, device: Any, served: list[int]
) -> None:
    """The machine has two GPUs."""
    devices: list[int] = []

    def start(*arguments: Any) -> None:
        count, address = arguments[-2:]
        devices.extend((ctypes.c_void_p * count).from_address(address))

    monkeypatch.setattr(rpc, "devices", lambda *, gpus: [7, 8] if gpus else [1, 2])
    monkeypatch.setattr(rpc, "_function", lambda *_: start)
    with pytest.raises(LoadFailed, match="cannot be served on"):
        rpc.serve("127.0.0.1", 1, 1, device)
    assert devices == served


@pytest.mark.parametrize(
    ("width", "heads", "options", "used"),
    [
        (64, 4, {}, "off"),
        (64, 2, {}, "off"),
        (320, 2, {}, "off"),
        (128, 2, {}, "auto"),
        (160, 2, {}, "auto"),
        (256, 1, {}, "auto"),
        (64, 2, {"flash_attention": "on"}, "on"),
        (64, 2, {"type_kv": "q8_0"}, "auto"),
    ],
)
def test_flash_attention_is_not_chosen_where_a_worker_may_lack_it(
    tmp_path: Path, width: int, heads: int, options: dict[str, Any], used: str
) -> None:
    """llama.cpp assumes that a worker supports every operation, and a worker without one would end."""
    shape = Shape(1, width, 64, heads, 512, n_ctx=512)
    target, _ = write_pair(tmp_path, shape, shape)
    with own_worker(PairFiles("it", str(target), None), **options) as engine:
        assert engine.pair.models.settings.flash_attention == used
        assert engine.pair.models.attention == used
        assert engine.ask([5, 6], 4).tokens
