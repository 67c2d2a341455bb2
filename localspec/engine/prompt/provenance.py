"""Track which characters of a rendered prompt the template wrote, and which came from the caller.

A template joins its own text and the caller's into one string. A special token that a user spells in a
message then looks like one of the template's. The constants of a template are therefore compiled to
`TemplateText`, a `str` with a second copy of itself (`marked`) in a private alphabet. The template's
operations keep this copy. The caller's strings are ordinary ones. In the result, a special token whose
characters are all in the private alphabet is the template's, and any other one is text. If an operation is
not supported, the copy is lost and the result counts as the caller's. A special token may then become text by
mistake, but text never becomes a special token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import product
from types import BuiltinMethodType
from typing import Any, SupportsIndex

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localspec.engine.prompt.spellings import pattern_of

# The private alphabet is lone surrogates. Valid text has none, so no caller can write in it.
_FIRST_MARK, _N_MARKS = 0xD800, 0x800
# A role such as `user` may be part of a special token ("<|" + role + "|>"), so it counts as the template's.
_ROLE = re.compile(r"\w{1,64}", re.ASCII)
_CONVERSION = re.compile(r"%[^A-Za-z%]*[A-Za-z%]")  # A placeholder of the operator `%`.
_FIELD = re.compile(r"\{[^{}]*\}")  # A placeholder of `str.format`.


class TemplateText(str):
    """A text of which the template wrote at least a part.

    `marked` is the same text, of the same length, with the template's characters in the private alphabet.
    """

    __slots__ = ("marked",)
    marked: str

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        text = str.__add__(self, other)
        return _text(text, self.marked + getattr(other, "marked", other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return _text(str.__add__(other, self), other + self.marked)

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        return _text(str.__getitem__(self, index), self.marked[index])


def _text(text: str, marked: str) -> TemplateText:
    result = str.__new__(TemplateText, text)
    result.marked = marked
    return result


class Alphabet:
    """The special tokens of a vocabulary, in ordinary characters and in the private alphabet."""

    def __init__(self, spellings: Sequence[str]) -> None:
        characters = dict.fromkeys(c for text in spellings for c in text if not c.isspace())
        marks = {ord(c): chr(_FIRST_MARK + i) for i, c in enumerate([*characters][:_N_MARKS])}
        self._marks = marks
        self._characters = {ord(mark): chr(character) for character, mark in marks.items()}
        self._pattern = pattern_of(spellings)
        self._spelling = {self.mark(text): text for text in spellings}
        self._marked_pattern = pattern_of(self._spelling)

    def mark(self, text: str) -> str:
        """Return `text` in the private alphabet, which has only the characters of special tokens."""
        return text.translate(self._marks)

    def unmark(self, marked: str) -> str:
        """Return a text that may be in the private alphabet in ordinary characters."""
        return marked.translate(self._characters)

    def written(self, text: str) -> str:
        """Return `text` as text of the template."""
        marked = self.mark(text)
        return text if marked == text else _text(text, marked)

    def special(self, text: str, marked: str, *, always: bool) -> list[int] | None:
        """Return the alternating starts and ends of the template's own special tokens in `text`.

        Return None if all special tokens in the text are the template's, unless `always` is set. Also return
        None for a text that is not valid Unicode, which no tokenizer accepts.
        """
        if not always:
            template_tokens = self._marked_pattern.findall(marked)
            if self._pattern.findall(text) == [*map(self._spelling.__getitem__, template_tokens)]:
                return None
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
        matches = self._marked_pattern.finditer(marked)
        return [position for match in matches for position in match.span()]


# ------------------------------------------------------------------------ the environment


class _Generator(CodeGenerator):
    """A code generator that compiles constants to `TemplateText` where they may become prompt text."""

    environment: ProvenanceEnvironment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str | list | tuple | dict) and not getattr(node, "only_read", False):
            self.write(self.environment.source(value))
        else:
            super().visit_Const(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802
        """Compile `{{ a + b }}` as `{{ a }}{{ b }}` if it joins texts.

        This avoids tracking the sum; templates have about ten of these per turn.
        """
        parts = [part for expression in node.nodes for part in _summands(expression)]
        super().visit_Output(nodes.Output(parts, lineno=node.lineno), frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self.environment.source("".join(map(str, group)))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class ProvenanceEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates track their own text."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"%", "*"})

    def __init__(self, spellings: Sequence[str]) -> None:
        """Track these special tokens."""
        super().__init__()
        self.alphabet = Alphabet(spellings)
        self.constants: list[str] = []
        for name in _TEXT_FILTERS:
            self.filters[name] = self._tracking(self.filters[name])

    def source(self, value: Any) -> str:
        """Return the source code of a constant, with the texts in it as text of the template."""
        match value:
            case str() if (
                type(value) is str and (text := self.alphabet.written(value)) is not value
            ):
                self.constants.append(text)
                return f"environment.constants[{len(self.constants) - 1}]"
            case list():
                return f"[{', '.join(map(self.source, value))}]"
            case tuple():
                return f"({''.join(f'{self.source(item)}, ' for item in value)})"
            case dict():
                pairs = (f"{self.source(key)}: {self.source(item)}" for key, item in value.items())
                return f"{{{', '.join(pairs)}}}"
        return repr(value)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a block or a macro."""
        parts = list(parts)
        text = "".join(parts)
        is_tracked = any(type(part) is TemplateText for part in parts)
        return _text(text, marked_of(parts)) if is_tracked else text

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for node in source.find_all((nodes.Getitem, nodes.Compare, nodes.Test, nodes.Filter)):
            for constant in _inspected_constants(node):
                constant.only_read = True  # type: ignore[attr-defined]
        return super()._generate(source, *args, **kwargs)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object as the sandbox does, and track texts through their methods."""
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            owner, name = __obj.__self__, __obj.__name__
            if isinstance(owner, TemplateText) or name in ("replace", "join"):
                for compiler_argument in ("_loop_vars", "_block_vars"):
                    kwargs.pop(compiler_argument, None)
                return __self.tracked(getattr(str, name), owner, *args, **kwargs)
            # The separator that `partition` returns comes from the caller's text.
            args = tuple(map(_plain, args))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, TemplateText):
            left = _with_plain(left, _CONVERSION)
        return self.tracked(self.binop_table[operator], left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        owner = getattr(value, "__self__", None)
        if wrapper is None or not isinstance(owner, TemplateText):
            return wrapper
        wrap = super().wrap_str_format

        def formatted(text: str, *args: Any, **kwargs: Any) -> Any:
            bound = wrap(getattr(text, value.__name__))
            assert bound is not None
            return bound(*args, **kwargs)

        fields = _with_plain(owner, _FIELD)
        return lambda *args, **kwargs: self.tracked(formatted, fields, *args, **kwargs)

    def _tracking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def tracking(*args: Any, **kwargs: Any) -> Any:
            return self.tracked(function, *args, **kwargs)

        return tracking

    def tracked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `function`, with the template's characters in it tracked.

        The function is called again with as many arguments as possible in the private alphabet. If the result
        is the same in ordinary characters, its private characters are those that the template wrote.
        """
        values = [list(value) if isinstance(value, Iterator) else value for value in args]
        if not any(map(_is_tracked, values)):
            return function(*values, **kwargs)
        result = function(*map(_plain, values), **kwargs)
        if not isinstance(result, str | list | tuple):
            return result
        choices = [[_marked(value), _plain(value)] for value in values]
        for choice in product(*[pair if pair[0] != pair[1] else pair[:1] for pair in choices]):
            try:
                marked = function(*choice, **kwargs)
            except Exception:  # The function may need an argument in ordinary characters.
                continue
            if self._reads_as(marked, result):
                return _with_marks(result, marked)
        return self._with_marks_of(values[0], result)

    def _with_marks_of(self, source: Any, result: Any) -> Any:
        """Return `result` with the marks of `source`, if they differ only in case."""
        if not isinstance(source, TemplateText) or not isinstance(result, str):
            return result
        if len(source) != len(result) or str.lower(source) != result.lower():
            return result
        chars = zip(result, _plain(source), source.marked, strict=True)
        marks = (self.alphabet.mark(new) if mark != old else new for new, old, mark in chars)
        return _text(result, "".join(marks))

    def _reads_as(self, marked: Any, plain: Any) -> bool:
        """Return whether `marked` is equal to `plain` in ordinary characters."""
        if isinstance(plain, str):
            return isinstance(marked, str) and self.alphabet.unmark(marked) == plain
        return len(marked) == len(plain) and all(map(self._reads_as, marked, plain))


