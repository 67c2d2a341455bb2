"""The next turn of a chat is read while nobody waits, and costs no other request anything."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localspec.chat.families.hermes import HERMES
from localspec.engine.cache.slot import TAIL_STATES
from localspec.engine.engine import Engine
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.read_ahead import find_form, read_message, write_message
from localspec.errors import LocalspecError
from localspec.protocol.calls import ToolSet
from localspec.protocol.frames import (
    AnswerForm,
    ChatPrompt,
    Constraint,
    Done,
    Failed,
    Generate,
    Message,
    PairFiles,
    PromptCost,
    SentBack,
    ThinkingLimit,
)
from tests.engine.drafters.test_layers import contextual_files as with_layers
from tests.support import running as support
from tests.support.heads import contextual_heads
from tests.support.recurrent import lfm2_pair
from tests.support.rescoring import assert_alike
from tests.support.running import GREEDY, Answer, Running, drafting, running
from tests.support.templates import shared_renderer

MARKERS = ("<think>", "</think>")
TURNS = """{% for m in messages -%}
[{{ m.role }}]{% if KEEPS %}{{ m.reasoning_content }}{% endif %}{{ m.content }}[end]
{% endfor %}"""
OPENING = "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
DROPS = TURNS.replace("KEEPS", "false") + OPENING
KEEPS = TURNS.replace("KEEPS", "m.reasoning_content") + OPENING
# An answer of 80 letters behind thoughts of 12 tokens.
ANSWER = Constraint("grammar", "root ::= [a-z]{80}")
THINKING = ThinkingLimit(12, [MARKERS])


class Chats(Running):
    """An engine that reads ahead, with chats by a template. `sent` are the ids of all frames."""

    def use(self, template: str) -> None:
        self.preparer = Preparer(self.pair, shared_renderer(template, "", ""))
        self.engine = Engine(self.pair, self.receive, prepare=self.prepare)
        self.sent: list[int] = []

    def receive(self, frame: Any) -> None:
        self.sent.append(frame.id)
        self._receive(frame)

    def prepare(self, request: Generate) -> None:
        with contextlib.suppress(LocalspecError):  # which is sent to nobody
            self.engine.submit(self.preparer.prepare(request))

    def begin(self, messages: list[Message], **options: Any) -> int:
        self._next += 1
        request = Generate(
            self._next,
            ChatPrompt(messages),
            GREEDY,
            **{
                "constraint": ANSWER,
                "thinking": THINKING,
                "thoughts": [MARKERS],
                "read_ahead": True,
                **options,
            },
        )
        self.submit(self.preparer.prepare(request))
        return self._next

    def chat(self, messages: list[Message], **options: Any) -> Answer:
        number = self.begin(messages, **options)
        self.finish()
        return self.answers[number]

    def rest(self, rounds: int = 1000) -> None:
        """Let the engine use its idle time to read for so many rounds."""
        for _ in range(rounds):
            if self.engine.active:
                self.engine.step()
            elif (ahead := self.engine._ahead) is not None and ahead.is_due:
                self.engine.use_idle_time()


KINDS = ("full attention", "hybrid", "sliding window")


@pytest.fixture(scope="module")
def loaded(contextual_files: PairFiles, models: Path) -> Iterator[Callable[[str], Chats]]:
    """Return an engine with each kind of cache, which is loaded once."""
    files = {
        "full attention": lambda: contextual_files,
        "hybrid": lambda: lfm2_pair(models / "lfm2"),
        "sliding window": lambda: contextual_heads(models, "gemma4"),
        "sidecar": lambda: with_layers(models / "layers", "eagle3"),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(support, "Running", Chats)

        @functools.cache
        def load(kind: str) -> Chats:
            engine = running(files[kind](), n_ctx=2048, prefix_bytes=1 << 24)
            return cast(Chats, stack.enter_context(engine))

        yield load


@pytest.fixture(params=KINDS)
def chats(loaded: Callable[[str], Chats], request: pytest.FixtureRequest) -> Chats:
    engine = loaded(request.param)
    engine.forget()
    engine.pair.forget(None)
    engine.answers.clear()
    engine.use(DROPS)
    return engine


def spread(name: str, cases: Sequence[Any]) -> pytest.MarkDecorator:
    """Give each kind of cache some of the cases, which are the same for all of them."""
    pairs = [(KINDS[at % len(KINDS)], case) for at, case in enumerate(cases)]
    return pytest.mark.parametrize(("chats", name), pairs, indirect=["chats"])


def question(text: str) -> Message:
    return Message("user", text)


def follow(messages: list[Message], answer: Answer, text: str) -> list[Message]:
    """Return a chat with an answer, as a client sends it that keeps no thoughts, and the next question."""
    return [*messages, Message("assistant", answer.text), question(text)]


def unread(answer: Answer) -> int:
    return answer.done.timings.prompt_n


def ahead(answer: Answer) -> int:
    return answer.done.timings.cache_ahead_n or 0


def slot_texts(engine: Running) -> list[list[int]]:
    return [list(slot.cached) for slot in engine.pair.shared.slots]


FIRST = [question("first question")]


def test_a_follow_up_reads_only_what_is_new(chats: Chats) -> None:
    plain = chats.chat(follow(FIRST, chats.chat(FIRST), "and then"))
    assert unread(plain) > 100
    assert not ahead(plain)
    chats.forget()
    first = chats.chat(FIRST)
    assert len(first.text) == 80
    chats.rest()
    second = chats.chat(follow(FIRST, first, "and then"))
    new = len(
        chats.pair.vocab.tokenize(
            "and then[end]\n[assistant]<think>\n", add_special=False, parse_special=True
        )
    )
    assert unread(second) <= new + 1
    assert ahead(second) > 80
    prompt = second.all_tokens[: second.done.prompt_tokens]
    assert_alike(chats.pair.files.target, prompt, second.tokens[:12], plain.tokens[:12])
    assert min(chats.sent) > 0


@pytest.mark.parametrize("chats", ["sidecar"], indirect=True)
def test_a_sidecar_reads_the_next_turn_too(chats: Chats) -> None:
    first = chats.chat(FIRST, speculative=drafting(3, "eagle3"))
    chats.rest()
    (slot,) = [slot for slot in chats.pair.shared.slots if slot.ahead]
    assert slot.n_past_draft > slot.n_past - TAIL_STATES > slot.ahead.start
    second = chats.chat(follow(FIRST, first, "and then"), speculative=drafting(3, "eagle3"))
    assert second.done.speculation.drafted


def test_thoughts_before_an_earlier_call_count_too(chats: Chats) -> None:
    """The last answer of a turn has none, but they go from the turn's beginning with the next question."""
    kept = "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}"
    chats.use(DROPS.replace("{% if false %}{{ m.reasoning_content }}{% endif %}", kept))
    step = Message("assistant", "looked", {"reasoning_content": "so many thoughts about it " * 4})
    turn = [*FIRST, step, question("it says this")]
    first = chats.chat(turn, thinking=None, thoughts=[])
    chats.rest()
    assert unread(chats.chat(follow(turn, first, "and then"))) < 60


