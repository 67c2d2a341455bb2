"""`localspec ask`: one question, one answer.

Modules that a plain question does not need (files, templates, Markdown, a spinner) are imported where
they are used, because every import delays the first word of the answer.
"""

from __future__ import annotations

import os
import sys

from localspec.cli.options import EXCLUSIVE, SAMPLING
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalspecError,
    TemplateFailed,
    UsageError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from localspec.cli.options import AskOptions

    Attachment = tuple[str, dict[str, Any]]  # the name of a file, and the part of a message

EXAMPLE = """\
  localspec ask "What does shutil.copytree do?"
  git diff | localspec ask "review this"
  localspec ask -f 'src/*.py' "Where is the cache emptied?"
  localspec ask -x "a function that parses ISO dates" > dates.py
  localspec ask -x > dates.py    # the code of the last answer
  localspec ask -c "and with time zones?"
"""
# A longer question was not typed by hand, so an error about its length says how much of it would fit.
_MIN_PIPED_CHARS = 2000
MAX_TITLE_CHARS = 1000  # the daemon's limit, of which it keeps the beginning of the first line


def run(options: AskOptions) -> int:
    """Ask a question, print the answer and return the exit code.

    Raises UsageError if there is nothing to ask, or options exclude each other, and LocalspecError if no
    daemon is running, or it answered with an error.
    """
    _check_exclusive(options)
    if options.query:
        from localspec.cli import inputs

        options = inputs.resolve_query(options)
    if options.save is not None:
        from localspec.cli import templates

        templates.save(options)
        return 0
    options = _split_words_and_files(options)
    if _is_about_last(options):
        return _print_last_answer(options)
    options, attachments = _take_attachments(options)
    options, question = _build_question(options)
    request = request_for(options, question)
    if attachments:
        _attach(request, attachments, question)
    client = Client(autostart=not options.no_daemon_start)
    beginning = "" if question else _load_unfinished_answer(client, request)
    try:
        response = _print_answer(client, request, options, beginning)
    except TemplateFailed as error:
        from localspec.cli import base_models

        base, request = base_models.to_completion(client, request, options, question, error)
        response = _print_answer(base, request, options.changed(plain=True), "")
    except ContextExceeded as error:
        if len(question) < _MIN_PIPED_CHARS:
            raise
        from localspec.cli import inputs

        longer = inputs.find_longer_pair(client, error.n_prompt_tokens or 0)
        stdin_alone = _is_piped() and not options.files
        message = inputs.describe_too_long(error, question, stdin_alone=stdin_alone, longer=longer)
        raise ContextExceeded(message) from error
    except InvalidRequest as error:
        _name_attachments(error, [name for name, _ in attachments])
        raise
    finally:
        if options.no_log:
            client.forget_private()
    return _finish(client, response, request, options)


def _take_attachments(options: AskOptions) -> tuple[AskOptions, list[Attachment]]:
    """Return the options without files that are pictures or documents, and those as parts of a message.

    They have the names of their files. Standard input may be one, too.
    """
    if not options.files and not _is_piped():
        return options, []
    from localspec.cli import inputs

    attachments: list[Attachment] = []
    if _is_piped() and not set(inputs.STDIN) & set(options.files):
        _, attachments = inputs.read_attachments(["-"])
    files, more = inputs.read_attachments(options.files)
    attachments += more
    return options.changed(files=files) if attachments else options, attachments


def _attach(request: dict[str, Any], attachments: list[Attachment], question: str) -> None:
    """Put the attachments before the question. Raises UsageError if that is empty."""
    if not question:
        raise UsageError("A picture or document needs a question: localspec ask -f FILE WORDS")
    parts = [*(part for _, part in attachments), {"type": "text", "text": question}]
    request["messages"][-1]["content"] = parts


def _name_attachments(error: InvalidRequest, names: list[str]) -> None:
    """Put the names of the files that a question begins with in place of their paths in its request."""
    import re

    path = r"'messages\[\d+\]\.content\[(\d+)\][.\w]*'"
    for match in re.finditer(path, error.message):
        if (number := int(match[1])) < len(names):
            error.message = error.message.replace(match[0], names[number])


def _is_about_last(options: AskOptions) -> bool:
    """Return whether the command line requests the last answer's code or a copy of it, without a question.

    A pipe always counts as a question, because it may be empty by mistake.
    """
    question_options = ("words", "files", "system", "template", "last", "conversation")
    has_question = _is_piped() or any(getattr(options, name) for name in question_options)
    return (options.extract or options.extract_last or options.copy) and not has_question


