"""Format answers as Ollama does, in lines of JSON or in one object, and pairs as its models."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

import localspec
from localspec.chat.notations.call_readers import replace_halves
from localspec.chat.token_report import decode_piece
from localspec.daemon.completion.answer import Choice, PendingAnswer, Shape
from localspec.daemon.http.sse import LineStream
from localspec.daemon.worker.process import Event
from localspec.errors import LocalspecError, stream_message
from localspec.extras.ollama.wire import (
    Called,
    Details,
    Logprob,
    OllamaChatLine,
    OllamaError,
    OllamaGenerateLine,
    OllamaLine,
    OllamaModel,
    OllamaOutputFunction,
    OllamaProgress,
    OllamaShown,
    OllamaTokenLogprob,
    OllamaVersion,
    Said,
)
from localspec.protocol import frames
from localspec.protocol.answers import Extra, PairStatus, ToolCall
from localspec.protocol.pairs import PairView
from localspec.protocol.pieces import Call, Piece, Text
from localspec.protocol.requests import sampling_parameters

_NS_PER_MS = 1_000_000


def format_now() -> str:
    """Return the current time in Ollama's format."""
    return format_time(time.time())


def format_time(seconds: float) -> str:
    """Return a Unix time in Ollama's format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def line(model: str, *, chat: bool, text: str = "", **fields: Any) -> OllamaLine:
    """Return one line of /api/chat if `chat` is true, else of /api/generate."""
    fields.setdefault("done", False)
    thinking = fields.pop("thinking", "")
    if chat:
        said = Said(text, "assistant", thinking, fields.pop("tool_calls", []))
        return OllamaChatLine(model=model, created_at=format_now(), message=said, **fields)
    return OllamaGenerateLine(
        model=model, created_at=format_now(), response=text, thinking=thinking or UNSET, **fields
    )


class OllamaShape(Shape):
    """Formats the one choice of /api/chat or /api/generate; a call is sent once it is complete."""

    events = LineStream

    def __init__(self, answer: PendingAnswer, model: str, *, chat: bool) -> None:
        """Create the shape. `model` is the name that the client used."""
        super().__init__(answer)
        self._model = model
        self._chat = chat
        self._sent_calls = 0
        self._began = time.monotonic_ns()

    @property
    def _choice(self) -> Choice:
        return self.answer.choices[0]

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        lines = [
            self._line(piece.text) if piece.kind == "content" else self._line(thinking=piece.text)
            for piece in pieces
            if isinstance(piece, Text)
        ]
        if any(isinstance(piece, Call) for piece in pieces):
            lines += self._calls(self._choice.calls[:-1])
        if isinstance(event, frames.Delta) and event.logprobs and self.answer.wants_logprobs:
            lines = lines or [self._line()]
            lines[0].logprobs = _logprobs(event.logprobs)
        if isinstance(event, frames.Done):
            lines += self._calls(self._choice.calls)
            lines.append(self._line(**self._end(event)))
        return lines

    @classmethod
    def failed_early(cls, error: LocalspecError) -> Sequence[object]:
        return [OllamaError(stream_message(error))]

    def complete(self) -> object:
        choice = self._choice
        assert choice.done is not None
        calls, incomplete_text = _decode_calls(choice.calls)
        fields = {"thinking": choice.reasoning, **self._end(choice.done)}
        if calls:
            fields["tool_calls"] = calls
        if self.answer.wants_logprobs:
            fields["logprobs"] = _logprobs(choice.logprobs)
        return self._line(choice.content + incomplete_text, **fields)

    def _line(self, text: str = "", **fields: Any) -> OllamaLine:
        return line(self._model, chat=self._chat, text=text, **fields)

    def _calls(self, complete: list[ToolCall]) -> list[OllamaLine]:
        """Return a line for each of the calls that was not sent yet."""
        lines = []
        for call in complete[self._sent_calls :]:
            calls, incomplete_text = _decode_calls([call])
            lines.append(self._line(incomplete_text, **({"tool_calls": calls} if calls else {})))
        self._sent_calls = len(complete)
        return lines

    def _end(self, done: frames.Done) -> dict[str, Any]:
        prompt_ns = round(done.timings.prompt_ms * _NS_PER_MS)
        eval_ns = round(done.timings.predicted_ms * _NS_PER_MS)
        total_ns = time.monotonic_ns() - self._began
        return {
            "done": True,
            "done_reason": "length" if done.finish_reason == "length" else "stop",
            "total_duration": total_ns,
            # Includes the time in the queue.
            "load_duration": max(total_ns - prompt_ns - eval_ns, 0),
            "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": done.completion_tokens,
            "eval_duration": eval_ns,
            "localspec": Extra(
                speculation=done.speculation,
                note=self.answer.note() or UNSET,
                ignored=[*self.answer.notes.ignored()] or UNSET,
            ),
        }


def _decode_calls(calls: list[ToolCall]) -> tuple[list[Called], str]:
    """Return the calls with their arguments as objects, and those that were cut off as text."""
    decoded, incomplete_text = [], ""
    for call in calls:
        name, text = call.function.name, call.function.arguments
        try:
            arguments = json.loads(replace_halves(text or "{}"))
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            decoded.append(Called(call.id, OllamaOutputFunction(name, arguments)))
        else:
            incomplete_text += f'{{"name": {json.dumps(name)}, "arguments": {text}'
    return decoded, incomplete_text


def _logprobs(tokens: list[frames.TokenLogprob]) -> list[Logprob]:
    return [
        Logprob(
            decode_piece(token.piece),
            token.logprob,
            list(token.piece),
            [OllamaTokenLogprob(decode_piece(raw), value, list(raw)) for _, raw, value in token.top]
            or UNSET,
        )
        for token in tokens
    ]


if TYPE_CHECKING:
    from localspec.registry.pulls.messages import PullState


# The release of Ollama whose API this is. Clients refuse servers that are older than they support.
VERSION = OllamaVersion("0.13.0", localspec.__version__)
_TAG = ":latest"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_FOREVER_S = 4_102_444_800.0  # Unix time of the year 2100


def tagged(name: str) -> str:
    """Return a pair's name as Ollama writes it, always with a tag."""
    return name if ":" in name else name + _TAG


