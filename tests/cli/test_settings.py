"""Test `localspec config`: accepted values work and apply at once, and no file stops the commands."""

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
from tests.support.extras import has_command, needs
from tests.support.many import Job, in_pipes

# A daemon that does not watch its files, so that it learns of changes only from the client.
BLIND = """
import sys
from localspec.daemon import lifecycle
lifecycle._START_DELAY_S = 1000.0
from localspec.daemon.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def fake_home(home: Home) -> Home:
    """Return a home with the scripted engine whose pair is set in config.toml alone."""
    home.use_fake()
    del home.environment["LOCALSPEC_PAIR"]
    return home


def config_file(home: Home) -> Path:
    file = home.root / "config" / "config.toml"
    file.parent.mkdir(exist_ok=True)
    return file


def make_pairs(home: Home, count: int) -> list[str]:
    files = [home.root / f"{number}.gguf" for number in range(count)]
    for file in files:
        file.touch()
    return [str(file) for file in files]


TYPED = [
    ("depth", "-1", -1),
    ("gpu_layers", "-1", -1),
    ("depth", "auto", -1),
    ("threads", "auto", 0),
    ("exact", "on", True),
    ("idle_unload", "0.5", 0.5),
    ("idle_unload", "never", 0.0),
]


def test_values_are_accepted_as_people_type_them(home: Home) -> None:
    jobs: list[Job] = [
        (["config", *words.split()], {})
        for key, text, _ in TYPED
        for words in (f"set {key} {text}", f"get {key}", f"set {key}={text}", f"unset {key}")
    ]
    runs = in_pipes(home.environment, jobs)
    assert [(run.code, run.err) for run in runs] == [(0, "")] * len(jobs)
    assert [json.loads(run.out) for run in runs[1::4]] == [value for _, _, value in TYPED]
    assert tomllib.loads(config_file(home).read_text()) == {}
    for key, text, value in TYPED[:2]:
        home.must_run("config", "set", key, text)
        assert tomllib.loads(config_file(home).read_text())[key] == value


REFUSED = [
    ("paralel", "2", "no setting 'paralel' (did you mean 'parallel'?)."),
    ("nope", "2", "no setting 'nope' (all settings: localspec config)."),
    ("parallel", "many", "must be a whole number"),
    ("exact", "perhaps", "must be true or false"),
    ("kv_type", "f32", "must be one of f16, q8_0, q5_1, q4_0"),
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
]


def test_an_unusable_value_is_refused(fake_home: Home) -> None:
    jobs: list[Job] = [(["config", "set", key, text], {}) for key, text, _ in REFUSED]
    for (key, text, message), run in zip(
        REFUSED, in_pipes(fake_home.environment, jobs), strict=True
    ):
        assert (run.code, message in run.err) == (2, True), (key, text, run.err)
    assert not config_file(fake_home).exists()


def test_settings_that_exclude_each_other_are_refused_in_any_order(fake_home: Home) -> None:
    assert fake_home.run("config", "set", "flash_attention", "off").returncode == 0
    assert "needs 'flash_attention'" in fake_home.refused(
        "config", "set", "kv_type", "q8_0", code=2
    )
    assert fake_home.run("config", "set", "flash_attention", "on").returncode == 0
    assert fake_home.run("config", "set", "kv_type", "q8_0").returncode == 0
    assert fake_home.run("config", "set", "flash_attention", "off").returncode == 2
    assert tomllib.loads(config_file(fake_home).read_text()) == {
        "flash_attention": "on",
        "kv_type": "q8_0",
    }


def test_the_tcp_listener_follows_the_setting(fake_home: Home) -> None:
    RunningDaemon(fake_home, program=BLIND)
    output = fake_home.must_run("config", "set", "listen", "127.0.0.1:0")
    url = fake_home.status()["listen"]
    assert f"The daemon listens on {url}" in output
    port = int(url.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    run = fake_home.run("config", "unset", "listen")
    assert "listens on its own socket only" in run.stdout
    assert fake_home.status()["listen"] is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@needs("service")
def test_a_port_in_use_is_refused_and_does_not_stop_the_daemon(fake_home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        run = fake_home.run("config", "set", "listen", listen)
        assert (run.returncode, "is in use by another program" in run.stderr) == (2, True)
        assert tomllib.loads(config_file(fake_home).read_text()) == {}
        fake_home.run("stop")
        config_file(fake_home).write_text(f'listen = "{listen}"\npair = "{fake_home.model}"\n')
        assert fake_home.run("ask", "say hello").stdout == "hello\n"
        assert any("in use" in problem for problem in fake_home.status()["problems"])
        findings = json.loads(fake_home.run("doctor", "--json").stdout)
        assert [problem["cure"] for problem in findings if problem["state"] == "bad"] == [
            "localspec config unset listen"
        ]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_changed_pair_applies_from_the_next_question(fake_home: Home, loaded: bool) -> None:
    names = make_pairs(fake_home, 2)
    RunningDaemon(fake_home, program=BLIND)
    for turn in range(4):
        name = names[turn % 2]
        run = fake_home.run("config", "set", "pair", name)
        assert "It applies from the next question." in run.stdout
        assert (
            fake_home.status()["pair"]["name"] == name
            or fake_home.status()["pair"]["state"] != "unloaded"
        )
        if loaded:
            assert fake_home.chat("say x").json["model"] == name


def test_concurrent_changes_are_all_saved(fake_home: Home) -> None:
    RunningDaemon(fake_home, program=BLIND)
    values = {"queue": 7, "parallel": 3, "depth": 5, "prefix_memory": 9, "exact": True}

    def set_value(item: tuple[str, Any]) -> int:
        key, value = item
        return fake_home.run("config", "set", key, json.dumps(value)).returncode

    with ThreadPoolExecutor(5) as pool:
        assert set(pool.map(set_value, values.items())) == {0}
    assert tomllib.loads(config_file(fake_home).read_text()) == values
    assert fake_home.status()["queue_limit"] == 7


def test_a_running_answer_ends_before_new_settings_apply(fake_home: Home) -> None:
    first_pair, second_pair = make_pairs(fake_home, 2)
    assert fake_home.run("config", "set", "pair", first_pair).returncode == 0
    RunningDaemon(fake_home, program=BLIND)
    assert fake_home.chat("say x").json["model"] == first_pair
    with fake_home.streaming("slow 40") as stream, ThreadPoolExecutor(8) as pool:
        stream.readline()
        old_pid = fake_home.status()["worker_pid"]
        assert fake_home.run("config", "set", "depth", "3").returncode == 0
        requests = [pool.submit(fake_home.chat, "echo") for _ in range(4)]
        assert b"[DONE]" in stream.read()
        for request in requests:
            assert request.result().status == 200
        assert fake_home.status()["worker_pid"] != old_pid
    assert fake_home.run("config", "set", "pair", second_pair).returncode == 0
    assert fake_home.chat("say x").json["model"] == second_pair


def is_draining(home: Home) -> bool:
    """Return whether the daemon is stopping or has already stopped."""
    try:
        return bool(home.status()["draining"])
    except OSError:
        return True


def test_a_change_during_a_load_or_a_stop_applies_from_the_next_question(fake_home: Home) -> None:
    first_pair, second_pair = make_pairs(fake_home, 2)
    fake_home.use_fake("--load-delay", "0.8", "--end-delay", "0.5")
    del fake_home.environment["LOCALSPEC_PAIR"]
    config_file(fake_home).write_text(f'pair = "{first_pair}"\n')
    fake_home.run("start")
    with ThreadPoolExecutor(2) as pool:
        request = pool.submit(fake_home.chat, "say x")
        wait_for(lambda: fake_home.status()["pair"]["state"] == "loading", "the load")
        assert fake_home.run("config", "set", "depth", "3").returncode == 0
        assert json.loads(fake_home.chat("echo").text)["speculative"] == {}
        old_pid = fake_home.status()["worker_pid"]
        assert request.result().status == 200
        assert fake_home.run("config", "set", "pair", second_pair).returncode == 0
        assert fake_home.chat("say x").json["model"] == second_pair
        assert fake_home.status()["worker_pid"] != old_pid
        stopping = pool.submit(fake_home.run, "stop")
        wait_for(lambda: is_draining(fake_home), "the end's beginning")
        assert fake_home.run("config", "set", "pair", first_pair).returncode == 0
        result = fake_home.run("ask", "--json", "say x")
        assert json.loads(result.stdout)["model"] == first_pair
        stopping.result()


def test_a_starting_daemon_uses_a_change_made_meanwhile(fake_home: Home) -> None:
    """The daemon cannot be reached between reading the file and listening."""
    names = make_pairs(fake_home, 2)
    for turn in range(2):
        config_file(fake_home).write_text(f'pair = "{names[0]}"\n')
        started = fake_home.spawn_daemon(BLIND)
        is_set = threading.Event()
        fake_home.run("config", "set", "pair", names[1])
        is_set.set()
        wait_for(
            lambda: fake_home.socket.exists() and fake_home.run("status").returncode == 0,
            "the daemon",
        )
        assert fake_home.chat("say x").json["model"] == names[1], turn
        started.terminate()
        started.communicate()


def test_undoing_a_setting_restores_a_pair_that_was_set_aside(fake_home: Home) -> None:
    (name,) = make_pairs(fake_home, 1)
    assert fake_home.run("config", "set", "pair", name).returncode == 0
    RunningDaemon(fake_home, program=BLIND)
    assert fake_home.run("config", "set", "context", "512").returncode == 0
    for _ in range(3):
        assert fake_home.chat("die SIGABRT").status == 500
    assert fake_home.chat("say x").error["code"] == "pair_set_aside"
    assert fake_home.status()["pair"]["state"] == "set_aside"
    assert fake_home.run("config", "unset", "context").returncode == 0
    assert fake_home.status()["pair"]["state"] == "unloaded"
    assert fake_home.chat("say x").text == "x"
    assert fake_home.run("config", "set", "context", "512").returncode == 0
    # This configuration is still set aside.
    assert fake_home.chat("say x").error["code"] == "pair_set_aside"


def test_a_variable_of_the_running_daemon_is_named(fake_home: Home) -> None:
    fake_home.environment["LOCALSPEC_QUEUE"] = "3"
    RunningDaemon(fake_home)
    del fake_home.environment["LOCALSPEC_QUEUE"]
    assert "was started with LOCALSPEC_QUEUE" in fake_home.run("config", "set", "queue", "5").stderr


def test_a_variable_that_only_a_starting_daemon_reads_is_named(fake_home: Home) -> None:
    fake_home.run("start")
    assert fake_home.run("ask", "say x").stderr == ""
    for value, reason in (
        ("8192", "to use it: localspec restart"),
        ("abc", "besides, 'context' must be a whole number, not 'abc'"),
        ("\x1b[31m", "besides, "),
    ):
        fake_home.environment["LOCALSPEC_CONTEXT"] = value
        run = fake_home.run("ask", "say x")
        assert (run.returncode, run.stdout) == (0, "x\n")
        assert "LOCALSPEC_CONTEXT=" in run.stderr
        assert "no effect on the daemon" in run.stderr
        assert reason in run.stderr
        assert "\x1b" not in run.stderr
    fake_home.environment["LOCALSPEC_CONTEXT"] = "8192"
    fake_home.run("restart")
    assert fake_home.run("ask", "say x").stderr == ""


def test_a_context_beyond_the_pairs_maximum_is_a_warning(fake_home: Home) -> None:
    run = fake_home.run("config", "set", "context", "100000")
    assert run.returncode == 0
    assert "at most 1024 tokens of context; 100000 were requested" in run.stderr
    assert "context: 0 (auto) → 100000. It applies from the next question." in run.stdout


@pytest.mark.parametrize(
    "text",
    [
        b"context = \n",
        b'pair = "builtin\nqueue = 7\n',
        b"\xff\xfe\x00\n",
        b"context = 8\nthreads = -5\nnonsense = [1, 2]\n",
        b"[pair]\nname = 1\n",
    ],
)
def test_commands_work_with_any_configuration_file(fake_home: Home, text: bytes) -> None:
    config_file(fake_home).write_bytes(text)
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
    present = [command for command in commands if has_command(command[0])]
    runs = in_pipes(fake_home.environment, [(command, {}) for command in present])
    for command, run in zip(present, runs, strict=True):
        assert run.code in ((0, 1) if command == ["doctor"] else (0,)), (command, run.err)
        assert "Traceback" not in run.err
        assert "mistake" not in run.err
    assert fake_home.run("config", "set", "queue", "5").returncode == 0
    assert fake_home.status()["queue_limit"] == 5
    assert fake_home.run("config", "unset", "queue").returncode == 0
    assert fake_home.status()["queue_limit"] == Config().queue


def test_a_configuration_problem_is_reported_once(fake_home: Home) -> None:
    config_file(fake_home).write_text(f'pair = "{fake_home.model}"\ncontext = 8\n')
    assert "'context' must be 0 (auto)" in fake_home.run("ask", "say x").stderr
    assert fake_home.run("ask", "say x").stderr == ""
    config_file(fake_home).write_text(f'pair = "{fake_home.model}"\nthreads = -7\n')
    wait_for(lambda: "threads" in str(fake_home.status()["problems"]), "the edit to be seen")
    assert "'threads' must be between 0 and 512, not -7" in fake_home.run("ask", "say x").stderr
    assert fake_home.run("ask", "say x").stderr == ""


def test_every_problem_is_gone_after_its_cure(fake_home: Home) -> None:
    file = config_file(fake_home)
    editor = fake_home.root / "editor"
    editor.write_text('#!/bin/sh\nsed -i "/^hello/d" "$1"; touch -d "+2 seconds" "$1"\n')
    editor.chmod(0o755)
    fake_home.environment |= {"EDITOR": str(editor), "VISUAL": ""}
    content = 'context = \nhello\nqueue = 1\nqueue = 2\nx.y = 1\n"we ird" = 1\nparallel = 0\n'
    content += 'kv_type = "q8_0"\nflash_attention = "off"\nlisten = "1.2.3.4:5"\n'
    content += "[table]\na = 1\n[table.inner]\n[[tables]]\nb = 2\n"
    for step in range(30):
        file.write_text(content) if step == 0 else None
        problems = load_config(file, {}).problems
        if not problems:
            break
        cures = [problem.cure for problem in problems]
        # The editor saves only valid files, so try it last.
        cures.sort(key=lambda cure: cure.endswith("edit"))
        cure = cures[-1 if step % 2 and not cures[-1].endswith("edit") else 0]
        run = run_in_shell(fake_home, cure)
        assert run.returncode == 0, (cure, run.stderr)
        remaining = load_config(file, {}).problems
        assert len(remaining) < len(problems), (
            cure,
            [problem.sentence for problem in remaining],
            file.read_text(),
        )
    assert not load_config(file, {}).problems
    assert tomllib.loads(file.read_text()) == {"flash_attention": "off"}


def run_in_shell(home: Home, command: str) -> Any:
    import subprocess
    import sys

    program = f'localspec() {{ "{sys.executable}" -m localspec "$@"; }}\n{command}'
    return subprocess.run(
        ["bash", "-c", program], env=home.environment, capture_output=True, text=True, timeout=60
    )


def curable_findings(home: Home) -> list[dict[str, str]]:
    findings: list[dict[str, str]] = json.loads(home.run("doctor", "--json").stdout)
    subjects = ("config", "pair", "tcp", "daemon", "files")
    return [finding for finding in findings if finding["about"] in subjects and finding["cure"]]


@needs("service")
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    ("text", "message", "cure"),
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
def test_doctor_finds_and_cures_configuration_problems(
    fake_home: Home, running: bool, text: str, message: str, cure: str
) -> None:
    config_file(fake_home).write_text(f"{text}\n")
    if running:
        fake_home.run("start")
    (finding,) = curable_findings(fake_home)
    assert message in finding["what"]
    assert finding["cure"] == cure
    if "pull" not in cure:  # A pull needs a network and is tested elsewhere.
        assert run_in_shell(fake_home, cure).returncode == 0
        assert curable_findings(fake_home) == []


@needs("service")
def test_doctor_cures_problems_that_only_a_daemon_knows(fake_home: Home) -> None:
    (name,) = make_pairs(fake_home, 1)
    config_file(fake_home).write_text(f'pair = "{name}"\n')
    # The variable is set only while the daemon starts.
    fake_home.environment["LOCALSPEC_QUEUE"] = "many"
    fake_home.run("start")
    del fake_home.environment["LOCALSPEC_QUEUE"]
    for _ in range(3):
        assert fake_home.chat("die SIGABRT").status == 500
    causes = {finding["cure"]: finding["what"] for finding in curable_findings(fake_home)}
    assert causes.keys() == {"localspec start --reset", "localspec stop && localspec start"}
    for finding in causes:
        assert run_in_shell(fake_home, finding).returncode == 0
    assert curable_findings(fake_home) == []
    assert fake_home.run("ask", "say x").stdout == "x\n"


@needs("service")
def test_doctor_cures_a_context_that_no_pair_has(fake_home: Home) -> None:
    config_file(fake_home).write_text("context = 100000\n")
    fake_home.run("start")
    (finding,) = curable_findings(fake_home)
    assert "1024 tokens of context; 100000 " in finding["what"]
    assert run_in_shell(fake_home, finding["cure"]).returncode == 0
    assert curable_findings(fake_home) == []


def test_values_are_completed(fake_home: Home) -> None:
    def list_completions(key: str) -> list[str]:
        environment = {
            "_LOCALSPEC_COMPLETE": "bash_complete",
            "COMP_WORDS": f"localspec config set {key} ",
            "COMP_CWORD": "4",
        }
        fake_home.environment |= environment
        lines = fake_home.run().stdout.split()
        for name in environment:
            del fake_home.environment[name]
        return [line.partition(",")[2] for line in lines]

    assert list_completions("kv_type") == ["f16", "q8_0", "q5_1", "q4_0"]
    assert list_completions("exact") == ["true", "false", "free"]
    assert list_completions("depth") == ["auto"]
    assert list_completions("nonsense") == []
    RunningDaemon(fake_home)
    assert "builtin" in list_completions("pair")


def test_a_link_stays_a_link(fake_home: Home, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("queue = 3\n")
    config_file(fake_home).symlink_to(tmp_path / "mine.toml")
    assert fake_home.run("config", "set", "queue", "4").returncode == 0
    assert config_file(fake_home).is_symlink()
    assert (tmp_path / "mine.toml").read_text() == "queue = 4\n"


def test_every_key_is_shown(fake_home: Home) -> None:
    stdout = fake_home.run("config").stdout
    for key in KEYS:
        assert f"\n{key} " in stdout
