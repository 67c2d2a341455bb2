"""Tests of turning documentation into exchanges."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path

import pytest

import builtin_pair
from builtin_pair import questions as q
from builtin_pair.docs import Entry, entries_from_docstrings, first_sentences, parse_html
from builtin_pair.outside import HONEST, TEMPLATES, outside_question
from builtin_pair.popular import MOST_USED
from builtin_pair.tasks import TASKS
from localspec.cli.app import COMMANDS

EVALUATION = Path(builtin_pair.__file__).with_name("evaluation")
COPYTREE = Entry(
    "shutil.copytree",
    "function",
    "(src, dst)",
    "shutil",
    ("Recursively copy an entire directory tree and return the destination directory.",),
    (),
)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Copy a tree and return its root.", "`f` copies a tree and returns its root."),
        ("Recursively copy a tree", "`f` recursively copies a tree."),
        ("A dict subclass.", "`f` is a dict subclass."),
        ("Whether it exists:", "`f` tells whether it exists."),
        ("Raised when a key is missing.", "`f` is raised when a key is missing."),
        ("Return x. Raise ValueError if absent.", "`f` returns x. It raises ValueError if absent."),
        ("See above.", "`f`: See above."),
    ],
)
def test_imperatives_become_statements(sentence: str, expected: str) -> None:
    assert q.statement("`f`", sentence) == expected


def test_the_same_seed_draws_the_same_exchanges() -> None:
    source = q.Questions([COPYTREE])
    draws, other_draws = ([source.draw(random.Random(5)) for _ in range(3)] for _ in range(2))
    assert draws == other_draws


def test_a_what_question_names_the_object_in_its_answer() -> None:
    source = q.Questions([COPYTREE])
    rng = random.Random(1)
    for _ in range(50):
        assert "copytree" in source.about(COPYTREE, rng).answer


def test_a_task_in_peoples_words_is_answered_with_the_object() -> None:
    drawn = q.Questions([COPYTREE])
    exchanges = [drawn.about(COPYTREE, random.Random(n)) for n in range(300)]
    matching = [e for e in exchanges if "duplicate a whole folder" in e.question]
    assert matching
    assert {e.answer.split(":")[0] for e in matching} == {"Use `shutil.copytree()`"}
    assert all(
        e.answer.startswith("Use `shutil.copytree()`: it recursively copies") for e in matching
    )


def test_tasks_are_of_the_most_used_objects_and_one_object_each() -> None:
    assert set(TASKS) <= set(MOST_USED)
    phrases = [phrase for phrases in TASKS.values() for phrase in phrases]
    assert len(phrases) == len(set(phrases))
    assert all(phrase == phrase.strip() and " " in phrase for phrase in phrases)


def test_every_command_of_the_program_is_asked_about() -> None:
    source = q.Questions([COPYTREE])
    rng = random.Random(4)
    answers = {source.draw(rng).answer for _ in range(12_000)}
    assert {f"`localspec {name}`: {summary}" for name, (_, summary) in COMMANDS.items()} <= answers


def test_invented_functions_are_answered_honestly() -> None:
    source = q.Questions([COPYTREE])
    rng = random.Random(2)
    answers = {source.draw(rng).answer for _ in range(300)}
    assert HONEST in answers


def skeleton(question: str, name: str) -> str:
    """Return a question without the name it is about, so that phrasings can be compared."""
    return re.sub(r"\W+", " ", question.replace(name, "{}").lower()).strip()


def test_evaluation_phrasings_are_not_among_the_templates() -> None:
    templates = (q.WHAT, q.PARAMETERS, q.RETURNS, q.RAISES, q.EXAMPLE, q.WHICH, q.WHICH_THIRD)
    trained = {skeleton(phrase, "{}") for group in templates for phrase in group}
    for item in tomllib.loads((EVALUATION / "questions.toml").read_text("utf-8"))["question"]:
        assert skeleton(item["ask"], item["about"]) not in trained, item["ask"]
        tasks = {
            skeleton(form.format(t), "{}") for form in q.WHICH for t in TASKS.get(item["about"], ())
        }
        assert skeleton(item["ask"], "{}") not in tasks, item["ask"]


def test_evaluation_asks_no_outside_question_that_is_trained() -> None:
    questions = tomllib.loads((EVALUATION / "outside.toml").read_text("utf-8"))["questions"]
    assert not set(questions) & set(TEMPLATES)
    rng = random.Random(3)
    drawn = {outside_question(rng, [COPYTREE], frozenset()) for _ in range(20_000)}
    assert not drawn & set(questions)


def test_whole_sentences_are_taken_up_to_a_limit() -> None:
    text = "Return e.g. this. And that too."
    assert first_sentences(text, 18) == "Return e.g. this."
    assert first_sentences(text, 100) == text


def test_html_text_has_no_permalinks() -> None:
    page = parse_html('<p>Join <em>path</em>.<a class="headerlink" href="#x">¶</a><br></p>')
    assert page.text() == "Join path."


def test_docstrings_stand_in_for_missing_documentation() -> None:
    names = {entry.name: entry for entry in entries_from_docstrings(("shutil", "no_such_module"))}
    assert "directory tree" in names["shutil.copytree"].paragraphs[0]
