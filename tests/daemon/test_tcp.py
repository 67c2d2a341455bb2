"""TCP: off by default, with a token, for local host names, and closed to web pages."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx2
import openai
import pytest

from localspec.daemon.http import tcp
from localspec.errors import UnsafePath
from tests.support.daemons import (
    Answer,
    Home,
    RunningDaemon,
    scripted_home,
    wait_for,
)
from tests.support.patience import PATIENCE


@dataclass
class TcpHome:
    """A daemon that also serves TCP."""

    home: Home
    url: str
    token: str

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send a request; `headers` have _ for -, and the token unless `authorization` is given."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        all_headers = {"host": f"{host}:{port}", "authorization": f"Bearer {self.token}"}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PATIENCE)
        try:
            connection.putrequest(method, path, skip_host=True)
            for name, value in all_headers.items():
                if value:
                    connection.putheader(name, value)
            connection.endheaders()
            return Answer(connection.getresponse())
        finally:
            connection.close()


def served(home: Home) -> TcpHome:
    status = home.status()
    return TcpHome(home, status["listen"], Path(status["token_file"]).read_text().strip())


@pytest.fixture(scope="module")
def api() -> Iterator[TcpHome]:
    with scripted_home(listen="127.0.0.1:0") as home:
        yield served(home)


def test_the_official_client_works_with_the_token(api: TcpHome) -> None:
    messages = [{"role": "user", "content": "say hello there"}]
    with openai.OpenAI(api_key=api.token, base_url=f"{api.url}/v1", max_retries=0) as client:
        answer = client.chat.completions.create(model="", messages=messages)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "hello there"
    with (
        openai.OpenAI(api_key="wrong", base_url=f"{api.url}/v1", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="token is missing or wrong") as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer x", "Basic {}", "{}", "Bearer {}x", "Bearer ü"],
)
def test_without_the_token_there_is_401(api: TcpHome, authorization: str) -> None:
    answer = api.get("/v1/models", authorization=authorization.format(api.token))
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == 'Bearer, Basic realm="localspec"'
    assert answer.error["type"] == "invalid_request_error"
    assert api.token not in answer.body.decode()


def test_the_scheme_is_read_as_the_standard_has_it(api: TcpHome) -> None:
    assert api.get("/v1/models", authorization=f"bearer  {api.token}").status == 200


def encode_basic(user_and_password: str) -> str:
    return base64.b64encode(user_and_password.encode()).decode()


def test_the_token_may_be_the_password_of_an_address(api: TcpHome) -> None:
    """Some clients accept an address and no header."""
    for user in ("localspec", "", "jürgen", "a b"):
        url = api.url.replace("://", f"://{quote(user)}:{api.token}@")
        assert httpx2.get(f"{url}/v1/models").status_code == 200
    credentials = encode_basic(f"x:{api.token}")
    assert api.get("/v1/models", authorization=f"basic  {credentials}").status == 200
    assert api.get("/v1/models", authorization=f"Basic {credentials}", host="evil.x").status == 403


@pytest.mark.parametrize(
    "password", ["{}", ":", "x:", "x:{}x", "x:x{}", "x::{}", "{}:", "{}:x", "x:{} ", "\0:ü", "x"]
)
def test_a_wrong_password_gets_401(api: TcpHome, password: str) -> None:
    credentials = encode_basic(password.format(api.token))
    for authorization in (f"Basic {credentials}", f"Basic {credentials}!", f"Bearer {credentials}"):
        answer = api.get("/v1/models", authorization=authorization)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == 'Bearer, Basic realm="localspec"'


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 401), ("same-site", 401), ("same-origin", 200), ("none", 200), ("", 200)],
)
def test_a_page_cannot_use_the_password_that_its_browser_knows(
    api: TcpHome, site: str, status: int
) -> None:
    """A browser adds it by itself, even to a picture's address on a foreign page."""
    basic = f"Basic {encode_basic(f'x:{api.token}')}"
    assert api.get("/v1/models", authorization=basic, sec_fetch_site=site).status == status


