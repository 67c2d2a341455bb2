"""`localspec doctor`."""

from __future__ import annotations

import click

from localspec.cli import doctor


@click.command(
    help="Look for what keeps localspec from working well here, and name the cure. Exit code 1 when "
    "something does not work. Nothing is changed and nothing is sent.",
    epilog="Examples:\n\n\b\n  localspec doctor\n  localspec doctor --json",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one line of JSON.")
def command(as_json: bool) -> int:
    return doctor.run(doctor.Machine.here(), as_json=as_json)
