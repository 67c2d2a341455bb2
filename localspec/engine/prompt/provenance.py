"""Which characters of a rendered prompt the template wrote itself, and which came from the caller.

A template joins its own text and the caller's into one string, in which a special token that somebody
spelled in a message looks like one of the template's. So the constants of a template are compiled to
`TemplateText`, a `str` that carries a second copy of itself whose characters are written in a private
alphabet. What the template does with them keeps that copy; the caller's strings are ordinary ones. In the
end a special token whose characters are all in the private alphabet is the template's own, and any other
spelling is text. Where an operation is not understood the copy is lost, and the result counts as the
caller's: a special token may become text by mistake, but never text a special token.
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

# Lone surrogates: no valid text has them, so no caller can write in this alphabet.
_FIRST_MARK, _MARKS = 0xD800, 0x800
# A role such as `user` may stand inside a special token ("<|" + role + "|>"): a turn's kind is structure.
_ROLE = re.compile(r"\w{1,64}", re.ASCII)


_CONVERSION = re.compile(r"%[^A-Za-z%]*[A-Za-z%]")  # of the operator `%`
_FIELD = re.compile(r"\{[^{}]*\}")  # of `str.format`


class TemplateText(str):
    """Text of which the template wrote at least a part. `marked` is the same text, of the same length,
    with the template's characters in the private alphabet."""

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

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        return _text(str.__getitem__(self, place), self.marked[place])


def _text(text: str, marked: str) -> TemplateText:
    made = str.__new__(TemplateText, text)
    made.marked = marked
    return made


class Alphabet:
    """The special tokens of a vocabulary, as they are spelled and in the private alphabet."""

    def __init__(self, spellings: Sequence[str]) -> None:
        characters = dict.fromkeys(c for text in spellings for c in text if not c.isspace())
        marks = {ord(c): chr(_FIRST_MARK + at) for at, c in enumerate([*characters][:_MARKS])}
        self._marks = marks
        self._characters = {ord(mark): chr(character) for character, mark in marks.items()}
        self._pattern = pattern_of(spellings)
        self._spelling = {self.mark(text): text for text in spellings}
        self._marked_pattern = pattern_of(self._spelling)

    def mark(self, text: str) -> str:
        """Return `text` in the private alphabet, as far as special tokens have its characters."""
        return text.translate(self._marks)

    def unmark(self, marked: str) -> str:
        """Return a text that is partly in the private alphabet as it reads."""
        return marked.translate(self._characters)

    def written(self, text: str) -> str:
        """Return `text` as text of the template."""
        marked = self.mark(text)
        return text if marked == text else _text(text, marked)

    def special(self, text: str, marked: str, *, always: bool) -> list[int] | None:
        """Return where the template's own special tokens begin and end in `text`, in turns.

        None where every spelling of one in it is the template's, unless the places are wanted `always`;
        also for a text that is not valid Unicode, which no tokenizer accepts.
        """
        if not always:
            own = self._marked_pattern.findall(marked)
            if self._pattern.findall(text) == [*map(self._spelling.__getitem__, own)]:
                return None
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
        return [at for match in self._marked_pattern.finditer(marked) for at in match.span()]


# ------------------------------------------------------------------------ the environment


