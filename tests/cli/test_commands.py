"""Test the basic commands: ask, status, help and their errors."""

from __future__ import annotations

import json
import os
import signal

import pytest
from click.testing import CliRunner

import localspec
from localspec.cli.app import app
from localspec.cli.terminal import figures
from tests.support.commands import list_commands
from tests.support.daemons import Home, wait_for
from tests.support.extras import needs
from tests.support.patience import PATIENCE


def test_ask_prints_the_answer_and_nothing_else(warm: Home) -> None:
    run = warm.run("ask", "say", "hello", "world")
    assert (run.returncode, run.stdout, run.stderr) == (0, "hello world\n", "")


def test_stdin_comes_first_then_a_blank_line_then_the_words(warm: Home) -> None:
    run = warm.run("ask", "review this", stdin="a diff\nof lines\n")
    assert run.stdout == "a diff\nof lines\n\nreview this\n"
    assert warm.run("ask", stdin="only this\n").stdout == "only this\n"


@pytest.mark.parametrize("stdin", ["", "  \n"])
def test_nothing_to_ask_is_a_usage_error_with_an_example(warm: Home, stdin: str) -> None:
    run = warm.run("ask", stdin=stdin)
    assert run.returncode == 2
    assert 'localspec ask "What does shutil.copytree do?"' in run.stderr
    assert run.stdout == ""


def test_statistics_go_to_stderr(warm: Home) -> None:
    run = warm.run("ask", "-u", "say hello")
    assert run.stdout == "hello\n"
    assert "token" in run.stderr
    assert "drafted 4, accepted 3 (75%)" in run.stderr
    assert "2.50 tokens per target pass" in run.stderr
    assert "plain decoding" not in run.stderr, "one token says nothing of a speed-up"
    assert "prompt: 2 tokens, 1 cached" in run.stderr


def test_options_reach_the_request(warm: Home) -> None:
    request = json.loads(
        warm.run("ask", "-s", "be brief", "-n", "9", "--temperature", "0", "echo").stdout
    )
    assert request["max_tokens"] == 9
    assert request["sampling"] == {"temperature": 0.0}
    assert request["prompt"]["messages"][0] == {"role": "system", "content": "be brief"}


def test_without_streaming_the_answer_is_the_same(warm: Home) -> None:
    run = warm.run("ask", "--no-stream", "-u", "say hello")
    assert run.stdout == "hello\n"
    assert "drafted 4" in run.stderr


def test_json_is_one_record(warm: Home) -> None:
    run = warm.run("ask", "--json", "say hé")
    assert run.stdout.count("\n") == 1
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == "hé"


def test_a_pair_can_be_named_by_its_file(warm: Home) -> None:
    run = warm.run("ask", "-m", "./fake.gguf", "say hello", cwd=warm.root)
    assert run.stdout == "hello\n"
    assert warm.run("ask", "-m", "nope", "hi").returncode == 1
    assert "There is no pair 'nope'" in warm.run("ask", "-m", "nope", "hi").stderr


def test_click_parses_what_the_short_parser_refuses(warm: Home) -> None:
    assert warm.run("ask", "-un5", "--temperature=0", "say hello").stdout == "hello\n"
    assert warm.run("ask", "--", "say", "--bogus").stdout == "--bogus\n"


def test_words_that_are_not_utf8_are_accepted(warm: Home) -> None:
    run = warm.run("ask", os.fsdecode(b"say h\xe9"))
    assert (run.returncode, run.stdout) == (0, "h\ufffd\n")


def test_without_daemon_and_autostart_the_exit_code_is_3(home: Home) -> None:
    run = home.run("ask", "--no-daemon-start", "hi")
    assert run.returncode == 3
    assert run.stderr == "localspec: No daemon is running; start one with: localspec start\n"
    assert home.run("status").returncode == 3


