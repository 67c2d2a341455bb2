"""Collect the texts that a draft learns from: answers in the history, and files that the target completes."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from localspec.client.conversations import ConversationsClient
from localspec.errors import LocalspecError, NotFound, TemplateFailed

MAX_CONVERSATIONS = 10_000
HELD_OUT_SHARE = 0.25  # the newest texts, by which the new draft is judged
FILE_KIND = "complete"  # the kind of work of completions in files, as editors ask for them
COMPLETION_TOKENS = 96
PLACES_PER_FILE = 4
MIN_TEXTS = 20  # to learn from
MIN_HELD_OUT_TEXTS = 4  # of a kind, to judge by
_LINES_BEFORE, _LINES_AFTER, _PART_LINES = 40, 20, 60
_MIN_LINES, _MAX_FILE_BYTES = 30, 1 << 20
_FOREIGN_FOLDERS = ("node_modules", "__pycache__")
# What a file must be for the target to complete places in it.
USABLE_FILES = f"UTF-8 text of at least {_MIN_LINES} lines and at most {_MAX_FILE_BYTES >> 20} MiB"
_ENDED_WELL = ("stop", "length")


@dataclass(frozen=True)
class TrainingText:
    """An answer of the target with what it answers: a rendered prompt, or the text around a place in a file.

    conversation: the id of the conversation that it is from; "" for a completion in a file. messages: of a
    chat, by which it is found again in the history. file: path of the file that it is from. is_own: whether
    the target has written it; otherwise only what the target would write at its positions is learned.
    """

    kind: str
    answer: str
    created: float = 0.0
    prompt: str = ""
    prefix: str = ""
    suffix: str = ""
    conversation: str = ""
    messages: tuple[dict[str, str], ...] = ()
    file: str = ""
    is_own: bool = True

    @property
    def source(self) -> str:
        """The conversation or file: its texts are all learned from, or all judged by. "": there is none."""
        return self.conversation or self.file

    def as_job(self) -> dict[str, Any]:
        """Return what the training process gets."""
        text = {"kind": self.kind, "answer": self.answer, "is_own": self.is_own}
        if self.prefix:
            return {**text, "prefix": self.prefix, "suffix": self.suffix}
        return {**text, "prompt": self.prompt}


class TuneClient(ConversationsClient):
    """A client that also renders chats, and answers what is rendered."""

    def render_chat(self, pair: str, messages: Sequence[dict[str, str]]) -> str:
        """Return the prompt of a chat up to the beginning of the answer."""
        body = {"model": pair, "messages": list(messages)}
        return str(self._json("POST", "/apply-template", body)["prompt"])

    def answer_prompt(self, pair: str, prompt: str, n_predict: int) -> dict[str, Any]:
        """Return a greedy answer to a rendered prompt, of which nothing is kept."""
        greedy = {"n_predict": n_predict, "temperature": 0, "localspec": {"private": True}}
        body = {"model": pair, "prompt": self._tokenize_prompt(pair, prompt), **greedy}
        return self._json("POST", "/completion", body)

    def _tokenize_prompt(self, pair: str, prompt: str) -> list[int]:
        """Return the tokens of a rendered prompt, with one BOS token if its template writes another."""
        body = {"model": pair, "content": prompt}
        tokens: list[int] = self._json("POST", "/tokenize", body | {"add_special": True})["tokens"]
        written: list[int] = self._json("POST", "/tokenize", body)["tokens"]
        return written if tokens[:2] == written[:1] * 2 else tokens


def collect_history(client: TuneClient, pair: str) -> list[TrainingText]:
    """Return the answers of a pair in the history, the oldest first."""
    texts = []
    for entry in client.conversations(MAX_CONVERSATIONS):
        messages = client.conversation(entry["id"])["messages"]
        for index, message in enumerate(messages):
            if is_answer_of(message, pair):
                *plain, _ = _plain(messages[: index + 1])
                with contextlib.suppress(TemplateFailed):  # what cannot be rendered is left out
                    text = TrainingText(
                        message.get("kind") or "ask",
                        message["content"],
                        message["created"],
                        prompt=client.render_chat(pair, plain),
                        conversation=entry["id"],
                        messages=tuple(plain),
                    )
                    texts.append(text)
    return sorted(texts, key=lambda text: text.created)


def is_answer_of(message: dict[str, Any], pair: str) -> bool:
    """Return whether a stored message is a text that the pair wrote to its end.

    Answers with thoughts or calls are left out: how the model wrote them is not stored.
    """
    return (
        message["role"] == "assistant"
        and message.get("model") == pair
        and message.get("finish") in _ENDED_WELL
        and bool(message["content"])
        and not message.get("reasoning_content")
        and not message.get("tool_calls")
    )


def _plain(messages: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def check_kept(client: TuneClient, texts: Iterable[TrainingText]) -> None:
    """Check that the history still holds answers, and the questions before them, as they were collected.

    Raises:
        NotFound: something of them was removed.
    """
    by_conversation: dict[str, list[TrainingText]] = {}
    for text in texts:
        if text.conversation:
            by_conversation.setdefault(text.conversation, []).append(text)
    for conversation, answers in by_conversation.items():
        messages = _plain(client.conversation(conversation)["messages"])
        for text in answers:
            learned = [*text.messages, {"role": "assistant", "content": text.answer}]
            if messages[: len(learned)] != learned:
                raise NotFound(f"A question of conversation {conversation} was removed.")


class Place(NamedTuple):
    """A place in a file, and the text before and after it."""

    file: str
    before: str
    after: str


def find_places(paths: Iterable[Path]) -> list[Place]:
    """Return places in files, file after file, in an order that is random and always the same.

    A folder stands for the files in it whose name ends like a program's or a text's. A file and links to it
    are one file.
    """
    named = (_find_files(path) if path.is_dir() else [path] for path in paths)
    files = list(dict.fromkeys(file.resolve() for part in named for file in part))
    generator = random.Random(0)
    generator.shuffle(files)
    return [place for file in files for place in _places_of(file, generator)]


def _find_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder, without hidden ones and those that other people have written."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _FOREIGN_FOLDERS
            and not Path(root, name, "pyvenv.cfg").exists()
        )
        yield from (Path(root, name) for name in sorted(names) if name.find(".") > 0)


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a text file, none if it is something else or large."""
    try:
        if not file.is_file() or file.stat().st_size > _MAX_FILE_BYTES:
            return []
        return file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return []


