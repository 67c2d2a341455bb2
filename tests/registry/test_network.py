"""Each environment has its own way to the hub, and an error names the setting that is wrong."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from unittest import mock

import httpx2
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from localspec.daemon.pairs.tasks import pull_environment
from localspec.errors import (
    BadToken,
    Gated,
    HubError,
    LocalspecError,
    NetworkSettings,
    NotOnHub,
    ProxyRefused,
    Unreachable,
    Untrusted,
    WebPage,
)
from localspec.protocol.pairs import Network as PullNetwork
from localspec.protocol.pairs import PullRequest
from localspec.registry.hub import network as causes
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.network import find_proxy
from localspec.registry.hub.offline import HUB_URL
from localspec.registry.hub.retry import RetryableError, RetryPolicy, Tuning
from localspec.registry.pulls.pull import Puller
from localspec.registry.store import integrity
from tests.registry.conftest import QUICK
from tests.registry.pulling import DRAFT, TARGET, Rig
from tests.support.hub import TestHub
from tests.support.proxies import TestProxy, dead_port, make_certificate

VARIABLES = {name.upper() for name in PullNetwork.__struct_fields__} | {"http_proxy", "no_proxy"}
PASSWORD = "somebody:canarysecretword"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def secure(certificate: Path) -> Iterator[TestHub]:
    """Serve HTTPS with a self-signed certificate."""
    with TestHub(certificate).running() as hub:
        hub.add("own/draft", "draft.gguf", DRAFT)
        hub.add("own/target", "target.gguf", TARGET)
        yield hub


def pull(rig: Rig, tuning: Tuning = QUICK, **variables: str) -> None:
    """Pull as a process with these variables."""
    with (
        mock.patch.dict(os.environ, {"HF_ENDPOINT": "", **variables}),
        # These were read when it was imported.
        mock.patch.multiple(
            constants,
            HF_TOKEN_PATH=variables.get("HF_TOKEN_PATH", "/none"),
            HF_HUB_DISABLE_IMPLICIT_TOKEN="HF_HUB_DISABLE_IMPLICIT_TOKEN" in variables,
        ),
    ):
        Puller(rig.store, Hub(stall=tuning.stall_s), tuning).pull("p", rig.pair)


# Which proxy, certificate and token a pull uses.


@pytest.mark.parametrize(
    ("variables", "address", "proxy"),
    [
        ({}, "https://a.example", ""),
        ({"HTTPS_PROXY": "http://p:1"}, "https://a.example", "p:1"),
        ({"HTTPS_PROXY": "http://p:1"}, "http://a.example", ""),
        ({"http_proxy": "p:1"}, "http://a.example", "p:1"),
        ({"ALL_PROXY": "http://p:1"}, "http://a.example", "p:1"),
        ({"all_proxy": "http://p:1", "https_proxy": "q:2"}, "https://a.example", "q:2"),
        ({"HTTPS_PROXY": "http://p:1", "https_proxy": "q:2"}, "https://a.example", "q:2"),
        ({"HTTPS_PROXY": "http://p:1", "https_proxy": ""}, "https://a.example", ""),
        ({"ALL_PROXY": f"http://{PASSWORD}@p:1/"}, "http://a.example", "p:1"),
        *(
            ({"ALL_PROXY": "p:1", name: spared}, address, "" if direct else "p:1")
            for name in ("NO_PROXY", "no_proxy")
            for spared, address, direct in [
                ("*", "http://a.example", True),
                ("a.example", "http://a.example", True),
                ("A.Example", "http://b.a.example", True),
                (".a.example", "http://b.a.example", True),
                ("*.a.example", "http://b.a.example", True),
                ("a.example", "http://ba.example", False),
                ("x, a.example ,y", "http://a.example", True),
                ("a.example:8080", "http://a.example:8080", True),
                ("a.example:8080", "http://a.example", False),
                ("a.example:443", "https://a.example", True),
                ("127.0.0.1", "http://127.0.0.1:5", True),
                ("127.0.0.0/8", "http://127.1.2.3", True),
                ("10.0.0.0/8", "http://127.1.2.3", False),
                ("::1", "http://[::1]:5", True),
                ("[::1]", "http://[::1]:5", True),
                ("", "http://a.example", False),
                ("http://[, :x, a:b:c", "http://a.example", False),
            ]
        ),
    ],
)  # fmt: skip
def test_the_environment_decides_which_proxy_is_used(
    variables: dict[str, str], address: str, proxy: str
) -> None:
    with mock.patch.dict(os.environ, variables):
        chosen = find_proxy(httpx2.URL(address))
    assert (chosen.place if chosen else "") == proxy
    assert "canarysecretword" not in repr(chosen)


def test_a_proxy_of_the_environment_is_used(rig: Rig) -> None:
    with TestProxy(rig.hub.port, password=PASSWORD).running() as proxy:
        pull(
            rig,
            HF_ENDPOINT="http://hub.invalid",
            HTTP_PROXY=proxy.url(PASSWORD),
            NO_PROXY="localhost",
        )
    assert {address.split("/")[2] for address in proxy.requests} == {"hub.invalid"}
    rig.assert_installed()


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_a_certificate_of_the_environment_is_trusted(
    rig: Rig, secure: TestHub, certificate: Path, variable: str
) -> None:
    """A proxy stands between, so this holds for tunnelled connections too."""
    with TestProxy(secure.port).running() as proxy:
        pull(
            rig,
            QUICK,
            HF_ENDPOINT=secure.endpoint,
            https_proxy=proxy.url(),
            **{variable: str(certificate)},
        )
        assert f"127.0.0.1:{secure.port}" in proxy.requests
    rig.assert_installed()


def test_a_token_of_the_environment_is_sent_to_its_endpoint_alone(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hf_inafile\n")
    for variables, token in (
        ({"HF_TOKEN": "hf_named", "HF_TOKEN_PATH": str(file)}, "hf_named"),
        ({"HF_TOKEN_PATH": str(file)}, "hf_inafile"),
        ({"HF_TOKEN": "hf_named", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, ""),
        ({}, ""),
    ):
        rig.hub.requests.clear()
        pull(rig, QUICK, HF_ENDPOINT=rig.hub.endpoint, **variables)
        headers = {request.authorization for request in rig.hub.requests if not request.to_storage}
        assert headers == {f"Bearer {token}" if token else ""}
        assert not any(request.authorization for request in rig.hub.requests if request.to_storage)
        integrity.remove_pair(rig.store, "p")


# Errors.


@pytest.mark.parametrize(
    ("response", "token", "kind"),
    [
        ((401, ""), "hf_old", BadToken),
        ((403, "GatedRepo"), "hf_good", Gated),
        ((404, "EntryNotFound"), "", NotOnHub),
    ],
)
def test_a_refusal_of_the_hub_is_not_retried(
    rig: Rig, response: tuple[int, str], token: str, kind: type[HubError]
) -> None:
    rig.faults.answer = response
    with pytest.raises(kind) as caught:
        pull(rig, HF_ENDPOINT=rig.hub.endpoint, HF_TOKEN=token)
    assert type(caught.value) is kind
    assert not token or token not in str(caught.value)
    requests = [request for request in rig.hub.requests if "target.gguf" in request.path]
    assert len(requests) == 1


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize(
    ("status", "password", "message"),
    [
        (407, "", "asks for a name and a password"),
        (407, PASSWORD, "does not accept the name and password"),
        (403, "", "refuses to connect to (hub.invalid|127.0.0.1)"),
    ],
)
def test_a_proxy_that_refuses_is_named(
    rig: Rig, certificate: Path, secured: bool, status: int, password: str, message: str
) -> None:
    endpoint = "https://hub.invalid" if secured else "http://hub.invalid"
    with TestProxy(status=status).running() as proxy:
        with pytest.raises(ProxyRefused, match=message) as caught:
            pull(rig, HF_ENDPOINT=endpoint, ALL_PROXY=proxy.url(password))
        assert len(proxy.requests) <= 2, "at most one per model"
    error_text = str(caught.value)
    assert str(status) in error_text
    assert proxy.place in error_text
    assert "ALL_PROXY" in error_text
    assert "canarysecretword" not in error_text


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_dead_proxy_is_named(rig: Rig, scheme: str) -> None:
    place = f"127.0.0.1:{dead_port()}"
    with pytest.raises(Unreachable) as caught:
        pull(rig, HF_ENDPOINT=f"{scheme}://hub.invalid", ALL_PROXY=f"http://{PASSWORD}@{place}")
    error_text = str(caught.value)
    assert f"the proxy {place} (ALL_PROXY) refuses connections" in error_text
    assert "check ALL_PROXY or unset it" in error_text
    assert "canarysecretword" not in error_text


@pytest.mark.parametrize(
    ("variables", "kind", "message"),
    [
        ({"HF_ENDPOINT": "https://hub.invalid"}, Unreachable, r"hub\.invalid cannot be resolved \(DNS\)"),
        ({"HTTPS_PROXY": "http://proxy.invalid:3128"}, Unreachable,
         r"the name proxy\.invalid of the proxy .*\(DNS\)"),
        ({"HF_ENDPOINT": "http://127.0.0.1:DEAD"}, Unreachable, "127.0.0.1:DEAD refuses connections"),
        ({"HF_TOKEN_PATH": "/none"}, NetworkSettings, "HF_TOKEN_PATH names /none, which does not exist"),
        ({"https_proxy": f"socks5://{PASSWORD}@p.invalid:1"}, NetworkSettings,
         "https_proxy .*a SOCKS proxy .p.invalid:1.* install socksio"),
        ({"https_proxy": "socks4://p:1"}, NetworkSettings, "https_proxy .*of an unsupported kind .socks4"),
        ({"https_proxy": f"http://{PASSWORD}@p:port"}, NetworkSettings,
         "https_proxy .*is not a valid proxy address"),
    ],
)  # fmt: skip
def test_a_variable_that_leads_nowhere_is_named(
    rig: Rig, variables: dict[str, str], kind: type[HubError], message: str
) -> None:
    port = str(dead_port())
    variables = {name: value.replace("DEAD", port) for name, value in variables.items()}
    with pytest.raises(kind, match=message.replace("DEAD", port)) as caught:
        pull(rig, QUICK, **variables)
    assert "canarysecretword" not in str(caught.value)


def test_an_endpoint_that_is_no_hub_is_named(rig: Rig) -> None:
    rig.faults.portal = True
    with pytest.raises(WebPage, match=r"127\.0\.0\.1:\d+ \(HF_ENDPOINT\) answered .* not a hub"):
        pull(rig, HF_ENDPOINT=rig.hub.endpoint)


def test_an_untrusted_certificate_is_refused(rig: Rig, secure: TestHub, tmp_path: Path) -> None:
    with pytest.raises(Untrusted, match=r"not trusted .*SSL_CERT_FILE or REQUESTS_CA_BUNDLE"):
        pull(rig, HF_ENDPOINT=secure.endpoint)
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other")
    with pytest.raises(Untrusted, match=re.escape(f"currently set: REQUESTS_CA_BUNDLE ({other})")):
        pull(rig, HF_ENDPOINT=secure.endpoint, REQUESTS_CA_BUNDLE=str(other))
    assert not secure.requests


def test_an_unreadable_certificate_file_is_named(rig: Rig, secure: TestHub, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for file, problem in (
        (tmp_path / "none.pem", "does not exist"),
        (empty, "contains no certificates"),
    ):
        with pytest.raises(NetworkSettings) as caught:
            pull(rig, HF_ENDPOINT=secure.endpoint, SSL_CERT_FILE=str(file))
        assert f"SSL_CERT_FILE names {file}, which {problem}" in str(caught.value)


def test_a_token_file_that_is_none_is_named(rig: Rig) -> None:
    pipe = rig.store.root.parent / "pipe"
    os.mkfifo(pipe)
    for strange in (pipe, rig.store.root.parent):
        with pytest.raises(NetworkSettings, match="which cannot be read"):
            pull(rig, HF_ENDPOINT=rig.hub.endpoint, HF_TOKEN_PATH=str(strange))


def test_a_silent_proxy_is_named(rig: Rig) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        tuning = replace(QUICK, stall_s=0.3, retry_policy=RetryPolicy(tries=1))
        with pytest.raises(Unreachable) as caught:
            pull(rig, tuning, HTTPS_PROXY=f"http://{PASSWORD}@{place}")
    error_text = str(caught.value)
    assert f"the proxy {place} (HTTPS_PROXY) stalled" in error_text
    assert "check HTTPS_PROXY or unset it" in error_text


def test_a_silent_server_is_named(rig: Rig) -> None:
    rig.faults.stall_after = [0] * 50
    tuning = replace(QUICK, stall_s=0.2, retry_policy=RetryPolicy(tries=1))
    with pytest.raises(Unreachable, match=r"the connection to localhost:\d+ stalled"):
        pull(rig, tuning, HF_ENDPOINT=rig.hub.endpoint)


# Responses and exceptions as the HTTP library returns them, without a network.

MIRROR = "http://mirror.example"
SECRET = "canarysecretword"
PROXIED = {"HTTPS_PROXY": f"http://me:{SECRET}@proxy.example:3128", "HF_ENDPOINT": MIRROR}


def build_response(
    status: int,
    url: str = f"{HUB_URL}/a/b",
    *,
    with_token: bool = False,
    redirected: bool = False,
    **headers: str,
) -> httpx2.Response:
    request_headers = {"authorization": f"Bearer {SECRET}"} if with_token else {}
    request = httpx2.Request("GET", url, headers=request_headers)
    response_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx2.Response(status, headers=response_headers, request=request)
    if redirected:
        response.history = [httpx2.Response(302, request=request)]
    return response


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (build_response(407), ProxyRefused, "and none is set; set HTTPS_PROXY"),
        (build_response(500), RetryableError, "answered 500"),
        (build_response(401), NotOnHub, "no repository a/b"),
        (build_response(401, with_token=True), BadToken, "does not accept the token"),
        (build_response(401, x_error_code="GatedRepo"), Gated, "or set HF_TOKEN"),
        (
            build_response(401, x_error_code="GatedRepo", with_token=True),
            Gated,
            "does not accept the token",
        ),
        (build_response(403, x_error_code="GatedRepo", with_token=True), Gated, "has no access"),
        (
            build_response(401, x_error_code="RepoNotFound", with_token=True),
            BadToken,
            "does not accept",
        ),
        (build_response(401, x_error_code="RepoNotFound"), NotOnHub, "a/b, or it is private"),
        (
            build_response(404, x_error_code="RepoNotFound", with_token=True),
            NotOnHub,
            "repository a/b",
        ),
        (build_response(403, x_error_code="RepoNotFound"), NotOnHub, "no repository a/b"),
        (
            build_response(403, f"{MIRROR}/x", redirected=True),
            RetryableError,
            "mirror.example answered 403",
        ),
        (
            build_response(416, f"{MIRROR}/x", redirected=True),
            RetryableError,
            "mirror.example answered 416",
        ),
        (build_response(404, redirected=True), NotOnHub, "no repository a/b"),
        (build_response(403, with_token=True), Gated, "may lack permission"),
        (build_response(403), HubError, "perhaps a firewall answered"),
        (build_response(404), NotOnHub, "no repository a/b"),
        (build_response(404, content_type="text/html"), NotOnHub, "no repository a/b"),
        (build_response(404, x_error_code="EntryNotFound"), NotOnHub, "no file f.gguf in a/b"),
        (build_response(418), HubError, "answered 418 for a/b/f.gguf"),
    ],
)
def test_each_refusal_of_the_hub_has_its_error(
    response: httpx2.Response, kind: type, message: str
) -> None:
    error = causes.error_from_status(response, HUB_URL, "a/b", "f.gguf")
    assert type(error) is kind
    assert message in str(error)
    assert SECRET not in str(error)


def test_a_missing_revision_is_named() -> None:
    response = build_response(404, x_error_code="RevisionNotFound")
    assert "no such revision of a/b" in str(causes.error_from_status(response, HUB_URL, "a/b", ""))


def test_a_web_page_from_another_endpoint_is_named() -> None:
    response = build_response(404, f"{MIRROR}/a/b", content_type="text/html")
    error = causes.error_from_status(response, MIRROR, "a/b", "f.gguf")
    assert isinstance(error, WebPage)
    assert "(HF_ENDPOINT)" in str(error)


def with_cause(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


UNTRUSTED = ssl.SSLCertVerificationError("self-signed certificate")
UNTRUSTED.verify_code, UNTRUSTED.verify_message = 18, "self-signed certificate"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (httpx2.InvalidURL("no"), HubError, "not a valid address"),
        (httpx2.TooManyRedirects("round"), HubError, "in a loop"),
        (httpx2.DecodingError("zip"), HubError, "cannot be decompressed"),
        (RuntimeError(SECRET), Unreachable, "(RuntimeError)"),
        (httpx2.ProxyError("407 asks"), ProxyRefused, "407"),
        (httpx2.ProxyError("502 Bad Gateway"), RetryableError, "cannot connect"),
        (httpx2.ProxyError("gone"), RetryableError, "cannot connect"),
        (with_cause(httpx2.ConnectError("x"), UNTRUSTED), Untrusted, "certificate"),
        (
            with_cause(httpx2.ConnectError("x"), ssl.SSLError("x")),
            RetryableError,
            "does not speak TLS",
        ),
        (with_cause(httpx2.ConnectError("x"), socket.gaierror(-2, "x")), RetryableError, "(DNS)"),
        (
            with_cause(httpx2.ConnectError("x"), ConnectionRefusedError()),
            RetryableError,
            "refuses conn",
        ),
        (with_cause(httpx2.ReadError("x"), OSError(101, "No route")), RetryableError, "(No route)"),
        (httpx2.ConnectTimeout("x"), RetryableError, "the connection timed out"),
        (httpx2.ReadTimeout("x"), RetryableError, "stalled"),
        (httpx2.RemoteProtocolError(SECRET), RetryableError, "(RemoteProtocolError)"),
    ],
)
@pytest.mark.parametrize("variables", [{}, PROXIED], ids=["directly", "by a proxy"])
def test_each_exception_of_the_http_library_has_its_error(
    error: Exception, kind: type, message: str, variables: dict[str, str]
) -> None:
    with mock.patch.dict(os.environ, variables):
        hub_error = causes.error_from_exception(
            error, httpx2.URL(f"{HUB_URL}/a/b"), "a/b", "f.gguf"
        )
    assert type(hub_error) is kind
    assert message in str(hub_error)
    assert SECRET not in f"{hub_error} {getattr(hub_error, 'advice', '')}"


NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)


@given(seconds=st.integers(-1000, 10_000), skew=st.integers(-100_000, 100_000))
def test_retry_after_may_be_a_date(seconds: int, skew: int) -> None:
    """The delay is measured by the server's clock, whatever the local clock shows."""
    server = NOW + timedelta(seconds=skew)
    headers = {
        "date": format_datetime(server, usegmt=True),
        "retry-after": format_datetime(server + timedelta(seconds=seconds), usegmt=True),
    }
    assert causes._parse_retry_after(headers) == min(max(seconds, 0), 300)
    assert causes._parse_retry_after({"retry-after": str(max(seconds, 0))}) == min(
        max(seconds, 0), 300
    )


