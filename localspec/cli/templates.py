"""Saved prompts with the options they are asked with: TOML files in the config folder, with $variables.

Some come with localspec (prompts.py); a file of the same name comes before each. A file's keys are `prompt`
and the names that `options.ASK` has. Paths in it are absolute when `--save` wrote them; a relative one in a
file that a person wrote is read from the folder of the command that uses it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from string import Template as Dollars
from typing import Any

from localspec import files, literals, paths
from localspec.cli import ask, inputs
from localspec.cli import options as table
from localspec.cli.prompts import BUILTIN
from localspec.cli.terminal import render
from localspec.errors import LocalspecError, UsageError

# Options of one run, which no template holds.
_OF_ONE_RUN = {
    *("last", "conversation", "template", "save", "replace", "no_daemon_start", "debug"),
}
KEPT = {each.name: each for each in table.ASK if each.name not in _OF_ONE_RUN}
_NAME = re.compile(r"\w[\w.-]{0,63}")
_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
INPUT = "input"  # the variable for what is asked about: stdin, files and words
_NEW = """\
# A template; use it with: localspec ask -t {name} WORDS
# $input is what is asked about; give other names with -p NAME=VALUE, and write $$ for a dollar sign.
prompt = "Explain $input"
# system = "Be brief."
# Other keys: {keys}
"""


def folder() -> Path:
    return paths.default_paths().config / "templates"


def names() -> list[str]:
    """Those that `-t` takes."""
    found = {each.stem for each in folder().glob("*.toml") if _NAME.fullmatch(each.stem)}
    return sorted({*BUILTIN, *found})


def path(name: str) -> Path:
    """The file of the template of that name.

    Raises:
        UsageError: there is no such template, or no file of it because it comes with localspec.
    """
    found = folder() / f"{name}.toml"
    if _NAME.fullmatch(name) and found.exists():
        return found
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
    """A template as its file has it, whether right or wrong.

    Raises:
        UsageError: there is no such template, or its file cannot be read.
    """
    return _data(name).decode(errors="replace")


def _data(name: str) -> bytes:
    if name in BUILTIN and not (folder() / f"{name}.toml").exists():
        return BUILTIN[name].encode()
    file = path(name)
    try:
        return paths.read_file(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from error


def read(name: str) -> dict[str, Any]:
    """The keys of a template.

    Raises:
        UsageError: there is no such template, or its file is wrong: which, in what line, and the cure.
    """
    data = _data(name)
    try:
        return parsed(data, str(folder() / f"{name}.toml"))
    except UsageError as error:
        raise UsageError(f"{error.message} To edit it: localspec templates edit {name}") from None


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """The keys of a file that is called `where`.

    Raises:
        UsageError: it is no template; the message begins with `where` and the line.
    """
    try:
        text = data.decode()
        found = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{where}, line {line}: not UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        line_ = re.match(r"line (\d+)", place)
        number = int(line_[1]) if line_ else text.count("\n") + 1
        raise UsageError(f"{where}, line {number}: {message or error}.") from error
    for key, value in found.items():
        if problem := _problem(key, value):
            at = re.search(rf"^[ \t\[]*[\"']?{re.escape(key)}\b", text, re.MULTILINE)
            number = text.count("\n", 0, at.start()) + 1 if at else 1
            raise UsageError(f"{where}, line {number}: {problem}")
    return found


def _problem(key: str, value: object) -> str:
    """Why a template cannot have this; nothing where it can."""
    option = KEPT.get(key)
    if option is None and key != "prompt":
        return f"unknown key '{key}'; the keys are prompt, {', '.join(KEPT)}."
    if option is not None and option.many:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            return f"'{key}' must be a list of strings, as in {key} = [\"…\"]."
        wrong = [each for each in value if not _is_pair(each)] if key == "values" else []
        return f"'{wrong[0]}' in 'values' must be NAME=VALUE." if wrong else ""
    kind = str if option is None else option.kind
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"'{key}' must be {_WORDS[kind]}, not {value!r}."
    if option is not None and isinstance(value, int | float) and kind is not bool:
        return "" if option.low <= value <= option.high else f"'{key}' must be {option.limits}."
    if key in ("prompt", "system") and not Dollars(str(value)).is_valid():
        return f"'{key}' has a $ that names no variable; write $$ for a dollar sign."
    return ""


def _is_pair(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and name.isidentifier()


def parameters(keys: dict[str, Any]) -> list[str]:
    """What `-p` gives values to, in the order of the text."""
    found = _variables(keys.get("system", "")) + _variables(keys.get("prompt", ""))
    return [each for each in dict.fromkeys(found) if each != INPUT]


def _variables(text: str) -> list[str]:
    return Dollars(text).get_identifiers()


def usage(name: str, keys: dict[str, Any]) -> str:
    """How the template is used: a command line whose words in capitals are to be filled in."""
    given = _given(keys.get("values", []))
    missing = [f"-p {each}=VALUE" for each in parameters(keys) if each not in given]
    words = ["WORDS"] if INPUT in _variables(keys.get("prompt", f"${INPUT}")) else []
    return " ".join(["localspec ask -t", name, *missing, *words])


def _given(values: list[str]) -> dict[str, str]:
    """By name. Raises UsageError: one has no name, or is for what is asked about."""
    found = {}
    for each in values:
        name, _, value = each.partition("=")
        if not _is_pair(each):
            raise UsageError(f"-p {each}: must be NAME=VALUE, for example: -p language=German")
        if name == INPUT:
            raise UsageError(
                "$input is what is asked about; give it as words, with -f or on stdin."
            )
        found[name] = value
    return found


# ---------------------------------------------------------------------------- used


class Template:
    """A template in use. `options` are those given, with the template's where none was."""

    def __init__(self, options: dict[str, Any], known: Mapping[str, str] | None = None) -> None:
        """`options["template"]` names it, and `options["values"]` are for its parameters.

        `known`: parameters that have a value by themselves, whether the template uses them or not.

        Raises:
            UsageError: there is no such template, it is wrong, or the parameters are not its own.
        """
        self._name = options["template"]
        keys = read(self._name)
        self._prompt: str = keys.pop("prompt", "")
        self._system: str | None = keys.get("system") if options["system"] is None else None
        its = parameters({**keys, "prompt": self._prompt})
        if unused := [each for each in _given(options["values"]) if each not in its]:
            has = f"it has ${', $'.join(its)}" if its else "it has none"
            raise UsageError(f"Template '{self._name}' has no parameter ${unused[0]}; {has}.")
        values = _given([*keys.pop("values", []), *options["values"]])
        self._values = {**(known or {}), **values}
        used = parameters({"prompt": self._prompt, "system": self._system or ""})
        if missing := [each for each in used if each not in self._values]:
            cure = " ".join(f"-p {each}=VALUE" for each in missing)
            raise UsageError(f"Template '{self._name}' needs ${', $'.join(missing)}; add {cure}")
        self.options = _merged(options, keys)

    def question(self, text: str) -> str:
        """The prompt about `text`, which it is followed by where it does not name $input.

        `options` get the system message, which may name $input too.

        Raises:
            UsageError: nothing would be asked, or nothing stand in the place of $input.
        """
        asked = _variables(self._prompt)
        if INPUT in asked + _variables(self._system or "") and not text.strip():
            raise UsageError(
                f"Template '{self._name}' needs something to ask about ($input): words, -f FILE "
                f"or standard input. For example: localspec ask -t {self._name} WORDS"
            )
        values = {**self._values, INPUT: text}
        question = Dollars(self._prompt).substitute(values)
        if text.strip() and INPUT not in asked:
            question = f"{question}\n\n{text}" if question else text
        if not question.strip():
            raise UsageError(f"No question given; for example: localspec ask -t {self._name} WORDS")
        if self._system is not None:
            self.options["system"] = Dollars(self._system).substitute(values)
        return question


