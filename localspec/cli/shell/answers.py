"""What a model wrote → the one thing that was asked for: a command, or a commit message.

Models are told to answer with nothing else, and then greet, explain, number, quote and fence all the same.
Nothing here decides what is safe: a person reads what comes out before it is used.
"""

from __future__ import annotations

import re
import textwrap

from localspec.cli.terminal import extract

# ------------------------------------------------------------------ a command

_PROMPT = re.compile(r"\s*(?:[\w.-]+@[\w.-]+[^$%#❯]*)?[$%❯] +(?=\S)")
_FENCED_DEEPER = re.compile(r"(?m)^[ \t>*+.\d-]+(?=```|~~~)")
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_LABEL = re.compile(r"(?i)^\**(?:shell |bash |zsh |fish )?(?:command|answer)\**\s*:\**\s*")
_LANGUAGE = re.compile(r"(?i)^(?:bash|zsh|fish|sh|shell|console)$")
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*[,.:;!?]*")
# How sentences begin that no command begins like.
_STARTS = frozenset(
    "here here's this that these you your to use using sure the try run note i i'm it it's certainly "
    "okay ok of and explanation output in as below above following".split()
)
# Shown as nothing, or as a blank that is none, though str.isprintable says they are shown.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def command(answer: str) -> str:
    """The first command in an answer, perhaps of several lines; nothing when there is none."""
    text = re.sub(r"\r\n?", "\n", answer)
    found = [each for each in extract.blocks(_FENCED_DEEPER.sub("", text)) if each.strip()]
    lines = found[0].split("\n") if found else _outside_fences(text)
    return _without_decoration(lines)


def _outside_fences(text: str) -> list[str]:
    """The first lines that are no sentence, else the first code within a sentence."""
    kept: list[str] = []
    for line in text.strip().split("\n"):
        bare = _LABEL.sub("", line)
        if not bare.strip() or _is_sentence(bare):
            if kept:
                break
            continue
        kept.append(bare)
    if len(kept) > 1 and _LANGUAGE.match(kept[0].strip()):
        kept = kept[1:]
    if not kept:
        spans = [match[2] for match in _SPAN.finditer(text)]
        return spans[:1]
    whole = _SPAN.fullmatch(kept[0].strip())
    return [whole[2]] if whole else kept


def _is_sentence(line: str) -> bool:
    words = [word.strip("*_") for word in line.split()]
    said = [bool(_WORD.fullmatch(word)) for word in words]
    if len(words) > 3 and words[-1].endswith((".", "!", "?")) and all(said[-3:]):
        return True
    if not said[0]:
        return False
    if words[0].rstrip(",.:;!?").lower().replace("’", "'") in _STARTS:
        return True
    if len(words) > 2 and words[-1].endswith(":"):
        return all(said)
    # "Find all files" is said, "find all files" might be run.
    return words[0][0].isupper() and len(words) > 2 and said[1]


def _without_decoration(lines: list[str]) -> str:
    """Without prompts, what they printed, and comments before the first command."""
    lines = textwrap.dedent("\n".join(lines)).split("\n")
    while lines and (not lines[0].strip() or lines[0].lstrip().startswith("#")):
        lines.pop(0)
    if lines and _PROMPT.match(lines[0]):
        lines = _typed(lines)
    text = "\n".join(lines).strip()
    return "" if text.startswith("-") else text  # a list: a shell would take it for its own option


def _typed(lines: list[str]) -> list[str]:
    """Of a session those that were typed: after a prompt, and going on from such a line."""
    found: list[str] = []
    goes_on = False
    for line in lines:
        match = _PROMPT.match(line)
        if match or goes_on:
            line = line[match.end() :] if match else line.removeprefix("> ")
            found.append(line)
            goes_on = line.endswith("\\")
    return found


def unseen(command: str) -> str:
    """The first character of a command that a terminal would not show as itself; nothing if none."""
    for char in command:
        if char not in "\n\t" and (not char.isprintable() or _UNSEEN.match(char)):
            return char
    return ""


# ------------------------------------------------------------------ a commit message

_TELLING = 8  # letters of a subject that nobody repeats by chance

_WIDTH = 72  # columns of a message's lines, as git's own manual asks for
_INTRODUCED = re.compile(
    r"(?i)^(?:sure|certainly|okay|here|the|a|this|commit message|\**commit)\b.*:\**$"
)
_TITLE = re.compile(r"(?i)^\**(?:(?:git )?commit message|subject|title|message|body)\**\s*:\**\s*")
_BULLET = re.compile(r"^(\s*(?:[-*+]|\d+[.)])\s+|\s*)")


def message(answer: str) -> str:
    """A commit message: a subject, and after an empty line perhaps more; nothing when there is none."""
    text = re.sub(r"\r\n?", "\n", answer)
    found = [each for each in extract.blocks(text) if each.strip()]
    text = "".join(
        each for each in (found[0] if found else text) if each in "\n\t" or each.isprintable()
    )
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and (not lines[0].strip() or _INTRODUCED.match(lines[0].strip())):
        lines.pop(0)
    if not lines:
        return ""
    subject = _subject(lines[0])
    body = [wrapped for line in lines[1:] for wrapped in _wrapped(_TITLE.sub("", line))]
    text = "\n".join(body).strip("\n")
    return f"{subject}\n\n{text}".strip() if subject else message("\n".join(lines[1:]))


def repeats(message: str, subjects: str) -> bool:
    """Whether a message begins with an earlier subject, one a line; small models copy what they see."""
    begins = _letters(message)
    known = [_letters(line) for line in subjects.split("\n")]
    return any(len(each) >= _TELLING and begins.startswith(each) for each in known)


def _letters(text: str) -> str:
    return "".join(each for each in text.casefold() if each.isalnum())


def _subject(line: str) -> str:
    line = _TITLE.sub("", line.strip()).lstrip("#").strip()
    for sign in ("**", '"', "`", "'"):
        if len(line) > 2 * len(sign) and line.startswith(sign) and line.endswith(sign):
            line = line.removeprefix(sign).removesuffix(sign).strip()
    return line.lstrip("#").strip()


def _wrapped(line: str) -> list[str]:
    if line.startswith("#"):
        line = f" {line}"  # git would take it for a comment
    if len(line) <= _WIDTH:
        return [line]
    match = _BULLET.match(line)
    indent = " " * len(match[1]) if match else ""
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