@given(st.text(max_size=40))
def test_an_invalid_retry_after_is_ignored(value: str) -> None:
    seconds = causes._parse_retry_after({"retry-after": value, "date": value})
    assert seconds is None or 0 <= seconds <= 300


def test_our_own_errors_pass_unchanged() -> None:
    for error in (HubError("ours"), RetryableError("ours")):
        assert causes.error_from_exception(error, None, "a/b", "f.gguf") is error


def test_an_error_without_an_address_is_unreachable() -> None:
    error = causes.error_from_exception(httpx2.ConnectError("x"), None, "a/b", "f.gguf")
    assert type(error) is Unreachable


TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["http://", "http://[", "https://a:b@c:d", "http://h.invalid:99999", "~nobody/x", "$HOME/x",
         "socks5h://", "http://h .invalid", "http://h.invalid/{repo}", "://", "a\0b", "http://é.invalid",
         "*", "[::1", "10.0.0.0/99", "http://h.invalid:0", "http://\ud800", "http://h.invalid?x#y"]
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    variables=st.dictionaries(st.sampled_from(sorted(VARIABLES)), TEXTS, max_size=4),
    secure=st.booleans(),
)
def test_any_environment_works_or_is_refused_with_our_own_error(
    variables: dict[str, str], secure: bool
) -> None:
    stated = {"HF_ENDPOINT": f"http{'s' * secure}://hub.invalid", **variables}
    network = PullNetwork(**{name.lower(): value for name, value in stated.items()})
    try:
        environment = pull_environment(PullRequest("p", network=network))
    except NetworkSettings:
        return
    with (
        mock.patch("socket.getaddrinfo", side_effect=socket.gaierror(-2, "unknown")),
        mock.patch.dict(os.environ, environment, clear=True),
        pytest.raises((LocalspecError, RetryableError)) as caught,
    ):
        Hub().resolve("own/target", "target.gguf")
    assert "Error)" not in str(caught.value)
