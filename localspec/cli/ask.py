"""`localspec ask`: one question, one answer.

Whatever a plain question does not need (files, templates, Markdown, a spinner) is imported where it
is used.
"""

from __future__ import annotations

import os
import sys

from localspec.cli.options import EXCLUSIVE, fields
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.errors import ContextExceeded, LocalspecError, TemplateFailed, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

EXAMPLE = """\
  localspec ask "What does shutil.copytree do?"
  git diff | localspec ask "review this"
  localspec ask -f 'src/*.py' "Where is the cache emptied?"
  localspec ask -x "a function that parses ISO dates" > dates.py
  localspec ask -x > dates.py    # the code of the last answer
  localspec ask -c "and with time zones?"
"""
# A question this long did not come from a keyboard: say how much of it would fit.
_LONG = 2000  # characters
_LONG_TITLE = 1000  # characters; the daemon takes no more, and keeps the first line's beginning


def run(options: dict[str, Any]) -> int:
    """Ask and print. `options` as `options.ASK` names them, and `words`.

    Raises:
        UsageError: there is nothing to ask, or options that exclude each other.
        LocalspecError: no daemon, or what it answered.
    """
    _check(options)
    if options["query"]:
        from localspec.cli import inputs

        options = inputs.chosen(options)
    if options["save"] is not None:
        from localspec.cli import templates

        templates.save(options)
        return 0
    options = _with_files(options)
    if _is_about_last(options):
        return _last(options)
    if options["template"] is not None:
        from localspec.cli import templates

        template = templates.Template(options)
        options = template.options
        _check(options)
        question = template.question(asked(options))
    else:
        question = _question(options)
    request = request_for(options, question)
    client = Client(autostart=not options["no_daemon_start"])
    begun = "" if question else _begun(client, request)
    try:
        last = _answered(client, request, options, begun)
    except TemplateFailed as error:
        last, request = _completed(client, request, options, question, error)
    except ContextExceeded as error:
        if len(question) < _LONG:
            raise
        from localspec.cli import inputs

        longer = inputs.longer_pair(client, error.n_prompt_tokens or 0)
        alone = _is_piped() and not options["files"]
        raise ContextExceeded(
            inputs.what_fits(error, question, stdin_alone=alone, longer=longer)
        ) from error
    return _after(client, last, request, options)


