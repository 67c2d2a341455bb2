"""`localspec help`: what --help says, and the same as man pages in roff."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

import localspec
from localspec.cli.terminal import render

# Of the program as a whole, on its own page.
_EXIT = (
    ("0", "Success."),
    ("1", "An error."),
    ("2", "Wrong usage."),
    ("3", "The daemon is not running, or could not be started."),
    ("130", "Interrupted."),
)
_ENVIRONMENT = (
    ("LOCALSPEC_HOME", "Folder for everything: socket, configuration, state and models."),
    ("LOCALSPEC_<KEY>", "Overrides a key of the configuration; see localspec config."),
    ("NO_COLOR", "Disables colors."),
)


def _offered(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    del parameter
    return [name for name, _ in _commands(context.find_root()) if name.startswith(typed)]


@click.command(
    help="Show help for a command, or the list of commands.",
    epilog="Examples:\n\n\b\n  localspec help ask\n  localspec help history rm\n"
    "  localspec help --man ask | man -l -",
)
@click.argument("names", metavar="[COMMAND]...", nargs=-1, shell_complete=_offered)
@click.option("--man", "as_man", is_flag=True, help="Print a man page, in roff.")
@click.pass_context
def command(context: click.Context, names: tuple[str, ...], as_man: bool) -> int:
    at = context.find_root()
    for name in names:
        if not isinstance(at.command, click.Group):
            raise click.UsageError(f"'{at.command_path}' has no commands.", at)
        own, found, _ = at.command.resolve_command(at, [name])
        assert found is not None
        at = click.Context(found, parent=at, info_name=own)
    render.line(page(at).removesuffix("\n") if as_man else at.get_help())
    return 0


def pages(context: click.Context) -> Iterator[tuple[str, str]]:
    """The file names and texts of the pages of a command and of all below it."""
    yield f"{_name(context)}.1", page(context)
    if isinstance(context.command, click.Group):
        for name, command in _commands(context):
            yield from pages(click.Context(command, parent=context, info_name=name))


def page(context: click.Context) -> str:
    """One command's page."""
    command, name = context.command, _name(context)
    text = command.help or ""
    parts = [
        f'.TH "{_plain(name.upper())}" 1 "" "localspec {localspec.__version__}" "User Commands"',
        f".SH NAME\n{_plain(name)} \\- {_plain(_summary(command))}",
        f".SH SYNOPSIS\n{_synopsis(context)}",
        f".SH DESCRIPTION\n{_paragraphs(text)}",
        _section("OPTIONS", _options(context)),
        _section("COMMANDS", _inner(context)),
    ]
    if context.parent is None:
        parts.append(_section("EXIT STATUS", [_item(_plain(a), b) for a, b in _EXIT]))
        environment = [_item(f"\\fB{_plain(a)}\\fR", b) for a, b in _ENVIRONMENT]
        parts.append(_section("ENVIRONMENT", environment))
    parts.append(_examples(command.epilog or ""))
    if context.parent is not None:
        parts.append(f".SH SEE ALSO\n.BR {_plain(_name(context.parent))} (1)")
    return "\n".join(part for part in parts if part) + "\n"


def _name(context: click.Context) -> str:
    """As in "localspec-history-rm"."""
    return context.command_path.replace(" ", "-")


def _plain(text: str) -> str:
    """Text that roff prints as it is, on one line."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    text = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in text)
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _summary(command: click.Command) -> str:
    """The first sentence of its help, without its full stop."""
    return re.split(r"[.;:](?: |$)", " ".join((command.help or "").split()))[0]


def _synopsis(context: click.Context) -> str:
    pieces = [_plain(piece) for piece in context.command.collect_usage_pieces(context)]
    return f"\\fB{_plain(context.command_path)}\\fR {' '.join(pieces)}"


def _paragraphs(text: str) -> str:
    return "\n.PP\n".join(_plain(each) for each in text.split("\n\n"))


def _section(title: str, items: list[str]) -> str:
    return "\n".join([f".SH {title}", *items]) if items else ""


def _item(term: str, text: str) -> str:
    return f".TP\n{term}\n{_plain(text)}"


def _options(context: click.Context) -> list[str]:
    items = []
    for each in context.command.get_params(context):
        record = each.get_help_record(context)
        if isinstance(each, click.Option) and record:
            flags = ", ".join(
                f"\\fB{_plain(flag)}\\fR" for flag in (*each.opts, *each.secondary_opts)
            )
            value = "" if each.is_flag else f" \\fI{_plain(each.make_metavar(context))}\\fR"
            items.append(_item(flags + value, record[1]))
    return items


def _commands(context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Those of a group, by name."""
    group = context.command
    for name in group.list_commands(context) if isinstance(group, click.Group) else []:
        command = group.get_command(context, name) if isinstance(group, click.Group) else None
        if command is not None:
            yield name, command


def _inner(context: click.Context) -> list[str]:
    named = _plain(_name(context))
    return [
        _item(f"\\fB{named}\\-{_plain(name)}\\fR(1)", f"{_summary(command)}.")
        for name, command in _commands(context)
    ]


def _examples(epilog: str) -> str:
    """What follows "Example:" or "Examples:", line by line."""
    _, _, text = epilog.partition(":")
    lines = [line.strip() for line in text.replace("\b", "").splitlines() if line.strip()]
    if not lines:
        return ""
    shown = "\n".join(_verbatim(line) for line in lines)
    return f".SH EXAMPLES\n.nf\n{shown}\n.fi"


def _verbatim(line: str) -> str:
    """One line of an example, its spaces kept."""
    kept = re.sub(" ", "\0", line)
    return _plain(kept).replace("\0", " ")
