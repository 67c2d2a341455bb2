"""Templates: saved prompts with $variables and their options, as TOML files in the config folder.

Some are built in, as files in the folder prompts. A file of the same name overrides a built-in one. The keys
of a file are `prompt` and the names of `options.ASK`. `--save` writes absolute paths. A relative path in a
file that a person wrote is relative to the folder of the command that uses it.
"""

from __future__ import annotations

import re
import string
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localspec import files, literals, paths
from localspec.cli import ask, inputs
from localspec.cli import options as option_table
from localspec.cli.options import AskOptions
from localspec.cli.terminal import render
from localspec.errors import LocalspecError, UsageError

# `tokens` of the built-in templates: room for thoughts. The text of their answers has another limit.
SHELL_TOKENS = 2048

# The prompts of `localspec cmd`, `commit` and `explain`. The wording suits small models too. There are no
# examples, because small models repeat an example as their answer, and the task comes last.
BUILTIN = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted(Path(__file__).with_name("prompts").glob("*.toml"))
}


# Options that only make sense for one run, so no template holds them.
_RUN_OPTIONS = set("last conversation template save replace no_daemon_start debug".split())
SAVED_OPTIONS = {each.name: each for each in option_table.ASK if each.name not in _RUN_OPTIONS}
_NAME = re.compile(r"\w[\w.-]{0,63}")
_TYPE_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
INPUT_VARIABLE = "input"  # the variable that stands for stdin, files and words
_NEW_FILE = """\
# A template; use it with: localspec ask -t {name} WORDS
# $input is what is asked about; give other names with -p NAME=VALUE, and write $$ for a dollar sign.
prompt = "Explain $input"
# system = "Be brief."
# Other keys: {keys}
"""


def folder() -> Path:
    return paths.default_paths().config / "templates"


def names() -> list[str]:
    """Return the names of all templates, the built-in ones included."""
    own_names = {file.stem for file in folder().glob("*.toml") if _NAME.fullmatch(file.stem)}
    return sorted({*BUILTIN, *own_names})


def path(name: str) -> Path:
    """Return the file of a template.

    Raises UsageError if there is no such template, or it is built in and has no file.
    """
    file = folder() / f"{name}.toml"
    if _NAME.fullmatch(name) and file.exists():
        return file
    if name in BUILTIN:
        raise UsageError(
            f"Template '{name}' is built in and has no file. To override it: localspec "
            f"templates edit {name}"
        )
    raise UsageError(
        f"There is no template '{name}'; there are {', '.join(names())}. To create one: "
        "localspec ask --save NAME 'Explain $input'"
    )


def text(name: str) -> str:
    """Return the text of a template's file, whether it is valid or not.

    Raises UsageError if there is no such template, or its file cannot be read.
    """
    return _read_bytes(name).decode(errors="replace")


def _read_bytes(name: str) -> bytes:
    if name in BUILTIN and not (folder() / f"{name}.toml").exists():
        return BUILTIN[name].encode()
    file = path(name)
    try:
        return paths.read_file(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from error


def read(name: str) -> dict[str, Any]:
    """Return the keys of a template.

    Raises:
        UsageError: there is no such template, or its file is wrong; with the line and a remedy.
    """
    data = _read_bytes(name)
    try:
        return parse(data, str(folder() / f"{name}.toml"))
    except UsageError as error:
        raise UsageError(f"{error.message} To edit it: localspec templates edit {name}") from None


def parse(data: bytes, file_name: str) -> dict[str, Any]:
    """Return the keys of the template in `data`, the contents of the file `file_name`.

    Raises:
        UsageError: it is not a template. The message begins with the file's name and the line.
    """
    try:
        text = data.decode()
        keys = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file_name}, line {line}: not UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        message, _, position = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+)", position)
        line = int(found[1]) if found else text.count("\n") + 1
        raise UsageError(f"{file_name}, line {line}: {message or error}.") from error
    for key, value in keys.items():
        if problem := _find_problem(key, value):
            pattern = rf"^[ \t]*\[*[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*[=.\]]"
            found = re.search(pattern, text, re.MULTILINE)
            line = text.count("\n", 0, found.start()) + 1 if found else 1
            raise UsageError(f"{file_name}, line {line}: {problem}")
    return keys


def _find_problem(key: str, value: object) -> str:
    """Return why a template cannot have this value, or an empty string if it can."""
    option = SAVED_OPTIONS.get(key)
    if option is None and key != "prompt":
        return f"unknown key '{key}'; the keys are prompt, {', '.join(SAVED_OPTIONS)}."
    if option is not None and option.many:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return f"'{key}' must be a list of strings, as in {key} = [\"…\"]."
        invalid = [item for item in value if key == "values" and not _is_assignment(item)]
        return f"'{invalid[0]}' in 'values' must be NAME=VALUE." if invalid else ""
    kind = str if option is None else option.kind
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"'{key}' must be {_TYPE_NAMES[kind]}, not {value!r}."
    if option is not None and isinstance(value, int | float) and kind is not bool:
        return "" if option.low <= value <= option.high else f"'{key}' must be {option.limits}."
    if key in ("prompt", "system") and not string.Template(str(value)).is_valid():
        return f"'{key}' has a $ that names no variable; write $$ for a dollar sign."
    return ""


