"""Extract a command or a commit message from the text of a model.

The prompt requests nothing else, but models also greet, explain, number, quote and fence. Nothing here
decides whether a command is safe, because a person reads the result before it is used.
"""

from __future__ import annotations

import re
import textwrap

from localspec.cli.terminal import extract

# ------------------------------------------------------------------ a command

_PROMPT = re.compile(r"\s*(?:[\w.-]+@[\w.-]+[^$%#❯]*)?[$%❯] +(?=\S)")
_FENCE_PREFIX = re.compile(r"(?m)^[ \t>*+.\d-]+(?=```|~~~)")
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_LABEL = re.compile(r"(?i)^\**(?:shell |bash |zsh |fish )?(?:command|answer)\**\s*:\**\s*")
_LANGUAGE = re.compile(r"(?i)^(?:bash|zsh|fish|sh|shell|console)$")
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*[,.:;!?]*")
# Words that begin sentences and that no command begins with.
_SENTENCE_STARTS = frozenset(
    "here here's this that these you your to use using sure the try run note i i'm it it's certainly "
    "okay ok of and explanation output in as below above following".split()
)
# Characters that terminals show as nothing or as a blank, although str.isprintable is true for them.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def extract_command(answer: str) -> str:
    """Return the first command in an answer, which may have several lines; empty if there is none."""
    text = re.sub(r"\r\n?", "\n", answer)
    blocks = [block for block in extract.blocks(_FENCE_PREFIX.sub("", text)) if block.strip()]
    lines = blocks[0].split("\n") if blocks else _outside_fences(text)
    return _strip_decoration(lines)


def _outside_fences(text: str) -> list[str]:
    """Return the first lines that are no sentence, or else the first code span within a sentence."""
    command_lines: list[str] = []
    for line in text.strip().split("\n"):
        bare = _LABEL.sub("", line)
        if not bare.strip() or _is_sentence(bare):
            if command_lines:
                break
            continue
        command_lines.append(bare)
    if len(command_lines) > 1 and _LANGUAGE.match(command_lines[0].strip()):
        command_lines = command_lines[1:]
    if not command_lines:
        spans = [match[2] for match in _SPAN.finditer(text)]
        return spans[:1]
    span = _SPAN.fullmatch(command_lines[0].strip())
    return [span[2]] if span else command_lines


def _is_sentence(line: str) -> bool:
    """Return whether a line is prose and not a command, judged by its words and punctuation."""
    words = [word.strip("*_") for word in line.split()]
    is_plain_word = [bool(_WORD.fullmatch(word)) for word in words]
    if len(words) > 3 and words[-1].endswith((".", "!", "?")) and all(is_plain_word[-3:]):
        return True
    if not is_plain_word[0]:
        return False
    if words[0].rstrip(",.:;!?").lower().replace("’", "'") in _SENTENCE_STARTS:
        return True
    if len(words) > 2 and words[-1].endswith(":"):
        return all(is_plain_word)
    # "Find all files" is prose, but "find all files" may be a command.
    return words[0][0].isupper() and len(words) > 2 and is_plain_word[1]


def _strip_decoration(lines: list[str]) -> str:
    """Return the lines without prompts, output, and comments before the first command."""
    lines = textwrap.dedent("\n".join(lines)).split("\n")
    while lines and (not lines[0].strip() or lines[0].lstrip().startswith("#")):
        lines.pop(0)
    if lines and _PROMPT.match(lines[0]):
        lines = _drop_output(lines)
    text = "\n".join(lines).strip()
    # Text that begins with a dash is a list item, which a shell would take for an option of its own.
    return "" if text.startswith("-") else text


def _drop_output(lines: list[str]) -> list[str]:
    """Return the typed lines of a session: those after a prompt, and their continuation lines."""
    typed_lines: list[str] = []
    continues = False
    for line in lines:
        match = _PROMPT.match(line)
        if match or continues:
            line = line[match.end() :] if match else line.removeprefix("> ")
            typed_lines.append(line)
            continues = line.endswith("\\")
    return typed_lines


def find_invisible(command: str) -> str:
    """Return the first character that a terminal would not show as itself; empty if there is none."""
    for char in command:
        if char not in "\n\t" and (not char.isprintable() or _INVISIBLE.match(char)):
            return char
    return ""


# ------------------------------------------------------------------ a commit message

_MIN_REPEATED_LETTERS = 8  # a shorter subject may be repeated by chance
_MAX_COLUMNS = 72  # width of a message's lines that git's manual recommends
_INTRODUCTION = re.compile(
    r"(?i)^(?:sure|certainly|okay|here|the|a|this|commit message|\**commit)\b.*:\**$"
)
_TITLE = re.compile(r"(?i)^\**(?:(?:git )?commit message|subject|title|message|body)\**\s*:\**\s*")
_BULLET = re.compile(r"^(\s*(?:[-*+]|\d+[.)])\s+|\s*)")


def extract_message(answer: str) -> str:
    """Return a commit message: a subject, and perhaps a body after an empty line.

    Returns an empty string if there is none.
    """
    text = re.sub(r"\r\n?", "\n", answer)
    blocks = [block for block in extract.blocks(text) if block.strip()]
    text = "".join(
        char for char in (blocks[0] if blocks else text) if char in "\n\t" or char.isprintable()
    )
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and (not lines[0].strip() or _INTRODUCTION.match(lines[0].strip())):
        lines.pop(0)
    if not lines:
        return ""
    subject = _subject(lines[0])
    body = [wrapped for line in lines[1:] for wrapped in _wrapped(_TITLE.sub("", line))]
    text = "\n".join(body).strip("\n")
    return f"{subject}\n\n{text}".strip() if subject else extract_message("\n".join(lines[1:]))


def repeats_subject(message: str, subjects: str) -> bool:
    """Return whether a message begins with one of the earlier subjects, which are one per line.

    Small models copy what the prompt shows them.
    """
    message_letters = _letters(message)
    known_letters = [_letters(line) for line in subjects.split("\n")]
    return any(
        len(letters) >= _MIN_REPEATED_LETTERS and message_letters.startswith(letters)
        for letters in known_letters
    )


def _letters(text: str) -> str:
    return "".join(char for char in text.casefold() if char.isalnum())


def _subject(line: str) -> str:
    line = _TITLE.sub("", line.strip()).lstrip("#").strip()
    for sign in ("**", '"', "`", "'"):
        if len(line) > 2 * len(sign) and line.startswith(sign) and line.endswith(sign):
            line = line.removeprefix(sign).removesuffix(sign).strip()
    return line.lstrip("#").strip()


def _wrapped(line: str) -> list[str]:
    if line.startswith("#"):
        line = f" {line}"  # otherwise git would take it for a comment
    if len(line) <= _MAX_COLUMNS:
        return [line]
    match = _BULLET.match(line)
    indent = " " * len(match[1]) if match else ""
    return textwrap.wrap(
        line, _MAX_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
