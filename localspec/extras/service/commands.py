"""`localspec service` and `localspec doctor`: the daemon as a user service, and what may be wrong with it."""

from __future__ import annotations

import contextlib

import click

from localspec.cli.app import Group, flag, json_option, require_consent, yes_option
from localspec.cli.terminal import render
from localspec.client import autostart
from localspec.client.api import Client
from localspec.config import load_config
from localspec.errors import NoDaemon
from localspec.extras.service import doctor, units
from localspec.paths import default_paths


@click.group(
    cls=Group,
    help="Run the daemon as a user service: systemd starts it on demand, launchd at login.",
    epilog="Examples:\n\n\b\n  localspec service install\n  localspec service install --print\n"
    "  localspec service uninstall",
)
def service_command() -> None:
    pass


def _manager() -> units.Systemd | units.Launchd:
    paths = default_paths()
    # A TCP request cannot start the daemon, so with `listen` it has to run already.
    return units.manager(paths.socket, always=bool(load_config(paths.config_file).listen))


@service_command.command(
    help="Install and start the service. A running daemon is stopped first.",
    epilog="Example: localspec service install",
)
@flag("--print", "only_print", help="Only print the files that would be written.")
def install(only_print: bool) -> None:
    manager = _manager()
    if only_print:
        for path, text in manager.files().items():
            render.verbatim(f"# {path}\n{text}")
        return
    manager.require()
    with contextlib.suppress(NoDaemon), autostart.until_gone():
        Client(autostart=False).shutdown()
    manager.install()
    render.line(manager.state())


@service_command.command(
    help="Stop and remove the service. Models, history and configuration are kept.",
    epilog="Example: localspec service uninstall",
)
@yes_option
def uninstall(yes: bool) -> None:
    require_consent(yes=yes)
    remove_installed()


def remove_installed() -> None:
    removed = _manager().uninstall()
    render.line("The service has been removed." if removed else "No service is installed.")


@service_command.command(
    help="Show whether the service is installed and active.",
    epilog="Example: localspec service status",
)
def status() -> None:
    render.line(_manager().state())


@click.command(
    help="Check for problems and suggest fixes. Exits with 1 if something does not work. "
    "Nothing is changed and nothing is sent.",
    epilog="Examples:\n\n\b\n  localspec doctor\n  localspec doctor --json",
)
@json_option
def doctor_command(as_json: bool) -> int:
    code = doctor.run(doctor.CheckedMachine.current(), as_json=as_json)
    Client.daemon_version = None  # it has a line about that of its own
    return code