def test_a_next_turn_that_depends_on_the_client_is_not_read(chats: Chats) -> None:
    chats.use(KEEPS)
    first = chats.chat(FIRST)
    chats.rest()
    assert not ahead(chats.chat(follow(FIRST, first, "and then")))


def message_of(answer: Answer) -> Message:
    message = read_message([piece for delta in answer.deltas for piece in delta.pieces])
    assert message is not None
    return message


def sent_as(message: Message, form: AnswerForm) -> list[Message]:
    return [*FIRST, write_message(message, form), question("and then")]


@pytest.mark.parametrize("was_right", [True, False])
@spread("form", ["whole", "bare", "bare, trimmed"])
def test_the_form_that_a_client_has_shown_is_read(
    chats: Chats, form: AnswerForm, was_right: bool
) -> None:
    """The template keeps what it gets, so the next turn depends on the client."""
    chats.use(KEEPS)
    first = chats.chat(FIRST, form=form)
    message = message_of(first)
    chats.rest()
    sent: AnswerForm = form if was_right else "whole" if form.startswith("bare") else "bare"
    second = chats.chat(sent_as(message, sent), form=form)
    back = second.done.sent_back
    assert back is not None
    assert (back.form, back.right) == (sent if sent != form else form, was_right)
    assert (ahead(second) > 80) == was_right
    assert (unread(second) < 60) == was_right
    assert (back.saved_ms > back.wasted_ms) == was_right


def test_what_comes_back_changed_is_no_guess(chats: Chats) -> None:
    first = chats.chat(FIRST, form="other")
    chats.rest()
    second = chats.chat([*FIRST, Message("assistant", "quite another"), question("and then")])
    assert not ahead(second)
    assert second.done.sent_back == SentBack("other")
    assert chats.chat([question("something else")]).done.sent_back is None
    assert first.text


def test_how_a_forgotten_answer_comes_back_is_not_known(chats: Chats) -> None:
    first = chats.chat(FIRST, conversation="mine")
    chats.engine.forget("mine")
    second = chats.chat(follow(FIRST, first, "and then"), conversation="mine")
    assert second.done.sent_back is None


CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ c.function.name }} with {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
)
CALL = Constraint(
    "grammar",
    r"""root ::= "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": \"" at
at ::= [a-z]{60} "\"}}\n</tool_call>" """,
)