def test_only_health_needs_no_token(api: TcpHome) -> None:
    assert api.get("/health", authorization="").json == {"status": "ok"}
    for path in ("/health/", "//health", "/health?x", "/v1/health", "/metrics", "/nothing"):
        expected = 200 if path == "/health?x" else 401
        assert api.get(path, authorization="").status == expected


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}"),
        *("localhost.evil.example", "evil.example#localhost:{port}", "10.0.0.1:{port}"),
        *("[::2]:{port}", "0x7f000001:{port}"),
    ],
)
def test_a_foreign_host_is_refused_even_with_the_token(api: TcpHome, host: str) -> None:
    port = api.url.rpartition(":")[2]
    for path in ("/v1/models", "/health"):
        answer = api.get(path, host=host.format(port=port))
        assert (answer.status, answer.error["code"]) == (403, "forbidden")


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST", "127.0.0.1:9", "[::1]:{port}"])
def test_local_host_names_are_accepted(api: TcpHome, host: str) -> None:
    port = api.url.rpartition(":")[2]
    assert api.get("/v1/models", host=host.format(port=port)).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://{host}", "vscode://x"]
)
def test_a_foreign_origin_is_refused_even_with_the_token(api: TcpHome, origin: str) -> None:
    host = api.url.removeprefix("http://")
    answer = api.get("/v1/models", origin=origin.format(host=host))
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_its_own_origin_is_accepted(api: TcpHome) -> None:
    answer = api.get("/v1/models", origin=api.url)
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_unix_socket_goes_on_without_a_token(api: TcpHome) -> None:
    assert api.home.chat("say hello").text == "hello"


def test_status_names_address_and_token_for_a_person(api: TcpHome) -> None:
    output = api.home.run("status").stdout
    assert api.url in output
    assert str(api.home.root / "state" / "token") in output
    assert api.token not in output
    assert api.token not in api.home.log.read_text()


def test_tcp_is_off_by_default(home: Home, daemon: RunningDaemon) -> None:
    assert home.status()["listen"] is None
    assert not (home.root / "state" / "token").exists()


def test_ipv6_and_a_token_that_is_kept(home: Home) -> None:
    home.use_fake()
    run = home.run("start", "--listen", "[::1]:0")
    assert "http://[::1]:" in run.stdout
    first = served(home)
    assert first.get("/v1/models").status == 200
    assert first.get("/v1/models", host="localhost:1").status == 200
    file = home.root / "state" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "localspec config set listen 127.0.0.1:0" in home.refused(
        "start", "--listen", "127.0.0.1:0"
    )
    home.run("stop")
    (home.root / "config").mkdir(exist_ok=True)
    (home.root / "config" / "config.toml").write_text('listen = "127.0.0.1:0"\n')
    home.run("start")
    second = served(home)
    assert second.token == first.token
    assert second.url.startswith("http://127.0.0.1:")


def test_other_machines_are_accepted_only_on_request(home: Home) -> None:
    home.use_fake()
    message = home.refused("start", "--listen", "0.0.0.0:0", code=2)
    assert "can be reached from other machines" in message
    assert "--listen-anywhere" in message
    assert home.run("start", "--listen", "0.0.0.0:0", "--listen-anywhere").returncode == 0
    api = served(home)
    api.url = api.url.replace("0.0.0.0", "127.0.0.1")
    assert api.get("/v1/models", host="192.168.7.7:1").status == 200
    assert api.get("/v1/models", host="evil.example").status == 403
    assert api.get("/v1/models", authorization="").status == 401


def test_a_port_in_use_is_said_in_one_sentence(home: Home) -> None:
    home.use_fake()
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        run = home.run("start", "--listen", f"127.0.0.1:{port}")
    assert run.returncode == 3
    assert run.stderr == (
        f"localspec: The daemon did not start: Port {port} of 127.0.0.1 is in use by another "
        "program; choose another one (`listen` in config.toml, or --listen).\n"
    )
    assert not home.socket.exists()


@pytest.mark.parametrize("listen", ["8080", ":8080", "example.org:80", "::1:80", "127.0.0.1:70000"])
def test_an_invalid_address_is_reported_before_the_start(home: Home, listen: str) -> None:
    assert "must be an address and a port, such as 127.0.0.1:8080" in home.refused(
        "start", "--listen", listen, code=2
    )
    assert not home.socket.parent.exists()