def test_a_socket_path_that_is_too_long_is_explained(home: Home) -> None:
    home.environment["LOCALSPEC_HOME"] = str(home.root / ("x" * 100))
    message = home.refused("ask", "hi")
    assert "bytes long and the limit is 103; set LOCALSPEC_HOME" in message
    assert "Traceback" not in message


def test_debug_shows_the_traceback(home: Home) -> None:
    assert "Traceback" in home.run("ask", "--debug", "--no-daemon-start", "hi").stderr
    assert "Traceback" in home.run("--debug", "status").stderr


def test_ctrl_c_cancels_and_exits_with_130(home: Home) -> None:
    home.start(parallel=1)
    process = home.open_command("ask", "forever")
    assert process.stdout is not None
    assert process.stdout.read(2) == "0 "
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (-signal.SIGINT, "")
    wait_for(lambda: home.status()["counts"]["cancelled"], "the cancellation")


def test_a_crashed_worker_leaves_its_text_and_a_message(warm: Home) -> None:
    run = warm.run("ask", "die SIGABRT")
    assert run.returncode == 1
    assert run.stdout == "one two \n"
    assert run.stderr.startswith("localspec: The engine crashed (signal SIGABRT)")


def test_status_prints_text_and_json(warm: Home) -> None:
    warm.run("ask", "say hello")
    output = warm.run("status").stdout
    assert "ready, context 4096" in output
    assert f"localspec {localspec.__version__}" in warm.run("status", "-v").stdout
    assert json.loads(warm.run("status", "--json").stdout)["pair"]["state"] == "ready"


def test_a_pairs_note_stands_before_the_other_pairs(warm: Home) -> None:
    warm.run("ask", "say hello")
    status = json.loads(warm.run("status", "--json").stdout)
    status["pair"]["note"] = "this pair has no draft model"
    status["pairs"].append({**status["pair"], "name": "another"})
    names = [name for name, _ in figures.rows(status)]
    assert names.index("pair") < names.index("note") < names.index("also")


@pytest.mark.parametrize("arguments", [["--version"], ["--debug", "--version"]])
def test_version(home: Home, arguments: list[str]) -> None:
    assert home.run(*arguments).stdout == f"localspec {localspec.__version__}\n"


@pytest.mark.parametrize("line", [line for line, _ in list_commands()])
def test_help_has_limits_in_words_and_whole_summaries(line: str) -> None:
    page = CliRunner().invoke(app, [*line.split(), "--help"]).output
    assert page.startswith("Usage:")
    cut = [line for line in page.splitlines() if line.endswith("...") and "Usage" not in line]
    assert not cut
    assert " RANGE" not in page
    assert "<=" not in page
    assert ">=" not in page


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ask -n x hi", "must be a whole number (at least 1), not 'x'."),
        ("ask -n 0 hi", "must be a whole number (at least 1), not '0'."),
        ("ask -n", "must be a whole number (at least 1)"),
        ("ask --temperature 300 hi", "must be a number (0 to 100), not '300'."),
        ("ask --draft 65 hi", "must be a whole number (0 to 64), not '65'."),
        ("ask --seed 1.5 hi", "must be a whole number, not '1.5'."),
        pytest.param(
            "stats --days 0", "must be a whole number (1 to 10000), not '0'.", marks=needs("stats")
        ),
        ("logs -n -1", "must be a whole number (at least 0), not '-1'."),
    ],
)
def test_a_wrong_number_shows_its_limits(home: Home, line: str, message: str) -> None:
    run = home.run(*line.split())
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr


def test_a_plain_ask_imports_no_heavy_module(warm: Home) -> None:
    run = warm.run_python(
        "import sys\nfrom localspec.cli import main\n"
        "code = main(['ask', '-u', '-n', '5', 'say', 'hello'])\n"
        "heavy = {'click', 'http.client', 'msgspec', 'typing', 'dataclasses', 'pathlib',"
        " 'subprocess', 'platformdirs', 'asyncio', 'inspect', 'logging'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else code)",
        "-S",
    )
    assert run.stdout == "hello\n"
    assert run.returncode == 0, run.stderr
