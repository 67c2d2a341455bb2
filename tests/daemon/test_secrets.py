"""Each secret goes to the host it is for, and into nothing that is written, said or shown."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.daemons import PATIENCE, Answer, RunningDaemon
from tests.support.hub import TestHub
from tests.support.proxies import TestProxy
from tests.support.pulling import PullingHome, pulling_home

LOGIN = "hf_canarydaemonslogin"  # the daemon's own
GIVEN = "hf_canarygivenwithapull"  # a request's
IN_A_FILE = "hf_canaryinafileoftheshell"
PASSWORD = "canarywordoftheproxy"


@dataclass(repr=False)
class Outside:
    """A daemon with a login and a TCP port, its own hub, and another one."""

    home: PullingHome
    other: TestHub
    url: str
    token: str
    said: list[bytes] = field(default_factory=list)

    def over_tcp(self, method: str, target: str, body: Any = None) -> Answer:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, target, data, {"Authorization": f"Bearer {self.token}"})
            return self._kept(Answer(connection.getresponse()))
        finally:
            connection.close()

    def over_socket(self, method: str, target: str, body: Any = None) -> Answer:
        return self._kept(self.home.request(method, target, body))

    def _kept(self, answer: Answer) -> Answer:
        self.said.append(repr(answer.headers).encode() + answer.body)
        return answer

    def pull(self, **fields: Any) -> str:
        """Pull the catalogue's pair over the socket; the state it came to."""
        assert (
            self.over_socket("POST", "/localspec/pulls", {"name": "tiny", **fields}).status == 202
        )
        last = self.over_socket("GET", "/localspec/pulls/tiny/events").events[-2]
        self.over_socket("DELETE", "/localspec/pairs/tiny")
        state: str = json.loads(last)["state"]
        return state

    def reset(self) -> None:
        for hub in (self.home.hub, self.other):
            hub.requests.clear()
            for file in hub.files.values():
                file.faults = type(file.faults)()

    def secrets_on_disk(self) -> dict[str, list[str]]:
        """Which files of the home hold which secrets, besides those that are there for them."""
        found: dict[str, list[str]] = {}
        for path in sorted(self.home.root.rglob("*")):
            name = str(path.relative_to(self.home.root))
            if path.is_file() and name not in ("state/token", "hf/token"):
                data = path.read_bytes()
                if held := [secret for secret in self.secrets if secret.encode() in data]:
                    found[name] = held
        return found

    @property
    def secrets(self) -> list[str]:
        return [LOGIN, GIVEN, IN_A_FILE, PASSWORD, self.token]


@pytest.fixture(scope="module", params=["HF_TOKEN", "a login"])
def outside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("pair")
    with pulling_home(folder) as home, TestHub().running() as other:
        for role, file in zip(("target", "draft"), home.files, strict=True):
            other.add(f"own/{role}", f"{role}.gguf", file.read_bytes())
        if request.param == "HF_TOKEN":
            home.environment["HF_TOKEN"] = LOGIN
        else:
            (home.root / "hf").mkdir()
            (home.root / "hf" / "token").write_text(LOGIN)
        home.configure(listen="127.0.0.1:0")
        daemon = RunningDaemon(home)
        status = home.status()
        token = Path(status["token_file"]).read_text().strip()
        yield Outside(home, other, status["listen"], token)
        daemon.stop()


def tokens(hub: TestHub) -> set[str]:
    """What a hub was shown."""
    return {request.authorization for request in hub.requests}


def test_an_endpoint_is_refused_over_tcp_and_asked_nothing(outside: Outside) -> None:
    outside.reset()
    for endpoint in (outside.other.endpoint, outside.home.hub.endpoint):
        body = {"name": "tiny", "endpoint": endpoint, "token": GIVEN}
        answer = outside.over_tcp("POST", "/localspec/pulls", body)
        assert (answer.status, answer.error["code"]) == (403, "forbidden")
        assert answer.error["param"] == "endpoint"
        for network in ({"HF_ENDPOINT": endpoint}, {"HF_TOKEN_PATH": "/etc/hostname"}, {}):
            answer = outside.over_tcp(
                "POST", "/localspec/pulls", {"name": "tiny", "network": network}
            )
            assert (answer.status, answer.error["param"]) == (403, "network")
    assert not outside.other.requests
    assert not outside.home.hub.requests


def test_another_endpoint_gets_no_token_of_the_daemons(outside: Outside) -> None:
    outside.reset()
    assert outside.pull(endpoint=outside.other.endpoint) == "done"
    assert tokens(outside.other) == {""}
    assert not outside.home.hub.requests


def test_another_endpoint_gets_the_token_that_comes_with_it(outside: Outside) -> None:
    outside.reset()
    assert outside.pull(endpoint=outside.other.endpoint, token=GIVEN) == "done"
    assert tokens(outside.other) == {"", f"Bearer {GIVEN}"}  # none for its storage


@pytest.mark.parametrize("ending", ["", "/"])
def test_the_daemons_own_endpoint_gets_its_token_also_when_named(
    outside: Outside, ending: str
) -> None:
    outside.reset()
    for file in outside.home.hub.files.values():
        file.faults.gated = True
    outside.home.hub.token = LOGIN
    assert outside.pull(endpoint=outside.home.hub.endpoint + ending) == "done"


