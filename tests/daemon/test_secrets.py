"""Each secret is sent only to its own host, and is in no file, answer or output."""

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

from tests.support.daemons import Answer, RunningDaemon
from tests.support.hub import TestHub
from tests.support.patience import PATIENCE
from tests.support.proxies import TestProxy
from tests.support.pulling import PullingHome, pulling_home

LOGIN_TOKEN = "hf_canarydaemonslogin"  # of the daemon
REQUEST_TOKEN = "hf_canarygivenwithapull"  # of a request
FILE_TOKEN = "hf_canaryinafileoftheshell"
PASSWORD = "canarywordoftheproxy"


@dataclass(repr=False)
class Surroundings:
    """A daemon with a login and a TCP port, its own hub, and another hub."""

    home: PullingHome
    other: TestHub
    url: str
    token: str
    answers: list[bytes] = field(default_factory=list)

    def over_tcp(self, method: str, target: str, body: Any = None) -> Answer:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, target, data, {"Authorization": f"Bearer {self.token}"})
            return self._record(Answer(connection.getresponse()))
        finally:
            connection.close()

    def over_socket(self, method: str, target: str, body: Any = None) -> Answer:
        return self._record(self.home.request(method, target, body))

    def _record(self, answer: Answer) -> Answer:
        self.answers.append(repr(answer.headers).encode() + answer.body)
        return answer

    def pull(self, **fields: Any) -> str:
        """Pull the catalogue's pair over the socket and return its final state."""
        assert (
            self.over_socket("POST", "/localspec/pulls", {"name": "tiny", **fields}).status == 202
        )
        final = self.over_socket("GET", "/localspec/pulls/tiny/events").events[-2]
        self.over_socket("DELETE", "/localspec/pairs/tiny")
        state: str = json.loads(final)["state"]
        return state

    def reset(self) -> None:
        for hub in (self.home.hub, self.other):
            hub.requests.clear()
            for file in hub.files.values():
                file.faults = type(file.faults)()

    def secrets_on_disk(self) -> dict[str, list[str]]:
        """Return the secrets by the file that holds them, except for the token files."""
        words_by_file: dict[str, list[str]] = {}
        for path in sorted(self.home.root.rglob("*")):
            name = str(path.relative_to(self.home.root))
            if path.is_file() and name not in ("state/token", "hf/token"):
                data = path.read_bytes()
                if held := [secret for secret in self.secrets if secret.encode() in data]:
                    words_by_file[name] = held
        return words_by_file

    @property
    def secrets(self) -> list[str]:
        return [LOGIN_TOKEN, REQUEST_TOKEN, FILE_TOKEN, PASSWORD, self.token]


@pytest.fixture(scope="module", params=["HF_TOKEN", "a login"])
def surroundings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Surroundings]:
    folder = tmp_path_factory.mktemp("pair")
    with pulling_home(folder) as home, TestHub().running() as other:
        for role, file in zip(("target", "draft"), home.files, strict=True):
            other.add(f"own/{role}", f"{role}.gguf", file.read_bytes())
        if request.param == "HF_TOKEN":
            home.environment["HF_TOKEN"] = LOGIN_TOKEN
        else:
            (home.root / "hf").mkdir()
            (home.root / "hf" / "token").write_text(LOGIN_TOKEN)
        home.configure(listen="127.0.0.1:0")
        RunningDaemon(home)
        status = home.status()
        token = Path(status["token_file"]).read_text().strip()
        yield Surroundings(home, other, status["listen"], token)


def list_tokens(hub: TestHub) -> set[str]:
    """Return the authorizations that a hub received."""
    return {request.authorization for request in hub.requests}


def test_an_endpoint_is_refused_over_tcp_without_a_request(surroundings: Surroundings) -> None:
    surroundings.reset()
    for endpoint in (surroundings.other.endpoint, surroundings.home.hub.endpoint):
        body = {"name": "tiny", "endpoint": endpoint, "token": REQUEST_TOKEN}
        answer = surroundings.over_tcp("POST", "/localspec/pulls", body)
        assert (answer.status, answer.error["code"]) == (403, "forbidden")
        assert answer.error["param"] == "endpoint"
        for network in ({"HF_ENDPOINT": endpoint}, {"HF_TOKEN_PATH": "/etc/hostname"}, {}):
            answer = surroundings.over_tcp(
                "POST", "/localspec/pulls", {"name": "tiny", "network": network}
            )
            assert (answer.status, answer.error["param"]) == (403, "network")
    assert not surroundings.other.requests
    assert not surroundings.home.hub.requests


def test_another_endpoint_does_not_get_the_token_of_the_daemon(surroundings: Surroundings) -> None:
    surroundings.reset()
    assert surroundings.pull(endpoint=surroundings.other.endpoint) == "done"
    assert list_tokens(surroundings.other) == {""}
    assert not surroundings.home.hub.requests


def test_another_endpoint_gets_the_token_of_the_request(surroundings: Surroundings) -> None:
    surroundings.reset()
    assert surroundings.pull(endpoint=surroundings.other.endpoint, token=REQUEST_TOKEN) == "done"
    assert list_tokens(surroundings.other) == {
        "",
        f"Bearer {REQUEST_TOKEN}",
    }  # the storage gets no token


