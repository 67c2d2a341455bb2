"""Every error a person can meet, in one tree.

Each class has its own error code, HTTP status and exit code, in the order exit code, status, code:

LocalspecError                      1  500  internal_error
├── UsageError                      2  400  usage
├── InvalidRequest                  1  400  invalid_request
│   ├── ContextExceeded             1  400  context_length_exceeded
│   ├── TemplateFailed              1  400  chat_template_error
│   ├── GrammarRejected             1  400  invalid_grammar
│   ├── RequestTooLarge             1  413  request_too_large
│   ├── UnsupportedEncoding         1  415  unsupported_encoding
│   ├── RequestTimeout              1  408  request_timeout
│   ├── ThreadUnsupported           1  400  thread_unsupported_request
│   └── ThreadMismatch              1  400  thread_fingerprint_mismatch
├── Unauthorized                    1  401  invalid_api_key
├── Forbidden                       1  403  forbidden
├── Cancelled                       130 499  cancelled
├── NotFound                        1  404  not_found
│   ├── ModelNotFound               1  404  model_not_found
│   └── ThreadNotFound              1  404  thread_not_found
├── Conflict                        1  409  conflict
├── Unavailable                     1  503  unavailable
│   ├── QueueFull                   1  503  queue_full
│   ├── PairSetAside                1  503  pair_set_aside
│   └── LoadFailed                  1  503  load_failed
├── WorkerDied                      1  500  worker_died
│   └── WorkerOutOfMemory           1  500  out_of_memory
├── WorkerTimeout                   1  504  worker_timeout
├── RegistryError                   1  400  registry_error
│   ├── CatalogueError              1  400  catalogue_error     names file, line, key and what is allowed
│   ├── BadGguf                     1  400  bad_gguf            not GGUF, truncated or inconsistent
│   │   └── UnsafeModel             1  400  unsafe_model        llama.cpp would crash on it or misread it
│   ├── NotMatched                  1  400  not_a_matched_pair  tokenizers differ; names the first difference
│   ├── CannotRollBack              1  400  cannot_roll_back    the architecture cannot undo tokens
│   ├── DoesNotFit                  1  400  does_not_fit        too little memory, even without a draft
│   ├── PullCancelled               1  409  pull_cancelled
│   ├── StoreError                  1  500  store_error
│   │   ├── DiskFull                1  507  disk_full           names the bytes needed and free
│   │   ├── StoreReadOnly           1  403  store_read_only
│   │   ├── RecordTooNew            1  409  record_too_new      written by a newer localspec; left untouched
│   │   └── Damaged                 1  500  file_damaged        a file is truncated or has a wrong hash
│   └── HubError                    1  502  hub_error
│       ├── Offline                 1  503  offline
│       ├── Gated                   1  403  gated
│       │   └── BadToken            1  401  bad_token           the hub does not accept the token
│       ├── NetworkSettings         1  400  network_settings    a proxy or certificate setting is unusable
│       ├── ProxyRefused            1  502  proxy_refused       the proxy needs a password or denies access
│       ├── Untrusted               1  502  untrusted           the certificate is not trusted
│       ├── NotOnHub                1  404  not_on_hub
│       ├── WebPage                 1  502  web_page            a captive portal answered, not the hub
│       ├── FileChanged             1  502  file_changed        the file changed during the download
│       ├── HashMismatch            1  502  hash_mismatch       the data does not have the hub's hash
│       └── Unreachable             1  502  hub_unreachable     gave up after retries
├── UpstreamError                   1  502  upstream_error      a pair's server sent an error
│   ├── UpstreamUnreachable         1  502  upstream_unreachable    the server sent no response
│   └── UpstreamTimeout             1  504  upstream_timeout
├── NotOffered                      1  501  not_offered         of a protocol, but unsupported here
├── NoDaemon                        3  503  no_daemon
│   └── NoAnswer                    3  503  no_answer           a daemon runs but is too slow
├── AlreadyRunning                  1  409  already_running
├── BadResponse                     1  502  bad_response
├── VersionMismatch                 1  409  version_mismatch
└── UnsafePath                      1  500  unsafe_path
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


class UsageError(LocalspecError):
    code = "usage"
    status = 400
    exit_code = 2


class InvalidRequest(LocalspecError):
    code = "invalid_request"
    status = 400

    @classmethod
    def at(cls, path: str, problem: str) -> InvalidRequest:
        """Return the error of a field: a sentence that begins with its path."""
        return cls(f"'{path}'{problem if problem[0] == ':' else f' {problem}'}", param=path)


# llama.cpp's words for a prompt that is too long. Clients that then shorten the conversation or switch the
# model (litellm, aider, pi, opencode) recognize the error by these words and not by its code.
EXCEEDS_CONTEXT = "exceeds the available context size"


class ContextExceeded(InvalidRequest):
    code = "context_length_exceeded"


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


class TemplateFailed(InvalidRequest):
    code = "chat_template_error"


class TemplateRaised(Exception):
    """Raised when a chat template itself raises, as many do for roles that they do not support."""


class GrammarRejected(InvalidRequest):
    code = "invalid_grammar"


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"
    status = 413


class UnsupportedEncoding(InvalidRequest):
    code = "unsupported_encoding"
    status = 415


class RequestTimeout(InvalidRequest):
    code = "request_timeout"
    status = 408


class ThreadUnsupported(InvalidRequest):
    """Threads are turned off, so Anthropic's clients send the whole conversation themselves."""

    code = "thread_unsupported_request"