def _merged(options: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """What was given comes first, also before what excludes it; of lists the template's part does."""
    merged = dict(options)
    for group in table.EXCLUSIVE:
        if any(options.get(each) for each in group):
            keys = {key: value for key, value in keys.items() if key not in group}
    for key in keys.keys() & options.keys():
        if isinstance(options[key], list):
            merged[key] = [*keys[key], *options[key]]
        elif _left_out(options[key]):
            merged[key] = keys[key]
    return merged


def applied(
    options: dict[str, Any], given: str, known: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """The options with the template's where none was given, and the question about `given`."""
    template = Template(options, known)
    return template.options, template.question(given)


# ---------------------------------------------------------------------------- changed


def save(options: dict[str, Any]) -> None:
    """Write the words and options as the template `options["save"]`.

    Raises:
        UsageError: the name is none, there is nothing to save, something of it cannot be, or there is
            such a template and nobody to ask.
        LocalspecError: the person at the terminal does not want it replaced.
    """
    name = options["save"]
    _check_name(name)
    keys: dict[str, Any] = {"prompt": " ".join(options["words"])} if options["words"] else {}
    keys |= {key: options[key] for key in KEPT if not _left_out(options[key])}
    if not keys:
        raise UsageError(
            f"There is nothing to save; for example: localspec ask --save {name} 'Explain $input'"
        )
    keys = {key: _lasting(key, value) for key, value in keys.items()}
    for key, value in keys.items():
        if problem := _problem(key, value):
            raise UsageError(f"--save {name}: {problem}")
    if unused := _given(keys.get("values", [])).keys() - set(parameters(keys)):
        raise UsageError(f"The prompt has no ${min(unused)}; leave out -p {min(unused)}=…")
    try:
        written = "".join(f"{key} = {literals.toml(value)}\n" for key, value in keys.items())
    except ValueError:
        raise UsageError(f"--save {name}: what is saved must be text; this is not UTF-8.") from None
    file = folder() / f"{name}.toml"
    if name in names() and not options["replace"]:
        _ask_to_replace(name, written)
    _write(file, written)
    render.line(f"Saved {file}. Use it with: {usage(name, keys)}")


def _left_out(value: object) -> bool:
    """Whether an option was not given. Zero is not False: `--temperature 0` was."""
    return value is None or value is False or value == []


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is not a valid template name; use letters, digits, '-', '_' and '.'."
        )


def _lasting(key: str, value: Any) -> Any:
    """Files are named from the folder where the template was made.

    Raises:
        UsageError: a file's name is not UTF-8, which a template is.
    """
    if key == "files":
        return [each if each == "-" else _lasting("schema", each) for each in value]
    if key == "model":
        value = inputs.pair(value)
    elif key == "schema" and not value.lstrip().startswith("{"):
        value = inputs.absolute(value)
    elif isinstance(value, str):
        return ask.clean(value)
    if isinstance(value, str) and value != (shown := ask.clean(value)):
        raise UsageError(f"{shown}: a template cannot name this file, whose name is not UTF-8.")
    return value


def _ask_to_replace(name: str, new: str) -> None:
    if _data(name) == new.encode():
        return
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"A template '{name}' already exists; --force replaces it.")
    import click

    if not click.confirm(f"A template '{name}' already exists. Replace it?", err=True):
        raise LocalspecError(f"Nothing was saved; the template '{name}' was not changed.")


