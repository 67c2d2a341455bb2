"""Clients that people use, behind one small interface: each sends a request and returns plain JSON."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import httpx2
import openai
import pytest

from tests.support.daemons import Answer, UnixConnection
from tests.support.patience import PATIENCE

JSON = dict[str, Any]
BASE = "http://localspec/v1"


class Caller(Protocol):
    """`path` is below /v1. `stream` returns the chunks, `refused` the status and error of a refusal."""

    def ask(self, path: str, body: JSON) -> JSON: ...
    def stream(self, path: str, body: JSON) -> list[JSON]: ...
    def refused(self, path: str, body: JSON) -> tuple[int, JSON]: ...
    def models(self) -> list[str]: ...


# The client of openai.

Create = Callable[..., Any]


def arguments(create: Create, body: JSON) -> JSON:
    """Return `body` as keywords; fields without a keyword are passed in the client's documented way."""
    parameters = inspect.signature(create).parameters
    extra = {name: value for name, value in body.items() if name not in parameters}
    return {"model": "", **{k: v for k, v in body.items() if k in parameters}, "extra_body": extra}


def find_create(client: Any, path: str) -> Create:
    methods: Create = {
        "chat/completions": client.chat.completions.create,
        "completions": client.completions.create,
    }[path]
    return methods


class OpenAI:
    """The official client."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def _run(self, use: Callable[[openai.OpenAI], Any]) -> Any:
        transport = httpx2.HTTPTransport(uds=str(self._socket), verify=False)
        with (
            httpx2.Client(transport=transport) as http,
            openai.OpenAI(api_key="none", base_url=BASE, http_client=http, max_retries=0) as client,
        ):
            return use(client)

    def ask(self, path: str, body: JSON) -> JSON:
        def use(client: openai.OpenAI) -> JSON:
            create = find_create(client, path)
            answer: JSON = create(**arguments(create, body)).to_dict()
            return answer

        result: JSON = self._run(use)
        return result

    def stream(self, path: str, body: JSON) -> list[JSON]:
        def use(client: openai.OpenAI) -> list[JSON]:
            create = find_create(client, path)
            chunks: list[JSON] = [
                c.to_dict() for c in create(**arguments(create, {**body, "stream": True}))
            ]
            return chunks

        events: list[JSON] = self._run(use)
        return events

    def refused(self, path: str, body: JSON) -> tuple[int, JSON]:
        with pytest.raises(openai.APIStatusError) as caught:
            self.ask(path, body)
        assert isinstance(caught.value.body, dict)
        return caught.value.status_code, caught.value.body

    def models(self) -> list[str]:
        names: list[str] = self._run(lambda client: [model.id for model in client.models.list()])
        return names


class AsyncOpenAI(OpenAI):
    """The official client for asyncio."""

    def _run(self, use: Callable[[Any], Awaitable[Any]]) -> Any:
        async def within() -> Any:
            transport = httpx2.AsyncHTTPTransport(uds=str(self._socket), verify=False)
            async with (
                httpx2.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(
                    api_key="none", base_url=BASE, http_client=http, max_retries=0
                ) as client,
            ):
                return await use(client)

        return asyncio.run(within())

    def ask(self, path: str, body: JSON) -> JSON:
        async def use(client: openai.AsyncOpenAI) -> JSON:
            create = find_create(client, path)
            answer: JSON = (await create(**arguments(create, body))).to_dict()
            return answer

        result: JSON = self._run(use)
        return result

    def stream(self, path: str, body: JSON) -> list[JSON]:
        async def use(client: openai.AsyncOpenAI) -> list[JSON]:
            create = find_create(client, path)
            chunks = await create(**arguments(create, {**body, "stream": True}))
            return [chunk.to_dict() async for chunk in chunks]

        result: list[JSON] = self._run(use)
        return result

    def models(self) -> list[str]:
        async def use(client: openai.AsyncOpenAI) -> list[str]:
            return [model.id async for model in client.models.list()]

        names: list[str] = self._run(use)
        return names


# Clients without a library.


class Plain:
    """A client that sends and reads bytes; `_send` is curl's or http.client's."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def _send(self, method: str, path: str, body: JSON | None) -> tuple[int, bytes]:
        raise NotImplementedError

    def ask(self, path: str, body: JSON) -> JSON:
        status, data = self._send("POST", path, body)
        assert status == 200, data
        answer: JSON = json.loads(data)
        return answer

    def stream(self, path: str, body: JSON) -> list[JSON]:
        status, data = self._send("POST", path, {**body, "stream": True})
        assert status == 200, data
        *events, end_event, rest = data.decode().split("\n\n")
        assert (end_event, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def refused(self, path: str, body: JSON) -> tuple[int, JSON]:
        status, data = self._send("POST", path, body)
        error: JSON = json.loads(data)["error"]
        return status, error

    def models(self) -> list[str]:
        _, data = self._send("GET", "models", None)
        return [model["id"] for model in json.loads(data)["data"]]


class Curl(Plain):
    """`curl --unix-socket`."""

    def _send(self, method: str, path: str, body: JSON | None) -> tuple[int, bytes]:
        command = ["curl", "--silent", "--show-error", "--no-buffer", "--request", method]
        command += ["--unix-socket", str(self._socket), "--write-out", "\n%{http_code}"]
        if body is not None:
            command += ["--header", "Content-Type: application/json", "--data-binary", "@-"]
        run = subprocess.run(
            [*command, f"{BASE}/{path}"],
            input=json.dumps(body).encode() if body is not None else b"",
            capture_output=True,
            timeout=PATIENCE,
            check=True,
        )
        data, _, status = run.stdout.rpartition(b"\n")
        return int(status), data


class HttpClient(Plain):
    """Python's own client, for machines without curl."""

    def _send(self, method: str, path: str, body: JSON | None) -> tuple[int, bytes]:
        connection = UnixConnection(self._socket)
        try:
            connection.request(method, f"/v1/{path}", json.dumps(body) if body else None)
            answer = Answer(connection.getresponse())
        finally:
            connection.close()
        return answer.status, answer.body


CALLERS: dict[str, Callable[[Path], Caller]] = {
    "openai": OpenAI,
    "openai, async": AsyncOpenAI,
    **({"curl": Curl} if shutil.which("curl") else {"http.client, for want of curl": HttpClient}),
}
