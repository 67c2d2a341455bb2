"""`localspec help`: the help of commands, the pages of the documentation, and man pages in roff."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import click

import localspec
from localspec.cli import command_names, topics
from localspec.cli.app import Commands, flag
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


_MAX_SECTIONS = 12  # that a search prints
_MAX_LINES = 3  # of each


def _offered(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    del parameter
    commands = (inner.info_name or "" for inner in subcommands(context.find_root()))
    names = [*commands, *topics.pages()]
    return [name for name in names if name.startswith(typed)]


@click.command(
    help="Show help for a command, a page of the documentation, or the list of both. Other words are "
    "searched for in all pages.\n\n"
    "On a terminal a page that is longer than the screen opens in a pager (PAGER, or less).",
    epilog="Examples:\n\n\b\n  localspec help ask\n  localspec help history rm\n"
    "  localspec help pairs\n  localspec help --search proxy\n"
    "  localspec help --man ask | man -l -",
)
@click.argument("names", metavar="[COMMAND|TOPIC]...", nargs=-1, shell_complete=_offered)
@click.option(
    "--search", metavar="TEXT", help="Find the pages and sections that contain all of these words."
)
@flag("--man", "as_man", help="Print a man page, in roff.")
@click.pass_context
def command(
    context: click.Context, names: tuple[str, ...], search: str | None, as_man: bool
) -> int:
    root = context.find_root()
    if search is not None:
        if names or as_man:
            raise click.UsageError("--search stands alone: localspec help --search TEXT", context)
        return _print_sections(topics.search(search.split()), search.split())
    if names and not as_man:
        # A command or an alias comes before a page of that name, and a synonym after it.
        topic = None if _is_command(root, names[0]) else topics.find(names)
        if topic is not None:
            topics.show(topic)
            return 0
        if not _is_known(root, names[0]):
            if not (sections := topics.search(names)):
                raise click.UsageError(_unknown(root, names[0]), root)
            render.note(_unknown(root, " ".join(names)))
            return _print_sections(sections, names)
    named = _command_named(root, names)
    if as_man:
        render.line(page(named).removesuffix("\n"))
    else:
        topics.show_text(named.get_help() + ("" if names else f"\n\n{_topics(root)}"))
    return 0


def _group(root: click.Context) -> Commands:
    group = root.command
    assert isinstance(group, Commands)
    return group


def _is_command(root: click.Context, word: str) -> bool:
    group = _group(root)
    return group.get_command(root, word) is not None or word in group.aliases


def _is_known(root: click.Context, word: str) -> bool:
    return _is_command(root, word) or word in _group(root).synonyms


def _unknown(root: click.Context, word: str) -> str:
    group = _group(root)
    command = " ".join(group.hints.get(word, ()))
    command = command or command_names.closest(word, group.list_commands(root))
    meant = " or ".join(name for name in (command, *topics.near(word)) if name)
    return f"No command or page '{word}'{f'; did you mean {meant}?' if meant else '.'}"


def _command_named(root: click.Context, names: tuple[str, ...]) -> click.Context:
    at = root
    for name in names:
        if not isinstance(at.command, click.Group):
            raise click.UsageError(f"'{at.command_path}' has no commands.", at)
        if at is root and not _is_known(root, name):
            raise click.UsageError(_unknown(root, name), at)
        own, found, _ = at.command.resolve_command(at, [name])
        assert found is not None
        at = click.Context(found, parent=at, info_name=own)
    return at


def _topics(root: click.Context) -> str:
    formatter = root.make_formatter()
    with formatter.section("Pages, shown by localspec help TOPIC"):
        for title, entries in topics.groups().items():
            with formatter.section(title):
                formatter.write_dl(entries)
    return formatter.getvalue().rstrip("\n")


def _print_sections(sections: Sequence[topics.Section], words: Sequence[str]) -> int:
    """Print the sections of the documentation that contain all words. Return 1 if there is none."""
    for number, section in enumerate(sections[:_MAX_SECTIONS]):
        place = f"{section.topic}: {section.heading}"
        render.line(f"\n{place}" if number else place)
        for line in section.lines[:_MAX_LINES]:
            found = (topics.word_pattern(word).search(line) for word in words)
            start, end = min(match.span() for match in found if match)
            render.highlighted("  ", line, start, end)
    if len(sections) > _MAX_SECTIONS:
        render.note(f"{len(sections) - _MAX_SECTIONS} more sections: use more words.")
    if not sections:
        render.note(f"No page contains '{' '.join(words)}'.")
    return 0 if sections else 1


def pages(context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the file names and texts of the man pages of a command and of all below it."""
    yield f"{_name(context)}.1", page(context)
    for inner in subcommands(context):
        yield from pages(inner)


def page(context: click.Context) -> str:
    """Return the man page of a command."""
    command, name = context.command, _name(context)
    paragraphs = "\n.PP\n".join(map(_plain, (command.help or "").split("\n\n")))
    usage = " ".join(map(_plain, command.collect_usage_pieces(context)))
    parts = [
        f'.TH "{_plain(name.upper())}" 1 "" "localspec {localspec.__version__}" "User Commands"',
        f".SH NAME\n{_plain(name)} \\- {_plain(_summary(command))}",
        f".SH SYNOPSIS\n\\fB{_plain(context.command_path)}\\fR {usage}",
        f".SH DESCRIPTION\n{paragraphs}",
        _section("OPTIONS", _options(context)),
    ]
    inner = subcommands(context)
    items = [(f"{_bold(_name(each))}(1)", f"{_summary(each.command)}.") for each in inner]
    parts.append(_section("COMMANDS", items))
    if context.parent is None:
        parts.append(_section("EXIT STATUS", _EXIT))
        parts.append(_section("ENVIRONMENT", [(_bold(name), text) for name, text in _ENVIRONMENT]))
    # What follows "Example:" or "Examples:", line by line, with the spaces in it.
    examples = (command.epilog or "").partition(":")[2].replace("\b", "").splitlines()
    if lines := [line.strip().replace(" ", "\0") for line in examples if line.strip()]:
        shown = "\n".join(_plain(line).replace("\0", " ") for line in lines)
        parts.append(f".SH EXAMPLES\n.nf\n{shown}\n.fi")
    if context.parent is not None:
        parts.append(f".SH SEE ALSO\n.BR {_plain(_name(context.parent))} (1)")
    return "\n".join(filter(None, parts)) + "\n"


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _plain(text: str) -> str:
    """Return a text so that roff prints it as it is, on one line."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    text = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in text)
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _summary(command: click.Command) -> str:
    """Return the first sentence of a command's help, without its full stop."""
    return re.split(r"[.;:](?: |$)", " ".join((command.help or "").split()))[0]


def _section(title: str, items: Sequence[tuple[str, str]]) -> str:
    lines = [f".TP\n{term}\n{_plain(text)}" for term, text in items]
    return "\n".join([f".SH {title}", *lines]) if lines else ""


def _bold(text: str) -> str:
    return f"\\fB{_plain(text)}\\fR"


def _options(context: click.Context) -> list[tuple[str, str]]:
    items = []
    for each in context.command.get_params(context):
        record = each.get_help_record(context)
        if isinstance(each, click.Option) and record:
            flags = ", ".join(map(_bold, (*each.opts, *each.secondary_opts)))
            value = "" if each.is_flag else f" \\fI{_plain(each.make_metavar(context))}\\fR"
            items.append((flags + value, record[1]))
    return items


def subcommands(context: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a group's commands, in the order of its help; none for a single command."""
    group = context.command
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            if (command := group.get_command(context, name)) is not None:
                yield click.Context(command, parent=context, info_name=name)
