"""Commands for those who write in an editor.

acp.py       a chat in an editor's agent panel
complete.py  fill in code at a place in a file
editor.py    the plug-in for Vim and Neovim, and settings for other editors
lsp.py       the language server
"""

from __future__ import annotations

import click

from localspec.cli import suggest

# Of those that work with any pair.
pair_option = click.option(
    "-m",
    "--model",
    metavar="PAIR",
    shell_complete=suggest.pairs,
    help="Use this pair instead of the configured one.",
)
