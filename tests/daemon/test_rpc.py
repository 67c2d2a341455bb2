"""A pair with layers on another machine, through the daemon: it answers, loses the machine, and goes on."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.engine.llama.rpc import find_problem, has_rpc_backend
from tests.support.daemons import RunningDaemon, temporary_home, wait_for
from tests.support.rpc import HELLO, free_port, rpc_worker
from tests.support.users import NOBODY, visit

# Prints its words, answers one connection at its end of the tunnel with what it gets, and ends.
SSH = """
import json, os, socket, sys
words = sys.argv[1:]
end = words[words.index("-L") + 1].rsplit(":", 2)[0]
with socket.socket(socket.AF_UNIX if end.startswith("/") else socket.AF_INET) as server:
    server.bind(end if end.startswith("/") else ("127.0.0.1", int(end.rsplit(":", 1)[1])))
    server.listen()
    print(json.dumps(words), flush=True)
    if end.startswith("/"):
        with server.accept()[0] as connection:
            connection.sendall(connection.recv(100))
sys.exit(7)
"""
QUESTION = "What does shutil.copytree do?"


@pytest.mark.skipif(not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC")
def test_a_lost_machine_is_an_error_and_the_next_answer_comes_without_it() -> None:
    with temporary_home() as home, rpc_worker() as (endpoint, worker):
        home.environment["LOCALSPEC_CONTEXT"] = "512"
        table = home.root / "config" / "models.toml"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(f'[pairs.builtin]\nrpc = ["{endpoint}"]\n')
        daemon = RunningDaemon(home)
        body = {
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 16,
        }
        there = home.request("POST", "/v1/chat/completions", body)
        assert there.status == 200, there.body
        assert endpoint in home.run("show", "builtin").stdout
        assert home.status()["pair"]["backend"] == f"cpu + {endpoint}"
        worker.kill()
        worker.wait()
        lost = home.request("POST", "/v1/chat/completions", {**body, "max_tokens": 8})
        assert lost.status == 500
        assert "is gone" in lost.error["message"]
        here = home.request("POST", "/v1/chat/completions", body)
        assert here.status == 200, here.body
        assert here.text == there.text
        assert endpoint in home.status()["pair"]["note"]
        assert home.status()["pair"]["backend"] == "cpu"
        daemon.stop()


def test_a_worker_listens_where_nobody_else_can_reach_it(tmp_path: Path) -> None:
    with temporary_home() as home:
        for wrong in ("tower", "0.0.0.0:1", "::"):
            refused = home.run("rpc-worker", "--listen-insecure", wrong)
            assert refused.returncode == 2
            assert "IPv4 address" in refused.stderr
        ssh = tmp_path / "ssh"
        ssh.write_text(f"#!{sys.executable}\n{SSH}")
        ssh.chmod(0o755)
        home.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        port = free_port()
        command = [sys.executable, "-m", "localspec", "rpc-worker", "--ssh", "me@tower"]
        with subprocess.Popen(
            [*command, "--port", str(port)],
            env=home.environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as tunnel:
            assert tunnel.stdout
            *options, host, there = json.loads(tunnel.stdout.readline())
            end = options[-1].removesuffix(f":127.0.0.1:{port}")
            assert (options[-2], host, there) == (
                "-L",
                "me@tower",
                f"localspec rpc-worker --port {port}",
            )
            if sys.platform.startswith("linux"):
                # ssh's own end is a socket that is closed to others, and the port is the relay's.
                assert "StreamLocalBindMask=0177" in options
                assert Path(end).parent == home.root / "run"
                assert stat.S_IMODE(Path(end).parent.stat().st_mode) == 0o700
                if os.getuid() == 0:
                    assert visit(port, NOBODY) == f"{NOBODY} b''"
                assert visit(port, os.getuid()) == f"{os.getuid()} b'hello'"
            assert tunnel.wait(20) == 7  # as ssh ends
        assert home.run("rpc-worker", "--ssh=-oProxyCommand=x").returncode == 2


@pytest.mark.skipif(not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC")
def test_a_worker_on_the_loopback_answers_its_own_user_alone() -> None:
    """Where the system does not let it keep the others out, it says so."""
    with temporary_home() as home:
        port = free_port()
        command = [sys.executable, "-m", "localspec", "rpc-worker", "--port", str(port)]
        with subprocess.Popen(
            command, env=home.environment, stderr=subprocess.PIPE, text=True
        ) as worker:
            wait_for(lambda: not find_problem(f"127.0.0.1:{port}"), "a worker that answers")
            kept = len(sockets_of(worker.pid, port)) if sys.platform.startswith("linux") else 0
            other = visit(port, NOBODY, HELLO) if os.getuid() == 0 else ""
            worker.kill()
            assert worker.stderr
            said = worker.stderr.read()
        if "DANGER" in said:
            assert f"every user of this machine can reach 127.0.0.1:{port}" in said
        else:
            assert kept == 1  # the relay's; llama.cpp's own is on another loopback
            assert other in ("", f"{NOBODY} b''")


def sockets_of(pid: int, port: int) -> list[str]:
    """Return the lines of this machine's listening sockets at a port, if they are the process's."""
    mine = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return [
        line
        for line in lines
        if line.split()[1].endswith(f":{port:04X}")
        and line.split()[3] == "0A"
        and f"socket:[{line.split()[9]}]" in mine
    ]


@pytest.mark.skipif(not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC")
def test_a_port_that_is_taken_is_said() -> None:
    with rpc_worker() as (endpoint, _), temporary_home() as home:
        taken = home.run("rpc-worker", "--port", endpoint.split(":")[1])
        assert taken.returncode == 1
        assert "cannot be served on" in taken.stderr