def _is_assignment(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and name.isidentifier()


def parameters(keys: dict[str, Any]) -> list[str]:
    """Return the names of a template's parameters, to which `-p` gives values, in the order of the text."""
    variables = _variables(keys.get("system", "")) + _variables(keys.get("prompt", ""))
    return [name for name in dict.fromkeys(variables) if name != INPUT_VARIABLE]


def _variables(text: str) -> list[str]:
    return string.Template(text).get_identifiers()


def usage(name: str, keys: dict[str, Any]) -> str:
    """Return a command line that uses the template. Words in capitals are placeholders."""
    values = _parse_values(keys.get("values", []))
    missing = [f"-p {parameter}=VALUE" for parameter in parameters(keys) if parameter not in values]
    takes_words = INPUT_VARIABLE in _variables(keys.get("prompt", f"${INPUT_VARIABLE}"))
    return " ".join(["localspec ask -t", name, *missing, *["WORDS"] * takes_words])


def _parse_values(values: list[str]) -> dict[str, str]:
    """Return the values of `-p NAME=VALUE` by name.

    Raises UsageError if one has no name, or is for $input.
    """
    values_by_name = {}
    for assignment in values:
        name, _, value = assignment.partition("=")
        if not _is_assignment(assignment):
            example = "for example: -p language=German"
            raise UsageError(f"-p {assignment}: must be NAME=VALUE, {example}")
        if name == INPUT_VARIABLE:
            message = "$input is what is asked about; give it as words, with -f or on stdin."
            raise UsageError(message)
        values_by_name[name] = value
    return values_by_name


class Template:
    """A template in use. `options` are those of the command line, completed by the template's."""

    def __init__(self, options: AskOptions, known: Mapping[str, str] | None = None) -> None:
        """Load the template `options.template` with the values `options.values` for its parameters.

        `known` has values for parameters that need none on the command line, whether or not the template uses
        them. Raises UsageError if there is no such template, it is wrong, or it has no such parameters.
        """
        self._name = options.template or ""
        keys = read(self._name)
        self._prompt: str = keys.pop("prompt", "")
        self._system: str | None = keys.get("system") if options.system is None else None
        own = parameters({**keys, "prompt": self._prompt})
        if unknown := [name for name in _parse_values(options.values) if name not in own]:
            listing = f"it has ${', $'.join(own)}" if own else "it has none"
            raise UsageError(f"Template '{self._name}' has no parameter ${unknown[0]}; {listing}.")
        values = _parse_values([*keys.pop("values", []), *options.values])
        self._values = {**(known or {}), **values}
        used = parameters({"prompt": self._prompt, "system": self._system or ""})
        if missing := [name for name in used if name not in self._values]:
            cure = " ".join(f"-p {name}=VALUE" for name in missing)
            raise UsageError(f"Template '{self._name}' needs ${', $'.join(missing)}; add {cure}")
        self.options = _merge_options(options, keys)

    def question(self, text: str) -> str:
        """Return the prompt with `text` in the place of $input, or followed by it without $input.

        It also sets the system message of `options`, which may name $input too. Raises UsageError if the
        question would be empty, or there is nothing for $input.
        """
        variables = _variables(self._prompt)
        if INPUT_VARIABLE in variables + _variables(self._system or "") and not text.strip():
            raise UsageError(
                f"Template '{self._name}' needs something to ask about ($input): words, -f FILE "
                f"or standard input. For example: localspec ask -t {self._name} WORDS"
            )
        values = {**self._values, INPUT_VARIABLE: text}
        question = string.Template(self._prompt).substitute(values)
        if text.strip() and INPUT_VARIABLE not in variables:
            question = f"{question}\n\n{text}" if question else text
        if not question.strip():
            raise UsageError(f"No question given; for example: localspec ask -t {self._name} WORDS")
        if self._system is not None:
            self.options.system = string.Template(self._system).substitute(values)
        return question


def _merge_options(options: AskOptions, keys: dict[str, Any]) -> AskOptions:
    """Return the options of the command line, completed by the template's keys.

    Options of the command line win, also over keys that they exclude. Of lists the template's items come
    first.
    """
    changes: dict[str, Any] = {}
    for group in option_table.EXCLUSIVE:
        if any(getattr(options, name) for name in group):
            keys = {key: value for key, value in keys.items() if key not in group}
    for key, value in keys.items():
        if isinstance(given := getattr(options, key), list):
            changes[key] = [*value, *given]
        elif _is_unset(given):
            changes[key] = value
    return options.changed(**changes)


def save(options: AskOptions) -> None:
    """Write the words and options as the template `options.save`.

    Raises UsageError if the name is not valid, there is nothing to save, some option cannot be saved, or such
    a template exists and there is no terminal to ask at, and LocalspecError if the person at the terminal
    does not want it replaced.
    """
    name = options.save or ""
    _check_name(name)
    given: dict[str, Any] = {"prompt": " ".join(options.words)} if options.words else {}
    given |= {key: value for key in SAVED_OPTIONS if not _is_unset(value := getattr(options, key))}
    if not given:
        example = f"localspec ask --save {name} 'Explain $input'"
        raise UsageError(f"There is nothing to save; for example: {example}")
    keys = {key: _make_permanent(key, value) for key, value in given.items()}
    for key, value in keys.items():
        if problem := _find_problem(key, value):
            raise UsageError(f"--save {name}: {problem}")
    if unused := _parse_values(keys.get("values", [])).keys() - set(parameters(keys)):
        raise UsageError(f"The prompt has no ${min(unused)}; leave out -p {min(unused)}=…")
    try:
        text = "".join(f"{key} = {literals.toml(value)}\n" for key, value in keys.items())
    except ValueError:
        raise UsageError(f"--save {name}: what is saved must be text; this is not UTF-8.") from None
    if name in names() and not options.replace and _read_bytes(name) != text.encode():
        _confirm_replacement(name)
    _write(folder() / f"{name}.toml", text)
    _print_saved(name, keys)


def _confirm_replacement(name: str) -> None:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"A template '{name}' already exists; --force replaces it.")
    import click

    if not click.confirm(f"A template '{name}' already exists. Replace it?", err=True):
        raise LocalspecError(f"Nothing was saved; the template '{name}' was not changed.")


