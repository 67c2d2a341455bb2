"""Settings for editors and for other plug-ins, with this machine's values."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from localspec import literals
from localspec.config import load_config
from localspec.errors import UsageError
from localspec.extras.editors.servers import missing_library
from localspec.paths import Paths, read_file

DEFAULT_LISTEN = "127.0.0.1:8012"
_TOKEN = "the output of: localspec token"


class EditorEnvironment(NamedTuple):
    """The values that settings need."""

    socket: Path
    listen: str
    token: str
    pair: str
    listens_on_tcp: bool  # the daemon is configured to listen on TCP
    # The command that an editor starts.
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "localspec", "lsp")


def read_environment(paths: Paths) -> EditorEnvironment:
    """Return the values of this machine from its configuration, without contacting a daemon."""
    config = load_config(paths.config_file)
    try:
        token = read_file(paths.token).decode("ascii", "replace").strip()
    except OSError:
        token = ""
    pair = config.pair_fim or config.pair
    listen = config.listen or DEFAULT_LISTEN
    return EditorEnvironment(paths.socket, listen, token or _TOKEN, pair, bool(config.listen))


def _nvim_lsp(machine: EditorEnvironment) -> str:
    return f"""\
vim.lsp.config('localspec', {{ cmd = {{ {", ".join(map(literals.lua, machine.command))} }} }})
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


def _helix(machine: EditorEnvironment) -> str:
    command, *arguments = machine.command
    return f"""\
[language-server.localspec]
command = {_toml(command)}
args = {_toml(arguments)}

[[language]]
name = "python"
language-servers = ["pylsp", "localspec"]"""


def _eglot(machine: EditorEnvironment) -> str:
    return f"""\
(with-eval-after-load 'eglot
  (add-to-list 'eglot-server-programs
               '((prog-mode text-mode) . ({" ".join(map(literals.lisp, machine.command))})) t))"""


def _lsp_mode(machine: EditorEnvironment) -> str:
    return f"""\
(with-eval-after-load 'lsp-mode
  (lsp-register-client
   (make-lsp-client
    :new-connection (lsp-stdio-connection '({" ".join(map(literals.lisp, machine.command))}))
    :activation-fn (lambda (&rest _) t)
    :add-on? t :priority -1 :server-id 'localspec)))"""


def _kakoune(machine: EditorEnvironment) -> str:
    command, *arguments = machine.command
    return f"""\
hook -group lsp-localspec global BufSetOption filetype=.+ %{{
    set-option -add buffer lsp_servers %{{
        [localspec]
        root_globs = [".git"]
        command = {_in_braces(_toml(command))}
        args = {_in_braces(_toml(arguments))}
    }}
}}"""


def _vim(machine: EditorEnvironment) -> str:
    return f"let g:localspec_socket = {literals.vim(str(machine.socket))}"


def _llama_vim(machine: EditorEnvironment) -> str:
    url = f"http://{machine.listen}"
    return f"""\
" In vimrc, before the plug-in llama.vim is loaded; it needs Vim 9.1 or Neovim.
let g:llama_config = {{
      \\ 'endpoint_fim': {literals.vim(f"{url}/infill")},
      \\ 'endpoint_inst': {literals.vim(f"{url}/v1/chat/completions")},
      \\ 'api_key': trim(system('localspec token'))}}"""


def _minuet(machine: EditorEnvironment) -> str:
    return f"""\
-- Over the socket; it needs plenary.nvim. Where nothing is shown: :Minuet virtualtext enable
require('minuet').setup {{
  provider = 'openai_fim_compatible',
  n_completions = 1,
  curl_extra_args = {{ '--unix-socket', {literals.lua(str(machine.socket))} }},
  virtualtext = {{ auto_trigger_ft = {{ '*' }}, keymap = {{ accept = '<A-a>' }} }},
  provider_options = {{ openai_fim_compatible = {{
    name = 'localspec', model = {literals.lua(machine.pair)},
    end_point = 'http://localhost/v1/completions',
    api_key = function() return 'unused' end,
  }} }},
}}"""


def _gptel(machine: EditorEnvironment) -> str:
    # gptel identifies models by symbols. A name with a blank or a bracket has to be quoted as a symbol.
    name = literals.lisp_symbol(machine.pair)
    return f"""\
;; Over the socket, through curl.
(setq gptel-model {name}
      gptel-backend
      (gptel-make-openai "localspec"
        :protocol "http" :host "localhost" :stream t :key "unused" :models (list {name})
        :curl-args '("--unix-socket" {literals.lisp(str(machine.socket))})))"""


def _minuet_el(machine: EditorEnvironment) -> str:
    return f"""\
;; Over the socket. A suggestion is shown by: M-x minuet-show-suggestion
(setq minuet-provider 'openai-fim-compatible
      minuet-n-completions 1)
(setq minuet-openai-fim-compatible-options
      (append (list :name "localspec" :model {literals.lisp(machine.pair)} :api-key (lambda () "unused")
                    :end-point "http://localhost/v1/completions")
              minuet-openai-fim-compatible-options))
(define-advice minuet--openai-fim-compatible-complete (:around (ask &rest given) localspec)
  (let ((plz-curl-default-args
         (append '("--unix-socket" {literals.lisp(str(machine.socket))}) plz-curl-default-args)))
    (apply ask given)))"""


