"""Settings for editors and for plug-ins of others, with this machine's values in them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from localspec import literals
from localspec.cli.editors.servers import missing
from localspec.config import load_config
from localspec.errors import UsageError
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
    # what an editor starts
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "localspec", "lsp")


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
    return f"let g:localspec_socket = {literals.vim(str(here.socket))}"


def _nvim_lsp(here: Machine) -> str:
    return f"""\
vim.lsp.config('localspec', {{ cmd = {{ {", ".join(map(literals.lua, here.command))} }} }})
vim.lsp.enable('localspec')
vim.api.nvim_create_autocmd('LspAttach', {{ callback = function(event)
  local client = vim.lsp.get_client_by_id(event.data.client_id)
  if client.name ~= 'localspec' then
    return
  elseif vim.lsp.inline_completion then -- ghost text: Neovim 0.12
    vim.lsp.inline_completion.enable(true, {{ client_id = client.id }})
    vim.keymap.set('i', '<Tab>', function()
      return vim.lsp.inline_completion.get() and '' or '<Tab>'
    end, {{ buffer = event.buf, expr = true }})
  else -- a menu: also by <C-x><C-o>; a line at a time
    vim.lsp.completion.enable(true, client.id, event.buf, {{ autotrigger = true,
      convert = function(item) return {{ word = item.textEdit.newText:match('^[^\\n]*') }} end }})
  end
end }})
-- Without an instruction the one in a comment counts: # localspec: add types
vim.lsp.commands['localspec.edit'] = function(command, context)
  vim.ui.input({{ prompt = 'Instruction: ' }}, function(typed)
    if typed then
      local words = {{ command.arguments[1], typed ~= '' and typed or nil }}
      vim.lsp.get_client_by_id(context.client_id):request('workspace/executeCommand',
        {{ command = command.command, arguments = words }}, function() end)
    end
  end)
end"""


def _helix(here: Machine) -> str:
    command, *arguments = here.command
    return f"""\
[language-server.localspec]
command = {_toml(command)}
args = {_toml(arguments)}

[[language]]
name = "python"
language-servers = ["pylsp", "localspec"]"""


def _eglot(here: Machine) -> str:
    return f"""\