def test_a_call_is_read_up_to_its_result(chats: Chats) -> None:
    """The template writes calls in another way than the model."""
    chats.use(DROPS.replace("{{ m.content }}", "{{ m.content or '' }}" + CALLS))
    tools = ToolSet(HERMES, {"look": {"type": "object"}})
    options: dict[str, Any] = {"tools": tools, "constraint": CALL, "shown": ["<tool_call>"]}
    first = chats.chat(FIRST, **options)
    message = message_of(first)
    (call,) = message.extra["tool_calls"]
    assert len(call["function"]["arguments"]["at"]) == 60
    chats.rest()
    result = Message("tool", "it says this", {"tool_call_id": call["id"]})
    second = chats.chat(
        [*FIRST, Message("assistant", None, {"tool_calls": [call]}), result], **options
    )
    assert second.done.sent_back is not None
    assert second.done.sent_back.right
    assert ahead(second) > 60
    assert unread(second) < 60


TEXTS = st.text(alphabet="ab \n", max_size=6)
FORMS = [form for form in get_args(AnswerForm) if form not in ("", "other")]


@given(
    content=TEXTS,
    thoughts=TEXTS.filter(str.strip),
    begun=st.booleans(),
    form=st.sampled_from(FORMS),
    known=st.sampled_from(get_args(AnswerForm)),
)
@example(content=" ", thoughts="a", begun=True, form="whole", known="whole, trimmed")
def test_a_form_is_found_by_what_it_makes(
    content: str, thoughts: str, begun: bool, form: AnswerForm, known: AnswerForm
) -> None:
    """Another form may be found that makes the same, and the known one is kept if it does."""
    content = f"<think>\n{thoughts}</think>{content}" if begun else content
    answer = Message("assistant", content, {} if begun else {"reasoning_content": thoughts})
    sent = write_message(answer, form)
    found = find_form(answer, sent, known)
    assert found != "other"
    if found:
        assert write_message(answer, found) == sent
        assert known not in FORMS or write_message(answer, known) != sent or found == known
    assert find_form(answer, Message("assistant", f"{sent.content}!")) == "other"


@spread(
    "options",
    [
        {"read_ahead": False},
        {"max_tokens": 8},  # nothing but thoughts
        {"thinking": None, "thoughts": []},  # no thoughts: the cache has the answer
    ],
)
def test_other_answers_have_no_next_turn(chats: Chats, options: dict[str, Any]) -> None:
    chats.chat(FIRST, **options)
    texts = slot_texts(chats)
    chats.rest()
    assert slot_texts(chats) == texts


def test_a_prompt_is_not_kept_behind_its_request(chats: Chats) -> None:
    word = "oysters" * 9
    chats.chat([question(word + "x" * 4000)], private=True, read_ahead=False)
    assert all(word not in str(value) for value in vars(chats.preparer).values())


def test_nothing_is_read_into_the_slots_of_others(chats: Chats) -> None:
    """All slots hold a text, and each stays but that of the answer."""
    for number in range(chats.pair.models.parallel + 1):
        chats.ask([300 + number] * 60, 4)
    first = chats.chat(FIRST)
    texts = slot_texts(chats)
    chats.rest()
    assert sum(a != b for a, b in zip(slot_texts(chats), texts, strict=True)) == 1
    assert ahead(chats.chat(follow(FIRST, first, "and then"))) > 80


def test_a_full_context_is_not_read_ahead(chats: Chats) -> None:
    chats.ask([300] * (chats.pair.n_ctx - 220), 4)
    first = chats.chat(FIRST)
    texts = slot_texts(chats)
    chats.rest()
    assert slot_texts(chats) == texts
    assert not ahead(chats.chat(follow(FIRST, first, "and then")))


