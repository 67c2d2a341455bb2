"""Test the commands in a real terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios

import pytest

from tests.support.daemons import Home
from tests.support.patience import PATIENCE
from tests.support.shells import BECOME, shell, status, with_program
from tests.support.terminal import ESCAPES, terminal

TEXT = (
    "# Title\n\nA **bold** word and `code`.\n\n- one\n- two\n\n```python\nprint('hi')\n```\n\nend"
)


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_markdown_is_drawn_and_stays_inside_the_window(warm: Home, columns: int) -> None:
    with terminal(warm.environment, "ask", TEXT, columns=columns) as session:
        assert session.wait() == 0
        assert "**" not in session.text
        assert "```" not in session.text
        assert "\x1b[" in session.raw
        for expected in ("Title", "bold", "• one", "print('hi')", "end"):
            assert expected in session.text
        # Ignore the spinner, which a carriage return overwrote.
        lines = [line.rsplit("\r", 1)[-1] for line in session.raw.replace("\r\n", "\n").split("\n")]
        assert max(len(ESCAPES.sub("", line)) for line in lines) < columns


LETTERS = "👩‍👩‍👧 e\u0301 नमस्ते 🇩🇪"


@pytest.mark.parametrize(
    ("variables", "words", "shown", "absent"),
    [
        ({}, ["--plain", TEXT], "**bold**", ""),
        ({"NO_COLOR": "1"}, [TEXT], "bold", "\x1b[3"),
        ({"TERM_": "dumb"}, [TEXT], "**bold**", "\x1b"),
        ({}, [f"say {LETTERS}"], LETTERS, ""),
    ],
    ids=["plain", "without colours", "a dumb terminal", "letters of several characters"],
)
def test_text_is_shown_as_the_terminal_can(
    warm: Home, variables: dict[str, str], words: list[str], shown: str, absent: str
) -> None:
    with terminal({**warm.environment, **variables}, "ask", *words) as session:
        assert session.wait() == 0
        assert shown in session.text
        assert not absent or absent not in session.raw


def test_stdout_in_a_pipe_is_clean_while_stderr_is_a_terminal(warm: Home) -> None:
    reading, writing = os.pipe()
    with terminal(warm.environment, "ask", "-u", TEXT, stdout=writing) as session:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert pipe.read() == f"{TEXT}\n"
        assert session.wait() == 0
        assert "1 token in " in session.text


def test_escape_codes_of_a_model_do_not_reach_the_terminal(warm: Home) -> None:
    for options in (["--plain"], []):
        with terminal(warm.environment, "ask", *options, "a \x1b]0;owned\x07 b") as session:
            assert session.wait() == 0
            assert "\x1b]0" not in session.raw
            assert "␛]0;owned" in session.text


@pytest.mark.parametrize("question", ["forever", "think"])
def test_ctrl_c_ends_the_answer_with_a_line_of_its_own(warm: Home, question: str) -> None:
    with terminal(warm.environment, "ask", question) as session:
        session.expect("2 3")
        session.interrupt()
        assert session.wait() == -signal.SIGINT
        assert "Traceback" not in session.text
        assert session.raw.endswith("\n")


def test_ctrl_c_before_the_first_token(warm: Home) -> None:
    with terminal(warm.environment, "ask", "stall-not slow", "--no-stream", "-n", "100") as session:
        assert session.wait() == 0
    with terminal(warm.environment, "ask", "--no-stream", "forever") as session:
        session._read(0.6)
        session.interrupt()
        assert session.wait() == -signal.SIGINT


def test_ctrl_c_while_the_pair_is_loaded_leaves_an_empty_line(home: Home) -> None:
    daemon = home.start("--load-delay", "5")
    with terminal(home.environment, "ask", "say hello") as session:
        session.expect("loading")
        session.interrupt()
        assert session.wait() == -signal.SIGINT
        assert session.raw.rsplit("\r", 1)[-1] == "\x1b[K"
    os.kill(daemon.worker_pid(), signal.SIGKILL)  # The worker would go on loading.


def test_a_loaded_pair_that_is_measured_is_not_called_loading(home: Home) -> None:
    daemon = home.start("--measure-delay", "60")
    with terminal(home.environment, "ask", "say hello", columns=200) as session:
        session.expect(f"measuring {home.model}")
        assert f"{home.model}: measuring" in home.run("status").stdout
        with terminal(home.environment, "load", columns=200) as loading:
            loading.expect(f"measuring {home.model}")
    os.kill(daemon.worker_pid(), signal.SIGKILL)


def test_the_load_of_another_pair_is_shown_with_its_name(home: Home) -> None:
    daemon = home.start("--load-delay", "4")
    assert home.run("ask", "say one").returncode == 0
    other = home.root / "other.gguf"
    other.touch()
    with terminal(home.environment, "load", str(other), columns=200) as session:
        session.expect(f"loading {other}")
    os.kill(daemon.worker_pid(), signal.SIGKILL)


def test_typing_is_not_echoed_into_an_answer_and_left_to_the_shell(warm: Home) -> None:
    with_program(warm)
    line = "localspec ask slow 40; read typed; echo got $typed"
    with terminal(warm.environment, "sh", "-c", line, program=BECOME) as session:
        session.expect("2 3")
        session.send("a command of mine\n")
        session.expect("got a command of mine")
        assert session.wait() == 0
        assert session.text.count("a command of mine") == 1
        assert termios.tcgetattr(session.master)[3] & termios.ECHO


def test_a_job_in_the_background_leaves_the_terminal_alone(warm: Home) -> None:
    with_program(warm)
    with shell(warm, "bash") as session:
        session.send("localspec ask slow 20 < /dev/tty & wait\n")
        session.expect("18 19")
        session.send("echo done $((1 + 1))\n")
        session.expect("done 2")


def test_a_waiting_client_sees_what_it_waits_for(home: Home) -> None:
    home.start("--load-delay", "1", memory=200)  # These MiB hold one scripted engine.
    other_model = home.root / "other.gguf"
    other_model.touch()
    with terminal(
        home.environment, "ask", "-m", str(other_model), "slow 150", columns=200
    ) as first_session:
        first_session.expect(f"loading {other_model}")
        first_session.expect("3 4")
        with terminal(home.environment, "ask", "say two", columns=200) as second_session:
            second_session.expect(f"waiting for {other_model}")
            first_session.interrupt()
            second_session.expect(f"loading {home.model}")
            assert second_session.wait() == 0
    with terminal(home.environment, "ask", "slow 100", columns=200) as first_session:
        first_session.expect("3 4")
        with terminal(
            home.environment, "ask", "-m", str(other_model), "say two", columns=200
        ) as second_session:
            second_session.expect(f"waiting for {home.model}")
            first_session.interrupt()


def test_the_progress_of_a_long_prompt_is_shown(warm: Home) -> None:
    with terminal(warm.environment, "ask", "read 20 4000", columns=200) as session:
        session.expect("reading 4,000 tokens ")
        assert session.wait() == 0
        assert session.raw.rsplit("\x1b[K", 1)[-1].strip() == "read"


@pytest.mark.parametrize(
    "command", ["ask say one", "catalogue", "config", "history export", "logs -n 1000", "--help"]
)
def test_output_into_head_causes_no_error(warm: Home, command: str) -> None:
    warm.run("ask", "say hi")
    run = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m localspec {command} | head -1"],
        env=warm.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (run.stdout.count("\n"), run.stderr) == (1, "")


def test_the_window_may_be_resized(warm: Home) -> None:
    with terminal(warm.environment, "ask", "slow 60", columns=100) as session:
        session.expect("10 11")
        session.resize(30, 10)
        assert session.wait() == 0
        assert "58 59" in " ".join(session.text.split())


def test_nothing_to_ask_at_a_terminal_does_not_wait_for_input(warm: Home) -> None:
    with terminal(warm.environment, "ask") as session:
        assert session.wait() == 2
        assert "No question given" in session.text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("localspec ask forever", "2 3"),
        ("localspec ask --temp=0 forever", "2 3"),  # click parses this one
        ("localspec ask --no-stream late 30", ""),
        ("ask forever", "2 3"),
        ("localspec explain forever", "2 3"),
        ("localspec logs -f -n 1000", "listens on"),
        ("localspec status --watch", "requests"),
        ("localspec history rm --all", "permanently?"),
        ("sleep 100 | localspec ask it", ""),
    ],
)
def test_ctrl_c_ends_a_loop_of_bash(warm: Home, command: str, shown: str) -> None:
    """Bash only ends a loop if the program died of SIGINT; one that returns 130 has handled it."""
    with_program(warm)
    with shell(warm, "bash") as session:
        session.send(f"for i in 1 2 3; do echo run $((i + 10)); {command}; done; echo all done\n")
        session.expect("run 11")
        if shown:
            session.expect(shown)
        # Python overlooks a signal between the text of a question and the read of its answer.
        session._read(1.5)
        session.interrupt()
        session.expect("ready> ")
        session.send(status("bash"))
        session.expect("[130]")
        assert "run 12" not in session.text
        assert "Traceback" not in session.text


def test_a_signal_ends_the_process_after_what_python_does_at_exit(warm: Home) -> None:
    program = (
        "import atexit, sys; from localspec import cli; atexit.register(print, 'at exit');"
        "sys.argv[1:] = ['ask', '--plain', 'forever']; sys.exit(cli.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=warm.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(2) == b"0 "
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT
    assert output.endswith(b"at exit\n")
    assert errors == b""
