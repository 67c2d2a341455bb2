"""Every way in which the hub can fail to answer has one sentence, and none that was not thought of passes.

Without a network: answers and exceptions as the HTTP library gives them.
"""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import (
    BadToken,
    Gated,
    HubError,
    NotOnHub,
    ProxyRefused,
    Unreachable,
    Untrusted,
    WebPage,
)
from localspec.registry.hub import network as causes
from localspec.registry.hub.network import HUB_URL, Network
from localspec.registry.hub.retry import RetryableError

MIRROR = "http://mirror.example"
SECRET = "canarysecretword"
PROXIED = Network.from_environment(
    {"HTTPS_PROXY": f"http://me:{SECRET}@proxy.example:3128", "HF_ENDPOINT": MIRROR}
)


def answered(
    status: int,
    url: str = f"{HUB_URL}/a/b",
    *,
    sent: bool = False,
    moved: bool = False,
    **headers: str,
) -> httpx2.Response:
    given = {"authorization": f"Bearer {SECRET}"} if sent else {}
    request = httpx2.Request("GET", url, headers=given)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    found = httpx2.Response(status, headers=named, request=request)
    if moved:
        found.history = [httpx2.Response(302, request=request)]
    return found


@pytest.mark.parametrize(
    ("response", "kind", "says"),
    [
        (answered(407), ProxyRefused, "and none is set; set HTTPS_PROXY"),
        (answered(500), RetryableError, "answered 500"),
        (answered(401), NotOnHub, "no repository a/b"),
        (answered(401, sent=True), BadToken, "does not accept the token"),
        (answered(401, x_error_code="GatedRepo"), Gated, "or set HF_TOKEN"),
        (answered(401, x_error_code="GatedRepo", sent=True), Gated, "does not accept the token"),
        (answered(403, x_error_code="GatedRepo", sent=True), Gated, "has no access"),
        (answered(403, x_error_code="RepoNotFound"), NotOnHub, "no repository a/b"),
        (answered(403, f"{MIRROR}/x", moved=True), RetryableError, "mirror.example answered 403"),
        (answered(416, f"{MIRROR}/x", moved=True), RetryableError, "mirror.example answered 416"),
        (answered(404, moved=True), NotOnHub, "no repository a/b"),
        (answered(403, sent=True), Gated, "may lack permission"),
        (answered(403), HubError, "perhaps a firewall answered"),
        (answered(404), NotOnHub, "no repository a/b"),
        (answered(404, content_type="text/html"), NotOnHub, "no repository a/b"),
        (answered(404, x_error_code="EntryNotFound"), NotOnHub, "no file f.gguf in a/b"),
        (answered(418), HubError, "answered 418 for a/b/f.gguf"),
    ],
)
def test_what_the_hub_answers(response: httpx2.Response, kind: type, says: str) -> None:
    found = causes.error_from_status(response, Network(), HUB_URL, "a/b", "f.gguf")
    assert type(found) is kind
    assert says in str(found)
    assert SECRET not in str(found)


def test_a_revision_that_is_not_there() -> None:
    response = answered(404, x_error_code="RevisionNotFound")
    assert "no such revision of a/b" in str(
        causes.error_from_status(response, Network(), HUB_URL, "a/b", "")
    )


def test_a_page_of_another_endpoint() -> None:
    response = answered(404, f"{MIRROR}/a/b", content_type="text/html")
    found = causes.error_from_status(response, PROXIED, MIRROR, "a/b", "f.gguf")
    assert isinstance(found, WebPage)
    assert "(HF_ENDPOINT)" in str(found)


def because(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


UNTRUSTED = ssl.SSLCertVerificationError("self-signed certificate")
UNTRUSTED.verify_code, UNTRUSTED.verify_message = 18, "self-signed certificate"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (httpx2.InvalidURL("no"), HubError, "not a valid address"),
        (httpx2.TooManyRedirects("round"), HubError, "in a loop"),
        (httpx2.DecodingError("zip"), HubError, "cannot be decompressed"),
        (RuntimeError(SECRET), Unreachable, "(RuntimeError)"),
        (httpx2.ProxyError("407 asks"), ProxyRefused, "407"),
        (httpx2.ProxyError("502 Bad Gateway"), RetryableError, "cannot connect"),
        (httpx2.ProxyError("gone"), RetryableError, "cannot connect"),
        (because(httpx2.ConnectError("x"), UNTRUSTED), Untrusted, "certificate"),
        (
            because(httpx2.ConnectError("x"), ssl.SSLError("x")),
            RetryableError,
            "does not speak TLS",
        ),
        (because(httpx2.ConnectError("x"), socket.gaierror(-2, "x")), RetryableError, "(DNS)"),
        (
            because(httpx2.ConnectError("x"), ConnectionRefusedError()),
            RetryableError,
            "refuses conn",
        ),
        (because(httpx2.ReadError("x"), OSError(101, "No route")), RetryableError, "(No route)"),
        (httpx2.ConnectTimeout("x"), RetryableError, "the connection timed out"),
        (httpx2.ReadTimeout("x"), RetryableError, "stalled"),
        (httpx2.RemoteProtocolError(SECRET), RetryableError, "(RemoteProtocolError)"),
    ],
)
@pytest.mark.parametrize("network", [Network(), PROXIED], ids=["directly", "by a proxy"])
def test_what_the_http_library_raises(
    error: Exception, kind: type, says: str, network: Network
) -> None:
    found = causes.error_from_exception(
        error, network, httpx2.URL(f"{HUB_URL}/a/b"), "a/b", "f.gguf"
    )
    assert type(found) is kind
    assert says in str(found)
    assert SECRET not in f"{found} {getattr(found, 'advice', '')}"


NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)


@given(seconds=st.integers(-1000, 10_000), skew=st.integers(-100_000, 100_000))
def test_a_time_to_wait_may_be_a_date(seconds: int, skew: int) -> None:
    """By the server's clock, whatever ours says."""
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
def test_a_time_to_wait_that_is_none_is_passed_over(value: str) -> None:
    seconds = causes._parse_retry_after({"retry-after": value, "date": value})
    assert seconds is None or 0 <= seconds <= 300


def test_our_own_errors_pass_as_they_are() -> None:
    for error in (HubError("ours"), RetryableError("ours")):
        assert causes.error_from_exception(error, Network(), None, "a/b", "f.gguf") is error


def test_an_error_before_there_was_an_address() -> None:
    found = causes.error_from_exception(httpx2.ConnectError("x"), Network(), None, "a/b", "f.gguf")
    assert type(found) is Unreachable
