"""Notice when an answer that writes a text anew has come to the part that stays as it is.

An editor's next edit is a window of lines with a few changes. Once the model has made a change and has then
written enough lines as they were, the rest is taken as it was and need not be written.
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.protocol.frames import Rewrite

# Lines as they were, after a change, behind which the rest is taken as it was. In 6331 windows of 21 lines of
# this repository's history (scripts/bench next_edit rule), the rule with as many
#
#   lines  leaves out a later change  is wrong  saves of the text
#       3                       18 %     0.1 %               24 %
#       4                       14 %    < 0.1 %              20 %
#       6                        7 %       0 %               11 %
#       8                        2 %       0 %                5 %
#
# The next request proposes the later change. To be wrong is to take an inserted copy for the lines below it.
UNCHANGED_LINES = 6
_MIN_FILLED_LINES = 2  # lines among them that are not blank


class Rewriting:
    """Follows an answer line by line. `rest` is the first line of the old text that is taken as it was.

    marks: texts by which a model shows a cursor, which belong to no line.
    """

    def __init__(self, old: str, marks: Sequence[str] = ()) -> None:
        self._old, self._marks = old.split("\n"), tuple(marks)
        self._new: list[str] = []
        self._line = ""
        self._n_same: int | None = None  # lines before the first change, once there is one
        self.rest: int | None = None

    @classmethod
    def of(cls, rewrite: Rewrite | None) -> Rewriting | None:
        """Return what follows a request's answer, if it rewrites a text."""
        return cls(rewrite.old, rewrite.marks) if rewrite else None

    def push(self, text: str) -> int | None:
        """Add the newest text. Return where in it the answer ends, if it does: behind a line's end."""
        *ended, unfinished = text.split("\n")
        position = 0
        for part in ended:
            position += len(part) + 1
            line, self._line = self._line + part, ""
            for mark in self._marks:
                line = line.replace(mark, "")
            self._new.append(line)
            self.rest = self._find_rest()
            if self.rest is not None:
                return position
        self._line += unfinished
        return None

    def _find_rest(self) -> int | None:
        """Return the line of the old text that comes next, where that is certain enough."""
        old, new = self._old, self._new
        if self._n_same is None:
            if len(new) <= len(old) and new[-1] == old[len(new) - 1]:
                return None
            self._n_same = len(new) - 1
        tail = new[-UNCHANGED_LINES:]
        is_filled = sum(bool(line.strip()) for line in tail) >= _MIN_FILLED_LINES
        if len(new) - UNCHANGED_LINES < self._n_same or not is_filled:
            return None
        # At the end of the old text nothing would be saved.
        ends = range(self._n_same + UNCHANGED_LINES, len(old) - 1)
        places = [end for end in ends if old[end - UNCHANGED_LINES : end] == tail]
        return places[0] if len(places) == 1 else None
