"""The commands for people who work in an editor.

acp.py       a chat in an editor's agent panel
complete.py  complete code at a position in a file
editor.py    the plug-in for Vim and Neovim, and settings for other editors
lsp.py       the language server
"""

from __future__ import annotations

import click

from localspec.cli import suggest

# The option of commands that work with any pair.
pair_option = click.option(
    "-m",
    "--model",
    metavar="PAIR",
    shell_complete=suggest.pairs,
    help="Use this pair instead of the configured one.",
)
