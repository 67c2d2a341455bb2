"""A pull goes the way of the shell that asks for it, whatever shell the daemon came from."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import wait_for
from tests.support.hub import TestHub
from tests.support.proxies import TestProxy, dead_port, make_certificate
from tests.support.pulling import PullingHome, pulling_home

SAYING = ("hf_", "ssl_", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
BUNDLES = ("requests_ca_bundle", "curl_ca_bundle", "transformers_offline")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullingHome]:
    """Its daemon was started where nothing can be pulled."""
    folder = tmp_path_factory.mktemp("pair")
    with pulling_home(folder) as home:
        catalogue = home.catalogue.read_text()
        same = catalogue.replace("pairs.tiny", "pairs.other").replace('"little"', "")
        home.catalogue.write_text(catalogue + same)
        usual = dict(home.environment)
        dead = f"http://127.0.0.1:{dead_port()}"
        home.environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_ENDPOINT": "https://the-daemons.invalid",
            "HF_TOKEN": "hf_thedaemons",
            "ALL_PROXY": dead,
            "SSL_CERT_FILE": "/none.pem",
        }
        assert home.run("start").returncode == 0
        home.environment = usual
        yield home


@pytest.fixture(autouse=True)
def _afresh(home: PullingHome) -> Iterator[None]:
    yield
    home.run("rm", "tiny")
    home.hub.requests.clear()


def pull(
    home: PullingHome, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`localspec pull tiny` in a shell that says this about the network and nothing else."""
    silent = {
        name: value
        for name, value in home.environment.items()
        if not name.lower().startswith(SAYING) and name.lower() not in BUNDLES
    }
    return subprocess.run(
        [sys.executable, "-m", "localspec", "pull", "tiny"],
        env={**silent, "HF_HOME": home.environment["HF_HOME"], **variables},
        capture_output=True,
        text=True,
        cwd=folder,
    )


def test_what_the_shell_does_not_say_is_not_said(home: PullingHome) -> None:
    run = pull(home, HF_ENDPOINT=home.hub.endpoint)
    assert run.returncode == 0, run.stderr
    assert {each.authorization for each in home.hub.requests} == {""}


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_in_the_shell_is_offline(home: PullingHome, variable: str) -> None:
    run = pull(home, None, HF_ENDPOINT=home.hub.endpoint, **{variable: "on"})
    assert run.returncode == 1
    assert f"{variable} is set, so nothing can be pulled" in run.stderr
    assert not home.hub.requests


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_the_proxy_of_the_shell_is_used(home: PullingHome, variable: str) -> None:
    with TestProxy(home.hub.port, password="me:word").running() as proxy:
        run = pull(
            home,
            None,
            HF_ENDPOINT="http://hub.invalid",
            no_proxy="localhost",
            **{variable: proxy.url("me:word")},
        )
    assert run.returncode == 0, run.stderr
    assert {each.split("/")[2] for each in proxy.requests} == {"hub.invalid"}


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_the_certificate_of_the_shell_is_trusted(
    home: PullingHome, tmp_path: Path, variable: str
) -> None:
    """Named as seen from the shell's folder."""
    certificate = make_certificate(tmp_path)
    with TestHub(certificate).running() as secure:
        secure.files = home.hub.files
        run = pull(home, HF_ENDPOINT=secure.endpoint)
        assert "is not trusted" in run.stderr
        named = {variable: certificate.name}
        run = pull(home, folder=tmp_path, HF_ENDPOINT=secure.endpoint, **named)
    assert run.returncode == 0, run.stderr


def test_the_token_of_the_shell_is_sent(home: PullingHome, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("hf_fromafile\n")
    for variables, token in (
        ({"HF_TOKEN": "hf_named"}, "hf_named"),
        ({"HF_TOKEN_PATH": "mine"}, "hf_fromafile"),
    ):
        run = pull(home, folder=tmp_path, HF_ENDPOINT=home.hub.endpoint, **variables)
        assert run.returncode == 0, run.stderr
        assert {each.authorization for each in home.hub.requests} == {"", f"Bearer {token}"}
        home.hub.requests.clear()
        home.run("rm", "tiny")


def test_a_login_is_not_sent_to_whichever_endpoint_a_shell_names(home: PullingHome) -> None:
    """That one was not what the person logged in at."""
    login = Path(home.environment["HF_HOME"]) / "token"
    login.parent.mkdir(exist_ok=True)
    login.write_text("hf_thelogin")
    try:
        assert pull(home, HF_ENDPOINT=home.hub.endpoint).returncode == 0
    finally:
        login.unlink()
    assert {each.authorization for each in home.hub.requests} == {""}


def test_two_shells_at_once_each_go_their_own_way(home: PullingHome) -> None:
    """And the daemon's own environment stays what it was."""
    with TestHub().running() as elsewhere:
        elsewhere.files, elsewhere.rate, home.hub.rate = home.hub.files, 1e6, 1e6
        ways = {"tiny": (home.hub, "hf_one"), "other": (elsewhere, "hf_two")}
        for name, (hub, token) in ways.items():
            body = {"name": name, "network": {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": token}}
            assert home.request("POST", "/localspec/pulls", body).status == 202
        for name, (hub, token) in ways.items():
            last = home.request("GET", f"/localspec/pulls/{name}/events").events[-2]
            assert '"state":"done"' in last
            assert {each.authorization for each in hub.requests} <= {"", f"Bearer {token}"}
            assert any(each.authorization for each in hub.requests)
    home.run("rm", "other")
    home.hub.rate = 0
    body = {"name": "tiny"}
    refused = home.request("POST", "/localspec/pulls", body)
    assert "HF_HUB_OFFLINE is set" in refused.error["message"], "without a shell, the daemon's own"


def test_that_a_pull_tries_again_is_shown(home: PullingHome) -> None:
    """To whoever watches, in the list, and to programs."""
    faults = home.hub.files["own/target", "target.gguf"].faults
    faults.head_statuses = [(503, "0"), (429, "2")]
    try:
        run = pull(home, HF_ENDPOINT=home.hub.endpoint)
        assert run.returncode == 0, run.stderr
        assert re.search(
            r"^tiny  retrying in 1 s: the hub answered 503 \(attempt 2 of 4\)$", run.stderr, re.M
        )
        assert re.search(r"in [23] s: the hub answered 429 \(attempt 3 of 4\)$", run.stderr, re.M)
        home.run("rm", "tiny")
        faults.head_statuses = [(503, "30")]
        body = {"name": "tiny", "network": {"HF_ENDPOINT": home.hub.endpoint}}
        assert home.request("POST", "/localspec/pulls", body).status == 202
        wait_for(lambda: state(home)["retry"], "the wait")
        assert state(home)["state"] == "checking"
        assert "tiny: retrying in 3" in home.run("pulls").stdout
        home.run("pulls", "cancel", "tiny")
        assert state(home)["retry"] is None
    finally:
        faults.head_statuses = []


def state(home: PullingHome) -> Any:
    return home.request("GET", "/localspec/pulls/tiny").json