def _print_last_answer(options: AskOptions) -> int:
    from localspec.cli.terminal import extract
    from localspec.client.conversations import ConversationsClient

    client = ConversationsClient(autostart=not options.no_daemon_start)
    conversation = client.conversation("last")
    if options.extract or options.extract_last:
        text = extract.last_code(conversation, last=options.extract_last)
        render.whole_text(text)
    else:
        text = extract.last_answer(conversation)
        render.answer(text, plain=options.plain)
    if options.copy:
        from localspec.cli.terminal import clipboard

        clipboard.copy(text)
    return 0


def _finish(
    client: Client, response: dict[str, Any], request: dict[str, Any], options: AskOptions
) -> int:
    print_notes(response)
    cut_off = _report_if_cut_off(response, request)
    if options.usage:
        from localspec.cli.terminal import figures

        figures.statistics(response)
    if response.get("model") == "builtin" and sys.stderr.isatty() and not options.json:
        from localspec.cli.terminal import hints

        hints.suggest_real_pair(client)
    if options.copy:
        from localspec.cli.terminal import clipboard

        clipboard.copy(response["said"])
    return 1 if cut_off and options.schema is not None else 0


def _report_if_cut_off(response: dict[str, Any], request: dict[str, Any]) -> bool:
    if not (response.get("localspec") or {}).get("limit"):
        return False
    from localspec.cli.terminal import hints

    hints.print_cut_off(response, "localspec ask -c" if _was_kept(response, request) else "")
    return True


def _was_kept(response: dict[str, Any], request: dict[str, Any]) -> bool:
    return is_saved(request) and not response["localspec"].get("not_kept")


def _load_unfinished_answer(client: Client, request: dict[str, Any]) -> str:
    """Return the beginning of the answer that is being continued.

    It also replaces the conversation in `request` by its id, so that another conversation that is started
    meanwhile cannot become the "last" one.
    """
    from localspec.client.conversations import ConversationsClient

    conversations = ConversationsClient(client.socket_path, autostart=client.autostart)
    conversation = conversations.conversation(request["localspec"]["conversation"])
    request["localspec"]["conversation"] = conversation["id"]
    last_message = conversation["messages"][-1] if conversation["messages"] else {}
    return str(last_message["content"]) if last_message.get("role") == "assistant" else ""


def print_notes(response: dict[str, Any]) -> None:
    """Print the notes that a response carries beside its answer."""
    extension = response.get("localspec") or {}
    if extension.get("news"):
        render.error(extension["news"])
    if extension.get("loop") == "thoughts":
        render.error("The thoughts repeated themselves, so they were ended (loop_guard).")
    if extension.get("not_kept"):
        render.error(f"The answer was not saved in the history. {extension['not_kept']}")


def _check_exclusive(options: AskOptions) -> None:
    flags = {"extract_last": "--xl", "conversation": "--cid", "last": "-c", "extract": "-x"}
    for group in EXCLUSIVE:
        used = [flags.get(name, f"--{name}") for name in group if getattr(options, name)]
        if len(used) > 1:
            raise UsageError(f"{' and '.join(used)} cannot be used together.")
    if options.values and not (options.template or options.save):
        raise UsageError("-p gives a value to a template's parameter; add -t TEMPLATE.")


def _split_words_and_files(options: AskOptions) -> AskOptions:
    """Return the options with files moved from the words to the files.

    The word `-` is standard input. A word that names a file may be a file too, so a person at a terminal is
    asked about it.
    """
    words = [word for word in options.words if word != "-"]
    files = ["-"] * ("-" in options.words) + options.files
    file_words = [word for word in words if word not in files and os.path.isfile(word)]  # noqa: PTH113 - pathlib would be one more import
    if file_words:
        from localspec.cli import inputs

        files += file_words if inputs.confirm_files(file_words) else []
    return options.changed(words=words, files=files)