def _write(file: Path, text: str) -> None:
    """In one step: a full disk leaves what was there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(file.resolve(), text.encode())  # a link into somebody's dotfiles stays one


def edit(name: str) -> None:
    """Edit a copy; it becomes the template when it is right.

    Raises:
        UsageError: the name is none, or it was left as it is because the copy is wrong.
    """
    _check_name(name)
    file = folder() / f"{name}.toml"
    keys = ", ".join(key for key in KEPT if key != "system")
    old = text(name) if name in names() else ""

    def problem(text: str) -> str:
        try:
            parsed(text.encode(), f"{name}.toml")
        except UsageError as error:
            return error.message
        return ""

    edited = inputs.edited(
        old or _NEW.format(name=name, keys=keys), problem, f"{file} was not changed."
    )
    if edited is None or edited == old:
        render.line("No changes.")
        return
    _write(file, edited)
    render.line(f"Saved {file}. Use it with: {usage(name, parsed(edited.encode(), name))}")


def remove(wanted: list[str]) -> None:
    """Delete templates, all or none.

    Raises:
        UsageError: there is none of one of the names.
    """
    found = [path(name) for name in dict.fromkeys(wanted)]
    for file in found:
        file.unlink()
        render.line(f"Removed {file.stem}.")


# ---------------------------------------------------------------------------- shown


def listed() -> list[dict[str, Any]]:
    """All of them, right or wrong: `name`, `file`, `parameters`, `template` (its keys) and `problem`.

    `file` is None for what comes with localspec, `problem` for what is right.
    """
    found = []
    own = {each.stem for each in folder().glob("[!.]*.toml")}
    for name in sorted({*BUILTIN, *own}):
        keys, problem = {}, None
        try:
            _check_name(name)
            keys = read(name)
        except UsageError as error:
            problem = error.message
        file = str(folder() / f"{name}.toml") if name in own else None
        entry = {"name": name, "file": file, "parameters": parameters(keys)}
        found.append({**entry, "template": keys, "problem": problem})
    return found
