"""Unusual but well-meant requests of clients."""

from __future__ import annotations

import codecs
import gzip
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.daemons import Answer, Home, UnixConnection

BODY = {"messages": [{"role": "user", "content": "say yes"}]}
PATHS = ["/v1/models", "/models", "/health", "/v1/health", "/openapi.yaml"]


def post(home: Home, target: str, body: bytes, **headers: str) -> Answer:
    connection = UnixConnection(home.socket)
    try:
        connection.request("POST", target, body, {"Content-Type": "application/json", **headers})
        return Answer(connection.getresponse())
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_a_byte_order_mark_is_ignored(api: Home, path: str) -> None:
    answer = post(api, path, codecs.BOM_UTF8 + json.dumps(BODY).encode())
    assert (answer.status, answer.text) == (200, "yes")
    assert post(api, path, codecs.BOM_UTF8 * 2 + json.dumps(BODY).encode()).status == 400
    assert post(api, path, json.dumps(BODY).encode("utf-16")).status == 400


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(PATHS), st.data())
def test_repeated_slashes_mean_the_same_path(api: Home, path: str, data: st.DataObject) -> None:
    counts = data.draw(
        st.lists(st.integers(1, 3), min_size=path.count("/"), max_size=path.count("/"))
    )
    parts = path.split("/")[1:]
    target = "".join("/" * count + part for count, part in zip(counts, parts, strict=True))
    target += "/" * data.draw(st.integers(0, 2))
    if target.startswith("//"):  # http.client reads such a target as an address
        target = f"http://localhost{target}"
    answer, plain = api.request("GET", target), api.request("GET", path)
    assert (answer.status, answer.headers["content-type"]) == (
        plain.status,
        plain.headers["content-type"],
    )
    assert plain.status == 200


def test_a_name_keeps_its_slashes(api: Home) -> None:
    answer = api.request("GET", "/localspec/pairs/x//y/")
    assert answer.status == 404
    assert "x//y/" in answer.error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "GZIP", "gzip, identity"])
def test_a_compressed_body_is_refused_with_the_reason(api: Home, encoding: str) -> None:
    body = gzip.compress(json.dumps(BODY).encode())
    answer = post(api, "/v1/chat/completions", body, **{"Content-Encoding": encoding})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
    assert "compressed" in answer.error["message"]
    plain = post(
        api, "/v1/chat/completions", json.dumps(BODY).encode(), **{"Content-Encoding": "identity"}
    )
    assert plain.status == 200


def test_every_answer_has_a_request_id_of_its_own(api: Home) -> None:
    answers = [api.request("GET", path) for path in ("/v1/models", "/nothing", "/v1/models")]
    answers += [api.chat("say a"), api.chat("say a", stream=True), api.chat("say a", n=0)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(re.fullmatch(r"req_[0-9a-f]{24}", request_id) for request_id in ids)
    assert len(set(ids)) == len(ids)
