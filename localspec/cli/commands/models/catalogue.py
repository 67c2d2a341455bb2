"""`localspec catalogue`."""

from __future__ import annotations

import click

from localspec.cli.terminal import pairs, render
from localspec.client.pairs import PairsClient


@click.command(
    help="List pairs available to pull, and whether each fits into this machine's free "
    "memory; 'partly' means that it needs main memory besides the GPU's. Drafts come "
    "from a draft model, from heads trained with the target (MTP) or from the text itself (n-gram).",
    epilog="Example: localspec catalogue --fits",
)
@click.option("--fits", is_flag=True, help="Only list pairs that fit.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(fits: bool, as_json: bool) -> int:
    listed = PairsClient().pairs(everything=True)
    listed["pairs"] = [
        each
        for each in listed["pairs"]
        if each["memory"] and not (fits and each["fits"] not in ("yes", "partly"))
    ]
    if as_json:
        render.record(listed)
        return 0
    pairs.catalogue(listed["pairs"])
    render.line(f"\n{pairs.memory(listed)}. To download one: localspec pull NAME")
    pairs.problems(listed)
    return 0
