"""Test `localspec commit`, in git's editor and in git's hook, which must never prevent a commit."""

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

import localspec
from localspec.extras.shell import asking, staged
from tests.support.daemons import Home, scripted_home, temporary_home
from tests.support.editors import EDITORS, program
from tests.support.patience import PATIENCE
from tests.support.shells import with_program
from tests.support.terminal import Terminal, terminal

BUILTIN = Path(localspec.__file__).parent / "builtin"
WHO = {f"GIT_{who}_{what}": "n" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
# These names would have an effect if a shell or git interpreted them.
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
    """Yield a home whose scripted model writes commit messages."""
    with scripted_home() as home:
        with_program(home)
        home.environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **WHO}
        yield home


class Repository:
    def __init__(self, home: Home, root: Path) -> None:
        self.home = home
        self.root = root
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            ["git", *words],
            cwd=self.root,
            env={**self.home.environment, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert result.returncode == 0, result.stderr
        return result

    def stage(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.git("add", "--", name)

    def prepare(self, answer: str, *, hook: bool = False) -> None:
        """Let the model give this answer, and stage a file."""
        set_answer(self.home, answer)
        if hook:
            self.hook()
        self.stage("a", "a\n")

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


def set_prompt(home: Home, prompt: str) -> Path:
    """Replace the template of the command; return its file."""
    file = home.root / "config" / "templates" / "commit.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"prompt = {json.dumps(prompt)}\n")
    return file


def set_answer(home: Home, answer: str) -> None:
    """Let the model give this answer, whatever is staged."""
    # The diff follows if the template does not place it, and a model may continue after the fence.
    set_prompt(home, f"raw ```\n{answer}\n```")


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
def test_a_message_is_extracted_from_an_answer(
    subject: str, body: str, form: str, intro: str, title: str
) -> None:
    answer = intro + form.format(title.format(subject) + body)
    assert asking.extract_message(answer) == subject + body


@given(st.text(st.one_of(st.characters(), st.sampled_from("#`*:\n\r -'")), max_size=200))
def test_an_extracted_message_is_not_changed_by_git(answer: str) -> None:
    message = asking.extract_message(answer)
    assert message == message.strip()
    assert all(char in "\n\t" or char.isprintable() for char in message)
    subject, *rest = message.split("\n")
    assert not rest or rest[0] == ""
    assert not any(line.startswith("#") for line in [subject, *rest])


@pytest.mark.parametrize("line", ["Title:", "#", "Subject:", "**Message:**", ""])
def test_a_repeated_title_is_not_a_subject(line: str) -> None:
    """Small models repeat themselves without an end."""
    assert asking.extract_message(f"{line}\n" * 5000) == ""
    assert asking.extract_message(f"{line}\n" * 5000 + "Add it") == "Add it"


def test_long_lines_of_the_body_are_wrapped() -> None:
    words = " ".join(["word"] * 40)
    lines = asking.extract_message(f"Add it\n\n{words}\n- {words}\nhttps://{'x' * 100}").split("\n")
    assert lines[:2] == ["Add it", ""]
    assert all(len(line) <= 72 or "https" in line for line in lines)
    assert [line[:6] for line in lines if line[0:1] in "- "][-3:] == ["- word", "  word", "  word"]


def test_nothing_staged_no_repository_and_a_merge_are_refused(
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


def test_missing_git_is_reported(home: Home, tmp_path: Path) -> None:
    path = home.environment["PATH"]
    home.environment["PATH"] = str(tmp_path)
    run = home.run("commit")
    home.environment["PATH"] = path
    assert (run.returncode, run.stdout) == (1, "")
    assert "git is not installed" in run.stderr


def test_without_a_terminal_the_message_is_printed_and_nothing_committed(
    repository: Repository,
) -> None:
    repository.prepare("Add a retry\n\nUploads fail at night.")
    run = repository.run()
    assert (run.returncode, run.stdout) == (0, "Add a retry\n\nUploads fail at night.\n")
    assert repository.commits() == 0


def test_the_template_gets_the_diff_the_words_and_the_last_subjects(repository: Repository) -> None:
    file = set_prompt(repository.home, "raw <$recent> $input")
    repository.stage("a.py", "x = 1\n")
    repository.git("commit", "-qm", "Add a")
    repository.git("mv", "a.py", "b.py")
    repository.stage("c.bin", "\0")
    (repository.root / "not.staged").write_text("no")
    answer = repository.run("mention", "issue 12").stdout
    for part in ("<- Add a>", "mention issue 12", "rename to b.py", "c.bin", "Binary files"):
        assert part in answer.replace("\n", " ")
    assert "not.staged" not in answer
    file.unlink()
    assert "- Add a" in repository.run().stdout  # The built-in template contains the subjects too.


def test_a_message_that_repeats_an_earlier_one_is_asked_for_again(repository: Repository) -> None:
    repository.prepare("$recent")
    repository.git("commit", "-qm", "Add a cache, a fetcher and a program")
    repository.stage("b", "b\n")
    assert repository.run().stdout == "(none)\n"


@given(
    subject=st.text("abcdefghäß ,.-'", min_size=1, max_size=60),
    signs=st.text(" ,.-'*`", max_size=3),
    suffix=st.text(max_size=60),
)
def test_repeated_subjects_are_found_despite_punctuation(
    subject: str, signs: str, suffix: str
) -> None:
    message = f"{signs}{subject.replace(' ', f'{signs} ').upper()}{signs}{suffix}"
    letters = sum(char.isalnum() for char in subject.casefold())
    assert asking.repeats_subject(message, f"- Other words than these\n- {subject}") == (
        letters >= 8
    )
    assert not asking.repeats_subject("", f"- {subject}")


def test_the_diff_is_plain_whatever_git_is_configured_to_show(repository: Repository) -> None:
    set_answer(repository.home, "x")
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
        patches = staged.patches()
    assert [patch.name for patch in patches] == ["b", "folder/a"]
    assert "\x1b" not in patches[0].text
    assert "+two" in patches[0].text
    assert not (repository.root / "pwned").exists()


def test_names_of_files_reach_no_shell(repository: Repository, using: dict[str, str]) -> None:
    set_answer(repository.home, "Add them")
    for name in STRANGE:
        try:
            (repository.root / name).parent.mkdir(parents=True, exist_ok=True)
            (repository.root / name).write_text(f"{name!r}\n")
        except OSError:
            continue  # This file system accepts only UTF-8.
    repository.git("add", "-A")
    run = repository.run()
    assert (run.returncode, run.stdout) == (0, "Add them\n"), run.stderr
    repository.hook()
    repository.git("commit", **using)
    assert repository.message() == "Add them"
    names = {path.name for path in repository.root.rglob("*")}
    assert "pwned" not in names


def make_patches(rng: random.Random) -> list[staged.Patch]:
    patches = []
    for number in range(rng.randrange(1, 30)):
        lines = [f"+{'x' * rng.randrange(80)}" for _ in range(int(rng.expovariate(0.02)))]
        name = f"file{number}.py"
        head = [f"diff --git a/{name} b/{name}", f"--- a/{name}", f"+++ b/{name}"]
        patches.append(staged.Patch(name, "\n".join([*head, *lines])))
    return patches


def test_a_shortened_diff_fits_and_names_what_is_missing() -> None:
    rng = random.Random(17)
    for _ in range(300):
        patches = make_patches(rng)
        diff = "\n".join(patch.text for patch in patches)
        max_chars = rng.randrange(1, len(diff) + 200)
        text, left_out = staged.shorten_patches(patches, max_chars)
        if len(diff) < max_chars:
            assert (text, left_out) == (diff, "")
            continue
        notes = sum(len(line) + 1 for line in text.split("\n") if line.startswith("[… "))
        assert len(text) - notes <= max_chars
        assert ("left out" in text) == bool(left_out) == (text != diff)
        retained_lines = {line for line in text.split("\n") if not line.startswith("[… ")}
        assert retained_lines <= set(diff.split("\n"))
        for patch in patches:  # Small patches stay whole while others are shortened.
            if len(patch.text) < max_chars // len(patches) - 1:
                assert patch.text in text


def test_a_diff_longer_than_the_context_is_cut_with_a_notice(tmp_path: Path) -> None:
    with temporary_home() as home:  # The shipped pair has a short context.
        home.environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        repository = Repository(home, tmp_path)
        repository.stage("large.py", "".join(f"value_{n} = {n}\n" for n in range(6_000)))
        repository.stage("small.py", "import os\n")
        run = repository.run()
        assert (run.returncode, run.stdout) == (1, "")
        # It has not learned commit messages.
        assert "The built-in demo pair knows only Python" in run.stderr
        model = ("-m", str(BUILTIN / "target.gguf"))
        run = repository.run(*model, "-n", "9")
        assert "Too long for the pair's context; left out: " in run.stderr
        assert "lines of large.py." in run.stderr
        repository.hook()
        repository.git("commit", GIT_EDITOR="sh -c 'echo Own > \"$1\"' -", **WHO)
        assert repository.message() == "Own"
        log = "".join(f"make: line {n}\n" for n in range(6_000))
        run = home.run("explain", *model, "-n", "9", stdin=log)
        assert run.returncode == 0, run.stderr
        assert "lines in the middle" in run.stderr


def test_generated_files_are_left_out_before_anything_else() -> None:
    rng = random.Random(44)
    for _ in range(200):
        written_patches = make_patches(rng)
        generated_patches = [make_generated_patch(rng) for _ in range(rng.randrange(1, 9))]
        for patch in generated_patches:
            assert staged.is_generated(patch), patch.name
        for patch in written_patches:
            assert not staged.is_generated(patch), patch.text[:300]
        max_chars = sum(len(patch.text) + 1 for patch in written_patches)
        mixed = [*written_patches, *generated_patches]
        rng.shuffle(mixed)
        text, left_out = staged.shorten_patches(mixed, max_chars)
        for patch in written_patches:
            assert patch.text in text
        assert all(patch.text not in text for patch in generated_patches)
        listed = [patch for patch in generated_patches if f"{patch.name} (generated)" in left_out]
        assert listed == generated_patches or len(listed) == 4


def make_generated_patch(rng: random.Random) -> staged.Patch:
    """Return the patch of a generated file, recognizable by its name or only by its lines."""
    name, lines = f"file{rng.randrange(10**6)}.txt", ["+a: 1"] * 3
    match rng.randrange(4):
        case 0:
            names: tuple[str, ...] = (
                "package-lock.json",
                "Cargo.lock",
                "sub/uv.lock",
                "a.min.js",
                "app.js.map",
            )
            names += ("go.sum", "pnpm-lock.yaml", "node_modules/a/b.js", "x/vendor/b.c", "a_pb2.py")
            name = f"dir{rng.randrange(10**6)}/{rng.choice(names)}"
        case 1:
            lines = [
                "+" + base64.b64encode(rng.randbytes(57)).decode()
                for _ in range(rng.randrange(3, 99))
            ]
        case 2:
            lines = ["+" + ";".join(f"var a{n}={n}" for n in range(rng.randrange(80, 900)))]
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
def test_text_that_people_write_is_not_generated(line: str) -> None:
    text = f"diff --git a/a.md b/a.md\n--- a/a.md\n+++ b/a.md\n@@ -1 +1 @@\n+{line}"
    assert not staged.is_generated(staged.Patch("a.md", text))


def test_a_diff_of_generated_files_alone_is_shortened() -> None:
    patch = staged.Patch("uv.lock", "diff --git a/uv.lock b/uv.lock\n" + "+a\n" * 500)
    text, left_out = staged.shorten_patches([patch], 300)
    assert text.startswith("diff --git a/uv.lock")
    assert "lines of uv.lock" in left_out


@pytest.mark.parametrize("tty", [False, True])
def test_a_diff_that_takes_long_to_read_is_shortened(repository: Repository, tty: bool) -> None:
    """The scripted engine reports a prefill speed of 100 tokens (here words) per second."""
    set_prompt(repository.home, "late 0.5 $input")
    repository.stage("package-lock.json", "a b c d e f\n" * 300)
    repository.stage("words.py", "one two three four five six\n" * 3000)
    if tty:
        with commit_at_terminal(repository, "--print", editor="true") as session:
            assert session.wait() == 0
            stderr = session.text
    else:
        stderr = repository.run().stderr
    stderr = " ".join(stderr.split())
    assert "Too long to read in 20 seconds; left out: package-lock.json (generated)," in stderr
    assert "lines of words.py." in stderr


def test_a_diff_that_is_read_in_time_is_whole(repository: Repository) -> None:
    set_prompt(repository.home, "late 0.5 $input")
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


def test_files_are_added_to_the_prompt(repository: Repository) -> None:
    set_prompt(repository.home, "raw $input")
    (repository.root / "notes").write_text("Reads faster.")
    repository.stage("a", "a\n")
    assert "Reads faster." in repository.run("-f", "notes", "why").stdout


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


def write_editor(repository: Repository, name: str) -> str:
    file = repository.root / ".git" / name
    file.write_text(VI)
    file.chmod(0o755)
    repository.home.environment["SEEN"] = str(repository.root / ".git" / "seen")
    return str(file)


@pytest.mark.parametrize(
    ("save", "cleanup", "sign"),
    [
        ("place", "default", "#"),
        ("rename", "default", ";"),
        ("place", "verbatim", ";"),
        ("place", "whitespace", "#"),
        ("rename", "scissors", "#"),
        ("no", "default", "#"),
        ("error", "verbatim", ";"),
    ],
)
def test_only_a_saved_message_is_committed(
    repository: Repository, save: str, cleanup: str, sign: str
) -> None:
    repository.prepare("Add a\n\nBecause.")
    repository.git("config", "commit.cleanup", cleanup)
    repository.git("config", "core.commentChar", sign)
    repository.git("config", "commit.status", "false")
    repository.home.environment["SAVE"] = save
    with commit_at_terminal(repository, editor=write_editor(repository, "vim")) as session:
        code = session.wait()
    proposal = (repository.root / ".git" / "seen").read_text()
    assert f"\n{sign} Proposed by localspec (" in proposal
    assert "To abort: delete the message, or leave with :cq." in proposal
    if save in ("no", "error"):
        assert code != 0
        assert repository.commits() == 0
        assert "nothing is committed" in session.text
    else:
        assert code == 0, session.text
        assert repository.message().startswith("Add a\n\nBecause.")
        assert "Proposed by localspec" not in repository.message()


@pytest.mark.parametrize(("key", "commits"), [("y", 1), ("", 0), ("n", 0)])
def test_an_unsaved_message_needs_a_confirmation(
    repository: Repository, key: str, commits: int
) -> None:
    repository.prepare("Add a")
    repository.home.environment["SAVE"] = "no"
    with commit_at_terminal(repository, editor=write_editor(repository, "nano")) as session:
        session.expect("The message was not saved. Commit with it as it is?")
        session.send(f"{key}\r")
        assert session.wait() == 1 - commits
    assert repository.commits() == commits


IN_FOLDER = """
import os, sys
os.chdir(sys.argv[1])
os.execv(sys.executable, [sys.executable, "-m", "localspec", "commit", *sys.argv[2:]])
"""


@contextlib.contextmanager
def commit_at_terminal(repository: Repository, *arguments: str, editor: str) -> Iterator[Terminal]:
    environment = {**repository.home.environment, "GIT_EDITOR": editor}
    folder = str(repository.root)
    with terminal(environment, folder, *arguments, program=("-c", IN_FOLDER)) as session:
        yield session


def test_at_a_terminal_gits_editor_has_the_message(repository: Repository) -> None:
    repository.prepare("Add a\n\nBecause.\n#12 is done.")
    editor = repository.root / ".git" / "editor"
    editor.write_text('#!/bin/sh\ncp "$1" seen\nsed -i 1s/a/b/ "$1"\ntest -t 0\n')
    editor.chmod(0o755)
    with commit_at_terminal(repository, editor=str(editor)) as session:
        assert session.wait() == 0
    proposal = (repository.root / "seen").read_text()
    assert proposal.startswith("Add a\n\nBecause.\n #12 is done.\n")
    assert "an empty message aborts the commit" in proposal.replace("\n# ", " ")
    assert repository.message() == "Add b\n\nBecause.\n #12 is done."


def test_without_a_message_left_git_aborts(repository: Repository) -> None:
    repository.prepare("Add a")
    with commit_at_terminal(repository, editor="truncate -s 0") as session:
        assert session.wait() == 1
        assert "Aborting commit due to empty commit message" in session.text
    assert repository.commits() == 0


def test_ctrl_c_reaches_the_editor(repository: Repository) -> None:
    repository.prepare("Add a")
    editor = repository.root / ".git" / "editor"
    editor.write_text("#!/bin/sh\nkill -INT $$\ntouch survived\n")
    editor.chmod(0o755)
    with commit_at_terminal(repository, editor=str(editor)) as session:
        assert session.wait() != 0
    assert not (repository.root / "survived").exists()
    assert repository.commits() == 0


def test_all_changes_of_tracked_files_are_committed_with_a(repository: Repository) -> None:
    set_answer(repository.home, "Change a")
    assert "git cannot show" in repository.run("-a").stderr  # There is no commit yet.
    repository.stage("a", "a\n")
    repository.git("commit", "-qm", "Add a")
    for flags in ([], ["-a"]):
        clean = repository.run(*flags).stderr
        assert clean == "localspec: Nothing to commit, working tree clean.\n"
    (repository.root / "new").write_text("new\n")
    assert "No tracked file has changed." in repository.run("-a").stderr
    (repository.root / "a").write_text("b\n")
    assert "Nothing is staged" in repository.run().stderr
    with commit_at_terminal(repository, "-a", editor="true") as session:
        assert session.wait() == 0
    assert repository.message() == "Change a"
    assert repository.git("show", "--name-only", "--format=").stdout == "a\n"


def test_print_commits_nothing_at_a_terminal_too(repository: Repository) -> None:
    repository.prepare("Add a")
    with commit_at_terminal(repository, "--print", editor="true") as session:
        assert session.wait() == 0
        assert session.text.endswith("Add a\n")
    assert repository.commits() == 0


# An editor that does what the comment about the proposal says, and keeps a copy of the file.
USE = """\
#!/bin/sh
cp "$1" "$SEEN"
lines=$(sed -n 's/.*To use it, .*(in Vim, :\\(.*\\))\\.$/\\1/p' "$1" | sed 's/=/?/')
if test -n "$lines"; then
  sed -i "$lines" "$1"
else
  sed -i '0,/>8/{/>8/d}; /delete this line and the one above/d' "$1"
fi
"""


@pytest.fixture
def using(repository: Repository) -> dict[str, str]:
    """Return the setting of an editor that uses what the hook proposes."""
    file = repository.root / ".git" / "use"
    file.write_text(USE)
    file.chmod(0o755)
    return {"GIT_EDITOR": str(file), "SEEN": str(repository.root / ".git" / "seen")}


OURS = "# Ours\n\nIssue: \n"


@pytest.mark.parametrize(
    ("cleanup", "words", "template"),
    [
        ("default", (), ""),
        ("strip", ("-n", "--no-status"), ""),
        ("scissors", ("-n", "--no-status"), OURS),
        ("--cleanup=default", ("-v",), OURS),
        ("--cleanup=strip", (), OURS),
        ("--cleanup=scissors", ("-v",), ""),
    ],
)
def test_only_a_proposal_that_was_used_is_committed(
    repository: Repository,
    using: dict[str, str],
    words: tuple[str, ...],
    cleanup: str,
    template: str,
) -> None:
    """An editor that changes nothing commits nothing, whether it saves the file or not."""
    answer = "Add a" if template else "Add a\n\nBecause.\n\n- one\n- two"
    repository.prepare(answer, hook=True)
    option = [cleanup] if cleanup.startswith("--") else []
    if not option:
        repository.git("config", "commit.cleanup", cleanup)
    if template and "scissors" in cleanup:
        template = template.removeprefix("# Ours\n\n")  # there it would be no comment
    if template:
        (repository.root / "template").write_text(template)
        repository.git("config", "commit.template", "template")
    for editor in ("true", "touch"):
        with pytest.raises(AssertionError, match="Aborting commit"):
            repository.git("commit", *words, *option, GIT_EDITOR=editor)
    repository.git("commit", *words, *option, **using)
    assert repository.message().startswith(answer) or template
    assert answer in repository.message()
    assert "localspec" not in repository.message()


@pytest.mark.parametrize("editor", EDITORS)
def test_the_command_that_is_shown_for_vim_uses_a_proposal(
    repository: Repository, editor: str
) -> None:
    repository.prepare("Add a\n\nBecause.", hook=True)
    vim = f"{shlex.quote(program(editor))} -es -u NONE"
    for leave in ("q!", "wq", "x"):
        with pytest.raises(AssertionError, match="Aborting commit"):
            repository.git("commit", GIT_EDITOR=f"{vim} -c '{leave}'")
    script = r"""exe matchstr(join(getline(1, '$')), 'in Vim, :\zs[^)]*') | wq"""
    repository.git("commit", GIT_EDITOR=f"{vim} -c {shlex.quote(script)}")
    assert repository.message() == "Add a\n\nBecause."


@pytest.mark.parametrize(
    ("words", "sign", "template"),
    [
        ((), "auto", "#1: \n"),
        (("-v",), ";", "#1: \n"),
        (("--no-status",), ";", ""),
        (("--cleanup=scissors",), "auto", ""),
    ],
)
def test_a_proposal_is_a_comment_with_any_sign(
    repository: Repository, using: dict[str, str], sign: str, words: tuple[str, ...], template: str
) -> None:
    repository.prepare("Add a\n\nBecause.", hook=True)
    repository.git("config", "core.commentChar", sign)
    if template:
        (repository.root / "template").write_text(template)
        repository.git("config", "commit.template", "template")
    with pytest.raises(AssertionError, match="Aborting commit"):
        repository.git("commit", *words, GIT_EDITOR="true")
    repository.git("commit", *words, **using)
    assert "Add a\n\nBecause." in repository.message()
    assert "localspec" not in repository.message()


@pytest.mark.parametrize("cleanup", ["verbatim", "whitespace"])
@pytest.mark.parametrize("option", [False, True])
def test_nothing_is_proposed_where_git_keeps_comments(
    repository: Repository, cleanup: str, option: bool
) -> None:
    repository.prepare("Proposed", hook=True)
    if not option:
        repository.git("config", "commit.cleanup", cleanup)
    words = [f"--cleanup={cleanup}"] if option else []
    result = repository.git("commit", *words, GIT_EDITOR="sh -c 'echo Own >> \"$1\"' -")
    assert "localspec: no commit message: git keeps comments here" in result.stderr
    assert "Own" in repository.message()
    assert "Proposed" not in repository.message()


def test_the_hook_says_how_to_install_it(repository: Repository, using: dict[str, str]) -> None:
    run = repository.run("--hook")
    assert run.stdout.startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n"], input=run.stdout, text=True, check=False).returncode == 0
    with terminal(repository.home.environment, "commit", "--hook", columns=200) as session:
        assert session.wait() == 0
        install = session.text.split("To install it here:")[1].strip()
    subprocess.run(
        ["sh", "-c", install], cwd=repository.root, env=repository.home.environment, check=True
    )
    repository.prepare("Add a")
    repository.git("commit", **using)
    assert repository.message() == "Add a"


def test_the_hook_proposes_a_message_only_where_none_was_given(
    repository: Repository, using: dict[str, str]
) -> None:
    set_answer(repository.home, "Proposed")
    repository.hook()
    editor = {"GIT_EDITOR": "true"}
    repository.stage("a", "a\n")
    repository.git("commit", **using)
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
    repository.git("commit", "-a", **using)
    assert repository.message() == "Proposed\n\nIssue:"
    repository.git("commit", "--allow-empty", "--allow-empty-message", "-m", "", **editor)
    assert repository.message() == ""


def test_the_hook_sees_only_the_files_of_its_commit(
    repository: Repository, using: dict[str, str]
) -> None:
    set_prompt(repository.home, "raw Files $input")
    for name in ("one", "two"):
        repository.stage(name, "1\n")
    repository.git("commit", "-qm", "Begin")
    repository.hook()
    for name in ("one", "two"):
        (repository.root / name).write_text("2\n")
    repository.git("commit", "one", **using)
    assert "b/one" in repository.message()
    assert "b/two" not in repository.message()


@pytest.mark.parametrize(
    "failure", ["no daemon", "no pair", "slow", "no program", "broken template"]
)
def test_the_hook_prevents_no_commit(repository: Repository, home: Home, failure: str) -> None:
    repository.prepare("Proposed", hook=True)
    message = "localspec: no commit message: "
    environment = {"GIT_EDITOR": "sh -c 'echo Own > \"$1\"' -"}
    hook = repository.root / ".git" / "hooks" / "prepare-commit-msg"
    template = home.root / "config" / "templates" / "commit.toml"
    if failure == "no daemon":
        environment["LOCALSPEC_HOME"] = str(repository.root)
    elif failure == "no pair":
        template.write_text('prompt = "x"\nmodel = "none"')
    elif failure == "slow":
        template.write_text('prompt = "forever"')
        program = repository.root / "impatient.py"
        program.write_text(IMPATIENT)
        text = hook.read_text()
        hook.write_text(text.replace("localspec commit", f"{sys.executable} {program} commit"))
    elif failure == "no program":
        message = "not found"
        hook.write_text(hook.read_text().replace("localspec commit", "localspec-gone commit"))
    else:
        template.write_text('prompt = "')
    result = repository.git("commit", **environment)
    assert repository.message() == "Own"
    assert message in result.stderr
    assert "Traceback" not in result.stderr


IMPATIENT = """
import sys
from localspec import cli
from localspec.extras.shell import commands
commands._HOOK_TIMEOUT_S = 1
sys.exit(cli.main())
"""
