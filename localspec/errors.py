"""Every error a person can meet, in one tree.

Each class names its error code, and the HTTP status and the exit code where they differ from its base's.
"""

from __future__ import annotations

from collections.abc import Iterator

# Unicode's Bidi_Control characters, which display text in another order than it is written in.
_BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINE_SEPARATORS = (0x2028, 0x2029)  # line breaks to some terminals, but not to our tables
# Each maps to one character, so that columns stay aligned. Unicode has pictures for C0 and DEL only.
_REPLACEMENTS = {
    **{code: 0x2400 + code for code in range(0x20)},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *_BIDI_CONTROLS, *_LINE_SEPARATORS), 0xFFFD),
}
_REPLACEMENTS_KEEPING_LINES = {
    code: character for code, character in _REPLACEMENTS.items() if chr(code) not in "\n\t"
}


def replace_control_characters(text: str, *, lines: bool = True) -> str:
    """Return `text` with every character replaced that could control a terminal or disguise the text.

    All output to a terminal passes through here: model output, names and headers of files, messages. If
    `lines` is true, newlines and tabs are kept.
    """
    return text.translate(_REPLACEMENTS_KEEPING_LINES if lines else _REPLACEMENTS)


class LocalspecError(Exception):
    """The base class of all localspec errors.

    message: one sentence, or two: what went wrong, and what to do next. param: the request field at fault, as
    in OpenAI's error bodies. retry_after: seconds. n_prompt_tokens, n_ctx: for a prompt that is too long, its
    length and the available context, as in llama-server's error bodies.
    """

    code = "internal_error"
    status = 500
    exit_code = 1
    permanent = False  # whether the same request fails until a person changes something

    def __init_subclass__(cls, **values: str | int) -> None:
        """Set the attributes above that a subclass names in its header."""
        for name, value in values.items():
            setattr(cls, name, value)

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        n_prompt_tokens: int | None = None,
        n_ctx: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class UsageError(LocalspecError, code="usage", status=400, exit_code=2): ...


class InvalidRequest(LocalspecError, code="invalid_request", status=400):
    @classmethod
    def at(cls, path: str, problem: str) -> InvalidRequest:
        """Return the error of a field: a sentence that begins with its path."""
        return cls(f"'{path}'{problem if problem[0] == ':' else f' {problem}'}", param=path)


# llama.cpp's words for a prompt that is too long. Clients that then shorten the conversation or switch the
# model (litellm, aider, pi, opencode) recognize the error by these words and not by its code.
EXCEEDS_CONTEXT = "exceeds the available context size"


class ContextExceeded(InvalidRequest, code="context_length_exceeded"): ...


def recognizable_message(error: LocalspecError) -> str:
    """Return the error's message in the words by which clients recognize it.

    This matters for a prompt that is too long: the engine uses llama.cpp's words itself, but another server
    that answers for a pair may use its own.
    """
    if error.code != ContextExceeded.code or EXCEEDS_CONTEXT in error.message:
        return error.message
    return f"The request {EXCEEDS_CONTEXT}. {error.message}"


# Words before the message of an error in a stream. Agents (pi) send a request again if its status is 5xx. A
# stream that has begun has no status for its error, so they look for such words instead.
RETRYABLE = "Server error: "


def stream_message(error: LocalspecError) -> str:
    """Return the error's message for a stream, in which it says whether the request may be sent again."""
    message = recognizable_message(error)
    return message if error.status < 500 or error.permanent else f"{RETRYABLE}{message}"


class TemplateFailed(InvalidRequest, code="chat_template_error"): ...


class TemplateRaised(Exception):
    """Raised when a chat template itself raises, as many do for roles that they do not support."""


class GrammarRejected(InvalidRequest, code="invalid_grammar"): ...


class RequestTooLarge(InvalidRequest, code="request_too_large", status=413): ...


class UnsupportedEncoding(InvalidRequest, code="unsupported_encoding", status=415): ...


class RequestTimeout(InvalidRequest, code="request_timeout", status=408): ...


class ThreadUnsupported(InvalidRequest, code="thread_unsupported_request"):
    """Threads are turned off, so Anthropic's clients send the whole conversation themselves."""


class ThreadMismatch(InvalidRequest, code="thread_fingerprint_mismatch"):
    """A request that continues a thread changes what the thread was created with."""


class Unauthorized(LocalspecError, code="invalid_api_key", status=401): ...


class Forbidden(LocalspecError, code="forbidden", status=403): ...


class Cancelled(LocalspecError, code="cancelled", status=499, exit_code=130): ...


class NotFound(LocalspecError, code="not_found", status=404): ...


