"""Of what agents send, the target reads only what is new or stands behind a change.

The sessions are recorded ones (`benchmarks.agents`), and generated ones. Reading is thought to be slow beside
copies, as it is with models of any size.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET

from benchmarks.agents import sessions
from benchmarks.agents.ledger import Ledger, ratio
from benchmarks.agents.prompts import render, word_tokens
from benchmarks.agents.sessions import Event, Request
from localspec.engine.cache import sessions as saved_states
from localspec.engine.prompt.template import TemplateRenderer
from localspec.protocol.frames import ANONYMOUS_CLIENTS, PairFiles
from tests.support import architectures, templates
from tests.support.architectures import N_VOCAB, Shape
from tests.support.running import Running, running

MIB = 1 << 20
MAX_RATIO = 1.05  # tokens that are read for each that is new or stands behind a change
WORDS, START, END = N_VOCAB - 12, N_VOCAB - 3, N_VOCAB - 1
KINDS = {"dense": "llama", "window": "gemma3", "hybrid": "lfm2", "recurrent": "mamba2"}
# A cache that can be cut anywhere shows in a short session what it shows in a long one. The places to which a
# state can go back are a number of tokens apart, whatever the length of the texts.
ONE_IN = {"dense": 4, "window": 2, "hybrid": 1, "recurrent": 1}
Tokenize = Callable[[Request, int], list[int]]


@pytest.fixture(autouse=True, scope="module")
def quick_profile() -> Iterator[None]:
    """Shorten the measurement of pass costs, which do not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localspec.engine.pair.profile.BUDGET_S", 0.01)
        yield


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PairFiles]:
    """Write a narrow target of a kind, for long texts."""
    folder = tmp_path_factory.mktemp("agents")

    def write(kind: str) -> PairFiles:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(architectures, "N_CTX", 1 << 15)
            heads = 2 if kind == "recurrent" else 1
            patch.setattr(architectures, "shape", lambda _: Shape(32 * heads, heads, 48 * heads))
            return PairFiles(kind, str(architectures.write(KINDS[kind], folder)), None)

    return write


@pytest.fixture(scope="module")
def tokenize() -> Iterator[Tokenize]:
    """Return the tokens of a request, one in so many of them. Each request is rendered once."""
    renderer = TemplateRenderer(templates.template("chatml"), "", "")
    known: dict[tuple[bytes, int], list[int]] = {}

    def words(request: Request, one_in: int) -> list[int]:
        key = msgspec.json.encode(request.body), one_in
        if key not in known:
            text = render(request, renderer)
            known[key] = word_tokens(text, START, END, WORDS, one_in=one_in)
        return known[key]

    yield words
    renderer.close()


@contextmanager
def opened(files: PairFiles, states: Path, n_ctx: int = 1 << 15) -> Iterator[Running]:
    """Open an engine that keeps texts in slots, in memory and on disk."""
    settings = {"prefix_bytes": 256 * MIB, "states_dir": str(states), "states_bytes": 1 << 30}
    with running(files, parallel=4, n_ctx=n_ctx, **settings) as engine:
        engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
        yield engine


class Replay:
    """Requests for one pair, whose prompts are made of words."""

    def __init__(self, tokenize: Tokenize, one_in: int) -> None:
        self.ledger = Ledger()
        self._tokenize, self._one_in = tokenize, one_in

    def send(self, engine: Running, requests: Sequence[Request]) -> None:
        for request in requests:
            tokens = self._tokenize(request, self._one_in)
            ask(engine, self.ledger, request.agent, request.event, tokens)

    def check(self) -> None:
        """Assert the bound for all requests together, and for every event."""
        assert ratio(self.ledger.rows) <= MAX_RATIO, self.ledger.totals()
        for event, (new, read) in self.ledger.totals().items():
            assert read <= MAX_RATIO * new, (event, new, read)


