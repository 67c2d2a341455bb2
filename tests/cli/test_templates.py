"""Test templates: saving, using, listing, showing, editing and removing them, and their errors."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from localspec.cli import options, templates
from localspec.errors import UsageError
from tests.cli.test_ask import ask_echo, ask_for_content
from tests.support.daemons import ROOT, Home, temporary_home
from tests.support.terminal import terminal


@contextmanager
def in_home(home: Home) -> Iterator[None]:
    """Let this process use the given home."""
    with patch.dict("os.environ", {"LOCALSPEC_HOME": str(home.root)}):
        yield


@pytest.fixture(scope="module")
def home_without_daemon() -> Iterator[Home]:
    """Yield a home where no daemon runs."""
    with temporary_home() as home, in_home(home):
        yield home


def write_template(home: Home, name: str, data: str | bytes) -> Path:
    file = home.root / "config" / "templates" / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


def test_a_template_is_saved_and_used(warm: Home) -> None:
    run = warm.run("ask", "--save", "tr", "-s", "In $language.", "-n", "9", "echo $input")
    assert run.returncode == 0, run.stderr
    assert "localspec ask -t tr -p language=VALUE WORDS" in run.stdout
    warm.run("ask", "--save", "plain", "echo")
    request = ask_echo(warm, "-t", "tr", "-p", "language=German", "good day")
    contents = [message["content"] for message in request["prompt"]["messages"]]
    assert contents == ["In German.", "echo good day"]
    assert request["max_tokens"] == 9
    assert ask_for_content(warm, "-t", "plain", "more") == "echo\n\nmore"
    assert ask_echo(warm, "-t", "tr", "-p", "language=x", "-n", "3", "hi")["max_tokens"] == 3


def test_files_and_statistics_are_saved(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)")
    warm.run("ask", "--save", "review", "-u", "-f", "a.py", "echo $input", cwd=tmp_path)
    run = warm.run("ask", "-t", "review", "why?", cwd="/")
    assert "speculation: drafted" in run.stderr
    content = json.loads(run.stdout)["prompt"]["messages"][0]["content"]
    assert content == f"echo {tmp_path}/a.py:\n```\nprint(1)\n```\n\nwhy?"


def test_a_file_name_in_braces_is_no_schema(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "{a}.md").write_text("braces")
    warm.must_run("ask", "--save", "braces", "-f", "{a}.md", "echo $input", cwd=tmp_path)
    run = warm.run("ask", "-t", "braces", "why?", cwd="/")
    assert "braces" in run.stdout, run.stderr


def option_values(option: options.Option) -> st.SearchStrategy[Any]:
    if option.kind is bool:
        return st.booleans()
    if option.name == "schema":
        return st.just('{"type": "object"}')
    words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
    if option.kind is str:
        value = words.map(lambda text: text.replace("$", "$$"))
        if option.name == "files":
            value = st.from_regex(r"/[a-z*?]{1,9}", fullmatch=True)
        if option.name == "values":
            value = words.map(lambda text: f"known={text}")
        if option.name == "model":
            value = st.sampled_from(["mine", "qwen2.5:7b", "/a.gguf,/b.gguf"])
        return st.lists(value, max_size=2) if option.many else st.none() | value
    low, high = option.low, option.high
    if option.kind is int:
        return st.none() | st.integers(int(low), int(high))
    return st.none() | st.floats(low, high)


SAVED_VALUES = st.fixed_dictionaries(
    {name: option_values(option) for name, option in templates.SAVED_OPTIONS.items()}
)


@given(SAVED_VALUES, st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_saved_options_come_back_unchanged(
    home_without_daemon: Home, values: dict[str, Any], words: str
) -> None:
    """Options that were saved with --save come back with -t, and no others."""
    assume(words.strip())
    prompt = words.replace("$", "$$") + " $known"
    values["values"] = values["values"] or ["known="]
    saved = options.AskOptions(**values, save="it", words=[prompt], replace=True)
    templates.save(saved)
    used = templates.Template(options.AskOptions(template="it"))
    known_value = values.pop("values")[-1].removeprefix("known=")
    assert used.question("") == f"{words} {known_value}"
    system = values.pop("system")
    assert used.options.system == (system and system.replace("$$", "$"))
    assert {key: getattr(used.options, key) for key in values} == values


def test_given_options_override_the_template(warm: Home) -> None:
    warm.run("ask", "--save", "it", "-n", "9", "--draft", "3", "--temperature", "1", "-x", "echo")
    request = ask_echo(warm, "-t", "it", "--draft", "0", "--temperature", "0", "--json")
    # --json also overrides the -x of the template.
    request = json.loads(request["choices"][0]["message"]["content"])
    assert request["sampling"]["temperature"] == 0
    assert request["speculative"]["enabled"] is False
    assert request["max_tokens"] == 9


def test_limits_of_options_are_those_of_requests() -> None:
    from localspec.protocol.requests import sampling_parameters

    limits = {}
    for parameter in sampling_parameters():
        bounds = [m for m in parameter.kind.__metadata__ if hasattr(m, "ge")]
        limits[parameter.name] = (bounds[0].ge, bounds[0].le) if bounds else None
    for option in options.SAMPLING:
        assert (option.low, option.high) == limits[option.name], option.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-t", "nope", "hi"], "There is no template 'nope'"),
        (["-t", "../needs", "hi"], "There is no template '../needs'"),
        (["-t", "needs"], "'needs' needs $tone, $thing; add -p tone=VALUE -p thing=VALUE"),
        (["-t", "needs", "-p", "thing"], "must be NAME=VALUE"),
        (["-t", "needs", "-p", "think=x"], "has no parameter $think; it has $tone, $thing."),
        (["-t", "about"], "needs something to ask about ($input)"),
        (["-t", "about", "  "], "needs something to ask about ($input)"),
        (["-t", "about", "-p", "x=y", "hi"], "has no parameter $x; it has none."),
        (["-t", "about", "-p", "input=y"], "$input is what is asked about"),
        (["-t", "brief"], "No question given; for example: localspec ask -t brief WORDS"),
        (["-p", "x=y", "hi"], "add -t TEMPLATE"),
        (["--save", "../x", "hi"], "'../x' is not a valid template name"),
        (["--save", "x", "costs 5$"], "write $$ for a dollar sign"),
        (["--save", "x", "-p", "a=b", "hi"], "The prompt has no $a"),
        (["--save", "x"], "There is nothing to save"),
        (["--save", "x", "-c", "hi"], "-c and --save cannot be used together"),
    ],
)
def test_unusable_templates_are_refused(
    home_without_daemon: Home, arguments: list[str], message: str
) -> None:
    write_template(home_without_daemon, "needs", 'prompt = "about $thing"\nsystem = "$tone"\n')
    write_template(home_without_daemon, "about", 'prompt = "Explain $input"\n')
    write_template(home_without_daemon, "brief", 'system = "Be brief."\n')
    run = home_without_daemon.run("ask", *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr
    assert not home_without_daemon.socket.exists()
    assert not (home_without_daemon.root / "config" / "templates" / "x.toml").exists()


def test_a_template_is_only_replaced_after_a_confirmation(home_without_daemon: Home) -> None:
    def read_stored() -> str:
        return (home_without_daemon.root / "config" / "templates" / "mine.toml").read_text()

    assert home_without_daemon.run("ask", "--save", "mine", "one").returncode == 0
    # The prompt is the same.
    assert home_without_daemon.run("ask", "--save", "mine", "one").returncode == 0
    run = home_without_daemon.run("ask", "--save", "mine", "two")
    assert (run.returncode, "--force replaces it" in run.stderr) == (2, True)
    assert read_stored() == 'prompt = "one"\n'
    for answer, code, prompt in (("n", 1, "one"), ("y", 0, "two")):
        with terminal(home_without_daemon.environment, "ask", "--save", "mine", "two") as session:
            session.expect("Replace it?")
            session.send(f"{answer}\r")
            assert session.wait() == code
        assert read_stored() == f'prompt = "{prompt}"\n'
    assert home_without_daemon.run("ask", "-y", "--save", "mine", "three").returncode == 0
    assert home_without_daemon.run("ask", "--save", "mine", "four", "--force").returncode == 0
    assert read_stored() == 'prompt = "four"\n'


WRONG = [
    ('prompt = """\ntop_p of $input\n"""\n\n"top_p" = 2\n', "line 5: 'top_p' must be from 0 to 1."),
    ("tokens = 'many'\n", "line 1: 'tokens' must be a whole number, not 'many'."),
    ('prompt = "x"\ncolour = 1\n', "line 2: unknown key 'colour'; the keys are prompt, model"),
    ('prompt = "x"\ntop_p = 2\n', "line 2: 'top_p' must be from 0 to 1."),
    ('# hm\nprompt = "costs 5$"\n', "line 2: 'prompt' has a $ that names no variable"),
    ('files = "a"\n', "line 1: 'files' must be a list of strings"),
    ('values = ["a"]\n', "line 1: 'a' in 'values' must be NAME=VALUE."),
    ('prompt = "x"\n\nsystem = \n', "line 3: Invalid value"),
    ('prompt = "x\n', "line 1: "),
    ('prompt = """x\n', "line 2: "),
    (b'prompt = "x"\nsystem = "\xff"\n', "line 2: not UTF-8."),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_an_invalid_template_is_named_with_its_line(
    home_without_daemon: Home, data: str | bytes, message: str
) -> None:
    file = write_template(home_without_daemon, "bad", data)
    write_template(home_without_daemon, "good", 'prompt = "Explain $input"\n')
    run = home_without_daemon.run("ask", "-t", "bad", "hi")
    assert run.returncode == 2
    assert f"{file}, {message}" in run.stderr
    assert "To edit it: localspec templates edit bad" in run.stderr
    run = home_without_daemon.run("templates")
    assert run.returncode == 0
    assert f"{file}, {message}" in run.stdout
    assert re.search(r"^good +yours +Explain \$input$", run.stdout, re.MULTILINE)
    assert (
        home_without_daemon.run("templates", "show", "good").stdout == 'prompt = "Explain $input"\n'
    )
    run = home_without_daemon.run("templates", "show", "bad")
    assert (run.returncode, message in run.stderr) == (2, True)
    assert run.stdout.splitlines()[0] == file.read_text(errors="replace").splitlines()[0]
    assert home_without_daemon.run("templates", "rm", "-y", "bad").stdout == "Removed bad.\n"


