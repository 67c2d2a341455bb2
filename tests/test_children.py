"""Child processes answer, end when they should, and get from the environment no secret."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localspec import children
from localspec.children import (
    HUGE_PAGES,
    Child,
    Deadline,
    engine_environment,
    helper_environment,
)
from localspec.daemon.completion.files import Converter
from localspec.engine.prompt.template_process import TemplateProcess
from localspec.errors import Cancelled
from tests.support.daemons import RunningDaemon, temporary_home, wait_for
from tests.support.documents import with_endless_conversions
from tests.support.patience import PATIENCE

SECRETS = {
    "HF_TOKEN": "zqhub",
    "HUGGING_FACE_HUB_TOKEN": "zqhub",
    "https_proxy": "http://user:zqproxy@proxy:8080",
    "HTTPS_PROXY": "http://user:zqproxy@proxy:8080",
    "ALL_PROXY": "socks5://user:zqproxy@proxy:1080",
    "OPENAI_API_KEY": "zqkey",
    "LOCALSPEC_API_KEY": "zqkey",
    "LLAMA_API_KEY": "zqkey",
    "CUDA_REGISTRY_TOKEN": "zqkey",
    "NVIDIA_NGC_PASSWORD": "zqkey",
    "TOWER": "zqkey",  # as key_env names it
    "SSH_AUTH_SOCK": "/zq/agent",
    "AWS_SECRET_ACCESS_KEY": "zqcloud",
    "LISTEN_FDS": "1",
    "NOTIFY_SOCKET": "/zq/notify",
}
NEEDED = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LANG": "C.UTF-8",
    "LC_CTYPE": "C.UTF-8",
    "TZ": "Europe/Berlin",
    "TMPDIR": "/tmp/me",
    "LOCALSPEC_HOME": "/home/me/ls",
    "CUDA_VISIBLE_DEVICES": "1",
    "HIP_VISIBLE_DEVICES": "1",
    "ROCR_VISIBLE_DEVICES": "1",
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1",
    "LLAMA_ARG_X": "1",
    "OMP_NUM_THREADS": "2",
    "GOMP_CPU_AFFINITY": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LD_LIBRARY_PATH": "/opt/cuda/lib64",
    "PYTHONPATH": "/src",
    "VIRTUAL_ENV": "/venv",
    "XDG_CACHE_HOME": "/home/me/.cache",
}
LISTED = children._ENGINE_VARIABLES  # Hypothesis may find these in the code, and draw them
WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "AUTH", "CREDENTIAL")
name = st.text(
    st.characters(blacklist_characters="=\0", blacklist_categories=["Cs"]), min_size=1, max_size=20
)
value = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20)
secret = st.builds(
    "{}_{}".format,
    st.sampled_from(["CUDA", "GGML", "LLAMA", "LOCALSPEC", "NVIDIA", "OMP", "XDG", "PYTHON", "MY"]),
    st.sampled_from(
        ["API_KEY", "TOKEN", "SECRET", "PASSWORD", "AUTH", "apiKey", "CREDENTIALS", "PASSPHRASE"]
    ),
)


@example(SECRETS)
@given(st.dictionaries(st.one_of(name, secret), value, max_size=12))
def test_a_variable_that_nobody_needs_reaches_no_child(unknown: dict[str, str]) -> None:
    """Only listed names and prefixes of devices pass."""
    unknown = {variable: text for variable, text in unknown.items() if variable not in LISTED}
    for variable in engine_environment({**NEEDED, **unknown}).keys() - NEEDED.keys():
        assert variable == "GLIBC_TUNABLES" or variable.startswith(children._ENGINE_PREFIXES)
        assert not any(word in variable.upper() for word in WORDS)
    assert helper_environment({**NEEDED, **unknown}).keys() <= NEEDED.keys()


def test_no_listed_name_is_of_a_secret() -> None:
    assert not [
        variable for variable in LISTED if any(word in variable for word in (*WORDS, "PROXY"))
    ]
    assert NEEDED.keys() - LISTED == {
        variable for variable in NEEDED if variable.startswith(children._ENGINE_PREFIXES)
    }


def test_needed_variables_reach_the_children() -> None:
    engine = engine_environment({**NEEDED, **SECRETS})
    assert engine == {**NEEDED, "GLIBC_TUNABLES": HUGE_PAGES}
    template = helper_environment({**NEEDED, **SECRETS})
    assert template.items() <= NEEDED.items()
    assert {"LANG", "TZ", "PYTHONPATH"} <= template.keys()
    assert not {"PATH", "LOCALSPEC_HOME", "CUDA_VISIBLE_DEVICES"} & template.keys()


def read_environment(pid: int) -> dict[str, str]:
    data = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    return dict(entry.partition("=")[::2] for entry in data.split("\0") if entry)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in SECRETS.items():
        monkeypatch.setenv(variable, text)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_template_runs_without_secrets(secrets: None) -> None:
    process = TemplateProcess()
    try:
        assert process.render("{{ messages[0] }}", {"messages": ["here"]}) == "here"
        assert process._child
        environment = read_environment(process._child.pid)
    finally:
        process.close()
    check_helper(environment)


def check_helper(environment: dict[str, str]) -> None:
    """Check that a process with this environment was started as a helper beside `SECRETS`."""
    assert not environment.keys() & SECRETS.keys()
    assert not [text for text in environment.values() if "zq" in text]
    assert environment.keys() <= helper_environment().keys() | {"LC_CTYPE"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_file_is_converted_without_secrets(
    secrets: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    for variable, text in with_endless_conversions(tmp_path, pid_file).items():
        monkeypatch.setenv(variable, text)

    async def read_while_it_runs(converter: Converter) -> dict[str, str]:
        conversion = asyncio.create_task(converter.convert(b"%PDF-", with_pictures=False))
        await asyncio.to_thread(wait_for, lambda: pid_file.exists() and pid_file.read_text(), "it")
        environment = read_environment(int(pid_file.read_text()))
        conversion.cancel()
        await asyncio.gather(conversion, return_exceptions=True)
        return environment

    check_helper(asyncio.run(read_while_it_runs(Converter())))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_worker_and_its_children_run_without_secrets() -> None:
    with temporary_home() as home:
        home.environment |= {**SECRETS, "LOCALSPEC_CONTEXT": "512"}
        del home.environment["NOTIFY_SOCKET"], home.environment["LISTEN_FDS"]
        daemon = RunningDaemon(home)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        body["grammar"] = 'root ::= "yes"'
        assert home.request("POST", "/v1/chat/completions", body).status == 200
        worker = daemon.worker_pid()
        tasks = Path(f"/proc/{worker}/task").iterdir()
        children = [pid for task in tasks for pid in (task / "children").read_text().split()]
        environments = [read_environment(pid) for pid in (worker, *map(int, children))]
        daemon.stop()
    # The worker, the process of its template and that of its grammars.
    assert len(environments) >= 3
    for environment in environments:
        assert not environment.keys() & SECRETS.keys()
        assert not [text for text in environment.values() if "zq" in text]
    assert environments[0]["LOCALSPEC_HOME"] == home.environment["LOCALSPEC_HOME"]
    assert environments[0]["PATH"] == os.environ["PATH"]


# A child that repeats messages, hangs, or ends, as it is asked.
ECHO = """
import signal
from localspec.children import become_helper, limit_cpu_time, receive_message, send_message
connection = become_helper()
while True:
    try:
        message = receive_message(connection)
    except EOFError:
        break
    if message == b"hang":
        signal.pause()
    if message == b"compute":
        limit_cpu_time(1)
        while True:
            pass
    if message == b"end":
        break
    send_message(connection, message)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    (tmp_path / "echo_child.py").write_text(ECHO)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    child = Child("echo_child", environment={**helper_environment(), "PYTHONPATH": paths})
    child.start()
    yield child
    child.close()


