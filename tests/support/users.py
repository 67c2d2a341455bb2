"""Connections of this user and of another one."""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE

NOBODY = 65_534

# Another user may not be able to read Python's own files, so everything is imported before the change.
_VISIT = """
import os, socket, sys
"".encode("idna")
uid, port = int(sys.argv[1]), int(sys.argv[2])
if uid != os.getuid():
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
visitor = socket.create_connection(("127.0.0.1", port), 20)
try:
    visitor.sendall(bytes.fromhex(sys.argv[3]))
    print(os.getuid(), visitor.recv(100))
except ConnectionError:
    print(os.getuid(), b"")
"""


def visit(port: int, uid: int, text: bytes = b"hello") -> str:
    """Connect as a user, from a process of its own; return the user and the answer.

    Only root can be another user.
    """
    command = [sys.executable, "-c", _VISIT, str(uid), str(port), text.hex()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