def test_a_token_that_others_could_read_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "state" / "token"
    token = tcp.load_token(file)
    assert tcp.load_token(file) == token
    file.chmod(0o640)
    with pytest.raises(UnsafePath, match="was open to other users"):
        tcp.load_token(file)
    file.unlink()
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(UnsafePath, match="too short"):
        tcp.load_token(file)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath, match="cannot be"):
        tcp.load_token(file)
    assert not (tmp_path / "elsewhere").exists()
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(UnsafePath, match="not a file that you own"):
        tcp.load_token(file)


BEARER = "Authorization: Bearer {token}\r\n"


@pytest.mark.parametrize(
    ("request_line", "more", "status"),
    [
        ("GET /v1/models HTTP/1.0", BEARER, 200),
        ("GET /v1/models HTTP/1.0", f"{BEARER}Host: evil.example\r\n", 403),
        ("GET /v1/models HTTP/1.0", f"{BEARER}Host:\r\n", 403),
        ("GET /v1/models HTTP/1.0", f"{BEARER}Origin: http://evil.example\r\n", 403),
        ("GET /v1/models HTTP/1.0", "", 401),
        ("GET /v1/models HTTP/1.1", BEARER, 400),
        ("PRI * HTTP/2.0", "\r\nSM\r\n", 505),
    ],
)
def test_only_http_1_0_needs_no_host(
    api: TcpHome, request_line: str, more: str, status: int
) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as raw:
        raw.sendall(f"{request_line}\r\n{more.format(token=api.token)}\r\n".encode())
        received = b""
        while chunk := raw.recv(65536):
            received += chunk
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert received.count(b"\r\n\r\n") == 1, "one answer, and the connection ends"


def test_a_key_may_come_as_azures_clients_send_it(api: TcpHome) -> None:
    assert api.get("/v1/models", authorization="", api_key=api.token).status == 200
    assert api.get("/v1/models", authorization="", api_key="x" + api.token).status == 401


def test_httpx_over_tcp_reads_a_stream(api: TcpHome) -> None:
    body = {"messages": [{"role": "user", "content": "slow 3"}], "stream": True}
    headers = {"authorization": f"Bearer {api.token}"}
    with httpx2.stream(
        "POST", f"{api.url}/v1/chat/completions", json=body, headers=headers
    ) as stream:
        assert [*stream.iter_lines()][-2:] == ["data: [DONE]", ""]


@pytest.fixture(scope="module")
def allowing() -> Iterator[TcpHome]:
    with scripted_home(
        listen="127.0.0.1:0",
        allow_hosts="Host.docker.internal, box.lan",
        allow_origins="http://localhost:3000 chrome-extension://*",
    ) as home:
        yield served(home)


def test_a_key_may_come_as_anthropics_clients_send_it(api: TcpHome) -> None:
    assert api.get("/v1/models", authorization="", x_api_key=api.token).status == 200
    # A client may send both, and one of them may be a placeholder.
    assert api.get("/v1/models", authorization="Bearer none", x_api_key=api.token).status == 200
    assert api.get("/v1/models", x_api_key="none").status == 200
    assert api.get("/v1/models", authorization="", x_api_key="none").status == 401
    assert api.get("/v1/models", authorization="", x_api_key="").status == 401


@pytest.mark.parametrize("host", ["host.docker.internal:8012", "BOX.lan", "box.lan:1"])
def test_a_container_may_use_a_name_that_was_allowed(allowing: TcpHome, host: str) -> None:
    assert allowing.get("/v1/models", host=host).status == 200
    assert allowing.get("/v1/models", host=host, authorization="").status == 401


@pytest.mark.parametrize("host", ["lan", "x.box.lan", "box.lan.evil.example", "box.lan:x"])
def test_only_complete_host_names_match(allowing: TcpHome, host: str) -> None:
    answer = allowing.get("/v1/models", host=host)
    assert answer.status == 403
    assert "`allow_hosts`" in answer.error["message"]


