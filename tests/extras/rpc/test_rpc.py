"""A pair with layers on another machine, through the daemon, and the RPC worker's safeguards."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.engine.llama.rpc import find_problem, has_rpc_backend
from tests.support.daemons import RunningDaemon, temporary_home, wait_for
from tests.support.patience import PATIENCE
from tests.support.rpc import HELLO, free_port, rpc_worker
from tests.support.users import NOBODY, visit

# A fake ssh: it prints its arguments, echoes one connection to its end of the tunnel, and exits.
SSH = """
import json, os, socket, sys, time
words = sys.argv[1:]
end = words[words.index("-L") + 1].rsplit(":", 2)[0]
with socket.socket(socket.AF_UNIX if end.startswith("/") else socket.AF_INET) as server:
    server.bind(end if end.startswith("/") else ("127.0.0.1", int(end.rsplit(":", 1)[1])))
    server.listen()
    print(json.dumps(words), flush=True)
    if end.startswith("/"):
        with server.accept()[0] as connection:
            connection.sendall(connection.recv(100))
        time.sleep(1)  # the relay ends with this process
sys.exit(7)
"""
QUESTION = "What does shutil.copytree do?"
needs_rpc = pytest.mark.skipif(
    not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC"
)


@needs_rpc
def test_a_lost_machine_fails_one_answer_and_is_left_out_then() -> None:
    with temporary_home() as home, rpc_worker() as (endpoint, worker):
        home.environment["LOCALSPEC_CONTEXT"] = "512"
        table = home.root / "config" / "models.toml"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(f'[pairs.builtin]\nrpc = ["{endpoint}"]\n')
        RunningDaemon(home)
        messages = [{"role": "user", "content": QUESTION}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 16}
        remote_answer = home.request("POST", "/v1/chat/completions", body)
        assert remote_answer.status == 200, remote_answer.body
        assert endpoint in home.run("show", "builtin").stdout
        assert home.status()["pair"]["backend"] == f"cpu + {endpoint}"
        worker.kill()
        worker.wait()
        lost = home.request("POST", "/v1/chat/completions", {**body, "max_tokens": 8})
        if lost.status != 200:  # measuring in idle time may have met the loss before
            assert lost.status == 500
            assert "is gone" in lost.error["message"]
        local_answer = home.request("POST", "/v1/chat/completions", body)
        assert local_answer.status == 200, local_answer.body
        assert local_answer.text == remote_answer.text
        assert endpoint in home.status()["pair"]["note"]
        assert home.status()["pair"]["backend"] == "cpu"


def test_a_tunnel_is_closed_to_other_users(tmp_path: Path) -> None:
    with temporary_home() as home:
        for address in ("tower", "0.0.0.0:1", "::"):
            assert "IPv4 address" in home.refused(
                "rpc-worker", "--listen-insecure", address, code=2
            )
        ssh = tmp_path / "ssh"
        ssh.write_text(f"#!{sys.executable}\n{SSH}")
        ssh.chmod(0o755)
        home.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        port = free_port()
        command = [sys.executable, "-m", "localspec", "rpc-worker", "--ssh", "me@tower"]
        with subprocess.Popen(
            [*command, "--port", str(port)], env=home.environment, stdout=subprocess.PIPE, text=True
        ) as tunnel:
            assert tunnel.stdout
            *options, host, command_line = json.loads(tunnel.stdout.readline())
            socket_path = options[-1].removesuffix(f":127.0.0.1:{port}")
            started = f"localspec rpc-worker --port {port}"
            assert (options[-2], host, command_line) == ("-L", "me@tower", started)
            if sys.platform.startswith("linux"):
                # ssh listens on a private Unix socket, and the relay listens on the port.
                assert "StreamLocalBindMask=0177" in options
                assert Path(socket_path).parent == home.root / "run"
                assert stat.S_IMODE(Path(socket_path).parent.stat().st_mode) == 0o700
                if os.getuid() == 0:
                    assert visit(port, NOBODY) == f"{NOBODY} b''"
                assert visit(port, os.getuid()) == f"{os.getuid()} b'hello'"
            assert tunnel.wait(PATIENCE) == 7  # the exit code of ssh
        assert home.run("rpc-worker", "--ssh=-oProxyCommand=x").returncode == 2


@needs_rpc
def test_a_worker_on_the_loopback_serves_only_its_user() -> None:
    """It prints a warning where the system cannot keep other users out."""
    with temporary_home() as home:
        port = free_port()
        command = [sys.executable, "-m", "localspec", "rpc-worker", "--port", str(port)]
        with subprocess.Popen(
            command, env=home.environment, stderr=subprocess.PIPE, text=True
        ) as worker:
            try:
                wait_for(lambda: not find_problem(f"127.0.0.1:{port}"), "a worker that answers")
                has_proc = sys.platform.startswith("linux")
                sockets = list_sockets(worker.pid, port) if has_proc else []
                answer_to_other_user = visit(port, NOBODY, HELLO) if os.getuid() == 0 else ""
            finally:
                worker.kill()
            assert worker.stderr
            stderr = worker.stderr.read()
        if "DANGER" in stderr:
            assert f"every user of this machine can reach 127.0.0.1:{port}" in stderr
        else:
            # Only the relay's, because llama.cpp listens on another loopback address.
            assert len(sockets) == 1
            assert answer_to_other_user in ("", f"{NOBODY} b''")


def list_sockets(pid: int, port: int) -> list[str]:
    """Return the lines of this machine's listening sockets at a port, if they are the process's."""
    own_sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            own_sockets.add(str(link.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
    return [row[9] for row in listening if f"socket:[{row[9]}]" in own_sockets]


@needs_rpc
def test_a_port_in_use_is_reported() -> None:
    with rpc_worker() as (endpoint, _), temporary_home() as home:
        assert "cannot be served on" in home.refused("rpc-worker", "--port", endpoint.split(":")[1])