@pytest.mark.parametrize("ending", ["", "/"])
def test_the_own_endpoint_gets_the_token_if_it_is_named(
    surroundings: Surroundings, ending: str
) -> None:
    surroundings.reset()
    for file in surroundings.home.hub.files.values():
        file.faults.gated = True
    surroundings.home.hub.token = LOGIN_TOKEN
    assert surroundings.pull(endpoint=surroundings.home.hub.endpoint + ending) == "done"


def test_a_redirect_to_another_hub_does_not_carry_the_token(surroundings: Surroundings) -> None:
    """Not even the daemon's own hub, which huggingface_hub itself would trust, gets the token."""
    surroundings.reset()
    for file in surroundings.other.files.values():
        file.faults.moved_to = surroundings.home.hub.endpoint
    assert surroundings.pull(endpoint=surroundings.other.endpoint, token=REQUEST_TOKEN) == "done"
    assert f"Bearer {REQUEST_TOKEN}" in list_tokens(surroundings.other)
    assert list_tokens(surroundings.home.hub) == {""}


def test_an_invalid_endpoint_is_refused(surroundings: Surroundings) -> None:
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
            answer = surroundings.over_socket(
                "POST", "/localspec/pulls", {"name": "tiny", **fields}
            )
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
    token=st.sampled_from([None, "", REQUEST_TOKEN]),
    fault=st.sampled_from(["", "gated", "portal", "moved", "direct", "missing"]),
)
def test_no_pull_leaks_a_secret(
    surroundings: Surroundings, tcp: bool, endpoint: str, token: str | None, fault: str
) -> None:
    surroundings.reset()
    own, other = surroundings.home.hub, surroundings.other
    for hub, redirect_target in ((own, other), (other, own)):
        for file in hub.files.values():
            file.faults.gated = fault == "gated"
            file.faults.portal = fault == "portal"
            file.faults.direct = fault == "direct"
        if fault == "moved":
            hub.files["own/target", "target.gguf"].faults.moved_to = (
                f"{redirect_target.endpoint}/{REQUEST_TOKEN}/{LOGIN_TOKEN}"
                if hub is other
                else redirect_target.endpoint
            )
    body = {"name": "tiny", "token": token}
    if endpoint != "none":
        body["endpoint"] = {"own": own, "other": other}[endpoint].endpoint
    send = surroundings.over_tcp if tcp else surroundings.over_socket
    if send("POST", "/localspec/pulls", body).status == 202:
        surroundings.over_socket("GET", "/localspec/pulls/tiny/events")
        surroundings.over_socket("DELETE", "/localspec/pairs/tiny")
    for hub, own_token in ((own, LOGIN_TOKEN), (other, None)):
        chosen = endpoint == ("own" if hub is own else "other") or (
            endpoint == "none" and hub is own
        )
        allowed = {"", f"Bearer {token or own_token}"} if chosen and (token or own_token) else {""}
        assert list_tokens(hub) <= allowed
    for target in (
        "/localspec/status", "/localspec/pulls", "/localspec/pulls/tiny", "/metrics", "/props",
        "/localspec/pairs?all=1", "/v1/models", f"/nothing/{endpoint}",
    ):  # fmt: skip
        surroundings.over_tcp("GET", target)
        surroundings.over_socket("GET", target)
    recorded = b"".join(surroundings.answers)
    assert not [secret for secret in surroundings.secrets if secret.encode() in recorded]
    assert not surroundings.secrets_on_disk()


@pytest.mark.parametrize("fault", ["", "named", "gated", "portal", "refused", "untrusted"])
def test_no_secret_of_the_network_settings_leaks(
    surroundings: Surroundings, tmp_path: Path, fault: str
) -> None:
    """The pull fails in several ways, or not at all."""
    surroundings.reset()
    file = tmp_path / "token"
    file.write_text(FILE_TOKEN)
    for remote_file in surroundings.other.files.values():
        remote_file.faults.gated, remote_file.faults.portal = fault == "gated", fault == "portal"
    with TestProxy(surroundings.other.port, password=f"me:{PASSWORD}").running() as proxy:
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
        assert surroundings.pull(network=network) == state
    if fault in ("", "gated"):
        assert f"Bearer {FILE_TOKEN}" in list_tokens(surroundings.other)
    assert list_tokens(surroundings.home.hub) == set()
    for target in ("/localspec/status", "/localspec/pulls", "/localspec/pulls/tiny", "/metrics"):
        surroundings.over_tcp("GET", target)
        surroundings.over_socket("GET", target)
    recorded = b"".join(surroundings.answers)
    assert not [secret for secret in surroundings.secrets if secret.encode() in recorded]
    assert not surroundings.secrets_on_disk()


def test_no_command_shows_a_secret(surroundings: Surroundings) -> None:
    for file in surroundings.home.hub.files.values():
        file.faults.gated = True
    surroundings.home.hub.token = "another one"
    environment = dict(surroundings.home.environment)
    try:
        surroundings.home.environment["HF_TOKEN"] = REQUEST_TOKEN
        commands = ("pull tiny", "pulls --json", "status", "status --json", "config show --json")
        for command in (*commands, "doctor --json", "logs -n 1000", "list --json", "pull nothing"):
            result = surroundings.home.run(*command.split())
            output = result.stdout + result.stderr
            assert not [secret for secret in surroundings.secrets if secret in output], command
    finally:
        surroundings.home.environment.clear()
        surroundings.home.environment.update(environment)
    assert not surroundings.secrets_on_disk()