@given(
    st.binary(max_size=40)
    | st.lists(
        st.sampled_from([*templates.SAVED_OPTIONS, "prompt", "x"]).flatmap(
            lambda key: st.sampled_from(
                [
                    "1",
                    "-1",
                    "nan",
                    '"a"',
                    '"$"',
                    "true",
                    "[]",
                    '["a"]',
                    "[1]",
                    "{}",
                    "1e400",
                    "0001",
                ]
            ).map(lambda value: f"{key} = {value}")
        ),
        max_size=4,
    ).map(lambda lines: "\n".join(lines).encode())
)
def test_any_template_file_is_read_or_reported(home_without_daemon: Home, data: bytes) -> None:
    file = write_template(home_without_daemon, "any", data)
    [entry] = [template for template in templates.list_templates() if template["name"] == "any"]
    if entry["problem"]:
        assert re.match(rf"{re.escape(str(file))}, line \d+: ", entry["problem"])
        with pytest.raises(UsageError):
            templates.read("any")
    else:
        assert entry["template"] == templates.read("any")
        assert entry["template"].keys() <= {*templates.SAVED_OPTIONS, "prompt"}
    file.unlink()


def test_a_folder_and_an_invalid_name_are_listed_with_a_reason(home: Home) -> None:
    (home.root / "config" / "templates" / "folder.toml").mkdir(parents=True)
    write_template(home, "two words", "prompt = 'x'")
    run = home.run("templates")
    assert run.returncode == 0
    assert "folder.toml cannot be read: " in run.stdout
    assert "'two words' is not a valid template name" in run.stdout
    assert home.run("ask", "-t", "folder", "hi").returncode == 2