def test_a_hub_that_sends_on_to_another_does_not_pass_a_token_on(outside: Outside) -> None:
    """Also not to one that huggingface_hub itself would trust: the daemon's own."""
    outside.reset()
    for file in outside.other.files.values():
        file.faults.moved_to = outside.home.hub.endpoint
    assert outside.pull(endpoint=outside.other.endpoint, token=GIVEN) == "done"
    assert f"Bearer {GIVEN}" in tokens(outside.other)
    assert tokens(outside.home.hub) == {""}


def test_an_endpoint_that_is_no_address_is_refused(outside: Outside) -> None:
    for endpoint in (
        "ftp://x",
        "file:///etc/passwd",
        "x",
        "://",
        "http://",
        "http://[",
        "http://x:y",
    ):
        for fields in ({"endpoint": endpoint}, {"network": {"HF_ENDPOINT": endpoint}}):
            answer = outside.over_socket("POST", "/localspec/pulls", {"name": "tiny", **fields})
            assert (answer.status, answer.error["param"]) == (400, "endpoint")


@settings(
    max_examples=6,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    tcp=st.booleans(),
    endpoint=st.sampled_from(["none", "own", "other"]),
    token=st.sampled_from([None, "", GIVEN]),
    fault=st.sampled_from(["", "gated", "portal", "moved", "direct", "missing"]),
)
def test_whatever_is_pulled_no_secret_gets_about(
    outside: Outside, tcp: bool, endpoint: str, token: str | None, fault: str
) -> None:
    outside.reset()
    own, other = outside.home.hub, outside.other
    for hub, away in ((own, other), (other, own)):
        for file in hub.files.values():
            file.faults.gated = fault == "gated"
            file.faults.portal = fault == "portal"
            file.faults.direct = fault == "direct"
        if fault == "moved":
            hub.files["own/target", "target.gguf"].faults.moved_to = (
                f"{away.endpoint}/{GIVEN}/{LOGIN}" if hub is other else away.endpoint
            )
    body = {"name": "tiny", "token": token}
    if endpoint != "none":
        body["endpoint"] = {"own": own, "other": other}[endpoint].endpoint
    send = outside.over_tcp if tcp else outside.over_socket
    if send("POST", "/localspec/pulls", body).status == 202:
        outside.over_socket("GET", "/localspec/pulls/tiny/events")
        outside.over_socket("DELETE", "/localspec/pairs/tiny")
    for hub, mine in ((own, LOGIN), (other, None)):
        chosen = endpoint == ("own" if hub is own else "other") or (
            endpoint == "none" and hub is own
        )
        allowed = {"", f"Bearer {token or mine}"} if chosen and (token or mine) else {""}
        assert tokens(hub) <= allowed
    for target in (
        "/localspec/status", "/localspec/pulls", "/localspec/pulls/tiny", "/metrics", "/props",
        "/localspec/pairs?all=1", "/v1/models", f"/nothing/{endpoint}",
    ):  # fmt: skip
        outside.over_tcp("GET", target)
        outside.over_socket("GET", target)
    everything = b"".join(outside.said)
    assert not [secret for secret in outside.secrets if secret.encode() in everything]
    assert not outside.secrets_on_disk()


@pytest.mark.parametrize("fault", ["", "named", "gated", "portal", "refused", "untrusted"])
def test_nothing_of_a_shells_network_gets_about(
    outside: Outside, tmp_path: Path, fault: str
) -> None:
    """Whatever goes wrong on its way."""
    outside.reset()
    file = tmp_path / "token"
    file.write_text(IN_A_FILE)
    for value in outside.other.files.values():
        value.faults.gated, value.faults.portal = fault == "gated", fault == "portal"
    with TestProxy(outside.other.port, password=f"me:{PASSWORD}").running() as proxy:
        proxy.status = 403 if fault == "refused" else 0
        network = {
            "HF_ENDPOINT": f"http{'s' * (fault == 'untrusted')}://hub.invalid",
            "HF_TOKEN_PATH": str(file),
            "HTTP_PROXY": f"http://me:{PASSWORD}@{proxy.place}",
            "HTTPS_PROXY": f"socks5://me:{PASSWORD}@{proxy.place}",
            "NO_PROXY": "localhost",
            "SSL_CERT_FILE": str(file),
        }
        if fault == "named":
            network["HF_ENDPOINT"] = f"http://me:{PASSWORD}@hub.invalid"
        state = "done" if fault in ("", "named") else "failed"
        assert outside.pull(network=network) == state
    if fault in ("", "gated"):
        assert f"Bearer {IN_A_FILE}" in tokens(outside.other)
    assert tokens(outside.home.hub) == set()
    for target in ("/localspec/status", "/localspec/pulls", "/localspec/pulls/tiny", "/metrics"):
        outside.over_tcp("GET", target)
        outside.over_socket("GET", target)
    everything = b"".join(outside.said)
    assert not [secret for secret in outside.secrets if secret.encode() in everything]
    assert not outside.secrets_on_disk()


def test_no_command_shows_a_secret(outside: Outside) -> None:
    for file in outside.home.hub.files.values():
        file.faults.gated = True
    outside.home.hub.token = "another one"
    environment = dict(outside.home.environment)
    try:
        outside.home.environment["HF_TOKEN"] = GIVEN
        commands = ("pull tiny", "pulls --json", "status", "status --json", "config show --json")
        for command in (*commands, "doctor --json", "logs -n 1000", "list --json", "pull nothing"):
            done = outside.home.run(*command.split())
            shown = done.stdout + done.stderr
            assert not [secret for secret in outside.secrets if secret in shown], command
    finally:
        outside.home.environment.clear()
        outside.home.environment.update(environment)
    assert not outside.secrets_on_disk()
