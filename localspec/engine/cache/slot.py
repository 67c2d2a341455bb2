"""A slot: its text, what target and draft remember of it, and how that is cut to fewer tokens.

The cache of full attention can be cut anywhere, and that of a sliding window while its beginning is still
there. A recurrent state cannot be cut, so copies of it ("marks") are kept on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np

from localspec.engine.llama import Context, State, States, begin_of_picture, is_picture
from localspec.protocol.frames import CacheLoss, CacheSource

# Which places of a prompt are worth going back to, in a memory that cannot be cut: where messages begin, and
# where two texts were seen to part.
#
# Agents send a conversation again with a change in the middle: a reminder that moved, a summary in place of
# old messages, other tools. What stands before the last place ahead of the change need not be read again.

# Shorter texts are read again within one or two passes.
MIN_TOKENS = 64
# Places in a long message are at distances from the end that grow by this factor, so that a change there has
# at most a sixteenth of the tokens behind it read in vain, besides MIN_TOKENS. Each place costs a copy of the
# state, and a pass that ends there. When recorded agents compacted, 1.125 had 6 % read in vain, and this 2 %.
PLACE_GROWTH = 1.0625
# The next turn of a chat shares the prompt except for its last tokens. They open an answer, or hold empty
# thoughts that templates drop later ("<think>\n\n</think>\n\n" is four tokens).
OPENING_TOKENS = 4


def choose_positions(
    tokens: Sequence[int],
    is_control: Callable[[int], bool],
    start: int,
    count: int,
    forks: Collection[int] = (),
) -> list[int]:
    """Return at most `count` positions of a prompt at which its state is worth saving.

    The first `start` tokens are read. forks: positions at which another text was seen to go on differently.
    """
    end, borders = len(tokens) - OPENING_TOKENS, list[int]()
    last_control = start - OPENING_TOKENS - 1
    for position in range(start, end + 1):  # A message ends before a group of control tokens.
        if not is_picture(tokens[position]) and is_control(tokens[position]):
            begins_group = position - last_control > OPENING_TOKENS
            if begins_group and position - (borders[-1] if borders else start) >= MIN_TOKENS:
                borders.append(position)
            last_control = position
    positions = {end, *borders, *forks}
    distance = MIN_TOKENS
    while end - distance - start >= MIN_TOKENS:
        farther = max(int(distance * PLACE_GROWTH), distance + MIN_TOKENS)
        # Within a long message there is no border, but an edit may be there.
        if not any(end - farther < border <= end - distance for border in borders):
            positions.add(end - distance)
        distance = farther
    # A picture may have to be read whole.
    positions = {begin_of_picture(tokens, position) for position in positions}
    chosen = sorted(position for position in positions if start < position <= end)
    while len(chosen) > max(count, 1):
        del chosen[choose_removable(chosen, forks)]
    return chosen


def choose_removable(positions: Sequence[int], forks: Collection[int] = ()) -> int:
    """Return the index of the position to give up.

    Never the last; a fork only if nothing else is left between the first and the last; and the first, which
    ends the instructions, only if there is no other.
    """
    end, previous = positions[-1] + MIN_TOKENS, (0, *positions)
    between = range(1, len(positions) - 1)
    removable: Sequence[int] = [index for index in between if positions[index] not in forks]
    removable = removable or between or range(1)  # of two or one, the first
    return min(removable, key=lambda index: (end - previous[index]) / (end - positions[index]))


CHANGE_TOKENS = 4  # by which the beginning of a change is known again
MAX_CHANGES = 64  # that are remembered, and
MAX_CHANGES_IN_PROMPT = 8  # that are looked for in a prompt, the last ones


class Changes:
    """The texts that were changed before, as a reminder that an agent moves from message to message."""

    def __init__(self) -> None:
        self._starts: dict[tuple[int, ...], None] = {}  # the latest is last

    def learn(self, tokens: Sequence[int], fork: int) -> None:
        """Note that another text did not go on as `tokens` do after `fork` tokens."""
        start = tuple(tokens[fork : fork + CHANGE_TOKENS])
        if len(start) == CHANGE_TOKENS:
            self._starts.pop(start, None)
            self._starts[start] = None
            if len(self._starts) > MAX_CHANGES:
                del self._starts[next(iter(self._starts))]

    def find(self, tokens: Sequence[int], start: int) -> list[int]:
        """Return the last positions after `start` where something stands that was changed before."""
        firsts, changes = {change[0] for change in self._starts}, self._starts
        places = range(len(tokens) - CHANGE_TOKENS, start, -1)
        found = (
            p
            for p in places
            if tokens[p] in firsts and tuple(tokens[p : p + CHANGE_TOKENS]) in changes
        )
        return sorted(islice(found, MAX_CHANGES_IN_PROMPT))


# States that stay after the draft has read them, because a rollback reads them again.
TAIL_STATES = 64
ALL_TOKENS = 1 << 31  # as a number of tokens: the whole text


class HiddenStates:
    """Hidden states of the target, one row each, until the draft reads them, if it ever does.

    They are those after the tokens [start, end) of a text. copy_s: seconds spent on copying them from passes
    that read a prompt, since the draft last read along.
    """

    def __init__(self, width: int) -> None:
        """width: numbers in a state."""
        self.start = self.end = 0
        self.copy_s = 0.0
        self._rows: States = np.empty((0, width), np.float32)

    def put(self, position: int, rows: States, limit: int) -> None:
        """Add the states after the tokens from `position` on.

        Older states go if they do not end at `position`, or if there are more than `limit`.
        """
        end, rows = position + len(rows), rows[-limit:]
        n_known = self.end - self.start if position == self.end else 0
        n_stay = n_known
        # Drops a quarter at once, so that rows seldom move.
        if n_known + len(rows) > limit:
            n_stay = min(n_known, max(limit * 3 // 4 - len(rows), 0))
        self._make_room(n_known, n_stay, len(rows))
        self._rows[n_stay : n_stay + len(rows)] = rows
        self.start, self.end = end - n_stay - len(rows), end

    def _make_room(self, n_known: int, n_stay: int, n_new: int) -> None:
        """Move the last `n_stay` of `n_known` rows to the front, with room for `n_new` behind them."""
        rows, n_needed = self._rows, n_stay + n_new
        # What a pass over a prompt needed is freed when tokens are decoded again.
        if n_needed > len(rows) or (n_new and len(rows) > 4 * max(n_needed, TAIL_STATES)):
            self._rows = np.empty((n_needed + TAIL_STATES, rows.shape[1]), np.float32)
        if self._rows is not rows or n_stay < n_known:
            self._rows[:n_stay] = rows[n_known - n_stay : n_known]

    def cut(self, length: int) -> None:
        """Drop the states behind the first `length` tokens."""
        self.end = min(self.end, length)
        self.start = min(self.start, self.end)

    def drop_read(self, n_read: int) -> None:
        """Drop most states of the first `n_read` tokens, because the draft has read them."""
        n_stay = self.end - max(n_read - TAIL_STATES, self.start)
        if self.end - self.start > 2 * max(n_stay, TAIL_STATES):
            self._make_room(self.end - self.start, n_stay, 0)
            self.start = self.end - n_stay

    def free(self) -> None:
        """Keep the last states alone, because the text is idle from now on."""
        n_known = self.end - self.start
        n_stay = min(n_known, 2 * TAIL_STATES)
        self._rows = self._rows[n_known - n_stay : n_known].copy()
        self.start = self.end - n_stay

    def states_before(self, first: int, last: int) -> States:
        """Return the states (last - first, width) before the tokens [first, last).

        Each is the state after the previous token; one that is not known is all zeros.
        """
        if self.start < first <= last <= self.end + 1:
            return self._rows[first - 1 - self.start : last - 1 - self.start]
        states: States = np.zeros((last - first, self._rows.shape[1]), np.float32)
        start, end = max(first - 1, self.start), min(last - 1, self.end)
        if start < end:
            known = self._rows[start - self.start : end - self.start]
            states[start - first + 1 : end - first + 1] = known
        return states

    def copy_from(self, other: HiddenStates, length: int) -> None:
        """Copy the states of the first `length` tokens from another text."""
        self.start = self.end = 0
        end = min(other.end, length)
        if other.start < end:
            self.put(other.start, other._rows[: end - other.start], ALL_TOKENS)


# Per slot. The marks of all slots take at most a quarter of the memory for prefixes, which holds far fewer of
# a large model's states.
MAX_MARKS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """What a target keeps besides its cache of full attention, after `tokens` tokens of a text."""

    tokens: int
    state: State
    is_fork: bool = False  # another text was seen to go on differently from here


def count_usable(shared: int, min_length: int, marks: Iterable[int]) -> int:
    """Return how many of `shared` tokens can be reused: all, those before the last mark, or none."""
    if shared >= min_length:
        return shared
    return max((mark for mark in marks if mark <= shared), default=0)


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence in the target's memory, and one in the draft's.

    tokens[:n_past] are in the target's KV, tokens[:n_past_draft] in the draft's. During a round the
    memories hold more (drafts not verified yet); after it they are rolled back to these counts.
    `Slots` alone writes both counts.
    """

    id: int
    draft_id: int
    tokens: list[int] = field(default_factory=list)
    n_past: int = 0
    n_past_draft: int = 0
    marks: list[Mark] = field(default_factory=list)  # places to go back to where it cannot be cut
    turns: list[int] = field(default_factory=list)  # positions where a mark may be worth its copy
    forks: set[int] = field(default_factory=set)  # those of `turns` at which another text parted
    # A draft's recurrent state and its number of tokens.
    draft_mark: tuple[int, State] | None = None
    hidden: HiddenStates | None = None  # the target's hidden states, if a draft reads them
    # The draft reads so many tokens at the end of the prompt along with the target, which takes it this time
    # for each.
    window: int = 0
    along_s: float = 0.0
    snapshots: int = 0  # the position of the first snapshot that the target's last pass has left
    pinned: int = 0  # tokens whose cells a sequence without passes shares, so that they stay
    busy: bool = False
    last_used: int = 0
    requested_at: int = 0  # number of its last request, as the store of prefixes counts them
    idle_cost_ms: float = 0.0  # what its cells have cost other requests since it became idle
    shared: int = 0  # tokens whose cells other sequences may share: these are not moved
    exact: int | None = None  # tokens before the first that was moved; None: none was
    moves: int = 0  # how often its text was moved since it was read
    reused: int = 0  # tokens that the present request did not have to read
    n_prompt: int = 0  # tokens of the present request's prompt
    ahead: range = range(0)  # tokens that were read while nobody waited,
    reused_ahead: int = 0  # and those of them that the present request did not have to read
    known: int = 0  # tokens of that prompt with which some earlier text begins
    loss: CacheLoss | None = None  # why more than `reused` of them are read again, if they are
    moved: int = 0  # tokens of `reused` that were moved
    # Where the text begins that an editor's next key replaces; None: nowhere.
    volatile_from: int | None = None
    # The conversation that the text belongs to, if it is to be saved.
    conversation: str | None = None
    # Where the text that the present request reused came from.
    source: Literal[""] | CacheSource = ""

    @property
    def cached(self) -> list[int]:
        return self.tokens[: self.n_past]

    @property
    def own_cells(self) -> int:
        """The number of cells that no other sequence shares."""
        return self.n_past - self.shared

    def count_exact(self, count: int) -> int:
        """Return how many of the first `count` tokens are remembered as a fresh reading would give."""
        return count if self.exact is None else min(count, self.exact)

    @property
    def reused_exact(self) -> int:
        """The reused tokens before the first one that was ever moved."""
        return self.count_exact(self.reused - self.moved)

    @property
    def reusable_count(self) -> int:
        """The number of read tokens that a later request may reuse."""
        return self.n_past if self.volatile_from is None else min(self.volatile_from, self.n_past)

    @property
    def unread(self) -> list[int]:
        """The tokens that the target has not read yet."""
        return self.tokens[self.n_past :]

    @property
    def mark_positions(self) -> list[int]:
        return [mark.tokens for mark in self.marks]

    @property
    def last_mark(self) -> int:
        """The position of its last mark; 0: there is none."""
        return self.marks[-1].tokens if self.marks else 0

    def set_draft_length(self, count: int) -> None:
        """Note that the draft's memory holds `count` tokens, its own drafts among them."""
        self.n_past_draft = count


