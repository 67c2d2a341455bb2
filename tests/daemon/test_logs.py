"""The log is rotated, private and without prompts, and a failure to write it stops nothing."""

from __future__ import annotations

import base64
import resource
import stat
from pathlib import Path

import pytest

from benchmarks.synthetic_projector import png
from tests.support.daemons import Home, RunningDaemon

SMALL_FILES = """
import sys
from localspec.daemon import logs
logs.MAX_LOG_BYTES = 4000
from localspec.daemon.__main__ import main
sys.exit(main())
"""


def everything_logged(home: Home) -> str:
    return "".join(file.read_text() for file in home.log.parent.glob("daemon.log*"))


def use_every_way_in(home: Home, text: str) -> None:
    """Send valid and invalid requests that contain `text`."""
    messages = [{"role": "user", "content": f"say {text}"}]
    home.chat(f"say {text}", localspec={"conversation": "new"})
    home.chat(f"exit 7 {text}")
    home.chat(f"refuse internal_error {text}")
    home.chat(f"say {text}", temperature=-1)
    with home.streaming(f"forever {text}") as stream:
        stream.readline()
    home.request("POST", "/infill", {"input_prefix": text, "input_suffix": text})
    home.request("POST", "/tokenize", {"content": text})
    home.request("POST", "/v1/chat/completions", {"messages": messages, "grammar": 5})
    home.request("POST", "/v1/chat/completions", f'{{"messages": "{text}'.encode())
    home.request("GET", f"/v1/nothing?q={text}")


def test_no_way_in_leaves_a_prompt_in_the_log(home: Home, daemon: RunningDaemon) -> None:
    use_every_way_in(home, "sesame")
    logged = everything_logged(home)
    assert "sesame" not in logged
    assert "exit status 7" in logged  # it was written to at all


def test_prompts_are_logged_when_that_is_asked_for(home: Home) -> None:
    home.start(log_prompts="true")
    home.chat("say sesame")
    home.request("POST", "/infill", {"input_prefix": "oysters", "input_suffix": ""})
    assert "sesame" in everything_logged(home)
    assert "oysters" in everything_logged(home)


def test_private_prompts_and_pictures_are_never_logged(home: Home) -> None:
    home.start(log_prompts="true")
    picture = base64.b64encode(png(1)).decode()
    url = {"url": f"data:image/png;base64,{picture}"}
    parts = [{"type": "text", "text": "say sesame"}, {"type": "image_url", "image_url": url}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert home.request("POST", "/v1/chat/completions", body).status == 200
    assert home.chat("say oysters", localspec={"private": True}).text == "oysters"
    assert home.run("ask", "--no-log", "say pearls").stdout.strip() == "pearls"
    logged = everything_logged(home)
    assert "sesame<__picture_" in logged
    assert picture[:20] not in logged
    assert "oysters" not in logged
    assert "pearls" not in logged


def test_the_log_is_rotated_and_for_its_owner_only(home: Home) -> None:
    daemon = home.start(log_prompts="true", program=SMALL_FILES)
    for number in range(24):
        assert home.chat(f"say {number} {'x' * 1000}").status == 200
    daemon.stop()
    files = sorted(home.log.parent.glob("daemon.log*"))
    assert [file.name for file in files] == [
        "daemon.log",
        "daemon.log.1",
        "daemon.log.2",
        "daemon.log.3",
    ]
    assert all(file.stat().st_size <= 4000 for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert "say 0 " not in everything_logged(home)


def serve(home: Home) -> None:
    """Check complete and streamed answers, a stored conversation, and an answer after a death."""
    assert home.chat("say hello", localspec={"conversation": "new"}).text == "hello"
    with home.streaming("say hello") as stream:
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert home.chat("die SIGABRT").error["code"] == "worker_died"
    assert home.chat("say again").text == "again"


def test_no_file_can_be_written_and_serving_goes_on(home: Home) -> None:
    home.use_fake("--first-decode", "SIGSEGV")  # safe mode helps, and cannot be remembered
    none = (0, 0)
    daemon = RunningDaemon(home, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, none))
    serve(home)
    assert home.status()["safe_mode"] is True
    assert not home.log.exists() or not home.log.read_text()
    assert daemon.stop() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_log_on_a_full_disk(home: Home) -> None:
    home.use_fake()
    home.log.parent.mkdir()
    home.log.symlink_to("/dev/full")
    daemon = RunningDaemon(home)
    serve(home)
    assert daemon.stop() == 0


def test_a_state_folder_that_cannot_be_made(home: Home) -> None:
    home.use_fake()
    for name in ("state", "data", "cache"):
        (home.root / name).write_text("a file where the folder should be")
    daemon = RunningDaemon(home)
    serve(home)
    assert daemon.stop() == 0