def preflight(api: TcpHome, origin: str, method: str = "POST") -> Answer:
    return api.get(
        "/v1/chat/completions",
        "OPTIONS",
        authorization="",
        origin=origin,
        access_control_request_method=method,
        access_control_request_headers="authorization,content-type,x-stainless-os",
        access_control_request_private_network="true",
    )


@pytest.mark.parametrize("origin", ["http://localhost:3000", "chrome-extension://abcdefgh"])
def test_an_allowed_origin_gets_cors_headers(allowing: TcpHome, origin: str) -> None:
    response = preflight(allowing, origin)
    assert response.status == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"].endswith("x-stainless-os")
    assert response.headers["access-control-allow-private-network"] == "true"
    assert response.headers["vary"].startswith("Origin")
    for authorization, status in ((f"Bearer {allowing.token}", 200), ("", 401)):
        answer = allowing.get("/v1/models", origin=origin, authorization=authorization)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["access-control-expose-headers"] == "Retry-After"
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("method", "status"), [("GET", 200), ("HEAD", 200), ("DELETE", 200), ("PUT", 400)]
)
def test_a_page_may_use_the_methods_that_there_are(
    allowing: TcpHome, method: str, status: int
) -> None:
    assert preflight(allowing, "http://localhost:3000", method).status == status


@pytest.mark.parametrize(
    "origin", ["http://localhost:3001", "https://localhost:3000", "null", "moz-extension://a"]
)
def test_other_origins_get_no_cors_headers(allowing: TcpHome, origin: str) -> None:
    answer = preflight(allowing, origin)
    assert answer.status == 403
    assert "`allow_origins`" in answer.error["message"]
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_allowed_origins_take_effect_at_once(home: Home) -> None:
    home.start(listen="127.0.0.1:0")
    api = served(home)
    page = "http://page.example"
    assert api.get("/v1/models", origin=page).status == 403
    home.run("config", "set", "allow_origins", "*")
    home.run("config", "set", "allow_hosts", "box.lan")
    assert api.get("/v1/models", origin=page, host="box.lan").status == 200
    home.run("config", "unset", "allow_origins")
    assert api.get("/v1/models", origin=page).status == 403


def test_options_lists_the_methods_of_a_path(api: TcpHome) -> None:
    methods = "GET, HEAD, OPTIONS"
    for path, allowed in (("/v1/models", methods), ("/localspec/pulls", f"{methods}, POST")):
        by_tcp = api.get(path, "OPTIONS", authorization="")
        for answer in (by_tcp, api.home.request("OPTIONS", path)):
            assert (answer.status, answer.headers["allow"]) == (204, allowed)
    assert api.get("/nothing", "OPTIONS").status == 404
    assert "POST" in api.get("*", "OPTIONS").headers["allow"]
    refused = api.get("/localspec/pulls", "PUT")
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS, POST")


def test_the_token_command_prints_the_token_and_its_file(api: TcpHome, home: Home) -> None:
    assert api.home.run("token").stdout == f"{api.token}\n"
    assert json.loads(api.home.run("token", "--json").stdout) == {
        "token": api.token,
        "file": str(api.home.root / "state" / "token"),
    }
    message = home.refused("token", code=2)
    assert "There is no token in" in message
    assert "localspec config set listen" in message


def exchange(api: TcpHome, data: str, *, unix: bool, leaves: bool = False) -> bytes:
    """Return the response to a client that closes its side after it has sent `data`."""
    if unix:
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(PATIENCE)
        raw.connect(str(api.home.socket))
    else:
        host, port = api.url.removeprefix("http://").split(":")
        raw = socket.create_connection((host, int(port)), PATIENCE)
    with raw:
        raw.sendall(data.encode())
        if leaves:
            wait_for(lambda: api.home.status()["running"] == 1, "the request to run")
            return b""
        raw.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := raw.recv(65536):
            received += chunk
    return received