class TargetMemory:
    """The target's memory of `slots`.

    worth(tokens, size): whether a copy of `size` bytes is worth the chance that `tokens` tokens need not be
    read again. mark_bytes: limit for the marks of all slots together. first_pin: the first of as many
    sequences, in which no pass takes place; see `pin`.
    """

    def __init__(
        self,
        context: Context,
        worth: Callable[[int, int], bool],
        mark_bytes: int,
        slots: Sequence[Slot],
        first_pin: int | None = None,
    ) -> None:
        self._context, self._slots, self._first_pin = context, slots, first_pin
        self._is_worth_copy, self._mark_bytes = worth, mark_bytes
        self._cuttable = context.model.cuttable
        self._state_bytes = 0  # size of the last mark

    def min_length(self, slot: Slot) -> int:
        """Return the fewest tokens that a slot can be cut to."""
        if self._cuttable:
            return _min_cut(self._context, slot.id, slot.n_past)
        return min(slot.snapshots, slot.n_past)

    def min_saved_length(self, slot: Slot) -> int:
        """Return the same for a saved copy, which lacks the cells that the last token could not see."""
        if not self._cuttable:
            return slot.n_past
        min_length, window = self.min_length(slot), self._context.model.n_swa
        return max(min_length, slot.n_past - 1) if 0 < window < slot.n_past else min_length

    def pin(self, slot: Slot) -> None:
        """Keep the cells of what a slot has read, also those that its window has left behind.

        llama.cpp gives such cells to whichever sequence is read next, even while others are free. Then an
        idle text could only be continued at its end. Cells that two sequences share are not given away.
        """
        if self._first_pin is not None and slot.n_past > slot.pinned:
            self._context.copy(slot.id, self._first_pin + slot.id, slot.n_past, start=slot.pinned)
            slot.pinned = slot.n_past

    def unpin(self, slot: Slot, length: int) -> None:
        """Release the cells behind the first `length` tokens."""
        if self._first_pin is not None and slot.pinned > length:
            self._context.remove(self._first_pin + slot.id, length)
            slot.pinned = length

    def cut(self, slot: Slot, length: int) -> int:
        """Cut a slot to `length` tokens, or to the last mark before. Return how many, 0 if none is left."""
        # Tokens that a pass read beyond `n_past` took no cell that the text up to there needs.
        is_read_ahead = self._cuttable and length >= slot.n_past
        is_reachable = is_read_ahead or length >= self.min_length(slot)
        if is_reachable and self._context.remove(slot.id, length):
            self.unpin(slot, length)
            slot.snapshots = length  # each snapshot can be used once
            return length
        return self.back_to_mark(slot, length)

    def back_to_mark(self, slot: Slot, length: int) -> int:
        """Go back to the last mark within `length` tokens. Return its position, 0 if there is none."""
        self.unpin(slot, 0)  # the mark brings its own cells
        for mark in reversed(slot.marks):
            if mark.tokens <= length and self._context.restore(slot.id, mark.state, partial=True):
                if not self._context.remove(slot.id, mark.tokens):
                    break
                slot.snapshots = mark.tokens
                return mark.tokens
        return 0

    @property
    def max_marks(self) -> int:
        """The most marks that a slot can have, as far as the size of a state is known."""
        return min(MAX_MARKS, self._mark_bytes // max(self._state_bytes, 1))

    def limit_prefill(self, slot: Slot, count: int) -> int:
        """Return how many of the next `count` prompt tokens one pass may read; call it before each pass.

        Where the memory cannot be cut, this sets marks on the way.
        """
        if not self._loses_history(slot) or self._mark_bytes <= 0:
            return count
        if slot.n_past in slot.turns:
            self.mark(slot, is_place=True)
        places = sorted(turn for turn in slot.turns if slot.n_past < turn < slot.n_past + count)
        for place in places:
            n_saved = max(place - slot.last_mark, MIN_TOKENS)
            if self._is_worth_copy(n_saved, self._state_bytes):
                return place - slot.n_past
        return count

    def _loses_history(self, slot: Slot) -> bool:
        """Whether the growing text loses what a cut would need, as a window does once it has moved on."""
        return not self._cuttable or self._context.first_position(slot.id) > 0

    def mark(self, slot: Slot, *, is_place: bool = False) -> None:
        """Mark the present state if it cannot be cut to later and is worth its copy.

        is_place: the next request may well go back here, so a mark a few tokens before does not do.
        """
        if not self._loses_history(slot) or slot.n_past <= slot.last_mark:
            return
        if self._context.length(slot.id) != slot.n_past:
            return  # a failed pass may have left more
        size = self._context.state_size(slot.id, partial=True)
        n_saved = max(slot.n_past - slot.last_mark, MIN_TOKENS * is_place)
        if size <= self._mark_bytes and self._is_worth_copy(n_saved, size):
            self._add_mark(slot, slot.n_past)

    def mark_turns(self, slot: Slot, n_left: int) -> None:
        """Mark the turns of a text with a sliding window before it leaves its slot.

        A copy will hold only the last window. So the memory is cut to one turn after another, from the last
        to the first, and marked there.
        """
        if not self._cuttable or not self._context.model.n_swa or not self._mark_bytes:
            return
        # What is pinned can be attached again, so marks before `n_left` are possible, too.
        can_attach = self._first_pin is not None and slot.pinned >= n_left
        min_position = max(self.min_length(slot), 1 if can_attach else n_left, 1)
        turns = sorted({turn for turn in slot.turns if min_position <= turn < slot.n_past})
        last = slot.n_past + MIN_TOKENS
        for turn in reversed(turns):
            if last - turn < MIN_TOKENS and turn not in slot.forks:
                continue
            last = turn
            if not self._context.remove(slot.id, turn):
                continue
            size = self._context.state_size(slot.id, partial=True)
            if size <= self._mark_bytes and self._is_worth_copy(turn, size):
                self._add_mark(slot, turn)
        length = self._context.length(slot.id)
        if self._first_pin is not None and can_attach and length < n_left:
            self._context.copy(self._first_pin + slot.id, slot.id, n_left, start=length)

    def _add_mark(self, slot: Slot, tokens: int) -> None:
        marks = {mark.tokens: mark for mark in slot.marks}
        state = self._context.save(slot.id, partial=True)
        self._state_bytes = state.nbytes
        marks[tokens] = Mark(tokens, state, tokens in slot.forks)
        slot.marks = [marks[position] for position in sorted(marks)]
        if len(slot.marks) > MAX_MARKS:
            _remove_mark(slot)
        while sum(m.state.nbytes for owner in self._slots for m in owner.marks) > self._mark_bytes:
            candidates = [other for other in self._slots if len(other.marks) > (other is slot)]
            if not candidates:
                break
            _remove_mark(max(candidates, key=lambda s: (len(s.marks), not s.busy, -s.last_used)))


def _remove_mark(slot: Slot) -> None:
    forks = [mark.tokens for mark in slot.marks if mark.is_fork]
    del slot.marks[choose_removable(slot.mark_positions, forks)]


class DraftMemory:
    """The draft's memory, if there is one. Methods that return a count return the tokens held then."""

    def __init__(self, context: Context | None) -> None:
        self._context = context

    def cut(self, slot: Slot, length: int) -> int:
        """Cut a slot to `length` tokens. Where that is impossible, go back to its mark, or empty it."""
        context = self._context
        if context is None:
            return 0
        n_held = context.length(slot.draft_id)
        if n_held <= length:
            return length
        if not context.cuttable and slot.draft_mark is not None:
            # Go back to where drafting began. llama.cpp's own snapshots reach no further back than the last
            # pass, and a draft reads its drafts one by one.
            n_marked, state = slot.draft_mark
            is_restored = n_marked <= length and context.restore(slot.draft_id, state, partial=True)
            if is_restored and context.remove(slot.draft_id, n_marked):
                return n_marked
        elif context.cuttable:
            is_reachable = length >= _min_cut(context, slot.draft_id, n_held)
            if is_reachable and context.remove(slot.draft_id, length):
                return length
        context.remove(slot.draft_id, 0)
        return 0

    def copy(self, source: Slot, slot: Slot, length: int) -> int:
        """Share what the draft holds of the first `length` tokens of another slot with an empty one."""
        context, shared = self._context, min(source.n_past_draft, length)
        if context is None or not context.cuttable or not shared:
            return 0
        if shared < _min_cut(context, source.draft_id, source.n_past_draft):
            return 0
        context.copy(source.draft_id, slot.draft_id, shared)
        return shared

    def save(self, slot: Slot) -> State | None:
        """Return a copy of a slot's state; None if it holds nothing."""
        if self._context is None or not slot.n_past_draft:
            return None
        return self._context.save(slot.draft_id)

    def restore(self, slot: Slot, state: State | None, count: int) -> int:
        """Restore a copy that was made after `count` tokens; None: there is none."""
        if self._context is None or state is None:
            return 0
        return count if self._context.restore(slot.draft_id, state) else 0

    def empty(self, slot: Slot) -> None:
        if self._context is not None:
            self._context.remove(slot.draft_id, 0)


def _min_cut(context: Context, sequence: int, n_held: int) -> int:
    """Return the fewest of `n_held` tokens that an attention cache can be cut to."""
    return min(n_held, context.model.min_continuable_length(context.first_position(sequence)))


# Moving cached text that is found again at another place, instead of reading it again.
#
# A line that is edited above the cursor moves all that follows, and a piece of another file that is replaced
# moves the others. llama.cpp can turn a cached key to another position (K-shift), but the influence of the
# text that stood before it stays. So what is moved, and all that is read after it, only comes near to what a
# fresh reading would give. It is therefore done only for requests that ask for it.

# How often a text may be moved before it is read again, because the errors add up.
MAX_MOVES = 64
# Tokens at the end of an editor's prompt that are always read: the text after the cursor and the line before
# it. If they were moved with each key, they would still say what they said before the key.
REREAD_TOKENS = 288


@dataclass(frozen=True, slots=True)
class MovableChunk:
    """`length` tokens at position `old` of a slot's text, and at position `new` of a prompt."""

    old: int
    new: int
    length: int

    @property
    def end(self) -> int:
        return self.new + self.length


def find_chunks(
    cached: Sequence[int], prompt: Sequence[int], start: int, min_length: int, n_reread: int = 1
) -> list[MovableChunk]:
    """Return the parts of `prompt` that `cached` contains too, both after `start` and in the same order.

    Each chunk has at least `min_length` tokens, and none contains one of the last `n_reread` of the prompt.
    """
    end = len(prompt) - n_reread
    old, new = (np.array(text, np.int32).tobytes() for text in (cached, prompt))
    positions: dict[bytes, list[int]] = {}
    for position in range(start, len(cached) - min_length + 1):
        positions.setdefault(old[4 * position : 4 * (position + min_length)], []).append(position)
    chunks: list[MovableChunk] = []
    prompt_position, cache_position = start, start
    while prompt_position + min_length <= end:
        matches = positions.get(new[4 * prompt_position : 4 * (prompt_position + min_length)], ())
        position = next((match for match in matches if match >= cache_position), -1)
        if position < 0:
            prompt_position += 1
            continue
        length = min_length
        while position + length < len(cached) and prompt_position + length < end:
            if cached[position + length] != prompt[prompt_position + length]:
                break
            length += 1
        chunks.append(MovableChunk(position, prompt_position, length))
        prompt_position, cache_position = prompt_position + length, position + length
    return chunks


class Parking:
    """A spare sequence of the target's memory, where chunks wait while the text before them is read.

    llama.cpp takes the tokens of a sequence in order only. One slot at a time uses it.
    """

    def __init__(self, context: Context, sequence: int | None) -> None:
        """sequence: None if there is none to spare, or if nothing can be moved."""
        self._context = context
        is_movable = sequence is not None and context.model.cuttable and not context.model.n_swa
        self._sequence = sequence if is_movable and context.can_shift else None
        self._waiting: list[MovableChunk] = []
        self._owner: Slot | None = None

    @property
    def free(self) -> bool:
        return self._sequence is not None and self._owner is None

    def park(self, slot: Slot, chunks: list[MovableChunk]) -> None:
        """Move the chunks to where they will be. The slot must then be cut before the first of them."""
        assert self._sequence is not None
        for chunk in chunks:
            end = chunk.old + chunk.length
            self._context.copy(slot.id, self._sequence, end, start=chunk.old)
        # In this order no chunk is moved onto one that was not moved yet.
        moving_right = [chunk for chunk in reversed(chunks) if chunk.new > chunk.old]
        moving_left = [chunk for chunk in chunks if chunk.new < chunk.old]
        for chunk in (*moving_right, *moving_left):
            end = chunk.old + chunk.length
            self._context.shift(self._sequence, chunk.old, end, chunk.new - chunk.old)
        self._owner, self._waiting = slot, list(chunks)

    def next_position(self, slot: Slot) -> int | None:
        """Return the position at which the slot's next chunk begins; None if there is none."""
        return self._waiting[0].new if self._owner is slot else None

    def attach(self, slot: Slot) -> int:
        """Attach the chunks that begin where the slot has read to; return how far it has read then."""
        n_past = slot.n_past
        while self._sequence is not None and self.next_position(slot) == n_past:
            chunk = self._waiting.pop(0)
            self._context.copy(self._sequence, slot.id, chunk.end, start=chunk.new)
            self._context.remove(self._sequence, chunk.new, chunk.end)
            n_past = chunk.end
            if not self._waiting:
                self._owner = None
        return n_past

    def drop(self, slot: Slot) -> None:
        """Drop the chunks that still wait for the slot."""
        if self._owner is slot and self._sequence is not None:
            self._context.remove(self._sequence, 0)
            self._owner, self._waiting = None, []
