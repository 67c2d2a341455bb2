"""Models that a request names by path are checked like those of `add`, without leaks over TCP."""

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
from tests.support.daemons import Answer, Home, real_home
from tests.support.gguf_files import model
from tests.support.patience import PATIENCE

SHIPPED = Path(localspec.__file__).parent / "builtin"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Run a daemon with TCP and the real engine, which no test here may start."""
    with real_home(listen="127.0.0.1:0") as home:
        yield home
        assert home.status()["counts"]["worker_starts"] == 0


def request_over_tcp(home: Home, method: str, target: str, body: Any) -> Answer:
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


def create_unusable_paths(folder: Path) -> dict[str, str]:
    """Create unusable files; return the names that a request would use, by their problem."""
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
    paths = {name: str(folder / f"{name}.gguf") for name in names}
    paths["unmatched"] = f"{folder}/good.gguf,{folder}/other.gguf"
    paths["no draft"] = f"{folder}/good.gguf,{folder}/missing.gguf"
    paths["three"] = ",".join([f"{folder}/good.gguf"] * 3)
    paths["relative"] = "good.gguf"
    paths["nobody's"] = "~nobody-of-that-name/good.gguf"
    paths["long"] = f"/{'x' * 5000}.gguf"
    paths["of nobody's ollama"] = "nothing-of-that-name:7b"
    paths["of ollama, one missing"] = f"nothing-of-that-name:7b,{folder}/good.gguf"
    paths["missing, one of ollama"] = f"{folder}/missing.gguf,nothing-of-that-name:7b"
    paths["good, one of ollama"] = f"{folder}/good.gguf,nothing-of-that-name:7b"
    paths["a blob"] = f"{folder}/sha256-missing"
    paths["of the system"] = "/proc/self/environ.gguf"
    return paths


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "model"),
    ("/v1/completions", {"prompt": "hi"}, "model"),
    ("/localspec/load", {}, "model"),
    ("/localspec/drafts", {}, "target"),
]


def test_paths_are_refused_like_those_of_add(home: Home, tmp_path: Path) -> None:
    for problem, name in create_unusable_paths(tmp_path).items():
        target, _, draft = name.partition(",")
        added = {"name": "mine", "target": target, **({"draft": draft} if draft else {})}
        refused = home.request("POST", "/localspec/pairs", added)
        assert 400 <= refused.status < 500, problem
        for path, body, field in REQUESTS:
            answer = home.request("POST", path, {**body, field: name})
            assert 400 <= answer.status < 500, (problem, path, answer.body)
            if problem in ("empty", "text", "cut", "zeros", "unmatched"):
                assert answer.error["message"] == refused.error["message"]


def test_over_tcp_all_unusable_paths_get_the_same_answer(home: Home, tmp_path: Path) -> None:
    names = create_unusable_paths(tmp_path)
    for path, body, field in [*REQUESTS, ("/localspec/pairs", {"name": "mine"}, "target")]:
        answers = set()
        for problem, name in names.items():
            if path.endswith("/pairs") and problem in ("relative", "nobody's", "three"):
                continue  # refused before any file is read
            if path.startswith("/localspec/") and problem == "long":
                continue
            fields = {**body, field: name.partition(",")[0] if path.endswith("pairs") else name}
            if path.endswith("/pairs") and "," in name:
                fields["draft"] = name.partition(",")[2]
            answer = request_over_tcp(home, "POST", path, fields)
            answers.add((answer.status, answer.body))
        assert len(answers) == 1, (path, answers)
        ((status, text),) = answers
        assert status == 404
        assert b"no usable model at that path" in text


def test_over_tcp_show_and_verify_get_the_same_answer(home: Home, tmp_path: Path) -> None:
    answers = set()
    for problem, name in create_unusable_paths(tmp_path).items():
        if problem != "long":
            path = f"/localspec/pairs/{quote(name, safe='')}"
            for method, target in (("GET", path), ("POST", f"{path}/verify")):
                answer = request_over_tcp(home, method, target, None)
                answers.add((answer.status, answer.body))
    ((status, text),) = answers
    assert (status, b"no usable model at that path" in text) == (404, True)


def test_over_tcp_the_default_for_unknown_names_reveals_no_path(home: Home, tmp_path: Path) -> None:
    names = create_unusable_paths(tmp_path)
    del names["of nobody's ollama"]  # the configured pair answers for it
    home.run("config", "set", "any_model", "true")
    try:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answers = {
            problem: request_over_tcp(home, "POST", "/v1/chat/completions", {**body, "model": name})
            for problem, name in names.items()
        }
    finally:
        home.run("config", "set", "any_model", "false")
    assert len({(answer.status, answer.body) for answer in answers.values()}) == 1, answers
    assert answers["missing"].status == 404


def test_over_tcp_no_folder_is_searched(home: Home) -> None:
    body = {"target": "builtin", "folders": ["/"]}
    for path in ("/localspec/drafts", "/localspec/disk"):
        answer = request_over_tcp(home, "POST", path, body)
        assert (answer.status, answer.error["code"]) == (403, "forbidden")


def test_a_usable_path_is_checked_once_until_it_changes(tmp_path: Path) -> None:
    from localspec.errors import RegistryError
    from localspec.paths import Paths
    from localspec.registry.header.fit import FreeMemory
    from localspec.registry.registry import Registry

    registry = Registry(Paths(*[tmp_path] * 5), lambda _: False, lambda: FreeMemory(0))
    file = tmp_path / "good.gguf"
    shutil.copy(SHIPPED / "target.gguf", file)
    registry.check_files(file)
    registry.check_files(file)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(RegistryError):
        registry.check_files(file)