def _summands(node: nodes.Expr) -> list[nodes.Expr]:
    """Return the texts that `node` joins, or `node` itself if they may be other than texts."""
    operands: list[nodes.Expr] = []
    remaining = node
    while isinstance(remaining, nodes.Add):
        operands.append(remaining.right)
        remaining = remaining.left
    operands.append(remaining)
    if not any(isinstance(op, nodes.Const) and isinstance(op.value, str) for op in operands):
        return [node]
    # Adding an empty text to an operand that is not a text raises the same error as the sum.
    empty = nodes.Const("")
    return [
        op if isinstance(op, nodes.Const) else nodes.Add(empty, op, lineno=node.lineno)
        for op in reversed(operands)
    ]


# Filters that make new text from texts. Those that only select values need no tracking.
_TEXT_FILTERS = (
    *("join", "replace", "format", "indent", "title", "capitalize", "upper", "lower", "trim"),
    *("center", "wordwrap", "truncate"),
)
# Filters whose arguments may become prompt text.
_FILTERS_WITH_TEXTS = {*_TEXT_FILTERS, "default", "d"}


def _inspected_constants(node: nodes.Node) -> Iterator[nodes.Const]:
    """Yield constants that are only compared or looked up, and never become prompt text."""
    inspected: list[nodes.Node] = []
    match node:
        case nodes.Getitem():
            inspected = [node.arg]
        case nodes.Compare():
            inspected = [node.expr, *(comparison.expr for comparison in node.ops)]
            for operand in [*inspected]:
                inspected += operand.items if isinstance(operand, nodes.List | nodes.Tuple) else []
        case nodes.Test():
            inspected = [node.node, *node.args]
        case nodes.Filter() if node.name not in _FILTERS_WITH_TEXTS:
            inspected = [*node.args, *(pair.value for pair in node.kwargs)]
    yield from (constant for constant in inspected if isinstance(constant, nodes.Const))