def ask(engine: Running, ledger: Ledger, agent: str, event: Event, tokens: list[int]) -> list[int]:
    """Send one request and book it; return its prompt and answer."""
    number = engine.start(tokens, 3, conversation=ANONYMOUS_CLIENTS)
    engine.finish()
    answer = engine.answers[number]
    timings = answer.done.timings
    row = ledger.add(agent, event, tokens, answer.tokens, timings.prompt_n)
    assert timings.cache_n + timings.prompt_n == len(tokens)
    assert isinstance(timings.cache_known_n, int)
    assert timings.cache_n <= timings.cache_known_n
    if row.read > row.new + 2 * 64:  # the answer says so, and why
        assert timings.cache_loss in ("checkpoint", "evicted")
    return answer.all_tokens


SCENARIOS: dict[str, Callable[[], list[list[Request]]]] = {
    # A helper that comes back once shows what is learnt of it; one that comes back every minute is below.
    "each agent": lambda: [
        [request for request in session if request.event is not Event.HELPER]
        for session in sessions.recorded().values()
    ],
    "two in turns": lambda: [sessions.in_turns([sessions.recorded()[n] for n in ("codex", "pi")])],
    "helpers return": lambda: [sessions.returning_helpers("opencode", 8)],
    "first message edited": lambda: [sessions.edited_first_message()],
    "reminder moves": lambda: [sessions.moving_reminder()],
}
SHORT = {"first message edited", "reminder moves"}  # so short that all words are needed


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_of_an_agent_is_read_twice(
    kind: str,
    scenario: str,
    pair_of: Callable[[str], PairFiles],
    tokenize: Tokenize,
    tmp_path: Path,
) -> None:
    replay = Replay(tokenize, 1 if scenario in SHORT else ONE_IN[kind])
    for number, requests in enumerate(SCENARIOS[scenario]()):
        with opened(pair_of(kind), tmp_path / str(number)) as engine:
            replay.send(engine, requests)
    replay.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_read_twice_after_a_restart(
    kind: str,
    pair_of: Callable[[str], PairFiles],
    tokenize: Tokenize,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pair is unloaded twice, as when the daemon ends or another pair needs the memory."""
    monkeypatch.setattr(saved_states, "DISK_BYTES_PER_S", 1 << 60)  # reading is slow beside it
    replay = Replay(tokenize, ONE_IN[kind])
    session = sessions.returning_helpers("claude", 8)
    for start, end in ((0, 14), (14, 30), (30, len(session))):
        with opened(pair_of(kind), tmp_path) as engine:
            replay.send(engine, session[start:end])
    replay.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_read_twice_where_cells_are_few(
    kind: str, pair_of: Callable[[str], PairFiles], tokenize: Tokenize, tmp_path: Path
) -> None:
    """The context holds little more than one agent's text, so the others wait in memory."""
    replay = Replay(tokenize, ONE_IN[kind])
    requests = sessions.in_turns(
        [sessions.recorded()[name] for name in ("codex", "opencode", "pi")]
    )
    requests = [request for request in requests if request.event is not Event.HELPER]
    with opened(pair_of(kind), tmp_path, n_ctx=7168 // ONE_IN[kind] + 512) as engine:
        replay.send(engine, requests)
    replay.check()


SESSIONS = int(os.environ.get("LOCALSPEC_TEST_SESSIONS", "1"))
LEAST_TURN_WORDS = 120


class GeneratedAgents:
    """Agents whose conversations grow, fork, are edited and compacted, one beside the other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._instructions = [self._message(self._random.randint(600, 1500)) for _ in range(3)]
        self._chats = [[*self._instructions[at % 3], *self._message(200)] for at in range(4)]

    def _message(self, length: int) -> list[int]:
        return [START, *(self._random.randrange(WORDS) for _ in range(length)), END]

    def next_prompt(self) -> tuple[int, Event, list[int]]:
        """Return which agent asks what, and what has happened."""
        rng = self._random
        at = rng.randrange(len(self._chats))
        event, chat = self._change(self._chats[at])
        chat = [*chat, *self._message(rng.randint(LEAST_TURN_WORDS, 400))]
        if len(chat) > 4000:
            event, chat = Event.COMPACTION, [*self._opening(chat), *self._message(500)]
        self._chats[at] = chat
        return at, event, [*chat, START]

    def _change(self, chat: list[int]) -> tuple[Event, list[int]]:
        rng = self._random
        borders = [place for place, token in enumerate(chat) if token == START][1:]
        what = rng.choices(list(Event), [0, 12, 1, 0, 0, 3, 1, 1])[0]
        if what is Event.HELPER:  # with the same instructions, and another task
            return what, [*self._opening(chat), *self._message(rng.randint(LEAST_TURN_WORDS, 300))]
        if what is Event.EDIT:
            return what, [*self._opening(chat), *self._message(200)]
        if what is Event.COMPACTION:  # a summary in place of the first messages
            return what, [*self._opening(chat), *self._message(400), *chat[borders[-1] :]]
        if what is Event.REMINDER:  # the last message is another one now
            return what, [*chat[: borders[-1]], *self._message(60)]
        return Event.TURN, chat

    def _opening(self, chat: list[int]) -> list[int]:
        return chat[: chat.index(END) + 1]

    def answered(self, at: int, text: Sequence[int]) -> None:
        """Let a conversation go on with the answer as it was, as most do."""
        if self._random.random() < 0.8:
            self._chats[at] = [*text, END]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SESSIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_generated_agents_have_little_read_twice(
    kind: str,
    seed: int,
    pair_of: Callable[[str], PairFiles],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cells are few, and the pair is unloaded twice. To run more: LOCALSPEC_TEST_SESSIONS=100."""
    monkeypatch.setattr(saved_states, "DISK_BYTES_PER_S", 1 << 60)
    agents, ledger = GeneratedAgents(seed), Ledger()
    for _ in range(3):
        with opened(pair_of(kind), tmp_path, n_ctx=8192) as engine:
            for _ in range(20):
                at, event, prompt = agents.next_prompt()
                agents.answered(at, ask(engine, ledger, str(at), event, prompt))
    assert ratio(ledger.rows) <= MAX_RATIO, ledger.totals()


def test_answer_says_that_a_text_had_to_make_room(
    load: Callable[..., Running], contextual_files: PairFiles
) -> None:
    """Without memory for prefixes, the second text takes the slot of the first."""
    engine, generated = load(contextual_files, parallel=1), random.Random(0)
    first, second = ([generated.randrange(400) for _ in range(200)] for _ in range(2))
    timings = engine.ask(first, 4).done.timings
    assert (timings.cache_known_n, timings.cache_loss) == (0, UNSET)
    engine.ask(second, 4)
    timings = engine.ask([*first, *second[:50]], 4).done.timings
    assert (timings.cache_n, timings.cache_known_n, timings.cache_loss) == (0, 200, "evicted")
    timings = engine.ask([*first, *second[:50]], 4, cache_prompt=False).done.timings
    assert timings.cache_loss is UNSET  # nobody wanted it to be cached


def test_forgotten_texts_are_not_counted_as_known(
    load: Callable[..., Running], contextual_files: PairFiles
) -> None:
    engine, generated = load(contextual_files, parallel=2), random.Random(1)
    text = [generated.randrange(400) for _ in range(200)]
    engine.ask(text, 4)
    engine.pair.forget(None)
    for slot in engine.pair.shared.slots:
        engine.pair.shared.slots.clear(slot)
    timings = engine.ask(text, 4).done.timings
    assert (timings.cache_n, timings.cache_known_n, timings.cache_loss) == (0, 0, UNSET)


def test_answer_says_that_a_state_could_not_go_back(
    load: Callable[..., Running], models: Path
) -> None:
    """Without memory for prefixes there are no places to go back to."""
    files = PairFiles("lfm2", str(architectures.write("lfm2", models)), None)
    engine, generated = load(files, parallel=1), random.Random(2)
    text = [generated.randrange(400) for _ in range(200)]
    engine.ask(text, 4)
    timings = engine.ask([*text[:150], *text[:30]], 4).done.timings
    assert (timings.cache_n, timings.cache_known_n, timings.cache_loss) == (0, 150, "checkpoint")