def _completed(
    client: Client,
    request: dict[str, Any],
    options: dict[str, Any],
    question: str,
    error: TemplateFailed,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let a base model complete what was asked; what `_answered` returns, and the request.

    Raises:
        TemplateFailed: `error`, if the pair is no base model. UsageError: an option needs a chat.
    """
    from localspec.cli import base_models

    name = base_models.name_of(client, request.get("model", ""))
    if not name:
        raise error
    text = base_models.text_of(name, options, question)
    request = base_models.request_for(request)
    completing = base_models.CompletionClient(client, text)
    return _answered(completing, request, {**options, "plain": True}, ""), request


def _is_about_last(options: dict[str, Any]) -> bool:
    """Whether code or a copy is wanted and nothing asked; a pipe asks, and may be empty by mistake."""
    wants = options["extract"] or options["extract_last"] or options["copy"]
    asks = ("words", "files", "system", "template", "last", "conversation")
    return bool(wants) and not any(options[name] for name in asks) and not _is_piped()


def _last(options: dict[str, Any]) -> int:
    """Print the last answer of the history, or its code."""
    from localspec.cli.terminal import extract
    from localspec.client.conversations import ConversationsClient

    client = ConversationsClient(autostart=not options["no_daemon_start"])
    found = client.conversation("last")
    if options["extract"] or options["extract_last"]:
        text = extract.kept_code(found, last=options["extract_last"])
        render.text(text)
        render.end_of_text()
    else:
        text = extract.kept_answer(found)
        printer = render.printer(plain=options["plain"])
        printer.text(text, [])
        printer.close()
    if options["copy"]:
        from localspec.cli.terminal import clipboard

        clipboard.copy(text)
    return 0


def _after(
    client: Client, last: dict[str, Any], request: dict[str, Any], options: dict[str, Any]
) -> int:
    """What follows an answer; the exit code."""
    tell(last)
    cut = _tell_if_cut(last, request)
    if options["usage"]:
        from localspec.cli.terminal import figures

        figures.statistics(last)
    if last.get("model") == "builtin" and sys.stderr.isatty() and not options["json"]:
        from localspec.cli.terminal import hints

        hints.real_pair(client)
    if options["copy"]:
        from localspec.cli.terminal import clipboard

        clipboard.copy(last["said"])
    return 1 if cut and options["schema"] is not None else 0


def _begun(client: Client, request: dict[str, Any]) -> str:
    """What was said of the answer that goes on; `request` names its conversation by its id then."""
    from localspec.client.conversations import ConversationsClient

    kept = ConversationsClient(client.socket_path, autostart=client.autostart)
    found = kept.conversation(request["localspec"]["conversation"])
    request["localspec"]["conversation"] = found["id"]
    last = found["messages"][-1] if found["messages"] else {}
    return str(last["content"]) if last.get("role") == "assistant" else ""


def _tell_if_cut(last: dict[str, Any], request: dict[str, Any]) -> bool:
    """Say that the answer was cut off, and how it goes on; whether it was."""
    if not (last.get("localspec") or {}).get("limit"):
        return False
    from localspec.cli.terminal import hints

    kept = keeps(request) and not last["localspec"].get("not_kept")
    hints.cut_off(last, "localspec ask -c" if kept else "")
    return True


def tell(last: dict[str, Any]) -> None:
    """What a person should know beside an answer, of which `last` has what it ended with."""
    ours = last.get("localspec") or {}
    if ours.get("news"):
        render.error(ours["news"])
    if ours.get("not_kept"):
        render.error(f"The answer was not saved in the history. {ours['not_kept']}")


def _check(options: dict[str, Any]) -> None:
    """Refuse options that ask for two things at once."""
    for group in EXCLUSIVE:
        given = [name for name in group if options[name]]
        if len(given) > 1:
            flags = {"extract_last": "--xl", "conversation": "--cid", "last": "-c", "extract": "-x"}
            names = [flags.get(name, f"--{name}") for name in given]
            raise UsageError(f"{' and '.join(names)} cannot be used together.")
    if options["values"] and not (options["template"] or options["save"]):
        raise UsageError("-p gives a value to a template's parameter; add -t TEMPLATE.")


def _with_files(options: dict[str, Any]) -> dict[str, Any]:
    """Of the words, `-` is standard input, and one that is a file is asked about where a person sits."""
    words = [word for word in options["words"] if word != "-"]
    files = ["-"] * ("-" in options["words"]) + options["files"]
    named = [word for word in words if word not in files and os.path.isfile(word)]  # noqa: PTH113 - pathlib is an import more
    if named:
        from localspec.cli import inputs

        files = files + named if inputs.wanted(named) else files
    return {**options, "words": words, "files": files}


def _answered(
    client: Client, request: dict[str, Any], options: dict[str, Any], begun: str
) -> dict[str, Any]:
    """Print the answer, after what was `begun` of it, as the options say.

    Its `timings`, `localspec`, `usage` and `model`, and what was `said` with its beginning; with -x the
    code of it.
    """
    if options["json"]:
        answer = client.chat(request)
        render.record(answer)
        answer["said"] = begun + (answer["choices"][0]["message"]["content"] or "")
        return answer
    if options["extract"] or options["extract_last"]:
        from localspec.cli.terminal import extract

        answer = client.chat(request)
        message = answer["choices"][0]["message"]
        message["content"] = begun + (message["content"] or "")
        kept = keeps(request) and not answer["localspec"].get("not_kept")
        try:
            answer["said"] = extract.code(answer, last=options["extract_last"], kept=kept)
        except LocalspecError:
            _tell_if_cut(answer, request)
            raise
        render.text(answer["said"])
        render.end_of_text()
        return answer
    printer = render.printer(plain=options["plain"], tinted=options["show_draft"], begun=begun)
    if not options["no_stream"]:
        last = stream(client, request, printer, hide_reasoning=options["hide_reasoning"])
        return {**last, "said": begun + last.get("said", "")}
    answer = client.chat(request)
    message = answer["choices"][0]["message"]
    if not options["hide_reasoning"]:
        render.reasoning(message.get("reasoning_content") or "")
    printer.text(message["content"] or "", [])
    printer.close()
    answer["said"] = begun + (message["content"] or "")
    return answer


def stream(
    client: Client,
    request: dict[str, Any],
    printer: render.Printer,
    *,
    hide_reasoning: bool = False,
    seen: dict[str, Any] | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Print the answer as it comes. What came: timings, localspec, usage, model, finish_reason, said.

    They are put into `seen` too, where an interrupt leaves what had come by then. `on_progress` gets each
    report on what the answer waits for; if it raises, the answer is cancelled.
    """
    last: dict[str, Any] = {} if seen is None else seen
    request = {**request, "stream_options": {"include_usage": True}}
    waiting = _spinner(client)
    if waiting or on_progress:
        request["localspec"] = {**request.get("localspec", {}), "progress": True}
    chunks = client.stream_chat(request)
    try:
        for chunk in chunks:
            _note(chunk, last)
            progress = (chunk.get("localspec") or {}).get("progress")
            if on_progress and progress:
                on_progress(progress)
            if waiting:
                waiting.tell(progress)
            for choice in chunk["choices"]:
                delta = choice["delta"]
                thought = "" if hide_reasoning else delta.get("reasoning_content") or ""
                text = delta.get("content") or ""
                if waiting and (text or thought):
                    waiting.stop()
                    waiting = None
                render.reasoning(thought)
                if text:
                    last["said"] = last.get("said", "") + text
                    printer.text(text, (chunk.get("localspec") or {}).get("drafted") or [])
    finally:
        if waiting:
            waiting.stop()
        _close(chunks, printer)
    return last


def _close(chunks: Generator[dict[str, Any], None, None], printer: render.Printer) -> None:
    chunks.close()  # the daemon sees it and stops generating
    render.end_of_thought()  # there may be nothing after it
    printer.close()


def _note(chunk: dict[str, Any], last: dict[str, Any]) -> None:
    for key in ("timings", "usage", "model"):
        if key in chunk:
            last[key] = chunk[key]
    for choice in chunk["choices"]:
        if thought := choice["delta"].get("reasoning_content"):
            last.setdefault("thoughts", []).append(thought)
        if reason := choice.get("finish_reason"):
            last["finish_reason"] = reason
    if "localspec" in chunk:
        last["localspec"] = {**last.get("localspec", {}), **chunk["localspec"]}


def _spinner(client: Client) -> Any:
    """Something that turns on stderr until `stop()`; None where nobody would see it."""
    if not render.is_drawn_on(sys.stderr):
        return None
    from localspec.cli.terminal import spinner

    return spinner.Spinner(client)


def request_for(options: dict[str, Any], question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}] if question else []
    if options["system"] is not None:
        messages.insert(0, {"role": "system", "content": clean(options["system"])})
    request = {**wanted(options), "messages": messages}
    if not question:
        request["continue_final_message"] = True
    if options["schema"] is not None:
        from localspec.cli import inputs

        request["json_schema"] = inputs.schema(options["schema"])
    conversation = "last" if options["last"] else options["conversation"]
    if options["no_log"]:
        if conversation:
            raise UsageError(
                "--no-log cannot be used with -c or --cid: what continues a conversation is "
                "saved in it."
            )
        request["localspec"] = {"private": True}
    else:
        request["localspec"] = {"conversation": conversation or "new", "kind": "ask"}
        if not conversation:
            request["localspec"]["title"] = _title(options)
    return request