@spread("rounds", [0, 2, 5, 11])
def test_a_request_that_comes_meanwhile_is_served_at_once(
    chats: Chats, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of rounds; the next turn is read on behind it."""
    reading = chats.pair.shared.reading
    monkeypatch.setattr(reading, "expected", PromptCost(1e-2))  # so that passes are short
    alone = chats.ask([300, 17, 402], 12).tokens
    chats.forget()
    first = chats.chat(FIRST)
    chats.rest(rounds)
    other = chats.start([300, 17, 402], 12)
    chats.engine.step()
    assert chats.sequence(other).generated
    chats.finish()
    assert_alike(chats.pair.files.target, [300, 17, 402], chats.answers[other].tokens, alone)
    chats.rest()
    second = chats.chat(follow(FIRST, first, "and then"))
    assert ahead(second) + unread(second) > 100
    assert unread(second) < 60


def hold_session(chats: Chats, seed: int, reads_ahead: bool) -> list[int]:
    """Hold several chats beside each other, and return how many tokens each question had to read.

    What the model answers is forced, so that a session is the same with and without reading ahead.
    """
    rng, chats_so_far = random.Random(seed), [[question(f"chat {n}")] for n in range(5)]
    chats.forget()
    read: list[int] = []
    for turn in range(16):
        messages = rng.choice(chats_so_far)
        text = "".join(rng.choices("abcdef", k=rng.randrange(20, 60)))
        answer = chats.chat(
            messages,
            constraint=Constraint("grammar", f'root ::= "{text}"'),
            read_ahead=reads_ahead,
        )
        assert answer.text == text
        read.append(unread(answer))
        messages += [Message("assistant", text), question(f"and {turn}")]
        chats.rest(rng.choice([0, 3, 100]))
    return read


def test_a_session_reads_no_more_than_without(chats: Chats) -> None:
    """Nothing makes room for a next turn that a later question needs."""
    plain, ahead = (hold_session(chats, 0, reads) for reads in (False, True))
    assert sum(ahead) <= sum(plain)
    assert all(mine <= own + 1 for mine, own in zip(ahead, plain, strict=True))


def test_a_follow_up_before_the_idle_time_is_over_is_right(chats: Chats) -> None:
    first = chats.chat(FIRST)
    messages = follow(FIRST, first, "and then")
    second = chats.chat(messages)  # with the first one's next turn still to be read
    chats.rest()
    third = chats.chat(follow(messages, second, "and more"))
    assert unread(third) < 60
    assert min(chats.sent) > 0


def guess(chats: Chats, messages: list[Message], **options: Any) -> int:
    """Begin to read a chat whose last message is still being typed."""
    prompt = ChatPrompt(messages, continued="content", answer_prefix=messages[-1].content or "")
    number = 1000 + chats._next
    chats._next += 1
    request = Generate(
        number, prompt, GREEDY, max_tokens=0, priority="ahead", read_ahead=True, **options
    )
    chats.submit(chats.preparer.prepare(request))
    return number


BEGUN = "and then there is something long that is still being typed " * 3


def test_a_question_that_is_being_typed_is_read(chats: Chats) -> None:
    first = chats.chat(FIRST)
    chats.rest()
    number = guess(chats, follow(FIRST, first, BEGUN))
    chats.finish()
    assert not chats.answers[number].text
    assert unread(chats.answers[number]) > 100
    second = chats.chat(follow(FIRST, first, f"{BEGUN}, and it ends"))
    assert unread(second) < 60
    assert ahead(second) > 100


@spread("rounds", [0, 1, 3])
def test_any_request_ends_the_reading_of_what_is_typed(
    chats: Chats, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = chats.pair.shared.reading
    monkeypatch.setattr(reading, "expected", PromptCost(1e-2))  # so that passes are short
    first = chats.chat(FIRST)
    number = guess(chats, follow(FIRST, first, BEGUN))
    for _ in range(rounds):
        chats.engine.step()
    other = chats.start([300, 17, 402], 12)
    assert isinstance(chats.answers[number].ending, Done | Failed)
    chats.engine.step()
    assert chats.sequence(other).generated
    chats.finish()


def test_what_is_typed_takes_no_room_and_no_time_of_others(chats: Chats) -> None:
    for number in range(chats.pair.models.parallel):
        chats.ask([300 + number] * 60, 4)
    texts = slot_texts(chats)
    assert chats.answers[guess(chats, [question(BEGUN)])].failed.code == "cancelled"
    assert slot_texts(chats) == texts
    chats.start([300, 17, 402], 12)
    chats.engine.step()
    assert chats.answers[guess(chats, [question(BEGUN)])].failed.code == "cancelled"
    chats.finish()


def test_what_was_typed_is_forgotten_with_its_chat(chats: Chats) -> None:
    first = chats.chat(FIRST, conversation="mine")
    guess(chats, follow(FIRST, first, BEGUN), conversation="mine")
    chats.engine.step()
    chats.engine.forget("mine")
    chats.finish()
    assert not any(slot.cached for slot in chats.pair.shared.slots)


@pytest.mark.parametrize("conversation", [None, "mine"])
@spread("rounds", [0, 2, 1000])
def test_nothing_of_a_forgotten_chat_is_read(
    chats: Chats, rounds: int, conversation: str | None
) -> None:
    chats.chat(FIRST, conversation="mine")
    chats.rest(rounds)
    chats.engine.forget(conversation)
    chats.rest()
    assert not any(slot.cached for slot in chats.pair.shared.slots)
    assert not len(chats.pair.memory)
    ahead_state = chats.engine._ahead
    assert ahead_state is not None
    assert (ahead_state._answers, ahead_state._turns, ahead_state.running) == ({}, {}, None)