class ModelNotFound(NotFound, code="model_not_found"): ...


class ThreadNotFound(NotFound, code="thread_not_found"):
    """No stored message has the id that a thread is to continue from."""


class Conflict(LocalspecError, code="conflict", status=409): ...


class Unavailable(LocalspecError, code="unavailable", status=503): ...


class QueueFull(Unavailable, code="queue_full"): ...


class PairSetAside(Unavailable, code="pair_set_aside", permanent=True): ...


class LoadFailed(Unavailable, code="load_failed", permanent=True): ...


class WorkerDied(LocalspecError, code="worker_died"): ...


class WorkerOutOfMemory(WorkerDied, code="out_of_memory"): ...


class WorkerTimeout(LocalspecError, code="worker_timeout", status=504): ...


class RegistryError(LocalspecError, code="registry_error", status=400): ...


class CatalogueError(RegistryError, code="catalogue_error"):
    """Names file, line, key and what is allowed."""


class BadGguf(RegistryError, code="bad_gguf"):
    """Not GGUF, truncated or inconsistent."""


class UnsafeModel(BadGguf, code="unsafe_model"):
    """Its use would crash llama.cpp, or it would be misread."""


class NotMatched(RegistryError, code="not_a_matched_pair"):
    """Tokenizers differ; names the first difference."""


class CannotRollBack(RegistryError, code="cannot_roll_back"):
    """The architecture cannot undo tokens."""


class DoesNotFit(RegistryError, code="does_not_fit"):
    """Too little memory, even without a draft."""


class PullCancelled(RegistryError, code="pull_cancelled", status=409): ...


class StoreError(RegistryError, code="store_error", status=500): ...


class DiskFull(StoreError, code="disk_full", status=507):
    """Names the bytes needed and free."""


class StoreReadOnly(StoreError, code="store_read_only", status=403): ...


class RecordTooNew(StoreError, code="record_too_new", status=409):
    """Written by a newer localspec; left untouched."""


class Damaged(StoreError, code="file_damaged"):
    """A file is truncated or has a wrong hash."""


class HubError(RegistryError, code="hub_error", status=502): ...


class Offline(HubError, code="offline", status=503): ...


class Gated(HubError, code="gated", status=403): ...


class BadToken(Gated, code="bad_token", status=401):
    """The hub does not accept the token."""


class NetworkSettings(HubError, code="network_settings", status=400):
    """A proxy or certificate setting is unusable."""


class ProxyRefused(HubError, code="proxy_refused"):
    """The proxy needs a password or denies access."""


class Untrusted(HubError, code="untrusted"):
    """The certificate is not trusted."""


class NotOnHub(HubError, code="not_on_hub", status=404): ...


class WebPage(HubError, code="web_page"):
    """A captive portal answered, not the hub."""


class FileChanged(HubError, code="file_changed"):
    """The file changed during the download."""


class HashMismatch(HubError, code="hash_mismatch"):
    """The data does not have the hub's hash."""


class Unreachable(HubError, code="hub_unreachable"):
    """Gave up after retries."""


class UpstreamError(LocalspecError, code="upstream_error", status=502):
    """A pair's server sent an error."""


class UpstreamUnreachable(UpstreamError, code="upstream_unreachable"):
    """The server sent no response."""


class UpstreamTimeout(UpstreamError, code="upstream_timeout", status=504): ...


class NotOffered(LocalspecError, code="not_offered", status=501, permanent=True):
    """A part of a protocol that is not supported here."""


class NoDaemon(LocalspecError, code="no_daemon", status=503, exit_code=3): ...


class NoAnswer(NoDaemon, code="no_answer"):
    """A daemon runs but is too slow."""


class AlreadyRunning(LocalspecError, code="already_running", status=409): ...


class BadResponse(LocalspecError, code="bad_response", status=502):
    """The program on the daemon's socket is not a daemon or does not speak HTTP."""


class VersionMismatch(LocalspecError, code="version_mismatch", status=409): ...


class UnsafePath(LocalspecError, code="unsafe_path"): ...


def _subclasses(cls: type[LocalspecError]) -> Iterator[type[LocalspecError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _subclasses(child)


def error_from_code(
    code: str,
    message: str,
    *,
    param: str | None = None,
    n_prompt_tokens: int | None = None,
    n_ctx: int | None = None,
) -> LocalspecError:
    """Return the error that another process reported by its code, the base class for an unknown one."""
    error_class = next(
        (subclass for subclass in _subclasses(LocalspecError) if subclass.code == code),
        LocalspecError,
    )
    return error_class(message, param=param, n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx)
