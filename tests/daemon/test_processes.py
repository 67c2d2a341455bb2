"""The end of the worker and of the daemon: crashes, signals, locks and sockets."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localspec.client import autostart
from localspec.daemon.handlers.streams import CONVERSATION_HEADER
from tests.support.daemons import ROOT, Home, RunningDaemon, UnixConnection, alive, wait_for
from tests.support.documents import pdf, show, with_endless_conversions
from tests.support.patience import PATIENCE


@pytest.fixture
def shared(api: Home) -> Home:
    """Return the shared daemon without a worker, and without what it remembers of deaths."""
    api.request("POST", "/localspec/reset", {})
    api.request("POST", "/localspec/unload", {})
    return api


def test_a_killed_worker_ends_its_answer_with_an_error(shared: Home) -> None:
    deaths = shared.status()["counts"]["worker_deaths"]
    with shared.streaming("forever") as response:
        assert response.readline().startswith(b"data: ")
        os.kill(shared.status()["worker_pid"], signal.SIGKILL)
        last = response.read().decode().strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "worker_died"
    assert "SIGKILL" in error["message"]
    assert "next request starts a new one" in error["message"]
    assert shared.chat("say again").text == "again"
    assert shared.status()["counts"]["worker_deaths"] == deaths + 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("tunables", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=4", "glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_an_engine_uses_huge_pages_unless_tunables_are_set(
    home: Home, tunables: str, expected: str
) -> None:
    home.environment["GLIBC_TUNABLES"] = tunables
    daemon = home.start()
    home.chat("say hello")
    environment = Path(f"/proc/{daemon.worker_pid()}/environ").read_bytes()
    environment = environment.replace(b"\0", b":")  # glibc cuts the values apart where they stand
    assert f":GLIBC_TUNABLES={expected}:".encode() in b":" + environment


def test_a_death_is_explained_with_the_workers_last_words(shared: Home) -> None:
    answer = shared.chat("exit 7")
    assert answer.status == 500
    assert "exit status 7" in answer.error["message"]
    assert "the last words of the engine" in answer.error["message"]


def test_a_stopped_worker_is_ended_by_the_watchdog(home: Home) -> None:
    daemon = home.start(watchdog=1)
    assert home.chat("say warm").status == 200
    os.kill(daemon.worker_pid(), signal.SIGSTOP)
    answer = home.chat("say anything")
    assert answer.status == 504
    assert answer.error["code"] == "worker_timeout"
    assert home.chat("say again").text == "again"


def test_a_killed_daemon_ends_its_worker_and_frees_the_socket(home: Home) -> None:
    first = home.start()
    with home.streaming("forever") as response:
        response.readline()
        worker = first.worker_pid()
        first.process.kill()
        first.process.communicate()
    wait_for(lambda: not alive(worker), "the worker's end")
    assert home.socket.exists()  # a stale socket, which the next daemon replaces
    home.start()
    assert home.chat("say hello").text == "hello"


def test_sigterm_lets_a_running_answer_finish_and_exits_with_0(
    home: Home, daemon: RunningDaemon
) -> None:
    with home.streaming("slow 20") as response:
        response.readline()
        worker = daemon.worker_pid()
        daemon.process.send_signal(signal.SIGTERM)
        body = response.read().decode()
    assert "19 " in body
    assert body.endswith("data: [DONE]\n\n")
    assert daemon.stop() == 0
    assert not alive(worker)
    assert not home.socket.exists()


@pytest.mark.parametrize("pairs", [["one"], ["one", "other"]])
@pytest.mark.parametrize("line", ["load", "ask"])
def test_stop_ends_a_load(home: Home, line: str, pairs: list[str]) -> None:
    """Also that of a pair that waits for the load of another one."""
    home.start("--load-delay", "600")
    commands = []
    for number, name in enumerate(pairs, 1):
        file = home.root / f"{name}.gguf"
        file.touch()
        words = ["load", str(file)] if line == "load" else ["ask", "-m", str(file), "hello"]
        command = [sys.executable, "-m", "localspec", *words]
        commands.append(
            subprocess.Popen(command, env=home.environment, stderr=subprocess.PIPE, text=True)
        )
        wait_for(lambda: len(home.status()["pairs"]) == number, name)  # noqa: B023
    (worker,) = wait_for(
        lambda: [pair["pid"] for pair in home.status()["pairs"] if pair["pid"]], "the worker"
    )
    stopped = home.run("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "The daemon has stopped.\n")
    assert not alive(worker)
    for process in commands:
        assert "The daemon was stopped." in process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 1


def test_stop_says_that_it_waits_for_an_answer(home: Home) -> None:
    home.start()
    with home.streaming("forever") as response:
        response.readline()
        command = [sys.executable, "-m", "localspec", "stop"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=home.environment, stdout=pipe, stderr=pipe, text=True
        )
        assert process.stderr is not None
        said = process.stderr.readline()
    assert said == "Waiting for 1 answer in progress, 10 s at most …\n"
    assert process.communicate(timeout=PATIENCE)[0] == "The daemon has stopped.\n"


IMPATIENT = """
import asyncio, os, shlex
from localspec.config import load_config
from localspec.daemon.lifecycle import Daemon
from localspec.paths import default_paths, make_private_directory
paths = default_paths()
make_private_directory(paths.runtime)
engine = shlex.split(os.environ["LOCALSPEC_ENGINE"])
async def run():
    config = load_config(paths.config_file)
    await Daemon(config, paths, worker_command=engine, drain_seconds=0.1).run()
