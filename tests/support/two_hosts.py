"""Two hosts on one machine: network namespaces, and a link between them that has a delay and can be cut.

A namespace belongs to a thread, so a host is a thread: its sockets and processes are on that host, whoever
uses them later. The kernel need not be able to delay packets, since they go through TUN devices and this
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TUN = Path("/dev/net/tun")
# The last two addresses belong to one host.
LOCAL_ADDRESS, REMOTE_ADDRESS, OTHER_REMOTE_ADDRESS = "10.77.0.1", "10.77.0.2", "10.77.0.3"


class Host:
    """A host with addresses of its own. Raises OSError if this machine does not allow that."""

    def __init__(self, *addresses: str) -> None:
        self._thread = ThreadPoolExecutor(1)
        try:
            self.device = self.do(lambda: _create_namespace(addresses))
        except BaseException:
            self._thread.shutdown()
            raise

    def do(self, function: Callable[[], T]) -> T:
        """Run a function on this host."""
        return self._thread.submit(function).result()

    def close(self) -> None:
        os.close(self.device)
        self._thread.shutdown()


def _create_namespace(addresses: tuple[str, ...]) -> int:
    """Create a namespace for this thread; return the other end of its device."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None or unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace")
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"far", _IFF_TUN | _IFF_NO_PI))
        commands = [f"addr add {address}/24 dev far" for address in addresses]
        for command in [*commands, "link set far up", "link set lo up"]:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        os.close(device)
        raise OSError(f"no device: {error}") from None
    return device


class Link:
    """A link between two hosts. delay: seconds each way."""

    def __init__(self, first_host: Host, second_host: Host) -> None:
        self.delay = 0.0
        self._devices = {
            first_host.device: second_host.device,
            second_host.device: first_host.device,
        }
        self._cut = False
        self._ends = False
        self._wake, self._waker = os.pipe()
        self._heeded = threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def cut(self) -> None:
        """Lose every packet from now on, without notice. Packets sent before still arrive."""
        self._tell(b"-")

    def heal(self) -> None:
        self._tell(b"+")

    def close(self) -> None:
        self._tell(b".")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def _tell(self, word: bytes) -> None:
        self._heeded.clear()
        os.write(self._waker, word)
        self._heeded.wait()

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # (due, number, device, packet)
        count = 0
        while not self._ends:
            remaining = waiting[0][0] - time.monotonic() if waiting else None
            readable, _, _ = select.select(
                [self._wake, *self._devices],
                [],
                [],
                None if remaining is None else max(remaining, 0),
            )
            for device, target in self._devices.items():
                with contextlib.suppress(BlockingIOError):
                    while packet := os.read(device, 1 << 16):
                        count += 1
                        if not self._cut:
                            due = time.monotonic() + self.delay
                            heapq.heappush(waiting, (due, count, target, packet))
            if self._wake in readable:
                self._heed(os.read(self._wake, 1))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                with contextlib.suppress(BlockingIOError):
                    os.write(target, packet)

    def _heed(self, word: bytes) -> None:
        self._cut, self._ends = word == b"-", word == b"."
        self._heeded.set()


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Link]]:
    """Yield two hosts and their link. Raises OSError if this machine does not allow that."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for addresses in ((LOCAL_ADDRESS,), (REMOTE_ADDRESS, OTHER_REMOTE_ADDRESS)):
            hosts.append(Host(*addresses))
            stack.callback(hosts[-1].close)
        link = Link(*hosts)
        stack.callback(link.close)
        yield hosts[0], hosts[1], link
