"""What a model answers to the tasks, as tokens: recorded once, and replayed without the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measuring.driven import Driven
from benchmarks.measuring.runs import BenchError
from benchmarks.texts.tasks import Kind, Task
from localspec.engine.pair.load import load_pair
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sequence import TokenizedRequest
from localspec.protocol.frames import (
    ChatPrompt,
    EngineSettings,
    Failed,
    Generate,
    Message,
    PairFiles,
    Sampling,
    SpeculationSettings,
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One task's tokens: what the model read, and what it wrote greedily."""

    name: str
    kind: Kind
    prompt: Sequence[int]
    answer: Sequence[int]

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self))
        _place(folder, self.name).write_text(text, encoding="utf-8")


def _place(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.json"


def saved(folder: Path) -> list[Answered]:
    """All that were recorded there, by name."""
    paths = sorted(folder.glob("*.json"))
    return [Answered(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


class Asker(Driven):
    """A model, alone or with its draft, which is asked in this process."""

    def __init__(self, target: Path, settings: EngineSettings, draft: Path | None = None) -> None:
        """Load it. Raises LoadFailed."""
        files = PairFiles("tasks", str(target), str(draft) if draft else None)
        super().__init__(load_pair(files, settings, _silent))
        vocab = self.pair.vocab
        self._renderer = TemplateRenderer(
            self.pair.chat_template, vocab.text(vocab.bos), vocab.text(vocab.eos)
        )
        self._preparer = Preparer(self.pair, self._renderer)
        self._asked = 0

    def request(
        self, task: Task, tokens: int, speculative: SpeculationSettings, private: bool = False
    ) -> TokenizedRequest:
        """Return a task, greedily. private: nothing of it is remembered."""
        self._asked += 1
        return self._preparer.prepare(
            Generate(
                self._asked,
                ChatPrompt([Message("user", task.question)]),
                Sampling(temperature=0.0),
                tokens,
                speculative=speculative,
                exact=False,
                private=private,
            )
        )

    def answer(self, task: Task, tokens: int) -> Answered:
        """Up to so many tokens of the answer. Raises BenchError."""
        request = self.request(task, tokens, SpeculationSettings())
        answer = self.submit(request)
        self.finish()
        if isinstance(answer.ending, Failed):
            raise BenchError(answer.ending.message)
        return Answered(task.name, task.kind, request.tokens, answer.tokens)

    def close(self) -> None:
        self._renderer.close()
        super().close()


def _silent(_stage: str, _fraction: float) -> None:
    pass


def record(
    target: Path,
    tasks: Sequence[Task],
    tokens: int,
    folder: Path,
    settings: EngineSettings,
    say: Callable[[str], None],
) -> Iterator[Answered]:
    """Those that are there, and those that are not yet, which are asked for.

    Raises:
        LoadFailed: the model does not load; BenchError: a generation failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = {answered.name: answered for answered in saved(folder)}
    asker: Asker | None = None
    try:
        for task in tasks:
            if task.name not in there:
                asker = asker or Asker(target, settings)
                say(f"asking for {task.name}")
                there[task.name] = asker.answer(task, tokens)
                there[task.name].save(folder)
            yield there[task.name]
    finally:
        if asker is not None:
            asker.close()
