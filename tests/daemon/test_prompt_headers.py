"""Headers that agents change in each request must not be at the beginning of the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.daemon.completion.request import stabilize_instructions
from localspec.protocol.frames import Message

BILL = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
RULES = "You are an agent.\n\nUse the tools.\n"
ASKED = Message("user", "x-anthropic-billing-header: what is it?")


def texts(*messages: Message) -> list[str | None]:
    return [message.content for message in stabilize_instructions(messages)]


@pytest.mark.parametrize("checksum", ["fa690", "00000", "1c8b4"])
def test_a_billing_header_is_removed(checksum: str) -> None:
    bill = BILL.format(checksum)
    instructions = Message("system", f"{bill}\n{RULES}")
    assert texts(instructions, ASKED) == [RULES, ASKED.content]
    apart = [Message("system", bill), Message("developer", RULES), ASKED]
    assert texts(*apart) == [RULES, ASKED.content]
    assert texts(apart[0]) == [bill]  # there is nothing else to read


@pytest.mark.parametrize(
    "clock",
    [
        "Today's date is 2026-11-22.",
        "Current time: 09:41:17 UTC",
        "The current date is Sunday, November 22, 2026",
        "today is 22 November 2026",
    ],
)
def test_date_and_time_move_behind_the_instructions(clock: str) -> None:
    settled = f"{RULES.rstrip()}\n\n{clock}"
    assert texts(Message("system", f"{clock}\n{RULES}"), ASKED) == [settled, ASKED.content]
    text = f"{BILL.format(1)}\n{clock}\n{RULES}"
    assert texts(Message("system", text), ASKED) == [settled, ASKED.content]
    assert texts(Message("system", clock), ASKED) == [clock, ASKED.content]


@pytest.mark.parametrize(
    "text",
    [
        RULES,
        "",
        "Today's date is 2026-11-22. Answer in French.",
        "Current time is money.",
        "Say x-anthropic-billing-header: 1",
        "You are here.\nToday's date is 2026-11-22.",
    ],
)
def test_lines_with_more_text_stay_in_place(text: str) -> None:
    assert texts(Message("system", text), ASKED) == [text, ASKED.content]


roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
contents = st.none() | st.lists(
    st.sampled_from([BILL.format("a"), RULES, "Today is 1 May", " ", "\n", "word"])
).map("\n".join)


@given(st.lists(st.builds(Message, roles, contents), max_size=5))
def test_stabilizing_is_idempotent_and_changes_only_instructions(messages: list[Message]) -> None:
    before = [str(message) for message in messages]
    once = stabilize_instructions(messages)
    assert stabilize_instructions(once) == once
    assert [str(message) for message in messages] == before
    first = next(
        (
            index
            for index, message in enumerate(messages)
            if message.role not in ("system", "developer")
        ),
        len(messages),
    )
    spoken = messages[first:]
    assert once[len(once) - len(spoken) :] == spoken
    if messages:
        assert once
