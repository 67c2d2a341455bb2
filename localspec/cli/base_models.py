"""Base models, which complete text and have no chat template for a question."""

from __future__ import annotations

from contextlib import closing
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
    try:
        view = PairsClient(client.socket_path, autostart=False).pair(model or _CONFIGURED_PAIR)
    except LocalspecError:
        return ""  # the error that led here is reported instead
    return str(view["name"]) if "text" in view["roles"] else ""


def explain_error(client: Client, model: str, error: TemplateFailed) -> LocalspecError:
    """Return the error to show where only a chat is possible.

    For a base model it says what the model can do instead; otherwise it is `error`.
    """
    return _cannot_chat(name) if (name := base_model_name(client, model)) else error


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


def to_completion(
    client: Client,
    request: dict[str, Any],
    options: AskOptions,
    question: str,
    error: TemplateFailed,
) -> tuple[CompletionClient, dict[str, Any]]:
    """Return a client that lets a base model complete the question, and the request for it.

    Files are inserted as they are, without their names and fences. The request has no conversation, because
    the history keeps no completions.

    Raises:
        TemplateFailed: `error`, if the pair is no base model.
        UsageError: an option makes sense in a chat only.
    """
    name = base_model_name(client, request.get("model", ""))
    if not name:
        raise error
    used = {"-s": options.system is not None, "-c": options.last, "--cid": options.conversation}
    for flag in (flag for flag, value in used.items() if value not in (None, False)):
        raise UsageError(
            f"{flag} cannot be used with '{name}': it is a base model, which completes one text and "
            "has no conversation."
        )
    if options.files and options.template is None:
        question = ask.read_question(options, labelled=False)
    extension = dict(request.get("localspec", {}))
    for key in ("conversation", "title"):
        extension.pop(key, None)
    return CompletionClient(client, question), {**request, "localspec": extension}


class CompletionClient(Client):
    """A client that answers a chat request with a completion of `text`, in the shape of a chat."""

    def __init__(self, client: Client, text: str) -> None:
        super().__init__(client.socket_path, autostart=client.autostart)
        self._text = text

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer, in the shape of a chat completion."""
        response = self._json("POST", "/v1/completions", self._body(request, stream=False))
        for choice in response["choices"]:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return response

    def stream_chat(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of the completion as they arrive."""
        chunks = self._events("POST", "/v1/completions", self._body(request, stream=True))
        with closing(chunks):
            for chunk in chunks:
                for choice in chunk["choices"]:
                    choice["delta"] = {"content": choice.pop("text")}
                yield chunk

    def _body(self, request: dict[str, Any], *, stream: bool) -> dict[str, Any]:
        fields = {key: value for key, value in request.items() if key not in _CHAT_FIELDS}
        return {"max_tokens": DEFAULT_TOKENS, **fields, "prompt": self._text, "stream": stream}