def _print_saved(name: str, keys: dict[str, Any]) -> None:
    render.line(f"Saved {folder() / f'{name}.toml'}. Use it with: {usage(name, keys)}")


def _is_unset(value: object) -> bool:
    """Return whether an option was not given. A zero was: `--temperature 0`."""
    return value is None or value is False or value == []


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        allowed = "use letters, digits, '-', '_' and '.'."
        raise UsageError(f"'{name}' is not a valid template name; {allowed}")


def _make_permanent(key: str, value: Any) -> Any:
    """Return an option's value with absolute paths and clean text.

    Raises UsageError if the name of a file or pair is not UTF-8, which a template must be.
    """
    result: Any
    if key == "files":
        result = [file if file == "-" else inputs.absolute(file) for file in value]
    elif key == "model":
        result = inputs.resolve_pair(value)
    elif key == "schema" and not value.lstrip().startswith("{"):
        result = inputs.absolute(value)
    else:
        return ask.clean(value) if isinstance(value, str) else value
    for name in result if key == "files" else [result]:
        if name != (cleaned := ask.clean(name)):
            raise UsageError(
                f"{cleaned}: a template cannot name this file, whose name is not UTF-8."
            )
    return result


def _write(file: Path, text: str) -> None:
    """Write a file in one step, so that a full disk does not damage the old one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # The path is resolved, so that a link, for example into dotfiles, stays a link.
    files.write_atomically(file.resolve(), text.encode())


def edit(name: str) -> None:
    """Let a person edit a copy, which becomes the template when it is valid.

    Raises UsageError if the name is not valid, or the copy is wrong and the template was not changed.
    """
    _check_name(name)
    file = folder() / f"{name}.toml"
    other_keys = ", ".join(key for key in SAVED_OPTIONS if key != "system")
    old = text(name) if name in names() else ""

    def problem(text: str) -> str:
        try:
            parse(text.encode(), f"{name}.toml")
        except UsageError as error:
            return error.message
        return ""

    new = old or _NEW_FILE.format(name=name, keys=other_keys)
    edited = inputs.edit_text(new, problem, f"{file} was not changed.")
    if edited is None or edited == old:
        render.line("No changes.")
        return
    _write(file, edited)
    _print_saved(name, parse(edited.encode(), name))


def remove(template_names: list[str]) -> None:
    """Delete all of these templates, or none. Raises UsageError if one of them does not exist."""
    for file in [path(name) for name in dict.fromkeys(template_names)]:
        file.unlink()
        render.line(f"Removed {file.stem}.")


def list_templates() -> list[dict[str, Any]]:
    """Return all templates: `name`, `file`, `parameters`, `template` (its keys) and `problem`.

    `file` is None for a built-in template, and `problem` is None for a valid one.
    """
    entries = []
    own_files = {file.stem: str(file) for file in folder().glob("[!.]*.toml")}
    for name in sorted({*BUILTIN, *own_files}):
        keys, problem = {}, None
        try:
            _check_name(name)
            keys = read(name)
        except UsageError as error:
            problem = error.message
        entry = {"name": name, "file": own_files.get(name), "parameters": parameters(keys)}
        entries.append({**entry, "template": keys, "problem": problem})
    return entries