def test_templates_are_listed_shown_and_removed(home: Home) -> None:
    home.run("ask", "--save", "tr", "-s", "In $language.", "Translate\n$input")
    home.run("ask", "--save", "brief", "-s", "Be brief.")
    rows = [row.split(None, 2) for row in home.run("templates", "list").stdout.splitlines()]
    assert ["brief", "yours", "Be brief."] in rows
    assert ["tr", "yours", "language    Translate $input"] in [
        [*row[:2], re.sub(" {2,}", "    ", row[2])] for row in rows
    ]
    assert {row[0] for row in rows if row[1] == "localspec"} == templates.BUILTIN.keys()
    listed = json.loads(home.run("templates", "list", "--json").stdout)
    file = home.root / "config" / "templates" / "tr.toml"
    assert listed[-1] == {
        "name": "tr",
        "file": str(file),
        "parameters": ["language"],
        "template": {"prompt": "Translate\n$input", "system": "In $language."},
        "problem": None,
    }
    assert home.run("templates", "show", "tr").stdout == file.read_text()
    assert home.run("templates", "path", "tr").stdout == f"{file}\n"
    assert home.run("templates", "path").stdout == f"{file.parent}\n"
    run = home.run("templates", "rm", "-y", "tr", "nope")
    assert (run.returncode, "There is no template 'nope'" in run.stderr) == (2, True)
    assert file.exists()
    assert (
        home.run("templates", "rm", "-y", "tr", "brief").stdout == "Removed tr.\nRemoved brief.\n"
    )
    assert not file.exists()


