"""What `localspec editor` writes and prints. The plug-in itself is Vim script, in `localspec/editors/`.

plugin.py    the one file that makes Vim or Neovim load it
servers.py   what `lsp` and `acp` need before they start
emacs.py     the block in Emacs' init file
settings.py  settings for plug-ins of others, with this machine's values
"""