def _print_answer(
    client: Client, request: dict[str, Any], options: AskOptions, beginning: str
) -> dict[str, Any]:
    """Print the answer as the options request, and return its response.

    The response has `timings`, `localspec`, `usage`, `model` and `said`, which is `beginning` and the text
    that followed it. With -x `said` is only the code.
    """
    extracts, hides = options.extract or options.extract_last, options.hide_reasoning
    plain, tinted = options.plain, options.show_draft
    if not (options.json or extracts or options.no_stream):
        printer = render.printer(plain=plain, tinted=tinted, beginning=beginning)
        response = stream(client, request, printer, hide_reasoning=hides)
        return {**response, "said": beginning + response.get("said", "")}
    completion = client.chat(request)
    if options.json:
        render.record(completion)
    message = completion["choices"][0]["message"]
    content = message["content"] or ""
    message["content"] = completion["said"] = beginning + content
    if extracts:
        from localspec.cli.terminal import extract

        kept = _was_kept(completion, request)
        try:
            completion["said"] = extract.code(completion, last=options.extract_last, saved=kept)
        except LocalspecError:
            _report_if_cut_off(completion, request)
            raise
        render.whole_text(completion["said"])
    elif not options.json:
        printer = render.printer(plain=plain, tinted=tinted, beginning=beginning)
        if not hides:
            render.reasoning(message.get("reasoning_content") or "")
        printer.text(content, [])
        printer.close()
    return completion