def _places_of(file: Path, generator: random.Random) -> list[Place]:
    lines, places = _read_lines(file), []
    for _ in range(PLACES_PER_FILE if len(lines) >= _MIN_LINES else 0):
        number = generator.randrange(len(lines))
        line = lines[number].rstrip("\n")
        indent = len(line) - len(line.lstrip())
        if line.strip():
            cut = generator.randrange(indent, len(line))
            before = "".join(lines[max(number - _LINES_BEFORE, 0) : number]) + line[:cut]
            after = "".join(lines[number + 1 : number + 1 + _LINES_AFTER])
            places.append(Place(str(file), before or "\n", after))
    return places


def read_files(files: Iterable[str]) -> list[TrainingText]:
    """Return the text of files in parts, each with what stands before and after it."""
    texts = []
    for file in files:
        lines = _read_lines(Path(file))
        for start in range(0, len(lines), _PART_LINES):
            end = start + _PART_LINES
            before = "".join(lines[max(start - _LINES_BEFORE, 0) : start]) or "\n"
            after = "".join(lines[end : end + _LINES_AFTER])
            part = "".join(lines[start:end])
            texts.append(
                TrainingText(FILE_KIND, part, prefix=before, suffix=after, file=file, is_own=False)
            )
    return texts


def complete_places(
    client: TuneClient, pair: str, places: Sequence[Place], report: Callable[[int], bool]
) -> list[TrainingText]:
    """Return what the target writes at places in files, until `report` returns False.

    report: called with the number of places.
    """
    texts = []
    for number, (file, prefix, suffix) in enumerate(places, 1):
        text = client.infill(infill_request(pair, prefix, suffix))["content"]
        if text:
            texts.append(TrainingText(FILE_KIND, text, prefix=prefix, suffix=suffix, file=file))
        if not report(number):
            break
    return texts


def infill_request(pair: str, prefix: str, suffix: str) -> dict[str, Any]:
    """Return the request for a greedy completion of a place in a file."""
    place = {"model": pair, "input_prefix": prefix, "input_suffix": suffix}
    return {**place, "n_predict": COMPLETION_TOKENS, "temperature": 0}


ASK_MORE = "Ask more, in new conversations, or let the target complete files: localspec tune --files FOLDER"


def split_by_time(
    texts: Sequence[TrainingText], advice: str = ASK_MORE
) -> tuple[list[TrainingText], list[TrainingText]]:
    """Return the texts to learn from and the newest ones, by which the draft is judged, of each kind.

    A kind of which there is too little to judge by is only learned from. No text judges whose conversation or
    file is learned from, in whatever kind of work, since later texts of one repeat the earlier ones.

    advice: what the error says to do.

    Raises:
        LocalspecError: there are too few.
    """
    learned: list[TrainingText] = []
    newest: list[TrainingText] = []
    for kind in sorted({text.kind for text in texts}):
        of_kind = [text for text in texts if text.kind == kind]
        n_held_out = math.ceil(len(of_kind) * HELD_OUT_SHARE)
        cut = len(of_kind) - (n_held_out if n_held_out >= MIN_HELD_OUT_TEXTS else 0)
        learned += of_kind[:cut]
        newest += of_kind[cut:]
    held_out = select_unlearned(newest, {text.source for text in learned})
    if len(learned) < MIN_TEXTS or not held_out:
        raise LocalspecError(
            f"There are too few answers to learn from and to judge by: {len(texts)}. About "
            f"{2 * MIN_TEXTS} are needed, and the newest quarter of each kind of work only judges, for which "
            f"it must be of other conversations or files than the rest. {advice}"
        )
    return learned, held_out


def select_unlearned(texts: Sequence[TrainingText], learned: set[str]) -> list[TrainingText]:
    """Return those of texts whose source is not learned from, without kinds that are too rare to judge by."""
    unlearned = [text for text in texts if not text.source or text.source not in learned]
    counts = Counter(text.kind for text in unlearned)
    return [text for text in unlearned if counts[text.kind] >= MIN_HELD_OUT_TEXTS]