def untagged(name: str) -> str:
    """Return a name without the default tag."""
    return name.removesuffix(_TAG)


def list_entry(view: PairView) -> OllamaModel:
    """Return a pair as an entry of /api/tags."""
    models, name = [model for model in (view.target, view.draft) if model], tagged(view.name)
    # The digest changes whenever one of the files does.
    files = "\n".join(f"{model.file} {model.size} {model.sha256}" for model in models)
    return OllamaModel(
        name=name,
        model=name,
        modified_at=format_time(view.created),
        size=view.size,
        digest=hashlib.sha256(files.encode()).hexdigest(),
        details=_details(view),
    )


def running_entry(view: PairView, status: PairStatus) -> OllamaModel:
    """Return a loaded pair as an entry of /api/ps."""
    model = list_entry(view)
    model.size = status.memory or view.needed
    on_gpu = status.plan.on_gpu if status.plan else 0
    model.size_vram = 0 if status.backend == "cpu" else on_gpu or view.needed
    unloads_in = status.unloads_in
    model.expires_at = format_time(_FOREVER_S if unloads_in is None else time.time() + unloads_in)
    model.context_length = status.n_ctx or view.context
    return model


def describe_model(view: PairView, n_ctx: int, defaults: dict[str, Any]) -> OllamaShown:
    """Return a pair as the answer of /api/show.

    `n_ctx` is the context that it is served with, and `defaults` are its sampling defaults if it is loaded.
    """
    target, architecture = view.target, view.target.architecture
    names = [parameter.name for parameter in sampling_parameters()]
    sampling = {name: defaults[name] for name in names if name in defaults}
    settings = {**({"num_ctx": n_ctx} if n_ctx else {}), **sampling}
    model_info: dict[str, Any] = {
        "general.architecture": architecture,
        "general.parameter_count": target.parameters,
        f"{architecture}.context_length": target.context,
        f"{architecture}.block_count": target.layers,
        f"{architecture}.embedding_length": target.width,
    }
    if not target.context:  # a model on another server, of which nothing is known
        model_info = {}
    return OllamaShown(
        modelfile=f"# To see all of it: localspec show {view.name}\nFROM {target.file}\n",
        parameters="\n".join(
            f"{name:<30} {value:g}"
            for name, value in settings.items()
            if isinstance(value, int | float)  # lists belong to samplers that Ollama does not have
        ),
        template=target.template.text if target.template else "",
        details=_details(view),
        model_info=model_info,
        capabilities=view.capabilities,
        modified_at=format_time(view.created),
        license=view.licence,
    )


def progress_lines(state: PullState) -> list[OllamaProgress]:
    """Return a pull's state as lines of /api/pull: one per file while downloading, else one."""
    match state.state:
        case "checking":
            return [OllamaProgress("pulling manifest")]
        case "downloading":
            return [
                OllamaProgress(f"pulling {file.file}", total=file.size, completed=file.done)
                for file in state.files
            ]
        case "verifying":
            return [OllamaProgress("verifying sha256 digest")]
        case "done":
            return [OllamaProgress("success")]
    return []


def _details(view: PairView) -> Details:
    target = view.target
    count = target.parameters
    sizes = (f"{count / unit:.1f}{suffix}" for unit, suffix in _UNITS if count >= unit)
    size = next(sizes, str(count or ""))
    return Details(target.architecture, [target.architecture], size, target.quantization)
