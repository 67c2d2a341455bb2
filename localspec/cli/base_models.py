"""Base models: they complete text, and have no chat template to be asked a question with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localspec.cli import ask
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, TemplateFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

# A base model rarely ends its text by itself, so there is a limit where none was given.
DEFAULT_TOKENS = 256
_CONFIGURED = "default"
_ONE_OF_CHAT = ("messages", "continue_final_message")


def name_of(client: Client, model: str) -> str:
    """Return the name of the pair that `model` means if it is a base model, else an empty string.

    An empty `model` means the configured pair.
    """
    pairs = PairsClient(client.socket_path, autostart=False)
    try:
        view = pairs.pair(model or _CONFIGURED)
    except LocalspecError:
        return ""  # the error that led here says enough
    return str(view["name"]) if "text" in view["roles"] else ""


def explained(client: Client, model: str, error: TemplateFailed) -> LocalspecError:
    """Return the error to show where only a chat would do: of a base model what it can do instead."""
    name = name_of(client, model)
    if not name:
        return error
    return LocalspecError(
        f"'{name}' is a base model: it completes text and cannot chat. To complete a text: "
        f'localspec ask -m {name} "Once upon a time". To choose another pair: localspec list'
    )


def text_of(name: str, options: dict[str, Any], question: str) -> str:
    """Return the text that the base model `name` is to complete.

    Files stand in it as they are, without their names and fences.

    Raises:
        UsageError: an option makes sense in a chat only.
    """
    refused = {
        "-s": options["system"] is not None,
        "-c": options["last"],
        "--cid": options["conversation"] is not None,
    }
    for flag, given in refused.items():
        if given:
            raise UsageError(
                f"{flag} cannot be used with '{name}': it is a base model, which completes one text and "
                "has no conversation."
            )
    if not options["files"] or options["template"] is not None:
        return question
    return ask.asked(options, labelled=False)


class CompletionClient(Client):
    """A client that answers a chat request with a completion of `text`, in the shape of a chat."""

    def __init__(self, client: Client, text: str) -> None:
        super().__init__(client.socket_path, autostart=client.autostart)
        self._text = text

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the whole completion."""
        body = {**self._completion(request), "stream": False}
        answer = self._json("POST", "/v1/completions", body)
        for choice in answer["choices"]:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return answer

    def stream_chat(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of the completion as they arrive."""
        body = {**self._completion(request), "stream": True}
        chunks = self._events("POST", "/v1/completions", body)
        try:
            for chunk in chunks:
                for choice in chunk["choices"]:
                    choice["delta"] = {"content": choice.pop("text")}
                yield chunk
        finally:
            chunks.close()

    def _completion(self, request: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in request.items() if key not in _ONE_OF_CHAT}
        return {"max_tokens": DEFAULT_TOKENS, **kept, "prompt": self._text}


def request_for(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request without a conversation: completions are not kept in the history."""
    ours = dict(request.get("localspec", {}))
    for key in ("conversation", "title"):
        ours.pop(key, None)
    return {**request, "localspec": ours}