def stream(
    client: Client,
    request: dict[str, Any],
    printer: render.Printer,
    *,
    hide_reasoning: bool = False,
    result: dict[str, Any] | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Print the answer while it arrives.

    Returns timings, localspec, usage, model, finish_reason and said, as far as they arrived; an interrupted
    stream leaves them in `result`. `on_progress` gets what the answer waits for, and may raise to cancel it.
    """
    response: dict[str, Any] = {} if result is None else result
    request = {**request, "stream_options": {"include_usage": True}}
    spinner = _start_spinner(client)
    if spinner or on_progress:
        request["localspec"] = {**request.get("localspec", {}), "progress": True}
    chunks = client.stream_chat(request)
    restoring = [_hide_typing()]
    try:
        for chunk in chunks:
            _record_chunk(chunk, response)
            progress = (chunk.get("localspec") or {}).get("progress")
            if on_progress and progress:
                on_progress(progress)
            if spinner:
                spinner.update(progress)
            for delta in (choice["delta"] for choice in chunk["choices"]):
                text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
                if reasoning and len(restoring) == 1:
                    restoring.append(_end_thoughts_on_key(client, chunk.get("id", "")))
                reasoning = "" if hide_reasoning else reasoning
                if spinner and (text or reasoning):
                    spinner.stop()
                    spinner = None
                render.reasoning(reasoning)
                if text:
                    response["said"] = response.get("said", "") + text
                    printer.text(text, (chunk.get("localspec") or {}).get("drafted") or [])
    finally:
        if spinner:
            spinner.stop()
        chunks.close()  # the daemon notices the closed connection and stops generating
        render.end_reasoning()  # the answer may have consisted of reasoning alone
        printer.close()
        for restore in restoring:
            restore()
    return response


def _hide_typing() -> Callable[[], object]:
    """End the terminal's echo of what is typed, which is kept for the shell. Return what begins it again."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: None
    import termios

    def set_modes(local: int) -> None:
        try:
            if os.tcgetpgrp(0) == os.getpgrp():  # a job in the background would be stopped
                modes[3] = local
                termios.tcsetattr(0, termios.TCSANOW, modes)
        except (OSError, termios.error):  # it is not this session's terminal, or is gone
            return

    modes = termios.tcgetattr(0)
    local = modes[3]
    set_modes(local & ~termios.ECHO)
    return lambda: set_modes(local)


def _start_spinner(client: Client) -> Any:
    """Start a spinner on stderr; return None if stderr is no terminal that can draw one."""
    if not render.is_drawn_on(sys.stderr):
        return None
    from localspec.cli.terminal import progress

    return progress.Spinner(client)


def _end_thoughts_on_key(client: Client, answer: str) -> Callable[[], object]:
    """Let Ctrl-\\ on the terminal end the thoughts of an answer. Return a function that ends this."""
    import signal  # imported late, because few answers have thoughts

    def end_thoughts(*_: object) -> None:
        try:
            Client(client.socket_path, autostart=False).end_thoughts(answer)
        except LocalspecError:  # the answer goes on as it would have
            return

    try:
        before = signal.signal(signal.SIGQUIT, end_thoughts)
    except ValueError:  # not in the main thread, which has the terminal
        return lambda: None
    return lambda: signal.signal(signal.SIGQUIT, before)


def _record_chunk(chunk: dict[str, Any], response: dict[str, Any]) -> None:
    response |= {key: chunk[key] for key in ("timings", "usage", "model") if key in chunk}
    for choice in chunk["choices"]:
        if reasoning := choice["delta"].get("reasoning_content"):
            response.setdefault("thoughts", []).append(reasoning)
        if reason := choice.get("finish_reason"):
            response["finish_reason"] = reason
    if "localspec" in chunk:
        response["localspec"] = {**response.get("localspec", {}), **chunk["localspec"]}


def request_for(options: AskOptions, question: str) -> dict[str, Any]:
    """Return the request that asks `question` with these options.

    An empty question continues the last answer of the conversation.
    """
    messages = [{"role": "user", "content": question}] if question else []
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": clean(options.system)})
    request = {**sampling_request(options), "messages": messages}
    if not question:
        request["continue_final_message"] = True
    if options.schema is not None:
        from localspec.cli import inputs

        request["json_schema"] = inputs.load_schema(options.schema)
    conversation = "last" if options.last else options.conversation
    if options.no_log:
        if conversation:
            raise UsageError(
                "--no-log cannot be used with -c or --cid: what continues a conversation is "
                "saved in it."
            )
        request["localspec"] = {"private": True}
    else:
        request["localspec"] = {"conversation": conversation or "new", "kind": "ask"}
        if not conversation:
            request["localspec"]["title"] = _make_title(options)
    return request


def is_saved(request: dict[str, Any]) -> bool:
    """Return whether the history keeps the question and the answer."""
    return "conversation" in request.get("localspec", {})


def _make_title(options: AskOptions) -> str:
    """Return the title of a question in the history: its words, or else the names of its files.

    The contents of files and of stdin are never part of a title.
    """
    if words := clean(" ".join(options.words)).strip():
        return words[:MAX_TITLE_CHARS]
    names = ", ".join(name for name in options.files if name != "-")
    parts = [options.template, clean(names or _stdin_name())]
    return ": ".join(part for part in parts if part)[:MAX_TITLE_CHARS]


def _stdin_name() -> str:
    """Return the name of the file that stdin reads, "Piped text" for a pipe, else an empty string."""
    if not _is_piped():
        return ""
    try:
        name = os.readlink("/proc/self/fd/0")  # noqa: PTH115 - pathlib would be one more import
    except OSError:
        return "Piped text"
    if os.path.isfile(name):  # noqa: PTH113 - pathlib would be one more import
        return os.path.basename(name)  # noqa: PTH119 - pathlib would be one more import
    return "" if os.path.exists(name) else "Piped text"  # noqa: PTH110 - pathlib would be one more import


def _is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.isatty()


def sampling_request(options: AskOptions) -> dict[str, Any]:
    """Return the request fields that choose the pair and its parameters. `chat` has these options too."""
    values = {option.name: getattr(options, option.name) for option in SAMPLING}
    fields = {"max_tokens": options.tokens, **values}
    request = {field: value for field, value in fields.items() if value is not None}
    if options.model:
        from localspec.cli import inputs

        request["model"] = inputs.resolve_pair(options.model)
    if options.exact:
        request["exact"] = True
    if (depth := options.draft) is not None:
        request["speculative"] = {"depth": depth} if depth else {"enabled": False}
    if options.show_draft:
        request["reveal_draft"] = True
    return request


def _build_question(options: AskOptions) -> tuple[AskOptions, str]:
    """Return the options, completed by those of a template, and the question.

    The question is empty where an answer that was cut off is to be continued.
    """
    if options.template is not None:
        from localspec.cli import templates

        template = templates.Template(options)
        options = template.options
        _check_exclusive(options)
        return options, template.question(read_question(options))
    question = read_question(options)
    continues = (options.last or options.conversation) and options.system is None
    if not question and not continues:
        advice = f"For example:\n{EXAMPLE.rstrip()}\nAll options: localspec ask --help"
        raise UsageError(f"No question given. {advice}")
    return options, question


def read_question(options: AskOptions, *, labelled: bool = True) -> str:
    """Return stdin, the files and the words, separated by empty lines; empty if there is none of them.

    Unless `labelled` is false, every file has its name above it and fences around it. Standard input comes
    first, unless `-` is one of the files.
    """
    parts = []
    if options.files or _is_piped():
        from localspec.cli import inputs

        if _is_piped() and not set(inputs.STDIN) & set(options.files):
            parts.append(inputs.read_stdin())
        if options.files:
            parts.append(inputs.read_files(options.files, labelled=labelled))
    context = "\n\n".join(filter(None, parts))
    return "\n\n".join(part for part in (context, clean(" ".join(options.words))) if part.strip())


def clean(text: str) -> str:
    """Return an argument with bytes that are not UTF-8 replaced.

    Python represents such bytes as lone surrogates, which JSON cannot carry.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
