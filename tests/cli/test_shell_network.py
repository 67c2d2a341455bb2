"""Test that a pull uses the network settings of the shell that requests it, not of the daemon."""

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

NETWORK_PREFIXES = ("hf_", "ssl_", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
NETWORK_VARIABLES = ("requests_ca_bundle", "curl_ca_bundle", "transformers_offline")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullingHome]:
    """Yield a home whose daemon was started with network settings that allow no pull."""
    folder = tmp_path_factory.mktemp("pair")
    with pulling_home(folder) as home:
        catalogue = home.catalogue.read_text()
        other_pair = catalogue.replace("pairs.tiny", "pairs.other").replace('"little"', "")
        home.catalogue.write_text(catalogue + other_pair)
        environment = dict(home.environment)
        dead_proxy = f"http://127.0.0.1:{dead_port()}"
        home.environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_ENDPOINT": "https://the-daemons.invalid",
            "HF_TOKEN": "hf_thedaemons",
            "ALL_PROXY": dead_proxy,
            "SSL_CERT_FILE": "/none.pem",
        }
        assert home.run("start").returncode == 0
        home.environment = environment
        yield home


@pytest.fixture(autouse=True)
def _remove_tiny(home: PullingHome) -> Iterator[None]:
    yield
    home.run("rm", "-y", "tiny")
    home.hub.requests.clear()


def pull(
    home: PullingHome, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `localspec pull tiny` in a shell with exactly these network variables."""
    environment = {
        name: value
        for name, value in home.environment.items()
        if not name.lower().startswith(NETWORK_PREFIXES) and name.lower() not in NETWORK_VARIABLES
    }
    return subprocess.run(
        [sys.executable, "-m", "localspec", "pull", "tiny"],
        env={**environment, "HF_HOME": home.environment["HF_HOME"], **variables},
        capture_output=True,
        text=True,
        cwd=folder,
    )


def test_variables_of_the_daemon_are_not_used(home: PullingHome) -> None:
    run = pull(home, HF_ENDPOINT=home.hub.endpoint)
    assert run.returncode == 0, run.stderr
    assert {request.authorization for request in home.hub.requests} == {""}


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
    assert {url.split("/")[2] for url in proxy.requests} == {"hub.invalid"}


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_the_certificate_of_the_shell_is_trusted(
    home: PullingHome, tmp_path: Path, variable: str
) -> None:
    """The path of the certificate is relative to the folder of the shell."""
    certificate = make_certificate(tmp_path)
    with TestHub(certificate).running() as secure:
        secure.files = home.hub.files
        run = pull(home, HF_ENDPOINT=secure.endpoint)
        assert "is not trusted" in run.stderr
        variables = {variable: certificate.name}
        run = pull(home, folder=tmp_path, HF_ENDPOINT=secure.endpoint, **variables)
    assert run.returncode == 0, run.stderr


def test_the_token_of_the_shell_is_sent(home: PullingHome, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("hf_fromafile\n")
    for variables, token in (
        ({"HF_TOKEN": "hf_named"}, "hf_named"),
        ({"HF_TOKEN_PATH": "mine"}, "hf_fromafile"),
    ):
        run = pull(home, folder=tmp_path, HF_ENDPOINT=home.hub.endpoint, **variables)
        assert run.returncode == 0, run.stderr
        assert {request.authorization for request in home.hub.requests} == {"", f"Bearer {token}"}
        home.hub.requests.clear()
        home.run("rm", "-y", "tiny")


def test_a_login_is_not_sent_to_another_endpoint(home: PullingHome) -> None:
    """The user logged in at another endpoint."""
    login = Path(home.environment["HF_HOME"]) / "token"
    login.parent.mkdir(exist_ok=True)
    login.write_text("hf_thelogin")
    try:
        assert pull(home, HF_ENDPOINT=home.hub.endpoint).returncode == 0
    finally:
        login.unlink()
    assert {request.authorization for request in home.hub.requests} == {""}


def test_concurrent_pulls_use_their_own_networks(home: PullingHome) -> None:
    """Two pulls use two hubs at the same time, and the daemon's own environment does not change."""
    with TestHub().running() as elsewhere:
        elsewhere.files, elsewhere.rate, home.hub.rate = home.hub.files, 1e6, 1e6
        networks = {"tiny": (home.hub, "hf_one"), "other": (elsewhere, "hf_two")}
        for name, (hub, token) in networks.items():
            body = {"name": name, "network": {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": token}}
            assert home.request("POST", "/localspec/pulls", body).status == 202
        for name, (hub, token) in networks.items():
            last_event = home.request("GET", f"/localspec/pulls/{name}/events").events[-2]
            assert '"state":"done"' in last_event
            assert {request.authorization for request in hub.requests} <= {"", f"Bearer {token}"}
            assert any(request.authorization for request in hub.requests)
    home.run("rm", "-y", "other")
    home.hub.rate = 0
    body = {"name": "tiny"}
    refused = home.request("POST", "/localspec/pulls", body)
    assert "HF_HUB_OFFLINE is set" in refused.error["message"], "without a shell, the daemon's own"


def test_retries_of_a_pull_are_shown(home: PullingHome) -> None:
    """Retries are shown during the pull, in the list of pulls, and over HTTP."""
    faults = home.hub.files["own/target", "target.gguf"].faults
    faults.head_statuses = [(503, "0"), (429, "2")]
    try:
        run = pull(home, HF_ENDPOINT=home.hub.endpoint)
        assert run.returncode == 0, run.stderr
        assert re.search(
            r"^tiny  retrying in 1 s: the hub answered 503 \(attempt 2 of 4\)$", run.stderr, re.M
        )
        assert re.search(r"in [23] s: the hub answered 429 \(attempt 3 of 4\)$", run.stderr, re.M)
        home.run("rm", "-y", "tiny")
        faults.head_statuses = [(503, "30")]
        body = {"name": "tiny", "network": {"HF_ENDPOINT": home.hub.endpoint}}
        assert home.request("POST", "/localspec/pulls", body).status == 202
        wait_for(lambda: read_pull(home)["retry"], "the wait")
        assert read_pull(home)["state"] == "checking"
        assert "tiny: retrying in 3" in home.run("pulls").stdout
        home.run("pulls", "cancel", "tiny")
        assert read_pull(home)["retry"] is None
    finally:
        faults.head_statuses = []


def read_pull(home: PullingHome) -> Any:
    return home.request("GET", "/localspec/pulls/tiny").json