class ThreadMismatch(InvalidRequest):
    """A request that continues a thread changes what the thread was created with."""

    code = "thread_fingerprint_mismatch"


class Unauthorized(LocalspecError):
    code = "invalid_api_key"
    status = 401


class Forbidden(LocalspecError):
    code = "forbidden"
    status = 403


class Cancelled(LocalspecError):
    code = "cancelled"
    status = 499
    exit_code = 130


class NotFound(LocalspecError):
    code = "not_found"
    status = 404


class ModelNotFound(NotFound):
    code = "model_not_found"


class ThreadNotFound(NotFound):
    """No stored message has the id that a thread is to continue from."""

    code = "thread_not_found"


class Conflict(LocalspecError):
    code = "conflict"
    status = 409


class Unavailable(LocalspecError):
    code = "unavailable"
    status = 503


class QueueFull(Unavailable):
    code = "queue_full"


class PairSetAside(Unavailable):
    code = "pair_set_aside"
    permanent = True


class LoadFailed(Unavailable):
    code = "load_failed"
    permanent = True


class WorkerDied(LocalspecError):
    code = "worker_died"


class WorkerOutOfMemory(WorkerDied):
    code = "out_of_memory"


class WorkerTimeout(LocalspecError):
    code = "worker_timeout"
    status = 504


class RegistryError(LocalspecError):
    code = "registry_error"
    status = 400


class CatalogueError(RegistryError):
    code = "catalogue_error"


class BadGguf(RegistryError):
    code = "bad_gguf"


class UnsafeModel(BadGguf):
    code = "unsafe_model"


class NotMatched(RegistryError):
    code = "not_a_matched_pair"


class CannotRollBack(RegistryError):
    code = "cannot_roll_back"


class DoesNotFit(RegistryError):
    code = "does_not_fit"


class PullCancelled(RegistryError):
    code = "pull_cancelled"
    status = 409


class StoreError(RegistryError):
    code = "store_error"
    status = 500


class DiskFull(StoreError):
    code = "disk_full"
    status = 507


class StoreReadOnly(StoreError):
    code = "store_read_only"
    status = 403


class RecordTooNew(StoreError):
    code = "record_too_new"
    status = 409


class Damaged(StoreError):
    code = "file_damaged"


class HubError(RegistryError):
    code = "hub_error"
    status = 502


class Offline(HubError):
    code = "offline"
    status = 503


class Gated(HubError):
    code = "gated"
    status = 403


class BadToken(Gated):
    code = "bad_token"
    status = 401


class NetworkSettings(HubError):
    code = "network_settings"
    status = 400


class ProxyRefused(HubError):
    code = "proxy_refused"


class Untrusted(HubError):
    code = "untrusted"


class NotOnHub(HubError):
    code = "not_on_hub"
    status = 404


class WebPage(HubError):
    code = "web_page"


class FileChanged(HubError):
    code = "file_changed"


class HashMismatch(HubError):
    code = "hash_mismatch"


class Unreachable(HubError):
    code = "hub_unreachable"


class UpstreamError(LocalspecError):
    code = "upstream_error"
    status = 502


class UpstreamUnreachable(UpstreamError):
    code = "upstream_unreachable"


class UpstreamTimeout(UpstreamError):
    code = "upstream_timeout"
    status = 504


class NotOffered(LocalspecError):
    code = "not_offered"
    status = 501
    permanent = True


class NoDaemon(LocalspecError):
    code = "no_daemon"
    status = 503
    exit_code = 3


class NoAnswer(NoDaemon):
    code = "no_answer"


class AlreadyRunning(LocalspecError):
    code = "already_running"
    status = 409


class BadResponse(LocalspecError):
    """The program on the daemon's socket is not a daemon or does not speak HTTP."""

    code = "bad_response"
    status = 502


class VersionMismatch(LocalspecError):
    code = "version_mismatch"
    status = 409


class UnsafePath(LocalspecError):
    code = "unsafe_path"


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
    """Return the error that another process reported by its code.

    An unknown code becomes the base class.
    """
    error_class = next(
        (subclass for subclass in _subclasses(LocalspecError) if subclass.code == code),
        LocalspecError,
    )
    return error_class(message, param=param, n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx)
