"""commit: a message for what is staged, in git's own editor; and in git's hook, where it stops nothing."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.extras.shell import asking, staged
from tests.support.daemons import Home, scripted_home, temporary_home
from tests.support.shells import with_program
from tests.support.terminal import Terminal, terminal

WHO = {f"GIT_{who}_{what}": "n" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
# Names that would do something if a shell, or git, read them.
STRANGE = [
    "$(touch pwned).txt",
    "`touch pwned`",
    "; touch pwned;",
    "a\ntouch pwned",
    "-rf",
    "--output=pwned",
    "\"quoted\" 'both'",
    "a b/ b/ c",
    "\x1b[2J\x07",
    "\u202egnp",
    "bytes\udcff",
    "$input $$",
]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Its model writes the message that stands in the first line that is added."""
    with scripted_home() as home:
        with_program(home)
        home.environment |= {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            **WHO,
        }
        yield home


class Repository:
    def __init__(self, home: Home, root: Path) -> None:
        self.home = home
        self.root = root
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["git", *words],
            cwd=self.root,
            env={**self.home.environment, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done

    def stage(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.git("add", "--", name)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.home.run("commit", *words, cwd=self.root)

    def message(self) -> str:
        return self.git("log", "-1", "--format=%B").stdout.strip()

    def commits(self) -> int:
        return int(self.git("rev-list", "--count", "--all").stdout)

    def hook(self) -> None:
        file = self.root / ".git" / "hooks" / "prepare-commit-msg"
        file.parent.mkdir(exist_ok=True)
        file.write_text(self.run("--hook").stdout)
        file.chmod(0o755)


@pytest.fixture
def repository(home: Home, tmp_path: Path) -> Repository:
    return Repository(home, tmp_path)


def says(home: Home, answer: str) -> None:
    """Let the model answer this, whatever is staged."""
    file = home.root / "config" / "templates" / "commit.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    # What is staged follows, where the template does not place it; a model may go on, too.
    prompt = f"raw ```\n{answer}\n```"
    file.write_text(f"prompt = {json.dumps(prompt)}\n")


# ------------------------------------------------------------------ a message


SUBJECT = (
    st.text("abc DEF.,()/'\"`$", min_size=1, max_size=60)
    .map(str.strip)
    .filter(lambda s: s.strip("\"'`") == s != "" and asking.extract_message(s) == s)
)


@given(
    SUBJECT,
    st.sampled_from(["", "\n\nBecause it was slow.", "\n\n- one\n- two"]),
    st.sampled_from(["{}", "```\n{}\n```", "```text\n{}\n```\n\nThis message says what changed."]),
    st.sampled_from(["", "Here is the commit message:\n\n", "Sure! Here's a message:\n"]),
    st.sampled_from(["{}", "**{}**", '"{}"', "`{}`", "# {}", "Subject: {}", "Commit message: {}"]),
)
def test_a_message_is_found(subject: str, body: str, form: str, intro: str, title: str) -> None:
    answer = intro + form.format(title.format(subject) + body)
    assert asking.extract_message(answer) == subject + body


@given(st.text(st.one_of(st.characters(), st.sampled_from("#`*:\n\r -'")), max_size=200))
def test_every_message_is_one_that_git_takes_as_it_is(answer: str) -> None:
    found = asking.extract_message(answer)
    assert found == found.strip()
    assert all(char in "\n\t" or char.isprintable() for char in found)
    subject, *rest = found.split("\n")
    assert not rest or rest[0] == ""
    assert not any(line.startswith("#") for line in [subject, *rest])


def test_long_lines_of_the_body_are_wrapped() -> None:
    words = " ".join(["word"] * 40)
    lines = asking.extract_message(f"Add it\n\n{words}\n- {words}\nhttps://{'x' * 100}").split("\n")
    assert lines[:2] == ["Add it", ""]
    assert all(len(line) <= 72 or "https" in line for line in lines)
    assert [line[:6] for line in lines if line[0:1] in "- "][-3:] == ["- word", "  word", "  word"]


# ------------------------------------------------------------------ what is staged


def test_nothing_staged_no_repository_and_a_merge_are_said(
    repository: Repository, home: Home, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (repository.root / "a").write_text("a")
    run = repository.run()
    assert (run.returncode, run.stdout) == (1, "")
    assert "Nothing is staged. Stage changes first: git add FILE" in run.stderr
    run = home.run("commit", cwd=tmp_path_factory.mktemp("none"))
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "localspec: Not a git repository.\n"
    repository.stage("a", "a")
    repository.git("commit", "-qm", "one")
    repository.git("checkout", "-qb", "other")
    repository.stage("a", "b")
    repository.git("commit", "-qm", "two")
    repository.git("checkout", "-q", "main")
    repository.stage("b", "b")
    repository.git("commit", "-qm", "three")
    repository.git("merge", "-q", "--no-commit", "other")
    run = repository.run()
    assert (run.returncode, run.stdout) == (1, "")
    assert "A merge is in progress and git already has a message for it" in run.stderr


def test_without_git_that_is_said(home: Home, tmp_path: Path) -> None:
    path = home.environment["PATH"]
    home.environment["PATH"] = str(tmp_path)
    run = home.run("commit")
    home.environment["PATH"] = path
    assert (run.returncode, run.stdout) == (1, "")
    assert "git is not installed" in run.stderr


def test_without_a_terminal_the_message_is_printed_and_nothing_committed(
    repository: Repository,
) -> None:
    says(repository.home, "Add a retry\n\nUploads fail at night.")
    repository.stage("a", "a\n")
    run = repository.run()
    assert (run.returncode, run.stdout) == (0, "Add a retry\n\nUploads fail at night.\n")
    assert repository.commits() == 0


def test_the_template_gets_the_diff_the_words_and_the_last_subjects(
    repository: Repository,
) -> None:
    file = repository.home.root / "config" / "templates" / "commit.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('prompt = "raw <$recent> $input"')
    repository.stage("a.py", "x = 1\n")
    repository.git("commit", "-qm", "Add a")
    repository.git("mv", "a.py", "b.py")
    repository.stage("c.bin", "\0")
    (repository.root / "not.staged").write_text("no")
    said = repository.run("mention", "issue 12").stdout
    for part in ("<- Add a>", "mention issue 12", "rename to b.py", "c.bin", "Binary files"):
        assert part in said.replace("\n", " ")
    assert "not.staged" not in said
    file.unlink()
    assert "- Add a" in repository.run().stdout  # what comes with localspec says them too


def test_a_message_that_repeats_an_earlier_one_is_asked_for_again(repository: Repository) -> None:
    says(repository.home, "$recent")
    repository.stage("a", "a\n")
    repository.git("commit", "-qm", "Add a cache, a fetcher and a program")
    repository.stage("b", "b\n")
    assert repository.run().stdout == "(none)\n"


@given(
    subject=st.text("abcdefghäß ,.-'", min_size=1, max_size=60),
    signs=st.text(" ,.-'*`", max_size=3),
    more=st.text(max_size=60),
)
def test_a_subject_with_other_signs_is_repeated_all_the_same(
    subject: str, signs: str, more: str
) -> None:
    said = f"{signs}{subject.replace(' ', f'{signs} ').upper()}{signs}{more}"
    letters = sum(each.isalnum() for each in subject.casefold())
    assert asking.repeats_subject(said, f"- Other words than these\n- {subject}") == (letters >= 8)
    assert not asking.repeats_subject("", f"- {subject}")


def test_whatever_git_is_configured_to_show_the_diff_is_plain(repository: Repository) -> None:
    says(repository.home, "x")
    for key, value in {
        "color.ui": "always",
        "diff.external": "touch pwned",
        "diff.mnemonicPrefix": "true",
        "diff.noprefix": "true",
        "diff.submodule": "log",
        "diff.relative": "true",
        "core.pager": "touch pwned",
    }.items():
        repository.git("config", key, value)
    repository.stage("folder/a", "one\n")
    repository.stage("b", "two\n")
    with contextlib.chdir(repository.root / "folder"):
        found = staged.patches()
    assert [each.name for each in found] == ["b", "folder/a"]
    assert "\x1b" not in found[0].text
    assert "+two" in found[0].text
    assert not (repository.root / "pwned").exists()


def test_names_of_files_reach_no_shell(repository: Repository) -> None:
    says(repository.home, "Add them")
    for name in STRANGE:
        try:
            (repository.root / name).parent.mkdir(parents=True, exist_ok=True)
            (repository.root / name).write_text(f"{name!r}\n")
        except OSError:
            continue  # a file system that knows only UTF-8
    repository.git("add", "-A")
    run = repository.run()
    assert (run.returncode, run.stdout) == (0, "Add them\n"), run.stderr
    repository.hook()
    repository.git("commit", GIT_EDITOR="true")
    assert repository.message() == "Add them"
    found = {each.name for each in repository.root.rglob("*")}
    assert "pwned" not in found


# ------------------------------------------------------------------ longer than the context


def made(random_: random.Random) -> list[staged.Patch]:
    found = []
    for number in range(random_.randrange(1, 30)):
        lines = [f"+{'x' * random_.randrange(80)}" for _ in range(int(random_.expovariate(0.02)))]
        name = f"file{number}.py"
        head = [f"diff --git a/{name} b/{name}", f"--- a/{name}", f"+++ b/{name}"]
        found.append(staged.Patch(name, "\n".join([*head, *lines])))
    return found


def test_a_cut_diff_has_its_length_and_says_what_is_missing() -> None:
    random_ = random.Random(17)
    for _ in range(300):
        patches = made(random_)
        whole = "\n".join(each.text for each in patches)
        room = random_.randrange(1, len(whole) + 200)
        text, left_out = staged.shorten_patches(patches, room)
        if len(whole) < room:
            assert (text, left_out) == (whole, "")
            continue
        notes = sum(len(line) + 1 for line in text.split("\n") if line.startswith("[… "))
        assert len(text) - notes <= room
        assert ("left out" in text) == bool(left_out) == (text != whole)
        kept = {line for line in text.split("\n") if not line.startswith("[… ")}
        assert kept <= set(whole.split("\n"))
        for each in patches:  # the small ones are whole where others are cut
            if len(each.text) < room // len(patches) - 1:
                assert each.text in text


def test_a_diff_longer_than_the_context_is_cut_and_that_is_said(tmp_path: Path) -> None:
    with temporary_home() as home:  # the shipped pair, whose context is short
        home.environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        repository = Repository(home, tmp_path)
        repository.stage("large.py", "".join(f"value_{n} = {n}\n" for n in range(6_000)))
        repository.stage("small.py", "import os\n")
        run = repository.run()
        assert (run.returncode, run.stdout) == (1, "")
        assert "Too long for the pair's context; left out: " in run.stderr
        assert "lines of large.py." in run.stderr
        assert "The built-in demo pair knows only Python" in run.stderr  # and nothing of commits
        repository.hook()
        repository.git("commit", GIT_EDITOR="sh -c 'echo Own > \"$1\"' -", **WHO)
        assert repository.message() == "Own"
        log = "".join(f"make: line {n}\n" for n in range(6_000))
        run = home.run("explain", stdin=log)
        assert run.returncode == 0, run.stderr
        assert "lines in the middle" in run.stderr


def test_generated_files_are_left_out_before_anything_else() -> None:
    random_ = random.Random(44)
    for _ in range(200):
        written = made(random_)
        generated = [made_by_a_program(random_) for _ in range(random_.randrange(1, 9))]
        for patch in generated:
            assert staged.is_generated(patch), patch.name
        for patch in written:
            assert not staged.is_generated(patch), patch.text[:300]
        room = sum(len(each.text) + 1 for each in written)
        mixed = [*written, *generated]
        random_.shuffle(mixed)
        text, left_out = staged.shorten_patches(mixed, room)
        for patch in written:
            assert patch.text in text
        assert all(patch.text not in text for patch in generated)
        named = [each for each in generated if f"{each.name} (generated)" in left_out]
        assert named == generated or len(named) == 4


def made_by_a_program(random_: random.Random) -> staged.Patch:
    """Return the patch of a generated file, which its name shows, or its lines alone."""
    name, lines = f"file{random_.randrange(10**6)}.txt", ["+a: 1"] * 3
    match random_.randrange(4):
        case 0:
            names: tuple[str, ...] = (
                "package-lock.json",
                "Cargo.lock",
                "sub/uv.lock",
                "a.min.js",
                "app.js.map",
            )
            names += ("go.sum", "pnpm-lock.yaml", "node_modules/a/b.js", "x/vendor/b.c", "a_pb2.py")
            name = f"dir{random_.randrange(10**6)}/{random_.choice(names)}"
        case 1:
            lines = [
                "+" + base64.b64encode(random_.randbytes(57)).decode()
                for _ in range(random_.randrange(3, 99))
            ]
        case 2:
            lines = ["+" + ";".join(f"var a{n}={n}" for n in range(random_.randrange(80, 900)))]
        case _:
            lines = ["+// Code generated by a tool. DO NOT EDIT.", *lines]
    head = [f"diff --git a/{name} b/{name}", f"--- a/{name}", f"+++ b/{name}", "@@ -1 +1 @@"]
    return staged.Patch(name, "\n".join([*head, *lines]))


@pytest.mark.parametrize(
    "line",
    [
        "A paragraph of prose in one long line, as Markdown has them. " * 20,
        "這是一段沒有空格的長文字，" * 60,
        "-" * 900,
        "x = foo(bar)",
    ],
)
def test_what_people_write_is_not_generated(line: str) -> None:
    text = f"diff --git a/a.md b/a.md\n--- a/a.md\n+++ b/a.md\n@@ -1 +1 @@\n+{line}"
    assert not staged.is_generated(staged.Patch("a.md", text))


def test_only_generated_files_are_shortened_as_others_are() -> None:
    patch = staged.Patch("uv.lock", "diff --git a/uv.lock b/uv.lock\n" + "+a\n" * 500)
    text, left_out = staged.shorten_patches([patch], 300)
    assert text.startswith("diff --git a/uv.lock")
    assert "lines of uv.lock" in left_out


@pytest.mark.parametrize("tty", [False, True])
def test_a_diff_that_takes_long_to_read_is_shortened(repository: Repository, tty: bool) -> None:
    """The scripted engine says that it reads 100 tokens, here words, a second."""
    file = repository.home.root / "config" / "templates" / "commit.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('prompt = "late 0.5 $input"')
    repository.stage("package-lock.json", "a b c d e f\n" * 300)
    repository.stage("words.py", "one two three four five six\n" * 3000)
    if tty:
        with at_terminal(repository, "--print", editor="true") as shown:
            assert shown.wait() == 0
            said = shown.text
    else:
        said = repository.run().stderr
    said = " ".join(said.split())
    assert "Too long to read in 20 seconds; left out: package-lock.json (generated)," in said
    assert "lines of words.py." in said


def test_a_diff_that_is_read_in_time_is_whole(repository: Repository) -> None:
    file = repository.home.root / "config" / "templates" / "commit.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('prompt = "late 0.5 $input"')
    repository.stage("package-lock.json", "a b c d e f\n" * 30)
    assert "left out" not in repository.run().stderr


def test_a_message_after_m_is_explained(repository: Repository) -> None:
    repository.stage("a", "a\n")
    for hint in ("fix bug", "fix", "don't", "a $HOME"):
        run = repository.run("-m", hint)
        assert (run.returncode, run.stdout) == (1, "")
        assert "-m names the pair here; a hint for the message goes without it:" in run.stderr
        assert f"localspec commit {shlex.quote(hint)}" in run.stderr
        assert "any_model" not in run.stderr


def test_files_say_more_of_the_message(repository: Repository) -> None:
    file = repository.home.root / "config" / "templates" / "commit.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('prompt = "raw $input"')
    (repository.root / "notes").write_text("Reads faster.")
    repository.stage("a", "a\n")
    assert "Reads faster." in repository.run("-f", "notes", "why").stdout


# ------------------------------------------------------------------ at a terminal


VI = """\
#!/bin/sh
# A stand-in for Vi: SAVE says whether it writes the file, in place or by renaming.
cp "$1" "$SEEN"
case "$SAVE" in
  no) ;;
  place) cat "$1" > "$1.new"; cat "$1.new" > "$1"; rm "$1.new" ;;
  rename) cp "$1" "$1.new"; mv "$1.new" "$1" ;;
  error) exit 1 ;;
esac
"""


def stand_in(repository: Repository, name: str) -> str:
    file = repository.root / ".git" / name
    file.write_text(VI)
    file.chmod(0o755)
    repository.home.environment["SEEN"] = str(repository.root / ".git" / "seen")
    return str(file)


@pytest.mark.parametrize("save", ["no", "place", "rename", "error"])
@pytest.mark.parametrize("cleanup", ["default", "verbatim", "whitespace", "scissors"])
@pytest.mark.parametrize("sign", ["#", ";"])
def test_only_a_saved_message_is_committed(
    repository: Repository, save: str, cleanup: str, sign: str
) -> None:
    says(repository.home, "Add a\n\nBecause.")
    repository.stage("a", "a\n")
    repository.git("config", "commit.cleanup", cleanup)
    repository.git("config", "core.commentChar", sign)
    repository.git("config", "commit.status", "false")
    repository.home.environment["SAVE"] = save
    with at_terminal(repository, editor=stand_in(repository, "vim")) as shown:
        code = shown.wait()
    seen = (repository.root / ".git" / "seen").read_text()
    assert f"\n{sign} Proposed by localspec (" in seen
    assert "To abort: delete the message, or leave with :cq." in seen
    if save in ("no", "error"):
        assert code != 0
        assert repository.commits() == 0
        assert "nothing is committed" in shown.text
    else:
        assert code == 0, shown.text
        assert repository.message().startswith("Add a\n\nBecause.")
        assert "Proposed by localspec" not in repository.message()


@pytest.mark.parametrize(("key", "commits"), [("y", 1), ("", 0), ("n", 0)])
def test_after_an_editor_that_saves_only_changes_that_is_asked(
    repository: Repository, key: str, commits: int
) -> None:
    says(repository.home, "Add a")
    repository.stage("a", "a\n")
    repository.home.environment["SAVE"] = "no"
    with at_terminal(repository, editor=stand_in(repository, "nano")) as shown:
        shown.expect("The message was not saved. Commit with it as it is?")
        shown.send(f"{key}\r")
        assert shown.wait() == 1 - commits
    assert repository.commits() == commits


IN_FOLDER = """
import os, sys
os.chdir(sys.argv[1])
os.execv(sys.executable, [sys.executable, "-m", "localspec", "commit", *sys.argv[2:]])
"""


@contextlib.contextmanager
def at_terminal(repository: Repository, *words: str, editor: str) -> Iterator[Terminal]:
    environment = {**repository.home.environment, "GIT_EDITOR": editor}
    where = str(repository.root)
    with terminal(environment, where, *words, program=("-c", IN_FOLDER)) as shown:
        yield shown


def test_at_a_terminal_gits_editor_has_the_message(repository: Repository) -> None:
    says(repository.home, "Add a\n\nBecause.\n#12 is done.")
    repository.stage("a", "a\n")
    editor = repository.root / ".git" / "editor"
    editor.write_text('#!/bin/sh\ncp "$1" seen\nsed -i 1s/a/b/ "$1"\ntest -t 0\n')
    editor.chmod(0o755)
    with at_terminal(repository, editor=str(editor)) as shown:
        assert shown.wait() == 0
    seen = (repository.root / "seen").read_text()
    assert seen.startswith("Add a\n\nBecause.\n #12 is done.\n")
    assert "an empty message aborts the commit" in seen.replace("\n# ", " ")
    assert repository.message() == "Add b\n\nBecause.\n #12 is done."


def test_without_a_message_left_git_aborts(repository: Repository) -> None:
    says(repository.home, "Add a")
    repository.stage("a", "a\n")
    with at_terminal(repository, editor="truncate -s 0") as shown:
        assert shown.wait() == 1
        assert "Aborting commit due to empty commit message" in shown.text
    assert repository.commits() == 0


def test_ctrl_c_reaches_the_editor(repository: Repository) -> None:
    says(repository.home, "Add a")
    repository.stage("a", "a\n")
    editor = repository.root / ".git" / "editor"
    editor.write_text("#!/bin/sh\nkill -INT $$\ntouch survived\n")
    editor.chmod(0o755)
    with at_terminal(repository, editor=str(editor)) as shown:
        assert shown.wait() != 0
    assert not (repository.root / "survived").exists()
    assert repository.commits() == 0


def test_all_changes_of_tracked_files_are_committed_when_that_is_wanted(
    repository: Repository,
) -> None:
    says(repository.home, "Change a")
    assert "git cannot show" in repository.run("-a").stderr  # there is no commit yet
    repository.stage("a", "a\n")
    repository.git("commit", "-qm", "Add a")
    for flags in ([], ["-a"]):
        clean = repository.run(*flags).stderr
        assert clean == "localspec: Nothing to commit, working tree clean.\n"
    (repository.root / "new").write_text("new\n")
    assert "No tracked file has changed." in repository.run("-a").stderr
    (repository.root / "a").write_text("b\n")
    assert "Nothing is staged" in repository.run().stderr
    with at_terminal(repository, "-a", editor="true") as shown:
        assert shown.wait() == 0
    assert repository.message() == "Change a"
    assert repository.git("show", "--name-only", "--format=").stdout == "a\n"


def test_print_commits_nothing_at_a_terminal_too(repository: Repository) -> None:
    says(repository.home, "Add a")
    repository.stage("a", "a\n")
    with at_terminal(repository, "--print", editor="true") as shown:
        assert shown.wait() == 0
        assert shown.text.endswith("Add a\n")
    assert repository.commits() == 0


# ------------------------------------------------------------------ the hook


def test_the_hook_says_how_to_install_it(repository: Repository) -> None:
    run = repository.run("--hook")
    assert run.stdout.startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n"], input=run.stdout, text=True, check=False).returncode == 0
    with terminal(repository.home.environment, "commit", "--hook", columns=200) as shown:
        assert shown.wait() == 0
        install = shown.text.split("To install it here:")[1].strip()
    subprocess.run(
        ["sh", "-c", install], cwd=repository.root, env=repository.home.environment, check=True
    )
    says(repository.home, "Add a")
    repository.stage("a", "a\n")
    repository.git("commit", GIT_EDITOR="true")
    assert repository.message() == "Add a"


def test_the_hook_proposes_a_message_where_none_was_given_and_only_there(
    repository: Repository,
) -> None:
    says(repository.home, "Proposed")
    repository.hook()
    editor = {"GIT_EDITOR": "true"}
    repository.stage("a", "a\n")
    repository.git("commit", **editor)
    assert repository.message() == "Proposed"
    repository.stage("a", "b\n")
    repository.git("commit", "-m", "Mine", **editor)
    assert repository.message() == "Mine"
    repository.stage("a", "c\n")
    repository.git("commit", "--amend", **editor)
    assert repository.message() == "Mine"
    (repository.root / "text").write_text("From a file\n")
    repository.stage("a", "d\n")
    repository.git("commit", "-F", "text", "-e", **editor)
    assert repository.message() == "From a file"
    repository.git("checkout", "-qb", "other", "HEAD~1")
    repository.stage("b", "b\n")
    repository.git("commit", "-m", "Other", **editor)
    repository.git("checkout", "-q", "main")
    repository.git("merge", "other", **editor)
    assert "Merge branch 'other'" in repository.message()
    assert "Proposed" not in repository.message()
    repository.git("revert", "--no-commit", "HEAD~1")
    repository.git("commit", **editor)
    assert "Revert" in repository.message()
    (repository.root / "text").write_text("# the template of this place\n\nIssue: \n")
    repository.git("config", "commit.template", "text")
    (repository.root / "a").write_text("of -a\n")
    repository.git("commit", "-a", **editor)
    assert repository.message() == "Proposed\n\nIssue:"
    repository.git("commit", "--allow-empty", "--allow-empty-message", "-m", "", **editor)
    assert repository.message() == ""


def test_the_hook_sees_what_this_commit_takes(repository: Repository) -> None:
    file = repository.home.root / "config" / "templates" / "commit.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('prompt = "raw Files $input"')
    for name in ("one", "two"):
        repository.stage(name, "1\n")
    repository.git("commit", "-qm", "Begin")
    repository.hook()
    for name in ("one", "two"):
        (repository.root / name).write_text("2\n")
    repository.git("commit", "one", GIT_EDITOR="true")
    assert "b/one" in repository.message()
    assert "b/two" not in repository.message()


@pytest.mark.parametrize("wrong", ["no daemon", "no pair", "slow", "no program", "broken template"])
def test_the_hook_prevents_no_commit(repository: Repository, home: Home, wrong: str) -> None:
    says(home, "Proposed")
    repository.hook()
    repository.stage("a", "a\n")
    said = "localspec: no commit message: "
    environment = {"GIT_EDITOR": "sh -c 'echo Own > \"$1\"' -"}
    hook = repository.root / ".git" / "hooks" / "prepare-commit-msg"
    template = home.root / "config" / "templates" / "commit.toml"
    if wrong == "no daemon":
        environment["LOCALSPEC_HOME"] = str(repository.root)
    elif wrong == "no pair":
        template.write_text('prompt = "x"\nmodel = "none"')
    elif wrong == "slow":
        template.write_text('prompt = "forever"')
        program = repository.root / "impatient.py"
        program.write_text(IMPATIENT)
        text = hook.read_text()
        hook.write_text(text.replace("localspec commit", f"{sys.executable} {program} commit"))
    elif wrong == "no program":
        said = "not found"
        hook.write_text(hook.read_text().replace("localspec commit", "localspec-gone commit"))
    else:
        template.write_text('prompt = "')
    done = repository.git("commit", **environment)
    assert repository.message() == "Own"
    assert said in done.stderr
    assert "Traceback" not in done.stderr


IMPATIENT = """
import sys
from localspec import cli
from localspec.extras.shell import commands
commands._HOOK_TIMEOUT_S = 1
sys.exit(cli.main())
"""