asyncio.run(run())
"""


def test_an_answer_beyond_the_grace_time_ends_with_an_error(home: Home) -> None:
    home.use_fake()
    process = subprocess.Popen([sys.executable, "-c", IMPATIENT], env=home.environment)
    wait_for(lambda: autostart.listens(str(home.socket)), "the daemon")
    with home.streaming("forever") as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        last = stream.read().decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert process.wait(timeout=PATIENCE) == 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_conversion_beyond_the_grace_time_ends_with_an_error(
    home: Home, tmp_path: Path, is_recorded: bool
) -> None:
    home.use_fake()
    pid_file = tmp_path / "pid"
    home.environment |= with_endless_conversions(tmp_path, pid_file)
    process = subprocess.Popen([sys.executable, "-c", IMPATIENT], env=home.environment)
    wait_for(lambda: autostart.listens(str(home.socket)), "the daemon")
    file = {"file_data": base64.b64encode(pdf(show("A"))).decode()}
    message = {"role": "user", "content": [{"type": "file", "file": file}]}
    connection = UnixConnection(home.socket)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({"messages": [message], "stream": is_recorded}),
        {CONVERSATION_HEADER: "a"} if is_recorded else {},
    )
    wait_for(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "the conversion")
    process.send_signal(signal.SIGTERM)
    response = connection.getresponse()
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert json.load(response)["error"]["message"] == "The daemon was stopped."
    connection.close()
    assert process.wait(timeout=PATIENCE) == 0
    assert not alive(int(pid_file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_daemon_ends_cleanly_on(
    number: signal.Signals, home: Home, daemon: RunningDaemon
) -> None:
    daemon.process.send_signal(number)
    assert daemon.stop() == 0
    assert not home.socket.exists()


def test_signals_up_to_the_last_moment_change_nothing(home: Home, daemon: RunningDaemon) -> None:
    while daemon.process.poll() is None:
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.0005)
    assert daemon.stop() == 0
    assert not home.socket.exists()


def test_a_pair_that_crashed_three_times_is_set_aside_until_reset(shared: Home) -> None:
    for _ in range(3):
        assert shared.chat("die SIGABRT").status == 500
    refused = shared.chat("say hello")
    assert refused.status == 503
    assert refused.error["code"] == "pair_set_aside"
    assert str(shared.model) in refused.error["message"]
    assert "localspec start --reset" in refused.error["message"]
    assert shared.status()["pair"]["state"] == "set_aside"
    assert shared.run("start", "--reset").returncode == 0
    assert shared.chat("say hello").text == "hello"


def test_a_changed_file_clears_a_pair_that_was_set_aside(shared: Home) -> None:
    for _ in range(3):
        assert shared.chat("die SIGABRT").status == 500
    assert shared.chat("say hello").error["code"] == "pair_set_aside"
    shared.model.write_bytes(b"another")
    assert shared.status()["pair"]["state"] == "unloaded"
    assert shared.chat("say hello").text == "hello"
    shared.model.write_bytes(b"")
    assert shared.chat("say hello").text == "hello"  # only the time of the file has changed


def test_out_of_memory_is_reported_and_not_retried(shared: Home) -> None:
    before = shared.status()["counts"]["worker_starts"]
    answer = shared.chat("starve")
    assert answer.status == 500
    assert answer.error["code"] == "out_of_memory"
    assert "Use a smaller pair or a smaller `context`" in answer.error["message"]
    assert shared.status()["counts"]["worker_starts"] == before + 1
    assert shared.chat("say hello").text == "hello"
    assert shared.status()["counts"]["worker_starts"] == before + 2


def test_a_second_daemon_reports_the_running_one(shared: Home) -> None:
    second = shared.spawn_daemon()
    output, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 1
    assert "already running" in output
    assert shared.chat("say hello").status == 200


def test_a_stale_socket_is_replaced(home: Home) -> None:
    home.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(home.socket))
    home.start()
    assert home.chat("say hello").status == 200


def test_a_stale_lock_file_with_a_living_pid_is_ignored(home: Home) -> None:
    home.socket.parent.mkdir(mode=0o700)
    (home.socket.parent / "daemon.lock").write_text(f"{os.getpid()}\n")
    home.start()
    assert home.status()["pid"] != os.getpid()


def test_a_link_in_place_of_the_lock_is_refused(home: Home) -> None:
    home.socket.parent.mkdir(mode=0o700)
    victim = home.root / "victim"
    victim.write_text("precious")
    (home.socket.parent / "daemon.lock").symlink_to(victim)
    process = home.spawn_daemon()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "daemon.lock cannot be opened" in output
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL"])
def test_a_worker_that_dies_at_its_first_decode_is_tried_again_in_safe_mode(
    name: str, home: Home
) -> None:
    first = home.start("--first-decode", name)
    answer = home.chat("say hello")
    assert answer.text == "hello"
    assert "Safe mode" in answer.json["localspec"]["note"]
    status = home.status()
    assert status["safe_mode"] is True
    assert status["counts"]["worker_starts"] == 2
    first.stop()
    assert "SIG" in (home.root / "state" / "safe-mode.json").read_text()

    home.start("--first-decode", name)  # safe mode is remembered, so there is no death
    assert home.chat("say hello").text == "hello"
    assert home.status()["counts"]["worker_deaths"] == 0


def test_a_retry_in_safe_mode_is_invisible_in_a_stream(home: Home) -> None:
    home.start("--first-decode", "SIGSEGV")
    with home.streaming("say a b") as response:
        lines = response.read().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    roles = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("role")]
    assert len(roles) == 1
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "a b"


def test_safe_mode_that_does_not_help_is_not_remembered(home: Home) -> None:
    home.start("--always", "SIGSEGV")
    answer = home.chat("say hello")
    assert answer.status == 500
    assert answer.error["code"] == "worker_died"
    status = home.status()
    assert status["counts"]["worker_starts"] == 2
    assert status["safe_mode"] is False
    assert not (home.root / "state" / "safe-mode.json").exists()


def test_a_later_segmentation_fault_is_no_reason_for_safe_mode(shared: Home) -> None:
    assert shared.chat("die SIGSEGV").error["code"] == "worker_died"
    assert shared.status()["safe_mode"] is False


def test_twenty_clients_at_once_start_one_daemon(home: Home) -> None:
    home.use_fake()
    with ThreadPoolExecutor(20) as pool:
        runs = list(pool.map(lambda _: home.run("ask", "say hello"), range(20)))
    assert {(run.returncode, run.stdout, run.stderr) for run in runs} == {(0, "hello\n", "")}
    assert home.log.read_text().count("listens on") == 1


def test_a_pair_unloaded_after_an_idle_time_is_loaded_again(home: Home) -> None:
    daemon = home.start(idle_unload=0.05)
    assert home.chat("say hello").text == "hello"
    wait_for(lambda: home.status()["worker_pid"] is None, "the unload")
    assert home.status()["pair"]["state"] == "unloaded"
    assert home.chat("say again").text == "again"
    assert home.status()["counts"]["worker_deaths"] == 0
    assert daemon.process.poll() is None


def test_a_pair_that_cannot_be_loaded_is_explained(home: Home) -> None:
    home.start("--load-error")
    answer = home.chat("say hello")
    assert answer.status == 503
    assert answer.error["code"] == "load_failed"
    assert answer.error["message"] == "The file is no GGUF."
    assert home.status()["worker_pid"] is None


def test_health_is_503_while_the_pair_is_loading(home: Home) -> None:
    home.start("--load-delay", "3")
    assert home.request("GET", "/health").json == {"status": "ok"}
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(home.chat, "say hello")
        wait_for(lambda: home.status()["pair"]["progress"], "progress")
        answer = home.request("GET", "/health")
        assert answer.status == 503
        assert answer.error["message"] == "Loading model"
        assert chat.result().text == "hello"


def test_the_socket_is_for_its_owner_only(shared: Home) -> None:
    assert stat.S_IMODE(shared.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(shared.socket.parent.stat().st_mode) == 0o700


def test_a_runtime_folder_open_to_others_is_refused(home: Home) -> None:
    home.socket.parent.mkdir(mode=0o755)
    home.socket.parent.chmod(0o755)
    process = home.spawn_daemon()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "chmod 700" in output


@pytest.mark.parametrize("signal_name", ["SIGSEGV", "SIGABRT"])
def test_a_text_that_crashes_the_engine_fails_only_its_request(
    shared: Home, signal_name: str
) -> None:
    deaths = shared.status()["counts"]["worker_deaths"]
    text = f"deadly {signal_name}"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(shared.chat, "say nothing of mine")
        answers = [shared.chat(text, seed=seed) for seed in range(5)]
    assert waiting.result().text == "nothing of mine"
    for answer in answers:
        assert answer.status == 400, answer.body
        assert "while it was being tokenized" in answer.error["message"]
        assert signal_name in answer.error["message"]
    status = shared.status()
    assert status["counts"]["worker_deaths"] == deaths + len(answers)
    assert "Safe mode" not in str(status)
    assert shared.chat("say again").text == "again"


def test_requests_without_output_are_retried_after_a_crash(home: Home) -> None:
    home.start("--first-delay", "3", parallel=4)
    with ThreadPoolExecutor() as pool:
        patient = [pool.submit(home.chat, f"say word {number}") for number in range(2)]
        wait_for(lambda: home.status()["counts"]["requests"] == 2, "both requests")
        wait_for(lambda: home.status()["pair"]["state"] == "ready", "the load")
        assert home.chat("deadly SIGSEGV").status == 400
    assert [future.result().text for future in patient] == ["word 0", "word 1"]
    assert home.status()["pair"]["state"] == "ready"


def test_a_death_after_a_file_changed_names_the_file(shared: Home) -> None:
    for number in range(4):  # more often than a faulty pair may die
        assert shared.chat("say warm").text == "warm"
        shared.model.write_bytes(b"cut" * (number + 1))
        answer = shared.chat("die SIGBUS")
        assert answer.status == 500
        assert f"{shared.model} was changed" in answer.error["message"]
    assert shared.chat("say again").text == "again"
    assert "Safe mode" not in str(shared.status())


def test_a_daemon_whose_program_is_deleted_ends_after_its_answers(
    home: Home, tmp_path: Path
) -> None:
    """After `pipx uninstall` no command is left that could stop it."""
    package = tmp_path / "site" / "localspec"
    shutil.copytree(ROOT / "localspec", package, ignore=shutil.ignore_patterns("docs", "*.gguf"))
    shutil.copy(ROOT / "models.toml", package)
    home.use_fake("--pace", "0.5")
    home.environment["PYTHONPATH"] = str(package.parent)
    daemon = RunningDaemon(home)
    with home.streaming("say a b c d e f") as stream:
        stream.await_text()
        package.rename(tmp_path / "removed")
        assert b"f" in stream.read()
    daemon.process.wait(PATIENCE)
    assert daemon.stop() == 0
    assert not home.socket.exists()
