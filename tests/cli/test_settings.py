"""`localspec config`: what is accepted works, what is set counts at once, and no file stops it."""

from __future__ import annotations

import json
import socket
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localspec.config import KEYS, Config, load_config
from tests.support.daemons import Home, RunningDaemon, wait_for
from tests.support.many import in_pipes

# A daemon that only sees what it is told: no edit of a file is noticed by watching it.
BLIND = """
import sys
from localspec.daemon import lifecycle
lifecycle._START_DELAY_S = 1000.0
from localspec.daemon.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def free(home: Home) -> Home:
    """With the scripted engine, and the pair left to config.toml."""
    home.use_fake()
    del home.environment["LOCALSPEC_PAIR"]
    return home


def kept(home: Home) -> Path:
    file = home.root / "config" / "config.toml"
    file.parent.mkdir(exist_ok=True)
    return file


def pairs_of(home: Home, count: int) -> list[str]:
    files = [home.root / f"{number}.gguf" for number in range(count)]
    for file in files:
        file.touch()
    return [str(file) for file in files]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("depth", "-1", -1),
        ("gpu_layers", "-1", -1),
        ("depth", "auto", -1),
        ("threads", "auto", 0),
        ("exact", "on", True),
        ("idle_unload", "0.5", 0.5),
        ("idle_unload", "never", 0.0),
    ],
)
def test_values_as_people_type_them(home: Home, key: str, text: str, value: Any) -> None:
    run = home.run("config", "set", key, text)
    assert (run.returncode, run.stderr) == (0, "")
    assert tomllib.loads(kept(home).read_text()) == {key: value}
    assert home.run("config", "get", key).stdout.strip() == json.dumps(value)
    assert home.run("config", "set", f"{key}={text}").returncode == 0
    assert home.run("config", "unset", key).returncode == 0
    assert tomllib.loads(kept(home).read_text()) == {}


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("context", "8", "'context' must be 0 (auto) or between 256 and 16777216, not 8."),
        ("threads", "513", "'threads' must be between 0 "),
        ("depth", "-2", "between -1 and 64, not -2"),
        ("watchdog", "nan", "between 1 and 86400, not nan"),
        ("idle_unload", "inf", "between 0 and 10000000, not inf"),
        ("listen", "0.0.0.0:8099", "can be reached from other machines"),
        ("listen", "8099", "must be an address and a port"),
        ("pair", "", "must be a pair's name"),
        ("pair", "default", "cannot be 'default'"),
        ("pair", "a\x1bb", "contains an unprintable character"),
        ("pair", "a\udcffb", "contains an unprintable character"),
    ],
)
def test_a_value_that_nobody_can_use_is_refused(free: Home, key: str, text: str, said: str) -> None:
    run = free.run("config", "set", key, text)
    assert (run.returncode, said in run.stderr) == (2, True), run.stderr
    assert not kept(free).exists()


def test_settings_that_exclude_each_other_are_refused_whichever_comes_second(free: Home) -> None:
    assert free.run("config", "set", "flash_attention", "off").returncode == 0
    refused = free.run("config", "set", "kv_type", "q8_0")
    assert (refused.returncode, "needs 'flash_attention'" in refused.stderr) == (2, True)
    assert free.run("config", "set", "flash_attention", "on").returncode == 0
    assert free.run("config", "set", "kv_type", "q8_0").returncode == 0
    assert free.run("config", "set", "flash_attention", "off").returncode == 2
    assert tomllib.loads(kept(free).read_text()) == {"flash_attention": "on", "kv_type": "q8_0"}


def test_tcp_comes_and_goes_as_it_is_set(free: Home) -> None:
    daemon = RunningDaemon(free, program=BLIND)
    run = free.run("config", "set", "listen", "127.0.0.1:0")
    assert run.returncode == 0, run.stderr
    url = free.status()["listen"]
    assert f"The daemon listens on {url}" in run.stdout
    port = int(url.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    run = free.run("config", "unset", "listen")
    assert "listens on its own socket only" in run.stdout
    assert free.status()["listen"] is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    daemon.stop()


def test_a_port_that_cannot_be_had_is_refused_and_never_stops_the_daemon(free: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        run = free.run("config", "set", "listen", listen)
        assert (run.returncode, "is in use by another program" in run.stderr) == (2, True)
        assert tomllib.loads(kept(free).read_text()) == {}
        free.run("stop")
        kept(free).write_text(f'listen = "{listen}"\npair = "{free.model}"\n')
        assert free.run("ask", "say hello").stdout == "hello\n"
        assert any("in use" in each for each in free.status()["problems"])
        bad = json.loads(free.run("doctor", "--json").stdout)
        assert [each["cure"] for each in bad if each["state"] == "bad"] == [
            "localspec config unset listen"
        ]


@pytest.mark.parametrize("loaded", [False, True])
def test_what_is_set_counts_for_the_next_question(free: Home, loaded: bool) -> None:
    names = pairs_of(free, 2)
    daemon = RunningDaemon(free, program=BLIND)
    for turn in range(4):
        name = names[turn % 2]
        run = free.run("config", "set", "pair", name)
        assert "It applies from the next question." in run.stdout
        assert free.status()["pair"]["name"] == name or free.status()["pair"]["state"] != "unloaded"
        if loaded:
            assert free.chat("say x").json["model"] == name
    daemon.stop()


def test_many_clients_set_at_once_and_nothing_is_lost(free: Home) -> None:
    daemon = RunningDaemon(free, program=BLIND)
    wanted = {"queue": 7, "parallel": 3, "depth": 5, "prefix_memory": 9, "exact": True}

    def set_(item: tuple[str, Any]) -> int:
        key, value = item
        return free.run("config", "set", key, json.dumps(value)).returncode

    with ThreadPoolExecutor(5) as pool:
        assert set(pool.map(set_, wanted.items())) == {0}
    assert tomllib.loads(kept(free).read_text()) == wanted
    assert free.status()["queue_limit"] == 7
    daemon.stop()


def test_answers_being_written_are_finished_and_nobody_else_gets_the_old_settings(
    free: Home,
) -> None:
    first, second = pairs_of(free, 2)
    assert free.run("config", "set", "pair", first).returncode == 0
    daemon = RunningDaemon(free, program=BLIND)
    assert free.chat("say x").json["model"] == first
    with free.streaming("slow 40") as stream, ThreadPoolExecutor(8) as pool:
        stream.readline()
        old = free.status()["worker_pid"]
        assert free.run("config", "set", "depth", "3").returncode == 0
        asked = [pool.submit(free.chat, "echo") for _ in range(4)]
        assert b"[DONE]" in stream.read()
        for each in asked:
            assert each.result().status == 200
        assert free.status()["worker_pid"] != old
    assert free.run("config", "set", "pair", second).returncode == 0
    assert free.chat("say x").json["model"] == second
    daemon.stop()


def _ending(home: Home) -> bool:
    """A daemon that has been told to end says so until nobody answers any more."""
    try:
        return bool(home.status()["draining"])
    except OSError:
        return True


def test_what_is_set_while_a_pair_loads_or_the_daemon_stops_counts_for_the_next_question(
    free: Home,
) -> None:
    first, second = pairs_of(free, 2)
    free.use_fake("--load-delay", "0.8", "--end-delay", "0.5")
    del free.environment["LOCALSPEC_PAIR"]
    kept(free).write_text(f'pair = "{first}"\n')
    free.run("start")
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(free.chat, "say x")
        wait_for(lambda: free.status()["pair"]["state"] == "loading", "the load")
        assert free.run("config", "set", "depth", "3").returncode == 0
        assert json.loads(free.chat("echo").text)["speculative"] == {}
        worker = free.status()["worker_pid"]
        assert old.result().status == 200
        assert free.run("config", "set", "pair", second).returncode == 0
        assert free.chat("say x").json["model"] == second
        assert free.status()["worker_pid"] != worker
        stopping = pool.submit(free.run, "stop")
        wait_for(lambda: _ending(free), "the end's beginning")
        assert free.run("config", "set", "pair", first).returncode == 0
        shown = free.run("ask", "--json", "say x")
        assert json.loads(shown.stdout)["model"] == first
        stopping.result()


def test_a_daemon_that_is_just_starting_uses_what_was_set(free: Home) -> None:
    """Between its reading the file and its listening nobody can be told."""
    names = pairs_of(free, 2)
    for turn in range(2):
        kept(free).write_text(f'pair = "{names[0]}"\n')
        started = free.spawn_daemon(BLIND)
        done = threading.Event()
        free.run("config", "set", "pair", names[1])
        done.set()
        wait_for(lambda: free.socket.exists() and free.run("status").returncode == 0, "the daemon")
        assert free.chat("say x").json["model"] == names[1], turn
        started.terminate()
        started.communicate()


def test_setting_it_back_brings_the_pair_back_at_once(free: Home) -> None:
    (name,) = pairs_of(free, 1)
    assert free.run("config", "set", "pair", name).returncode == 0
    daemon = RunningDaemon(free, program=BLIND)
    assert free.run("config", "set", "context", "512").returncode == 0
    for _ in range(3):
        assert free.chat("die SIGABRT").status == 500
    assert free.chat("say x").error["code"] == "pair_set_aside"
    assert free.status()["pair"]["state"] == "set_aside"
    assert free.run("config", "unset", "context").returncode == 0
    assert free.status()["pair"]["state"] == "unloaded"
    assert free.chat("say x").text == "x"
    assert free.run("config", "set", "context", "512").returncode == 0
    assert free.chat("say x").error["code"] == "pair_set_aside"  # for that nothing has changed
    daemon.stop()


def test_a_variable_that_the_daemon_was_started_with_is_said(free: Home) -> None:
    free.environment["LOCALSPEC_QUEUE"] = "3"
    daemon = RunningDaemon(free)
    del free.environment["LOCALSPEC_QUEUE"]
    assert "was started with LOCALSPEC_QUEUE" in free.run("config", "set", "queue", "5").stderr
    daemon.stop()


def test_a_context_that_the_pair_does_not_get_is_told_in_numbers(free: Home) -> None:
    run = free.run("config", "set", "context", "100000")
    assert run.returncode == 0
    assert "at most 1024 tokens of context; 100000 were requested" in run.stderr
    assert "context: 0 (auto) → 100000. It applies from the next question." in run.stdout


@pytest.mark.parametrize(
    "text",
    [
        b"context = \n",
        b"hello\n[table]\nx = 1\n",
        b'pair = "builtin\nqueue = 7\n',
        b"queue = 1\nqueue = 2\n",
        b"\xff\xfe\x00\n",
        b'listen = "0.0.0.0:1"\n',
        b"context = 8\nthreads = -5\nnonsense = [1, 2]\n",
        b"[pair]\nname = 1\n",
        b'"we ird" = 1\n',
    ],
)
def test_whatever_is_in_the_file_the_commands_work(free: Home, text: bytes) -> None:
    kept(free).write_bytes(text)
    commands = (
        ["config"],
        ["config", "show", "--json"],
        ["config", "get", "pair"],
        ["list"],
        ["status"],
        ["doctor"],
        ["--help"],
        ["config", "--help"],
    )
    done = in_pipes(free.environment, [(command, {}) for command in commands])
    for command, run in zip(commands, done, strict=True):
        assert run.code in ((0, 1) if command == ["doctor"] else (0,)), (command, run.err)
        assert "Traceback" not in run.err
        assert "mistake" not in run.err
    assert free.run("config", "set", "queue", "5").returncode == 0
    assert free.status()["queue_limit"] == 5
    assert free.run("config", "unset", "queue").returncode == 0
    assert free.status()["queue_limit"] == Config().queue


def test_what_is_wrong_is_said_with_one_answer_and_not_again(free: Home) -> None:
    kept(free).write_text(f'pair = "{free.model}"\ncontext = 8\n')
    assert "'context' must be 0 (auto)" in free.run("ask", "say x").stderr
    assert free.run("ask", "say x").stderr == ""
    kept(free).write_text(f'pair = "{free.model}"\nthreads = -7\n')
    wait_for(lambda: "threads" in str(free.status()["problems"]), "the edit to be seen")
    assert "'threads' must be between 0 and 512, not -7" in free.run("ask", "say x").stderr
    assert free.run("ask", "say x").stderr == ""


def test_every_problem_is_gone_after_its_cure(free: Home) -> None:
    file = kept(free)
    editor = free.root / "editor"
    editor.write_text('#!/bin/sh\nsed -i "/^hello/d" "$1"; touch -d "+2 seconds" "$1"\n')
    editor.chmod(0o755)
    free.environment |= {"EDITOR": str(editor), "VISUAL": ""}
    wrong = 'context = \nhello\nqueue = 1\nqueue = 2\nx.y = 1\n"we ird" = 1\nparallel = 0\n'
    wrong += 'kv_type = "q8_0"\nflash_attention = "off"\nlisten = "1.2.3.4:5"\n'
    wrong += "[table]\na = 1\n[table.inner]\n[[tables]]\nb = 2\n"
    for step in range(30):
        file.write_text(wrong) if step == 0 else None
        problems = load_config(file, {}).problems
        if not problems:
            break
        cures = [each.cure for each in problems]
        cures.sort(key=lambda cure: cure.endswith("edit"))  # an editor saves when all is right
        cure = cures[-1 if step % 2 and not cures[-1].endswith("edit") else 0]
        run = shell(free, cure)
        assert run.returncode == 0, (cure, run.stderr)
        left = load_config(file, {}).problems
        assert len(left) < len(problems), (cure, [each.sentence for each in left], file.read_text())
    assert not load_config(file, {}).problems
    assert tomllib.loads(file.read_text()) == {"flash_attention": "off"}


def shell(home: Home, command: str) -> Any:
    import subprocess
    import sys

    program = f'localspec() {{ "{sys.executable}" -m localspec "$@"; }}\n{command}'
    return subprocess.run(
        ["bash", "-c", program], env=home.environment, capture_output=True, text=True, timeout=60
    )


def bad(home: Home) -> list[dict[str, str]]:
    told: list[dict[str, str]] = json.loads(home.run("doctor", "--json").stdout)
    about = ("config", "pair", "tcp", "daemon", "files")
    return [each for each in told if each["about"] in about and each["cure"]]


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(
    ("text", "said", "cure"),
    [
        (
            'pair = "nobodys"',
            "The configured pair 'nobodys' does not exist",
            "localspec config unset pair",
        ),
        ('pair = "/nowhere/a.gguf"', "/nowhere/a.gguf is not there", "localspec config unset pair"),
        (
            'pair = "coder-7b"',
            "The configured pair 'coder-7b' is not pulled yet",
            "localspec pull coder-7b",
        ),
        (
            "threads = 500",
            "threads is 500, but this machine has only ",
            "localspec config unset threads",
        ),
        ("context = 8", "'context' must be 0 (auto)", "localspec config unset context"),
        ('listen = "0.0.0.0:1"', "from other machines", "localspec config unset listen"),
    ],
)
def test_doctor_finds_it_with_and_without_a_daemon_and_its_cure_helps(
    free: Home, runs: bool, text: str, said: str, cure: str
) -> None:
    kept(free).write_text(f"{text}\n")
    if runs:
        free.run("start")
    (found,) = bad(free)
    assert said in found["what"]
    assert found["cure"] == cure
    if "pull" not in cure:  # that needs a network; tests of pulls show it
        assert shell(free, cure).returncode == 0
        assert bad(free) == []


def test_doctor_cures_what_only_a_daemon_knows(free: Home) -> None:
    (name,) = pairs_of(free, 1)
    kept(free).write_text(f'pair = "{name}"\n')
    free.environment["LOCALSPEC_QUEUE"] = "many"  # in the shell that started it, and no longer
    free.run("start")
    del free.environment["LOCALSPEC_QUEUE"]
    for _ in range(3):
        assert free.chat("die SIGABRT").status == 500
    found = {each["cure"]: each["what"] for each in bad(free)}
    assert found.keys() == {"localspec start --reset", "localspec stop && localspec start"}
    for each in found:
        assert shell(free, each).returncode == 0
    assert bad(free) == []
    assert free.run("ask", "say x").stdout == "x\n"


def test_doctor_cures_a_context_that_no_pair_has(free: Home) -> None:
    kept(free).write_text("context = 100000\n")
    free.run("start")
    (found,) = bad(free)
    assert "1024 tokens of context; 100000 " in found["what"]
    assert shell(free, found["cure"]).returncode == 0
    assert bad(free) == []


def test_values_are_completed(free: Home) -> None:
    def offered(key: str) -> list[str]:
        environment = {
            "_LOCALSPEC_COMPLETE": "bash_complete",
            "COMP_WORDS": f"localspec config set {key} ",
            "COMP_CWORD": "4",
        }
        free.environment |= environment
        shown = free.run().stdout.split()
        for name in environment:
            del free.environment[name]
        return [each.partition(",")[2] for each in shown]

    assert offered("kv_type") == ["f16", "q8_0", "q5_1", "q4_0"]
    assert offered("exact") == ["true", "false"]
    assert offered("depth") == ["auto"]
    assert offered("nonsense") == []
    daemon = RunningDaemon(free)
    assert "builtin" in offered("pair")
    daemon.stop()


def test_a_link_stays_a_link(free: Home, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("queue = 3\n")
    kept(free).symlink_to(tmp_path / "mine.toml")
    assert free.run("config", "set", "queue", "4").returncode == 0
    assert kept(free).is_symlink()
    assert (tmp_path / "mine.toml").read_text() == "queue = 4\n"


def test_every_key_can_be_shown_and_got(free: Home) -> None:
    shown = free.run("config").stdout
    for key in KEYS:
        assert f"\n{key} " in shown
