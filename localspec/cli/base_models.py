"""Base models, which complete text and have no chat template for a question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localspec.cli import ask
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, TemplateFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

    from localspec.cli.options import AskOptions

# Limit where the command line has none, because a base model rarely ends its text by itself.
DEFAULT_TOKENS = 256
_CONFIGURED_PAIR = "default"
_CHAT_FIELDS = ("messages", "continue_final_message")


def base_model_name(client: Client, model: str) -> str:
    """Return the name of the pair that `model` means if it is a base model, else an empty string.

    An empty `model` means the configured pair.
    """
    pairs = PairsClient(client.socket_path, autostart=False)
    try:
        view = pairs.pair(model or _CONFIGURED_PAIR)
    except LocalspecError:
        return ""  # the error that led here is reported instead
    return str(view["name"]) if "text" in view["roles"] else ""


def explain_error(client: Client, model: str, error: TemplateFailed) -> LocalspecError:
    """Return the error to show where only a chat is possible.

    For a base model it says what the model can do instead; otherwise it is `error`.
    """
    name = base_model_name(client, model)
    return _cannot_chat(name) if name else error


def require_chat(client: Client, model: str) -> None:
    """Raise an error if there is no pair `model`, or if it is a base model, without loading it."""
    view = PairsClient(client.socket_path, autostart=client.autostart).pair(model)
    if "text" in view["roles"]:
        raise _cannot_chat(str(view["name"]))


def _cannot_chat(name: str) -> LocalspecError:
    return LocalspecError(
        f"'{name}' is a base model: it completes text and cannot chat. To complete a text: "
        f'localspec ask -m {name} "Once upon a time". To choose another pair: localspec list'
    )


def completion_text(name: str, options: AskOptions, question: str) -> str:
    """Return the text that the base model `name` is to complete.

    Files are inserted as they are, without their names and fences.

    Raises:
        UsageError: an option makes sense in a chat only.
    """
    chat_options = {
        "-s": options.system is not None,
        "-c": options.last,
        "--cid": options.conversation is not None,
    }
    for flag, used in chat_options.items():
        if used:
            raise UsageError(
                f"{flag} cannot be used with '{name}': it is a base model, which completes one text and "
                "has no conversation."
            )
    if not options.files or options.template is not None:
        return question
    return ask.read_question(options, labelled=False)


class CompletionClient(Client):
    """A client that answers a chat request with a completion of `text`, in the shape of a chat."""

    def __init__(self, client: Client, text: str) -> None:
        super().__init__(client.socket_path, autostart=client.autostart)
        self._text = text

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer, in the shape of a chat completion."""
        body = {**self._completion_body(request), "stream": False}
        response = self._json("POST", "/v1/completions", body)
        for choice in response["choices"]:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return response

    def stream_chat(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of the completion as they arrive."""
        body = {**self._completion_body(request), "stream": True}
        chunks = self._events("POST", "/v1/completions", body)
        try:
            for chunk in chunks:
                for choice in chunk["choices"]:
                    choice["delta"] = {"content": choice.pop("text")}
                yield chunk
        finally:
            chunks.close()

    def _completion_body(self, request: dict[str, Any]) -> dict[str, Any]:
        fields = {key: value for key, value in request.items() if key not in _CHAT_FIELDS}
        return {"max_tokens": DEFAULT_TOKENS, **fields, "prompt": self._text}


def request_for(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request without a conversation, because the history keeps no completions."""
    extension = dict(request.get("localspec", {}))
    for key in ("conversation", "title"):
        extension.pop(key, None)
    return {**request, "localspec": extension}