def request(api: TcpHome, text: str, *, stream: bool, version: str = "1.1") -> str:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": stream})
    host = api.url.removeprefix("http://")
    return (
        f"POST http://{host}/v1/chat/completions HTTP/{version}\r\nHost: {host}\r\nAuthorization: "
        f"Bearer {api.token}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )


@pytest.mark.parametrize("unix", [True, False])
@pytest.mark.parametrize(("stream", "version"), [(True, "1.1"), (False, "1.1"), (False, "1.0")])
def test_a_client_that_closes_its_side_gets_its_answer(
    api: TcpHome, unix: bool, stream: bool, version: str
) -> None:
    """The target of the request is an absolute URL, like in a request to a proxy."""
    answer = exchange(api, request(api, "slow 4", stream=stream, version=version), unix=unix)
    assert b"HTTP/1.1 200 OK" in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    two = exchange(api, 2 * request(api, "say both", stream=False), unix=unix)
    assert two.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("unix", [True, False])
def test_a_disconnect_cancels_the_request(api: TcpHome, unix: bool) -> None:
    before = api.home.status()["counts"]["cancelled"]
    exchange(api, request(api, "late 30", stream=True), unix=unix, leaves=True)

    def cancelled() -> bool:
        status = api.home.status()
        return bool(status["counts"]["cancelled"] == before + 1 and status["running"] == 0)

    wait_for(cancelled, "the request of a client that left to be cancelled")


def test_the_host_of_a_whole_address_is_the_one_that_counts(api: TcpHome) -> None:
    host = api.url.removeprefix("http://")
    for target, named, status in (
        (f"http://{host}/health", "evil.example", b"200"),
        ("http://evil.example/health", host, b"403"),
        (f"HTTP://{host}", host, b"401"),
    ):
        head = f"GET {target} HTTP/1.1\r\nHost: {named}\r\nConnection: close\r\n\r\n"
        assert exchange(api, head, unix=False).startswith(b"HTTP/1.1 " + status)


def test_a_name_that_no_pair_has_is_answered_where_that_is_allowed(
    home: Home, daemon: RunningDaemon
) -> None:
    refused = home.chat("say hello", model="gpt-4o")
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert refused.error["message"].endswith(
        "See: localspec list --all; to have the configured pair answer for such names: localspec "
        "config set any_model true"
    )
    with ThreadPoolExecutor(8) as pool:  # one look for all of them
        together = pool.map(lambda _: home.chat("say hello", model="gpt-4o").body, range(32))
        assert set(together) == {refused.body}
    home.run("config", "set", "any_model", "true")
    for name in ("gpt-4o", "anthropic/claude", "llama3:8b"):
        answered = home.chat("say hello", model=name)
        assert (answered.text, answered.json["model"]) == ("hello", str(home.model))
    assert home.chat("say hello", model=str(home.root / "none.gguf")).status == 404
    assert home.run("show", "gpt-4o").returncode == 1
    for name in ("gpt-4o", "llama3:8b"):  # what is said of a pair is said of that one
        verified = home.run("verify", name)
        assert (verified.returncode, name in verified.stderr) == (1, True), verified.stderr


NETWORK = [
    *({"network": {name: "http://127.0.0.1:9"}} for name in ("HF_ENDPOINT", "HTTPS_PROXY", "ALL_PROXY")),
    *({"network": {name: "/etc/passwd"}} for name in ("HF_TOKEN_PATH", "HF_HOME")),
    {"network": {"HF_TOKEN": "hf_theirs"}},
    {"network": {}},
    {"endpoint": "http://127.0.0.1:9"},
]  # fmt: skip


@pytest.mark.parametrize("chosen", NETWORK)
def test_the_endpoint_of_a_pull_cannot_be_chosen_over_tcp(
    api: TcpHome, chosen: dict[str, object]
) -> None:
    """Otherwise a holder of the token could make the daemon send a file to any address."""
    host, _, port = api.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    head = {"authorization": f"Bearer {api.token}", "content-type": "application/json"}
    body = json.dumps({"name": "nobody/nothing", "offline": True, **chosen})
    connection.request("POST", "/localspec/pulls", body, head)
    refused = Answer(connection.getresponse())
    connection.close()
    (name,) = chosen
    assert (refused.status, refused.error["param"]) == (403, name)
    assert not api.home.request("GET", "/localspec/pulls").json["pulls"]