def _emacs(machine: EditorEnvironment) -> str:
    parts = {"gptel": f"(require 'gptel-openai)\n{_gptel(machine)}", "minuet": _minuet_el(machine)}
    indented = {name: textwrap.indent(text, "  ") for name, text in parts.items()}
    return "\n".join(f"(with-eval-after-load '{name}\n{text})" for name, text in indented.items())


_AGENT = {"command": sys.executable, "args": ["-P", "-m", "localspec", "acp"]}


def _zed(machine: EditorEnvironment) -> str:
    url, pair = f"http://{machine.listen}/v1", machine.pair
    provider = {"api_url": url, "available_models": [{"name": pair, "max_tokens": 8192}]}
    api = {"api_url": f"{url}/completions", "model": pair, "prompt_format": "qwen"}
    settings = {
        "agent_servers": {"localspec": {"type": "custom", **_AGENT}},
        "language_models": {"openai_compatible": {"localspec": provider}},
        "edit_predictions": {"provider": "open_ai_compatible_api", "open_ai_compatible_api": api},
    }
    return json.dumps(settings, indent=2)


def _jetbrains(_: EditorEnvironment) -> str:
    return json.dumps({"agent_servers": {"localspec": _AGENT}}, indent=2)


def _llama_vscode(machine: EditorEnvironment) -> str:
    settings = {"endpoint": f"http://{machine.listen}", "api_key": machine.token}
    return json.dumps({f"llama-vscode.{key}": value for key, value in settings.items()}, indent=2)


class EditorSettings(NamedTuple):
    about: str  # the file that they belong in
    text: Callable[[EditorEnvironment], str]
    tcp: bool = False  # they need a TCP listener
    server: str = ""  # the server that the editor starts: "lsp" or "acp"
    more: str = ""  # what else there is to know or to do


SETTINGS = {
    "vim": EditorSettings("vimrc, only if the plug-in does not find the socket by itself", _vim),
    "nvim": EditorSettings(
        "init.vim, only if the plug-in does not find the socket by itself", _vim
    ),
    "nvim-lsp": EditorSettings(
        "Neovim's init.lua, instead of the plug-in, for those who want a language server; from 0.11 on",
        _nvim_lsp,
        server="lsp",
    ),
    "helix": EditorSettings(
        "Helix' languages.toml",
        _helix,
        server="lsp",
        more="Each language names its servers, those that it had among them: hx --health python",
    ),
    "eglot": EditorSettings(
        "Emacs' init file",
        _eglot,
        server="lsp",
        more="Eglot has one server for a buffer; here localspec is that of languages without another one.",
    ),
    "lsp-mode": EditorSettings(
        "Emacs' init file; localspec runs beside other servers", _lsp_mode, server="lsp"
    ),
    "kakoune": EditorSettings(
        "kakrc, below the line that starts kakoune-lsp", _kakoune, server="lsp"
    ),
    "llama.vim": EditorSettings("vimrc", _llama_vim, tcp=True),
    "minuet": EditorSettings("Neovim's init.lua", _minuet),
    "gptel": EditorSettings("Emacs' init file", _gptel),
    "emacs": EditorSettings("Emacs' init file: gptel and minuet, where they are installed", _emacs),
    "zed": EditorSettings(
        "Zed's settings.json",
        _zed,
        tcp=True,
        server="acp",
        more="Only the chat of agent_servers needs no TCP. For the others Zed takes the token from "
        "LOCALSPEC_API_KEY and ZED_OPEN_AI_COMPATIBLE_EDIT_PREDICTION_API_KEY in its environment.",
    ),
    "jetbrains": EditorSettings(
        "~/.jetbrains/acp.json, for the AI chat of JetBrains' editors", _jetbrains, server="acp"
    ),
    "llama.vscode": EditorSettings("VS Code's settings.json", _llama_vscode, tcp=True),
}


def setting_notes(name: str, machine: EditorEnvironment) -> list[str]:
    """Return what a person must know or do beside these settings, one sentence each."""
    setting = SETTINGS[name]
    tcp = f"It needs TCP, which is off: localspec config set listen {DEFAULT_LISTEN}"
    sentences = [
        f"For {setting.about}.",
        tcp if setting.tcp and not machine.listens_on_tcp else "",
        missing_library(setting.server) if setting.server else "",
        setting.more,
    ]
    return list(filter(None, sentences))


def _toml(value: object) -> str:
    """Return a value as TOML.

    Raises UsageError if a path has bytes that are not UTF-8, which TOML cannot represent.
    """
    try:
        return literals.toml(value)
    except ValueError:
        raise UsageError("The path of this Python is not UTF-8, which this editor needs.") from None


def _in_braces(text: str) -> str:
    return text.replace("{", "\\u007b").replace("}", "\\u007d")