class _Generator(CodeGenerator):
    """Compiles the template's constants to `TemplateText`, where they may come into the prompt."""

    environment: ProvenanceEnvironment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str | list | tuple | dict) and not getattr(node, "only_read", False):
            self.write(self.environment.source(value))
        else:
            super().visit_Const(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802
        """Write `{{ a + b }}` as `{{ a }}{{ b }}` where it joins texts: there are ten of these to a turn."""
        parts = [part for each in node.nodes for part in _summands(each)]
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
    """A sandbox whose templates remember which text is theirs. `watch` comes before any template."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"%", "*"})
    alphabet: Alphabet

    def watch(self, alphabet: Alphabet) -> None:
        """Remember where the special tokens of `alphabet` come from."""
        self.alphabet = alphabet
        self.constants: list[str] = []
        for name in _TEXT_FILTERS:
            self.filters[name] = self._tracking(self.filters[name])

    def source(self, value: Any) -> str:
        """Return the source code of a constant, the texts in it as text of the template."""
        match value:
            case str() if (
                type(value) is str and (text := self.alphabet.written(value)) is not value
            ):
                self.constants.append(text)
                return f"environment.constants[{len(self.constants) - 1}]"
            case list():
                return f"[{', '.join(map(self.source, value))}]"
            case tuple():
                return f"({''.join(f'{self.source(each)}, ' for each in value)})"
            case dict():
                pairs = (f"{self.source(key)}: {self.source(of)}" for key, of in value.items())
                return f"{{{', '.join(pairs)}}}"
        return repr(value)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a block or a macro wrote."""
        return joined(parts)

    def _generate(self, source: nodes.Template, *args: Any, **more: Any) -> str:
        for node in source.find_all((nodes.Getitem, nodes.Compare, nodes.Test, nodes.Filter)):
            for constant in _only_read(node):
                constant.only_read = True  # type: ignore[attr-defined]
        return super()._generate(source, *args, **more)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call, as the sandbox does, and follow a text through its methods."""
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            owner, name = __obj.__self__, __obj.__name__
            if isinstance(owner, TemplateText) or name in ("replace", "join"):
                for compilers_own in ("_loop_vars", "_block_vars"):
                    kwargs.pop(compilers_own, None)
                return __self.tracked(getattr(str, name), owner, *args, **kwargs)
            # the separator that `partition` found in the caller's text is the caller's
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
        """Return what `function` makes of texts, with the template's parts of it.

        It is called again with the private alphabet in place of as many arguments as possible; where the
        result then reads the same, that alphabet shows in it what the template wrote.
        """
        given = [list(value) if isinstance(value, Iterator) else value for value in args]
        if not any(map(_is_written, given)):
            return function(*given, **kwargs)
        real = function(*map(_plain, given), **kwargs)
        if not isinstance(real, str | list | tuple):
            return real
        choices = [[_marked(value), _plain(value)] for value in given]
        for choice in product(*[each if each[0] != each[1] else each[:1] for each in choices]):
            try:
                marked = function(*choice, **kwargs)
            except Exception:  # it wants the argument as it reads
                continue
            if self._reads(marked, real):
                return _with_marks(real, marked)
        return self._recased(given[0], real)

    def _recased(self, before: Any, after: Any) -> Any:
        """Return `after` with the marks of `before`, if they differ in upper and lower case alone."""
        if not isinstance(before, TemplateText) or not isinstance(after, str):
            return after
        if len(before) != len(after) or str.lower(before) != after.lower():
            return after
        marks = (
            self.alphabet.mark(new) if mark != old else new
            for new, old, mark in zip(after, _plain(before), before.marked, strict=True)
        )
        return _text(after, "".join(marks))

    def _reads(self, marked: Any, real: Any) -> bool:
        if isinstance(real, str):
            return isinstance(marked, str) and self.alphabet.unmark(marked) == real
        return len(marked) == len(real) and all(map(self._reads, marked, real))


def _summands(node: nodes.Expr) -> list[nodes.Expr]:
    """Return the texts that `node` joins, or `node` alone where they need not be texts."""
    spine: list[nodes.Expr] = []
    rest = node
    while isinstance(rest, nodes.Add):
        spine.append(rest.right)
        rest = rest.left
    spine.append(rest)
    if not any(isinstance(each, nodes.Const) and isinstance(each.value, str) for each in spine):
        return [node]
    # An operand that is no text fails as it does beside the constant.
    empty = nodes.Const("")
    return [
        each if isinstance(each, nodes.Const) else nodes.Add(empty, each, lineno=node.lineno)
        for each in reversed(spine)
    ]


# Filters that make new text of texts. Those that only choose among values need nothing.
_TEXT_FILTERS = (
    *("join", "replace", "format", "indent", "title", "capitalize", "upper", "lower", "trim"),
    *("center", "wordwrap", "truncate"),
)
_WITH_TEXTS = {*_TEXT_FILTERS, "default", "d"}  # what they are given may come into the prompt


def _only_read(node: nodes.Node) -> Iterator[nodes.Const]:
    """Yield constants that are compared or looked up, and are no part of the prompt."""
    inspected: list[nodes.Node] = []
    match node:
        case nodes.Getitem():
            inspected = [node.arg]
        case nodes.Compare():
            inspected = [node.expr, *(operand.expr for operand in node.ops)]
            for each in [*inspected]:
                inspected += each.items if isinstance(each, nodes.List | nodes.Tuple) else []
        case nodes.Test():
            inspected = [node.node, *node.args]
        case nodes.Filter() if node.name not in _WITH_TEXTS:
            inspected = [*node.args, *(pair.value for pair in node.kwargs)]
    yield from (each for each in inspected if isinstance(each, nodes.Const))


def joined(parts: Iterable[str]) -> str:
    """Return the parts as one text, with the template's parts of it."""
    parts = list(parts)
    text = "".join(parts)
    if any(type(part) is TemplateText for part in parts):
        return _text(text, marked_of(parts))
    return text


def marked_of(parts: Iterable[str]) -> str:
    """Return the parts as one text, what the template wrote of it in the private alphabet."""
    return "".join([part.marked if isinstance(part, TemplateText) else part for part in parts])


def with_own(variables: Mapping[str, Any], alphabet: Alphabet) -> dict[str, Any]:
    """Return the variables of a template, those that are structure as text of its own."""
    own = {
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
    return {**variables, **own}


def _with_plain(text: TemplateText, pattern: re.Pattern[str]) -> TemplateText:
    """Return `text` with what `pattern` matches in it as ordinary characters."""
    marks = list(text.marked)
    for match in pattern.finditer(_plain(text)):
        marks[slice(*match.span())] = match[0]
    return _text(_plain(text), "".join(marks))


def _is_written(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_written, value))
    return isinstance(value, TemplateText)


def _plain(value: Any) -> Any:
    match value:
        case TemplateText():
            return str.__str__(value)
        case list() | tuple():
            return type(value)(map(_plain, value))
    return value


def _marked(value: Any) -> Any:
    match value:
        case TemplateText():
            return value.marked
        case list() | tuple():
            return type(value)(map(_marked, value))
    return value


def _with_marks(real: Any, marked: Any) -> Any:
    if isinstance(real, str):
        return real if real == marked else _text(real, marked)
    return type(real)(map(_with_marks, real, marked))
