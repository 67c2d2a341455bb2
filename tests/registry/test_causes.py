"""Every way in which the hub can fail has one clear message, and no unexpected error passes unnoticed.

No network is used: responses and exceptions are built as the HTTP library returns them.
"""

from __future__ import annotations

import os
import socket
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from unittest import mock

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
from localspec.registry.hub.offline import HUB_URL
from localspec.registry.hub.retry import RetryableError

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
