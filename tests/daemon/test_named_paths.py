"""Models that a request names by their paths: checked as `add` checks, and telling TCP nothing."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import localspec
from tests.support.daemons import PATIENCE, Answer, Home, RunningDaemon, temporary_home
from tests.support.gguf_files import model

SHIPPED = Path(localspec.__file__).parent / "builtin"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """A daemon with the real engine, which must never be started here, and TCP."""
    with temporary_home() as home:
        home.environment["LOCALSPEC_LISTEN"] = "127.0.0.1:0"
        daemon = RunningDaemon(home)
        yield home
        assert home.status()["counts"]["worker_starts"] == 0
        daemon.stop()


def over_tcp(home: Home, method: str, target: str, body: Any) -> Answer:
    status = home.status()
    host, _, port = status["listen"].removeprefix("http://").rpartition(":")
    token = Path(status["token_file"]).read_text().strip()
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    try:
        headers = {"Authorization": f"Bearer {token}"}
        connection.request(method, target, json.dumps(body), headers)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def unusable(folder: Path) -> dict[str, str]:
    """What cannot be used, by what is wrong with it; each named as a request names it."""
    (folder / "folder.gguf").mkdir()
    (folder / "empty.gguf").touch()
    (folder / "text.gguf").write_text("this is no model, and it says: sesame")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "dangling.gguf").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.gguf")
    shipped = (SHIPPED / "target.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(shipped[: len(shipped) // 2])
    (folder / "zeros.gguf").write_bytes(shipped[: len(shipped) // 2].ljust(len(shipped), b"\0"))
    shutil.copy(SHIPPED / "target.gguf", folder / "good.gguf")
    model(layers=1).token(17, "seventeen").write(folder / "other.gguf")
    names = ["folder", "empty", "text", "loop", "dangling", "pipe", "cut", "zeros", "missing"]
    found = {name: str(folder / f"{name}.gguf") for name in names}
    found["unmatched"] = f"{folder}/good.gguf,{folder}/other.gguf"
    found["no draft"] = f"{folder}/good.gguf,{folder}/missing.gguf"
    found["three"] = ",".join([f"{folder}/good.gguf"] * 3)
    found["relative"] = "good.gguf"
    found["nobody's"] = "~nobody-of-that-name/good.gguf"
    found["long"] = f"/{'x' * 5000}.gguf"
    found["of nobody's ollama"] = "nothing-of-that-name:7b"
    found["of ollama, one missing"] = f"nothing-of-that-name:7b,{folder}/good.gguf"
    found["missing, one of ollama"] = f"{folder}/missing.gguf,nothing-of-that-name:7b"
    found["good, one of ollama"] = f"{folder}/good.gguf,nothing-of-that-name:7b"
    found["a blob"] = f"{folder}/sha256-missing"
    found["of the system"] = "/proc/self/environ.gguf"
    return found


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "model"),
    ("/v1/completions", {"prompt": "hi"}, "model"),
    ("/localspec/load", {}, "model"),
    ("/localspec/drafts", {}, "target"),
]


def test_they_are_refused_as_add_refuses_them(home: Home, tmp_path: Path) -> None:
    for what, name in unusable(tmp_path).items():
        target, _, draft = name.partition(",")
        added = {"name": "mine", "target": target, **({"draft": draft} if draft else {})}
        refused = home.request("POST", "/localspec/pairs", added)
        assert 400 <= refused.status < 500, what
        for path, body, field in REQUESTS:
            answer = home.request("POST", path, {**body, field: name})
            assert 400 <= answer.status < 500, (what, path, answer.body)
            if what in ("empty", "text", "cut", "zeros", "unmatched"):
                assert answer.error["message"] == refused.error["message"]


def test_over_tcp_all_that_cannot_be_used_is_one_answer(home: Home, tmp_path: Path) -> None:
    names = unusable(tmp_path)
    for path, body, field in [*REQUESTS, ("/localspec/pairs", {"name": "mine"}, "target")]:
        answers = set()
        for what, name in names.items():
            if path.endswith("/pairs") and what in ("relative", "nobody's", "three"):
                continue  # refused before anything is looked at
            if path.startswith("/localspec/") and what == "long":
                continue
            asked = {**body, field: name.partition(",")[0] if path.endswith("pairs") else name}
            if path.endswith("/pairs") and "," in name:
                asked["draft"] = name.partition(",")[2]
            answer = over_tcp(home, "POST", path, asked)
            answers.add((answer.status, answer.body))
        assert len(answers) == 1, (path, answers)
        ((status, text),) = answers
        assert status == 404
        assert b"no usable model at that path" in text


def test_over_tcp_to_show_or_verify_it_tells_as_little(home: Home, tmp_path: Path) -> None:
    answers = set()
    for what, name in unusable(tmp_path).items():
        if what != "long":
            path = f"/localspec/pairs/{quote(name, safe='')}"
            for method, target in (("GET", path), ("POST", f"{path}/verify")):
                answer = over_tcp(home, method, target, None)
                answers.add((answer.status, answer.body))
    ((status, text),) = answers
    assert (status, b"no usable model at that path" in text) == (404, True)


def test_over_tcp_no_path_is_told_by_what_stands_in_for_unknown_names(
    home: Home, tmp_path: Path
) -> None:
    names = unusable(tmp_path)
    del names["of nobody's ollama"]  # what the configured pair answers for
    home.run("config", "set", "any_model", "true")
    try:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        found = {
            what: over_tcp(home, "POST", "/v1/chat/completions", {**body, "model": name})
            for what, name in names.items()
        }
    finally:
        home.run("config", "set", "any_model", "false")
    assert len({(answer.status, answer.body) for answer in found.values()}) == 1, found
    assert found["missing"].status == 404


def test_over_tcp_no_folder_is_looked_through(home: Home) -> None:
    body = {"target": "builtin", "folders": ["/"]}
    for path in ("/localspec/drafts", "/localspec/disk"):
        answer = over_tcp(home, "POST", path, body)
        assert (answer.status, answer.error["code"]) == (403, "forbidden")


def test_a_good_one_is_found_right_once_and_again_when_it_changes(tmp_path: Path) -> None:
    from localspec.daemon.pairs.registry import Registry
    from localspec.errors import RegistryError
    from localspec.paths import Paths

    registry = Registry(Paths(*[tmp_path] * 5), lambda _: False, lambda: ())
    file = tmp_path / "good.gguf"
    shutil.copy(SHIPPED / "target.gguf", file)
    registry.check_files(file)
    registry.check_files(file)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(RegistryError):
        registry.check_files(file)
