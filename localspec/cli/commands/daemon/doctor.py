"""`localspec doctor`."""

from __future__ import annotations

import click

from localspec.cli import doctor


@click.command(
    help="Check for problems and suggest fixes. Exits with 1 if something does not work. "
    "Nothing is changed and nothing is sent.",
    epilog="Examples:\n\n\b\n  localspec doctor\n  localspec doctor --json",
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(as_json: bool) -> int:
    return doctor.run(doctor.CheckedMachine.here(), as_json=as_json)
