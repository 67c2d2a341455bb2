"""The relay in front of servers without a password forwards the connections of one user only."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import relay
from localspec.engine import rpc_entrance
from tests.support.patience import PATIENCE
from tests.support.users import NOBODY, visit

ROOT = Path(__file__).parents[1]
LINUX = sys.platform.startswith("linux")


class UnknownOwners(relay.SocketTables):
    """Tables in which no connection is found."""

    def peer_uid(self, connection: socket.socket) -> int | None:
        return None


@contextlib.contextmanager
def echoing(
    allowed: set[int], tables_type: type[relay.SocketTables] = relay.SocketTables
) -> Iterator[int]:
    """Yield the port of a relay in front of a server that returns what it gets."""

    def echo() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)

    tables = tables_type()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        inner = server.getsockname()
        threads = [
            threading.Thread(target=echo),
            threading.Thread(
                target=relay.forward,
                args=(listener, lambda: socket.create_connection(inner), tables, allowed),
            ),
        ]
        for thread in threads:
            thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            for server_socket in (listener, server):
                server_socket.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            tables.close()


@pytest.mark.skipif(not LINUX, reason="only Linux shows whose a connection is")
def test_the_connections_of_other_users_are_closed() -> None:
    own = os.getuid()
    with echoing({own}) as port:
        assert visit(port, own) == f"{own} b'hello'"
        if own == 0:
            assert visit(port, NOBODY) == f"{NOBODY} b''"
            assert visit(port, own) == f"{own} b'hello'"  # the relay continues
    with echoing({own + 1}) as port:
        assert visit(port, own) == f"{own} b''"
    with echoing({own}, UnknownOwners) as port:
        assert visit(port, own) == f"{own} b''"


@pytest.mark.skipif(not LINUX, reason="only Linux shows whose a connection is")
def test_a_connection_closed_by_its_program_has_no_owner() -> None:
    """The kernel lists such a connection as root's."""
    with (
        contextlib.closing(relay.SocketTables()) as tables,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        client = socket.create_connection(server.getsockname())
        with server.accept()[0] as accepted:
            client.sendall(b"left behind")
            client.shutdown(socket.SHUT_WR)
            assert tables.peer_uid(accepted) == os.getuid()
            client.close()
            assert tables.peer_uid(accepted) is None


@pytest.mark.skipif(not LINUX, reason="only Linux shows whose a connection is")
def test_an_ipv6_socket_with_an_ipv4_address_has_an_owner() -> None:
    with (
        contextlib.closing(relay.SocketTables()) as tables,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET6) as client,
    ):
        client.connect(("::ffff:127.0.0.1", server.getsockname()[1]))
        with server.accept()[0] as accepted:
            assert tables.peer_uid(accepted) == os.getuid()


@pytest.mark.skipif(not LINUX, reason="only Linux shows whose a connection is")
@pytest.mark.parametrize("seed", range(4))
def test_every_byte_is_forwarded_both_ways(seed: int) -> None:
    draw = random.Random(seed)
    chunks = [draw.randbytes(draw.choice([1, 7, 4096, 300_000, 1 << 21])) for _ in range(6)]
    with echoing({os.getuid()}) as port:
        for _ in range(2):  # one after the other
            with socket.create_connection(("127.0.0.1", port)) as client:
                received = bytearray()

                def read(client: socket.socket = client, buffer: bytearray = received) -> None:
                    while data := client.recv(1 << 16):
                        buffer += data

                reader = threading.Thread(target=read)
                reader.start()
                for chunk in chunks:
                    client.sendall(chunk)
                client.shutdown(socket.SHUT_WR)
                reader.join()
            assert bytes(received) == b"".join(chunks)


INSIDE = """
import socket, sys
from localspec import relay
outside = socket.create_server(("127.0.0.1", 0))
port = outside.getsockname()[1]
if not relay.enter_private_network():
    sys.exit("refused")
inside = socket.create_server(("127.0.0.1", port))  # the same port, of another loopback
print(port, flush=True)
mine = socket.create_connection(("127.0.0.1", port))
assert inside.accept()[0].getpeername() == mine.getsockname()
sys.stdin.read()
outside.settimeout(300)
assert outside.accept()[0].recv(5) == b"hello"  # who comes from outside does not come inside
"""


def test_no_outside_connection_reaches_a_private_network() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INSIDE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        port = process.stdout.readline().strip()
        if not port:  # without permission nothing has changed, and the program reports it
            assert process.stderr.read().strip() == "refused"
            return
        with socket.create_connection(("127.0.0.1", int(port))) as client:
            client.sendall(b"hello")
            process.stdin.close()
            assert process.wait(PATIENCE) == 0, process.stderr.read()


@pytest.mark.parametrize("missing", ["tables", "network"])
def test_a_port_that_stays_open_to_others_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    monkeypatch.setattr(relay, "enter_private_network", lambda: missing != "network")
    if missing == "tables":
        monkeypatch.setattr(relay.SocketTables, "available", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert rpc_entrance.open_entrance("127.0.0.1", port) is None
    output = capsys.readouterr().err
    assert f"every user of this machine can reach 127.0.0.1:{port}" in output
    assert "take over this account" in output
    with socket.create_server(("127.0.0.1", port)):  # llama.cpp can have it
        pass


def test_an_address_for_other_machines_is_not_relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> bool:
        raise AssertionError

    monkeypatch.setattr(relay, "enter_private_network", never)
    assert rpc_entrance.open_entrance("192.0.2.1", 50_052) is None
