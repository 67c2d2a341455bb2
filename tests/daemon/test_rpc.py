"""A pair with layers on another machine, through the daemon: it answers, loses the machine, and goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec.engine.llama.rpc import built
from tests.support.daemons import RunningDaemon, temporary_home
from tests.support.rpc import rpc_worker

QUESTION = "What does shutil.copytree do?"


@pytest.mark.skipif(not built(), reason="this llama.cpp was built without GGML_RPC")
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
        ssh.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        ssh.chmod(0o755)
        home.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        words = home.run("rpc-worker", "--ssh", "me@tower", "--port", "5001").stdout.splitlines()
        assert words[-4:] == [
            "-L",
            "127.0.0.1:5001:127.0.0.1:5001",
            "me@tower",
            "localspec rpc-worker --port 5001",
        ]
        assert home.run("rpc-worker", "--ssh=-oProxyCommand=x").returncode == 2


@pytest.mark.skipif(not built(), reason="this llama.cpp was built without GGML_RPC")
def test_a_port_that_is_taken_is_said() -> None:
    with rpc_worker() as (endpoint, _), temporary_home() as home:
        taken = home.run("rpc-worker", "--port", endpoint.split(":")[1])
        assert taken.returncode == 1
        assert "cannot be served on" in taken.stderr