(with-eval-after-load 'eglot
  (add-to-list 'eglot-server-programs
               '((prog-mode text-mode) . ({" ".join(map(literals.lisp, here.command))})) t))"""


def _lsp_mode(here: Machine) -> str:
    return f"""\
(with-eval-after-load 'lsp-mode
  (lsp-register-client
   (make-lsp-client
    :new-connection (lsp-stdio-connection '({" ".join(map(literals.lisp, here.command))}))
    :activation-fn (lambda (&rest _) t)
    :add-on? t :priority -1 :server-id 'localspec)))"""


def _kakoune(here: Machine) -> str:
    command, *arguments = here.command
    return f"""\
hook -group lsp-localspec global BufSetOption filetype=.+ %{{
    set-option -add buffer lsp_servers %{{
        [localspec]
        root_globs = [".git"]
        command = {_in_braces(_toml(command))}
        args = {_in_braces(_toml(arguments))}
    }}
}}"""


def _llama_vim(here: Machine) -> str:
    return (
        '" In vimrc, before the plug-in llama.vim is loaded; it needs Vim 9.1 or Neovim.\n'
        "let g:llama_config = {\n"
        f"      \\ 'endpoint_fim': {literals.vim(f'http://{here.listen}/infill')},\n"
        f"      \\ 'endpoint_inst': {literals.vim(f'http://{here.listen}/v1/chat/completions')},\n"
        f"      \\ 'api_key': trim(system('localspec token'))}}"
    )


def _minuet(here: Machine) -> str:
    return f"""\
-- Over the socket; it needs plenary.nvim. Where nothing is shown: :Minuet virtualtext enable
require('minuet').setup {{
  provider = 'openai_fim_compatible',
  n_completions = 1,
  curl_extra_args = {{ '--unix-socket', {literals.lua(str(here.socket))} }},
  virtualtext = {{ auto_trigger_ft = {{ '*' }}, keymap = {{ accept = '<A-a>' }} }},
  provider_options = {{ openai_fim_compatible = {{
    name = 'localspec', model = {literals.lua(here.pair)},
    end_point = 'http://localhost/v1/completions',
    api_key = function() return 'unused' end,
  }} }},
}}"""


def _gptel(here: Machine) -> str:
    # gptel knows models by symbols. A name with a blank or a bracket is one only if it is made of a string.
    name = literals.lisp_symbol(here.pair)
    return f"""\
;; Over the socket, through curl.
(setq gptel-model {name}
      gptel-backend
      (gptel-make-openai "localspec"
        :protocol "http" :host "localhost" :stream t :key "unused" :models (list {name})
        :curl-args '("--unix-socket" {literals.lisp(str(here.socket))})))"""


def _minuet_el(here: Machine) -> str:
    return f"""\
;; Over the socket. A suggestion is shown by: M-x minuet-show-suggestion
(setq minuet-provider 'openai-fim-compatible
      minuet-n-completions 1)
(setq minuet-openai-fim-compatible-options
      (append (list :name "localspec" :model {literals.lisp(here.pair)} :api-key (lambda () "unused")
                    :end-point "http://localhost/v1/completions")
              minuet-openai-fim-compatible-options))
(define-advice minuet--openai-fim-compatible-complete (:around (ask &rest given) localspec)
  (let ((plz-curl-default-args
         (append '("--unix-socket" {literals.lisp(str(here.socket))}) plz-curl-default-args)))
    (apply ask given)))"""


def _emacs(here: Machine) -> str:
    parts = {"gptel": f"(require 'gptel-openai)\n{_gptel(here)}", "minuet": _minuet_el(here)}
    return "\n".join(
        f"(with-eval-after-load '{name}\n{textwrap.indent(text, '  ')})"
        for name, text in parts.items()
    )


def _agent() -> dict[str, object]:
    """How an editor starts the agent."""
    return {"command": sys.executable, "args": ["-P", "-m", "localspec", "acp"]}


def _zed(here: Machine) -> str:
    url = f"http://{here.listen}/v1"
    settings = {
        "agent_servers": {"localspec": {"type": "custom", **_agent()}},
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


def _jetbrains(_: Machine) -> str:
    return json.dumps({"agent_servers": {"localspec": _agent()}}, indent=2)


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
    server: str = ""  # the command that it starts
    more: str = ""


SETTINGS = {
    "vim": Setting("vimrc, only if the plug-in does not find the socket by itself", _vim),
    "nvim": Setting("init.vim, only if the plug-in does not find the socket by itself", _vim),
    "nvim-lsp": Setting(
        "Neovim's init.lua, instead of the plug-in, for those who want a language server; from 0.11 on",
        _nvim_lsp,
        server="lsp",
    ),
    "helix": Setting(
        "Helix' languages.toml",
        _helix,
        server="lsp",
        more="Each language names its servers, those that it had among them: hx --health python",
    ),
    "eglot": Setting(
        "Emacs' init file",
        _eglot,
        server="lsp",
        more="Eglot has one server for a buffer; here localspec is that of languages without another one.",
    ),
    "lsp-mode": Setting(
        "Emacs' init file; localspec runs beside other servers", _lsp_mode, server="lsp"
    ),
    "kakoune": Setting("kakrc, below the line that starts kakoune-lsp", _kakoune, server="lsp"),
    "llama.vim": Setting("vimrc", _llama_vim, tcp=True),
    "minuet": Setting("Neovim's init.lua", _minuet),
    "gptel": Setting("Emacs' init file", _gptel),
    "emacs": Setting("Emacs' init file: gptel and minuet, where they are installed", _emacs),
    "zed": Setting(
        "Zed's settings.json",
        _zed,
        tcp=True,
        server="acp",
        more="Only the chat of agent_servers needs no TCP. For the others Zed takes the token from "
        "LOCALSPEC_API_KEY and ZED_OPEN_AI_COMPATIBLE_EDIT_PREDICTION_API_KEY in its environment.",
    ),
    "jetbrains": Setting(
        "~/.jetbrains/acp.json, for the AI chat of JetBrains' editors",
        _jetbrains,
        server="acp",
    ),
    "vscode": Setting("VS Code's settings.json, for the extension llama.vscode", _vscode, tcp=True),
}


def notes(name: str, here: Machine) -> list[str]:
    """What a person must know or do beside these settings, a sentence each."""
    chosen = SETTINGS[name]
    told = [f"For {chosen.about}."]
    if chosen.tcp and not here.listens:
        told.append(f"It needs TCP, which is off: localspec config set listen {LISTEN}")
    if chosen.server and (first := missing(chosen.server)):
        told.append(first)
    return [*told, *([chosen.more] if chosen.more else [])]


def _toml(value: object) -> str:
    """Raises UsageError: a path has bytes that TOML, which is UTF-8, has no form for."""
    try:
        return literals.toml(value)
    except ValueError:
        raise UsageError("The path of this Python is not UTF-8, which this editor needs.") from None


def _in_braces(text: str) -> str:
    """Return TOML for a place where an outer language counts braces."""
    return text.replace("{", "\\u007b").replace("}", "\\u007d")
