"""The files and settings of `localspec editor`. The plug-in itself is in `localspec/editors/`.

plugin.py    the one file that makes Vim or Neovim load the plug-in
servers.py   what `lsp` and `acp` need before they start
emacs.py     the block in Emacs' init file
settings.py  settings for other plug-ins, with this machine's values
"""
