"""Settings for editors and for plug-ins of others, with this machine's values in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from localspec.config import load_config
from localspec.paths import Paths, read_file

LISTEN = "127.0.0.1:8012"
_TOKEN = "the output of: localspec token"


class Machine(NamedTuple):
    """What settings need to know."""

    socket: Path
    listen: str
    token: str
    pair: str
    listens: bool  # TCP is served as it is configured


def machine(paths: Paths) -> Machine:
    """This one, by its configuration. Nothing is asked of a daemon, and nothing started."""
    config = load_config(paths.config_file)
    try:
        token = read_file(paths.token).decode("ascii", "replace").strip()
    except OSError:
        token = ""
    pair = config.pair_fim or config.pair
    listen = config.listen or LISTEN
    return Machine(paths.socket, listen, token or _TOKEN, pair, bool(config.listen))


def _vim(here: Machine) -> str:
    return f"let g:localspec_socket = {_vim_string(str(here.socket))}"


def _llama_vim(here: Machine) -> str:
    return (
        '" In vimrc, before the plug-in llama.vim is loaded; it needs Vim 9.1 or Neovim.\n'
        "let g:llama_config = {\n"
        f"      \\ 'endpoint_fim': 'http://{here.listen}/infill',\n"
        f"      \\ 'endpoint_inst': 'http://{here.listen}/v1/chat/completions',\n"
        f"      \\ 'api_key': trim(system('localspec token'))}}"
    )


def _minuet(here: Machine) -> str:
    return f"""\
-- Over the socket. Suggestions are shown with: :Minuet virtualtext enable
require('minuet').setup {{
  provider = 'openai_fim_compatible',
  n_completions = 1,
  curl_extra_args = {{ '--unix-socket', {json.dumps(str(here.socket))} }},
  virtualtext = {{ auto_trigger_ft = {{ '*' }}, keymap = {{ accept = '<A-a>' }} }},
  provider_options = {{ openai_fim_compatible = {{
    name = 'localspec', model = {json.dumps(here.pair)},
    end_point = 'http://localhost/v1/completions',
    api_key = function() return 'unused' end,
  }} }},
}}"""


def _gptel(here: Machine) -> str:
    name = here.pair.replace(" ", "-")
    return f"""\
;; Over the socket, through curl.
(setq gptel-model '{name}
      gptel-backend
      (gptel-make-openai "localspec"
        :protocol "http" :host "localhost" :stream t :key "unused" :models '({name})
        :curl-args '("--unix-socket" {json.dumps(str(here.socket))})))"""


def _zed(here: Machine) -> str:
    url = f"http://{here.listen}/v1"
    settings = {
        "language_models": {
            "openai_compatible": {
                "localspec": {
                    "api_url": url,
                    "available_models": [{"name": here.pair, "max_tokens": 8192}],
                }
            }
        },
        "edit_predictions": {
            "provider": "open_ai_compatible_api",
            "open_ai_compatible_api": {
                "api_url": f"{url}/completions",
                "model": here.pair,
                "prompt_format": "qwen",
            },
        },
    }
    return json.dumps(settings, indent=2)


def _vscode(here: Machine) -> str:
    settings = {
        "llama-vscode.endpoint": f"http://{here.listen}",
        "llama-vscode.api_key": here.token,
    }
    return json.dumps(settings, indent=2)


class Setting(NamedTuple):
    """One editor's: where it goes, and what else is to be done."""

    about: str
    text: Callable[[Machine], str]
    tcp: bool = False
    more: str = ""


SETTINGS = {
    "vim": Setting("vimrc, only if the plug-in does not find the socket by itself", _vim),
    "nvim": Setting("init.vim, only if the plug-in does not find the socket by itself", _vim),
    "llama.vim": Setting("vimrc", _llama_vim, tcp=True),
    "minuet": Setting("Neovim's init.lua", _minuet),
    "gptel": Setting("Emacs' init file", _gptel),
    "zed": Setting(
        "Zed's settings.json",
        _zed,
        tcp=True,
        more="Zed takes the token from LOCALSPEC_API_KEY and ZED_OPEN_AI_COMPATIBLE_EDIT_PREDICTION_API_KEY "
        "in its environment.",
    ),
    "vscode": Setting("VS Code's settings.json, for the extension llama.vscode", _vscode, tcp=True),
}


def notes(name: str, here: Machine) -> list[str]:
    """What a person must know or do beside these settings, a sentence each."""
    chosen = SETTINGS[name]
    told = [f"For {chosen.about}."]
    if chosen.tcp and not here.listens:
        told.append(f"It needs TCP, which is off: localspec config set listen {LISTEN}")
    return [*told, *([chosen.more] if chosen.more else [])]


def _vim_string(word: str) -> str:
    return "'" + word.replace("'", "''") + "'"
