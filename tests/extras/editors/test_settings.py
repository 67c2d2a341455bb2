"""Settings for editors: no path and no name changes what stands around it."""

from __future__ import annotations

import json
import re
import shutil
import string
import tomllib
from pathlib import Path

import pytest

from localspec import literals
from localspec.extras.editors.settings import SETTINGS, EditorEnvironment
from tests.test_literals import check_texts, run_and_read


def make_environment(text: str) -> EditorEnvironment:
    return EditorEnvironment(
        Path(f"/{text}/s.sock"), "127.0.0.1:8012", "t", text or "x", True, (f"/{text}", "-P")
    )


def remove_strings(text: str, language: str) -> str:
    """Return the text outside of strings and comments."""
    strings = {
        "lua": r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|--[^\n]*',
        "lisp": r'"(?:[^"\\]|\\.)*"|;[^\n]*',
        "vim": r"'(?:[^'\n]|'')*'|\"(?:[^\"\\\n]|\\.)*\"",
    }
    return re.sub(strings[language], "S", text)


LANGUAGES = {
    **dict.fromkeys(("vim", "nvim", "llama.vim"), "vim"),
    **dict.fromkeys(("nvim-lsp", "minuet"), "lua"),
    **dict.fromkeys(("eglot", "lsp-mode", "gptel", "emacs"), "lisp"),
    **dict.fromkeys(("helix", "kakoune"), "toml"),
    **dict.fromkeys(("zed", "jetbrains", "llama.vscode"), "json"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_paths_and_names_do_not_change_the_settings_around_them(name: str) -> None:
    """Outside of strings they are the same, whatever the paths and names are."""
    language = LANGUAGES[name]

    @check_texts
    def holds(text: str) -> None:
        if language in ("toml", "kakoune") and text.encode("utf-8", "ignore").decode() != text:
            return
        settings_text, plain = (
            SETTINGS[name].text(make_environment(content)) for content in (text, "plain")
        )
        if language == "json":
            assert json.loads(settings_text)
        elif name == "helix":
            assert (
                tomllib.loads(settings_text)["language-server"]["localspec"]["command"]
                == f"/{text}"
            )
        elif name == "kakoune":
            assert (
                settings_text.count("{")
                == plain.count("{")
                == settings_text.count("}")
                == plain.count("}")
            )
            inner = settings_text[settings_text.index("[localspec]") : settings_text.index("    }")]
            assert tomllib.loads(inner)["localspec"]["command"] == f"/{text}"
        else:
            assert remove_strings(settings_text, language) == remove_strings(plain, language)
            assert set(settings_text) <= {*"\n", *filter(str.isprintable, settings_text)}

    holds()


def test_emacs_has_the_pair_of_the_settings(tmp_path: Path) -> None:
    """A stand-in for gptel takes the settings of Emacs' own reader."""
    if not shutil.which("emacs"):
        pytest.skip("this machine has no emacs among its editors")
    for name in ("/x(1).gguf,/y/draft.gguf", "a b", "é'`,@#", string.punctuation):
        script = tmp_path / "x.el"
        out = literals.lisp(str(tmp_path / "out"))
        script.write_text(
            "(defun gptel-make-openai (name &rest given) (list name given))\n"
            f"{SETTINGS['gptel'].text(make_environment(name))}\n"
            "(unless (eq gptel-model (car (plist-get (cadr gptel-backend) :models))) (kill-emacs 1))\n"
            '(insert (mapconcat (lambda (c) (format "%02x" c)) (encode-coding-string '
            '(symbol-name gptel-model) \'utf-8-unix) "") "\\n")\n'
            f"(write-region nil nil {out})\n"
        )
        assert run_and_read(["emacs", "-Q", "--batch", "-l", str(script)], tmp_path) == [
            name.encode()
        ]