def keeps(request: dict[str, Any]) -> bool:
    """Does the history keep question and answer?"""
    return "conversation" in request.get("localspec", {})


def _title(options: dict[str, Any]) -> str:
    """What the history calls a question: its words, else what it is about; never what that says."""
    if words := clean(" ".join(options["words"])).strip():
        return words[:_LONG_TITLE]
    names = ", ".join(name for name in options["files"] if name != "-")
    parts = [options["template"], clean(names or _name_of_stdin())]
    return ": ".join(part for part in parts if part)[:_LONG_TITLE]


def _name_of_stdin() -> str:
    """The file it is, where the system tells; else that something is piped, if something is."""
    if not _is_piped():
        return ""
    try:
        name = os.readlink("/proc/self/fd/0")  # noqa: PTH115 - pathlib is an import more
    except OSError:
        return "Piped text"
    if os.path.isfile(name):  # noqa: PTH113 - pathlib is an import more
        return os.path.basename(name)  # noqa: PTH119 - pathlib is an import more
    return "" if os.path.exists(name) else "Piped text"  # noqa: PTH110 - pathlib is an import more


def _is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.isatty()


def wanted(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that say who is to answer, and how; `chat` has these options too."""
    request = fields(options)
    if options["model"]:
        from localspec.cli import inputs

        request["model"] = inputs.pair(options["model"])
    if options["exact"]:
        request["exact"] = True
    if (depth := options["draft"]) is not None:
        request["speculative"] = {"depth": depth} if depth else {"enabled": False}
    if options["show_draft"]:
        request["reveal_draft"] = True
    return request


def _question(options: dict[str, Any]) -> str:
    """What is asked; nothing where an answer goes on that was cut off."""
    question = asked(options)
    goes_on = (options["last"] or options["conversation"]) and options["system"] is None
    if not question and not goes_on:
        raise UsageError(
            f"No question given. For example:\n{EXAMPLE.rstrip()}\nAll options: localspec ask --help"
        )
    return question


def asked(options: dict[str, Any], *, labelled: bool = True) -> str:
    """Return stdin, the files and the words, with empty lines between; empty if there is none of them.

    Each file has its name above it and fences around it, unless `labelled` is false.
    """
    parts = [_given(options, labelled=labelled), clean(" ".join(options["words"]))]
    return "\n\n".join(part for part in parts if part.strip())


def _given(options: dict[str, Any], *, labelled: bool) -> str:
    """What is asked about: stdin, unless a file named `-` is, and the files."""
    if not options["files"]:
        return _piped()
    from localspec.cli import inputs

    piped = "" if set(inputs.STDIN) & set(options["files"]) else _piped()
    return "\n\n".join(
        part for part in [piped, inputs.files(options["files"], labelled=labelled)] if part
    )


def _piped() -> str:
    """All of stdin, unless a person sits there or it is closed."""
    if not _is_piped():
        return ""
    from localspec.cli import inputs

    return inputs.stdin()


def clean(text: str) -> str:
    """Arguments that are not UTF-8 arrive with lone surrogates, which no JSON may carry."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
