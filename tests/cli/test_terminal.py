"""The commands in a real terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.daemons import Home, RunningDaemon
from tests.support.terminal import ESCAPES, terminal

TEXT = (
    "# Title\n\nA **bold** word and `code`.\n\n- one\n- two\n\n```python\nprint('hi')\n```\n\nend"
)


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_markdown_is_drawn_and_stays_inside_the_window(warm: Home, columns: int) -> None:
    with terminal(warm.environment, "ask", TEXT, columns=columns) as shown:
        assert shown.wait() == 0
        assert "**" not in shown.text
        assert "```" not in shown.text
        assert "\x1b[" in shown.raw
        for wanted in ("Title", "bold", "• one", "print('hi')", "end"):
            assert wanted in shown.text
        # What a carriage return overwrote was the spinner's.
        lines = [line.rsplit("\r", 1)[-1] for line in shown.raw.replace("\r\n", "\n").split("\n")]
        assert max(len(ESCAPES.sub("", line)) for line in lines) < columns


def test_plain_shows_markdown_as_it_is(warm: Home) -> None:
    with terminal(warm.environment, "ask", "--plain", TEXT) as shown:
        assert shown.wait() == 0
        assert "**bold**" in shown.text


def test_no_color_leaves_no_colour(warm: Home) -> None:
    with terminal({**warm.environment, "NO_COLOR": "1"}, "ask", TEXT) as shown:
        assert shown.wait() == 0
        colours = [code for code in ESCAPES.findall(shown.raw) if code.startswith("\x1b[3")]
        assert not colours


def test_a_dumb_terminal_gets_no_escape_codes(warm: Home) -> None:
    with terminal({**warm.environment, "TERM_": "dumb"}, "ask", TEXT) as shown:
        assert shown.wait() == 0
        assert "\x1b" not in shown.raw
        assert "**bold**" in shown.text


def test_stdout_in_a_pipe_is_clean_while_stderr_is_a_terminal(warm: Home) -> None:
    reading, writing = os.pipe()
    with terminal(warm.environment, "ask", "-u", TEXT, stdout=writing) as shown:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert pipe.read() == f"{TEXT}\n"
        assert shown.wait() == 0
        assert "1 token in " in shown.text


def test_escape_codes_of_a_model_do_not_reach_the_terminal(warm: Home) -> None:
    for options in (["--plain"], []):
        with terminal(warm.environment, "ask", *options, "a \x1b]0;owned\x07 b") as shown:
            assert shown.wait() == 0
            assert "\x1b]0" not in shown.raw
            assert "␛]0;owned" in shown.text


def test_emoji_and_combining_characters_survive(warm: Home) -> None:
    with terminal(warm.environment, "ask", "say 👩‍👩‍👧 e\u0301 नमस्ते 🇩🇪") as shown:
        assert shown.wait() == 0
        assert "👩‍👩‍👧 e\u0301 नमस्ते 🇩🇪" in shown.text


def test_ctrl_c_ends_the_answer_with_130_and_a_line_of_its_own(warm: Home) -> None:
    with terminal(warm.environment, "ask", "forever") as shown:
        shown.expect("2 3")
        shown.interrupt()
        assert shown.wait() == 130
        assert "Traceback" not in shown.text
        assert shown.raw.endswith("\n")


def test_ctrl_c_while_nothing_has_come_yet(warm: Home) -> None:
    with terminal(warm.environment, "ask", "stall-not slow", "--no-stream", "-n", "100") as shown:
        assert shown.wait() == 0
    with terminal(warm.environment, "ask", "--no-stream", "forever") as shown:
        shown._read(0.6)
        shown.interrupt()
        assert shown.wait() == 130


def test_ctrl_c_while_it_thinks(warm: Home) -> None:
    with terminal(warm.environment, "ask", "think") as shown:
        shown.expect("2 3")
        shown.interrupt()
        assert shown.wait() == 130
        assert shown.raw.endswith("\n")
        assert "Traceback" not in shown.text


def test_ctrl_c_while_the_pair_is_loaded_leaves_an_empty_line(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    daemon = start_daemon("--load-delay", "5")
    with terminal(home.environment, "ask", "say hello") as shown:
        shown.expect("loading")
        shown.interrupt()
        assert shown.wait() == 130
        assert shown.raw.rsplit("\r", 1)[-1] == "\x1b[K"
    os.kill(daemon.worker_pid(), signal.SIGKILL)  # it would load to its end


def test_whoever_waits_reads_for_what(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon("--load-delay", "1", memory=200)  # MiB, which hold one scripted engine
    other = home.root / "other.gguf"
    other.touch()
    with terminal(home.environment, "ask", "-m", str(other), "slow 150", columns=200) as first:
        first.expect(f"loading {other}")
        first.expect("3 4")
        with terminal(home.environment, "ask", "say two", columns=200) as second:
            second.expect(f"waiting for {other}")
            first.interrupt()
            second.expect(f"loading {home.model}")
            assert second.wait() == 0
    with terminal(home.environment, "ask", "slow 100", columns=200) as first:
        first.expect("3 4")
        with terminal(home.environment, "ask", "-m", str(other), "say two", columns=200) as second:
            second.expect(f"waiting for {home.model}")
            first.interrupt()


def test_how_much_of_a_long_prompt_is_read_is_shown(warm: Home) -> None:
    with terminal(warm.environment, "ask", "read 20 4000", columns=200) as shown:
        shown.expect("reading 4,000 tokens ")
        assert shown.wait() == 0
        assert shown.raw.rsplit("\x1b[K", 1)[-1].strip() == "read"


@pytest.mark.parametrize(
    "command", ["catalogue", "config", "history export", "logs -n 1000", "--help"]
)
def test_head_gets_its_line_and_nobody_complains(warm: Home, command: str) -> None:
    warm.run("ask", "say hi")
    run = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m localspec {command} | head -1"],
        env=warm.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (run.stdout.count("\n"), run.stderr) == (1, "")


def test_the_window_may_change_its_size(warm: Home) -> None:
    with terminal(warm.environment, "ask", "slow 60", columns=100) as shown:
        shown.expect("10 11")
        shown.resize(30, 10)
        assert shown.wait() == 0
        assert "58 59" in " ".join(shown.text.split())


def test_nothing_to_ask_at_a_terminal_does_not_wait_for_input(warm: Home) -> None:
    with terminal(warm.environment, "ask") as shown:
        assert shown.wait() == 2
        assert "No question given" in shown.text