def marked_of(parts: Iterable[str]) -> str:
    """Join texts, with the template's characters in the private alphabet."""
    return "".join([part.marked if isinstance(part, TemplateText) else part for part in parts])


def with_own(variables: Mapping[str, Any], alphabet: Alphabet) -> dict[str, Any]:
    """Return a template's variables, with roles and BOS and EOS tokens as text of the template."""
    special = {
        name: alphabet.written(value)
        for name in ("bos_token", "eos_token")
        if isinstance(value := variables.get(name), str)
    }
    roles: dict[str, str] = {}
    for message in variables.get("messages") or ():
        role = str(message["role"])
        if role not in roles:
            roles[role] = alphabet.written(role) if _ROLE.fullmatch(role) else role
        message["role"] = roles[role]
    return {**variables, **special}


def _with_plain(text: TemplateText, pattern: re.Pattern[str]) -> TemplateText:
    """Return `text` with every match of `pattern` in ordinary characters."""
    marks = list(text.marked)
    for match in pattern.finditer(_plain(text)):
        marks[slice(*match.span())] = match[0]
    return _text(_plain(text), "".join(marks))


def _is_tracked(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_tracked, value))
    return isinstance(value, TemplateText)


def _plain(value: Any) -> Any:
    """Return a value with its texts in ordinary characters."""
    match value:
        case TemplateText():
            return str.__str__(value)
        case list() | tuple():
            return type(value)(map(_plain, value))
    return value


def _marked(value: Any) -> Any:
    """Return a value with the template's characters in the private alphabet."""
    match value:
        case TemplateText():
            return value.marked
        case list() | tuple():
            return type(value)(map(_marked, value))
    return value


def _with_marks(plain: Any, marked: Any) -> Any:
    """Combine a value in ordinary characters and the same value in the private alphabet."""
    if isinstance(plain, str):
        return plain if plain == marked else _text(plain, marked)
    return type(plain)(map(_with_marks, plain, marked))