def test_builtin_templates_are_shown_and_overridden(home: Home) -> None:
    name = min(templates.BUILTIN)
    assert home.run("templates", "show", name).stdout == templates.BUILTIN[name]
    for words in (["path", name], ["rm", "-y", name]):
        assert "is built in and has no file. To override it: " in home.refused(
            "templates", *words, code=2
        )
    assert home.run("ask", "--save", name, "mine").returncode == 2
    assert home.run("ask", "--save", name, "mine", "--force").returncode == 0
    assert home.run("templates", "show", name).stdout == 'prompt = "mine"\n'
    assert home.run("templates", "rm", "-y", name).returncode == 0
    assert home.run("templates", "show", name).stdout == templates.BUILTIN[name]


def write_editor(home: Home, *texts: str) -> None:
    """Set $EDITOR to a program that writes the first text, then the second, and so on."""
    program = home.root / "editor"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, pathlib\n"
        f"count = pathlib.Path({str(home.root / 'count')!r})\n"
        "n = len(count.read_text()) if count.exists() else 0\ncount.write_text('x' * (n + 1))\n"
        f"file = pathlib.Path(sys.argv[1]); file.write_text({list(texts)!r}[n])\n"
        "os.utime(file, (0, 10**9 + n))\n"
    )
    program.chmod(0o755)
    (home.root / "count").unlink(missing_ok=True)
    home.environment |= {"EDITOR": str(program), "VISUAL": ""}


def test_a_template_is_edited_until_it_is_valid(home: Home) -> None:
    file = home.root / "config" / "templates" / "new.toml"
    write_editor(home, "prompt = 1", "prompt = 'new $x'\n")
    run = home.run("templates", "edit", "new", stdin="n\n")
    assert (run.returncode, "new.toml, line 1: 'prompt' must be a string" in run.stderr) == (
        2,
        True,
    )
    assert not file.exists()
    write_editor(home, "prompt = 1", "prompt = 'new $x'\n")
    run = home.run("templates", "edit", "new", stdin="y\n")
    assert "localspec ask -t new -p x=VALUE\n" in run.stdout
    assert file.read_text() == "prompt = 'new $x'\n"
    assert home.run("templates", "edit", "a b").returncode == 2


def test_an_editor_that_does_not_run_is_named(home: Home) -> None:
    home.environment |= {"EDITOR": "false", "VISUAL": ""}
    assert "$EDITOR names the editor to use" in home.refused("templates", "edit", "new", code=2)


def test_a_new_template_begins_with_an_example(home: Home) -> None:
    home.environment |= {"EDITOR": f"cp {{}} {home.root}/seen; true", "VISUAL": ""}
    program = home.root / "editor"
    program.write_text(f'#!/bin/sh\ncp "$1" {home.root}/seen\n')
    program.chmod(0o755)
    home.environment["EDITOR"] = str(program)
    assert home.run("templates", "edit", "new").stdout == "No changes.\n"
    skeleton = (home.root / "seen").read_bytes()
    assert templates.parse(skeleton, "new")["prompt"] == "Explain $input"
    assert b"temperature" in skeleton


def read_texts(path: Path) -> Iterator[str]:
    """Yield the string literals of a Python file, with "it" for inserted values, or a whole text."""
    if path.suffix != ".py":
        yield path.read_text()
        return
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        literals = [part.value if isinstance(part, ast.Constant) else "it" for part in parts]
        if isinstance(node, ast.Constant | ast.JoinedStr):
            yield "".join(part for part in literals if isinstance(part, str))


def list_hints() -> set[str]:
    """Return every command line in messages and pages that saves a prompt with a variable."""
    paths = [*(ROOT / "localspec").rglob("*.py"), *(ROOT / "localspec" / "docs").rglob("*.md")]
    lines = [line for path in paths for text in read_texts(path) for line in text.splitlines()]
    commands = {
        line[line.index("localspec ask --save") :] for line in lines if "ask --save" in line
    }
    return {line.strip("`. ") for line in commands if "$" in line}


@pytest.mark.parametrize(
    "shell", [shell for shell in ("bash", "zsh", "fish") if shutil.which(shell)]
)
def test_hints_with_a_variable_keep_it_in_every_shell(home: Home, shell: str) -> None:
    assert len(list_hints()) > 2
    for hint in list_hints():
        command = hint.replace("localspec ask", f"{sys.executable} -m localspec ask --force")
        environment = {**home.environment, "HOME": str(home.root), "input": "wrong"}
        result = subprocess.run(
            [shell, "-c", command], env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, (hint, result.stderr)
        [file] = (home.root / "config" / "templates").glob("*.toml")
        assert "$input" in templates.parse(file.read_bytes(), "it")["prompt"], hint
        file.unlink()
