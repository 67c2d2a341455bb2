"""Distinguish the special tokens that a template writes from those that a caller's text spells.

A template joins its own text and the caller's into one string. A special token that a user spells in a
message then looks like one of the template's. The caller's texts are therefore rendered in a private
alphabet, which has a mark in place of each symbol of a special token ("<", "|", ">"). A special token in
ordinary characters is then the template's, whatever the template does with its own texts. After rendering,
each mark becomes its symbol again.

Where a template inspects a text, it sees ordinary characters: in comparisons, in methods of texts, and in
filters. If an operation is not supported, its whole result counts as the caller's. A special token may then
become text by mistake. Text becomes a special token only where a template cuts a word out of a longer text
of the caller and puts it between brackets of its own; no known template does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import product
from types import BuiltinMethodType
from typing import Any, SupportsIndex

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localspec.engine.prompt.spellings import pattern_of

# The marks are lone surrogates. Valid text has none, so no caller can write them.
_FIRST_MARK, _N_MARKS = 0xD800, 0x800
_MARK = re.compile("[\ud800-\udfff]")
_SYMBOL = re.compile(r"[^\w\s]")
_ENDS = re.compile(r"^\W+|\W+$")
# A role such as `user` may be part of a special token ("<|" + role + "|>"), so it counts as the template's.
_ROLE = re.compile(r"\w{1,64}", re.ASCII)
# Filters that make new text from texts. Those that only select values need nothing.
_TEXT_FILTERS = (
    *("join", "replace", "format", "indent", "title", "capitalize", "upper", "lower", "trim"),
    *("center", "wordwrap", "truncate", "string", "escape", "e", "forceescape", "urlencode"),
)


class CallerWord(str):
    """A caller's text of letters that may stand within a special token, as the name of a field "think".

    A template finds and compares it as any text. What it writes has marks for the letters.
    """

    __slots__ = ("marked",)
    marked: str

    def __str__(self) -> str:
        return self.marked

    def __format__(self, spec: str) -> str:
        return format(self.marked, spec)

    def __add__(self, other: str) -> str:
        return self.marked + other

    def __radd__(self, other: str) -> str:
        return other + self.marked

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        return self.marked[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.marked)


class ProvenanceEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates write the caller's texts in the private alphabet."""

    intercepted_binops = frozenset({"%", "*"})

    def __init__(self, spellings: Sequence[str]) -> None:
        """Distinguish these special tokens."""
        super().__init__(finalize=self._written)
        self.pattern = pattern_of(spellings)
        interiors = [_ENDS.sub("", text) for text in spellings]
        self._interiors, self._longest = "\n".join(interiors), max(map(len, interiors), default=0)
        symbols = [c for text in spellings for c in _SYMBOL.findall(text) or text]
        letters = [c for text in interiors for c in text]
        characters = [c for c in dict.fromkeys([*symbols, *letters]) if not c.isspace()]
        marks = {c: chr(_FIRST_MARK + at) for at, c in enumerate(characters[:_N_MARKS])}
        self._letters = str.maketrans(marks)
        self._characters = {mark: c for c, mark in marks.items()}
        self._symbols = [(c, marks[c]) for c in dict.fromkeys(symbols) if c in marks]
        for name in _TEXT_FILTERS:
            self.filters[name] = self._tracking(self.filters[name])
        for name in ("eq", "equalto", "==", "ne", "!=", "in"):
            compare: Any = self.tests[name]
            self.tests[name] = self._inspecting(compare)
        self.filters["ordinary"] = self.ordinary
        self.filters["dictsort"] = self._sorting(self.filters["dictsort"])

    def mark(self, text: str) -> str:
        """Return a text as the caller's."""
        if 0 < len(text) <= self._longest and text in self._interiors:
            word = CallerWord(text)
            word.marked = text.translate(self._letters)
            return word
        for symbol, mark in self._symbols:
            text = text.replace(symbol, mark)
        return text

    def mark_all(self, value: Any) -> Any:
        """Return a value with its texts as the caller's, those of the names of fields among them."""
        match value:
            case str():
                return self.mark(value)
            case list():
                return [self.mark_all(item) for item in value]
            case dict():
                return {self.mark(key): self.mark_all(item) for key, item in value.items()}
        return value

    def mark_variables(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return a template's variables, with all but roles and BOS and EOS tokens as the caller's."""
        own = ("bos_token", "eos_token")
        marked = {k: v if k in own else self.mark_all(v) for k, v in variables.items()}
        for message, original in zip(marked["messages"], variables["messages"], strict=True):
            if _ROLE.fullmatch(role := str(original["role"])):
                message["role"] = role
        return marked

    def ordinary(self, value: Any) -> Any:
        """Return a value with its texts in ordinary characters."""
        match value:
            case str():
                return self._ordinary_text(str.__str__(value))
            case list() | tuple():
                return type(value)(map(self.ordinary, value))
            case dict():
                return {self.ordinary(key): self.ordinary(item) for key, item in value.items()}
        return value

    def _ordinary_text(self, text: str) -> str:
        if text.isascii():
            return text
        for symbol, mark in self._symbols:  # much faster than `translate`
            text = text.replace(mark, symbol)
        try:
            text.encode()
        except UnicodeEncodeError:  # marks of letters, which are rare
            text = _MARK.sub(lambda match: self._characters[match[0]], text)
        return text

    def _written(self, value: Any) -> Any:
        """Return a value that is written; a list or an object is written as Python does."""
        return self.mark(str(self.ordinary(value))) if isinstance(value, list | dict) else value

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Compile a template that compares ordinary characters, and joins lists as it writes them."""

        def filtered(node: nodes.Expr, name: str) -> nodes.Expr:
            is_constant = isinstance(node, nodes.Const)
            return node if is_constant else nodes.Filter(node, name, [], [], None, None)

        for joined in [*source.find_all(nodes.Concat)]:
            joined.nodes = [filtered(node, "string") for node in joined.nodes]
        for compared in [*source.find_all(nodes.Compare)]:
            compared.expr = filtered(compared.expr, "ordinary")
            for operand in compared.ops:
                operand.expr = filtered(operand.expr, "ordinary")
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object as the sandbox does, and methods of texts so that they see ordinary characters."""
        owner = __obj.__self__ if isinstance(__obj, BuiltinMethodType) else None
        if isinstance(owner, str):
            for compiler_argument in ("_loop_vars", "_block_vars"):
                kwargs.pop(compiler_argument, None)
            return __self.tracked(getattr(str, __obj.__name__), owner, *args, **kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.mark_all(result) if isinstance(owner, bytes) else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self.tracked(self.binop_table[operator], left, right)

    def _tracking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def tracking(*args: Any, **kwargs: Any) -> Any:
            return self.tracked(function, *args, **kwargs)

        return tracking

    def of_caller(self, function: Callable[..., str]) -> Callable[..., str]:
        """Return a function of a value in ordinary characters whose whole result is the caller's."""
        return lambda value, *args, **kwargs: self.mark(
            function(self.ordinary(value), *args, **kwargs)
        )

    def _sorting(self, dictsort: Callable[..., Any]) -> Callable[..., Any]:
        def sort(value: dict[str, Any], *args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
            names = {self.ordinary(name): name for name in value}
            ordinary = {plain: value[name] for plain, name in names.items()}
            return [(names[plain], item) for plain, item in dictsort(ordinary, *args, **kwargs)]

        return sort

    def _inspecting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(*map(self.ordinary, args))

    def tracked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `function` for ordinary characters, in which the caller's are marked.

        The function is called again with marked texts. An argument of the template's, as what is searched
        for, may have to be marked, too.
        """
        values = [list(value) if isinstance(value, Iterator) else value for value in args]
        ordinary = [self.ordinary(value) for value in values]
        result = function(*ordinary, **kwargs)
        if not isinstance(result, str | list | tuple):
            return result
        marked = [_with_marks(value) for value in values]
        if marked == ordinary:
            return result
        choices = [
            [value, str(self.mark(value))] if type(value) is str else [value] for value in marked
        ]
        for choice in product(*choices):
            try:
                attempt = function(*choice, **kwargs)
            except Exception:  # The function may need an argument in ordinary characters.
                continue
            if self.ordinary(attempt) == result:
                return attempt
        return self.mark_all([*result] if isinstance(result, tuple) else result)


def _with_marks(value: Any) -> Any:
    """Return a value with the marks of letters in it."""
    match value:
        case CallerWord():
            return value.marked
        case list() | tuple():
            return type(value)(map(_with_marks, value))
    return value