def ask(child: Child, message: bytes) -> bytes:
    return child.ask(message, Deadline(PATIENCE))


def test_a_child_answers_messages_of_any_length(child: Child) -> None:
    for length in (0, 1, 1 << 16, 5_000_000):
        message = bytes(length)
        assert ask(child, message) == message
    process = child._process
    assert process is not None
    child.connection.close()  # as when the parent is gone
    assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("message", [b"hang", b"hang" + bytes(5_000_000), b"end", b"compute"])
def test_a_child_that_does_not_answer_is_ended_and_can_be_started_again(
    child: Child, message: bytes
) -> None:
    """It is stopped first where it must not read what is sent."""
    if len(message) > 10:
        os.kill(child.pid, signal.SIGSTOP)
    hangs = message.startswith(b"hang")
    with pytest.raises(TimeoutError if hangs else EOFError):
        child.ask(message, Deadline(0.2 if hangs else PATIENCE))
    assert not child.is_running
    expected = {b"end": (0, -signal.SIGKILL), b"compute": (-signal.SIGXCPU,)}
    assert child.last_exit in expected.get(message, (-signal.SIGKILL,))
    child.start()
    assert ask(child, b"again") == b"again"


def test_a_child_is_ended_when_nobody_waits_for_it(child: Child) -> None:
    """Before that it gives way, once."""
    gave_way: list[int] = []
    deadline = Deadline(
        PATIENCE, lambda: bool(gave_way), long_s=0.0, on_long=lambda: gave_way.append(child.pid)
    )
    with pytest.raises(Cancelled):
        child.ask(b"hang", deadline)
    assert len(gave_way) == 1
    assert not child.is_running


def test_a_child_that_cannot_be_started_leaves_nothing_open(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    child.close()
    before = len(list(Path("/dev/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(child, "_command", ["/nonexistent/program"])
        with pytest.raises(FileNotFoundError):
            child.start()
    assert len(list(Path("/dev/fd").iterdir())) == before
    assert not child.is_running
