"""The ``choros top`` command."""

import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any

import click

from choros import durations
from choros.errors import ConfigError, LaunchError
from choros.launch.driver.live_view import view_problem
from choros.launch.processes.control import RECORD_OF, VIEW_OF, answer_of, chosen_job
from choros.view.snapshot import table, view_of

_COMMAND = "choros top"


@click.command(context_settings={"max_content_width": 110})
@click.argument("job", type=int, required=False)
@click.option("--once", is_flag=True, help="Print one table and end, as without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the job's record as JSON and end: docs/report.md.")
@click.option("--of-chorosrun", is_flag=True, hidden=True)
def top(job: int | None, *, once: bool, as_json: bool, of_chorosrun: bool) -> None:
    """Shows a running job: its progress, its rates, what each rank's time goes to, and its last output.

    JOB is the PID of its chorosrun on this host; it can be left out if only one job of yours runs here. q and Ctrl-C
    leave; the job goes on. The ranks are not asked.
    """
    number = os.getppid() if of_chorosrun else chosen_job(VIEW_OF, job, _COMMAND)[0]

    def fetch() -> dict[str, Any]:
        try:
            return dict(json.loads(answer_of(VIEW_OF, number, _COMMAND, durations.RECORD)))
        except ValueError as error:
            raise LaunchError(f"{_COMMAND}: the job ended while it answered.") from error

    if as_json:
        click.echo(answer_of(RECORD_OF, number, _COMMAND, durations.STACKS_COMMAND))
    elif once or (problem := view_problem(os.environ)) == "":
        click.echo(table(view_of(fetch(), time.time())))
    elif problem:
        raise ConfigError(f"{_COMMAND}: {problem}. --once prints a table without it.")
    else:
        from choros.view.app import TopApp

        for name in ("COLUMNS", "LINES"):  # Textual would believe them, also when the terminal's size changes
            os.environ.pop(name, None)
        threading.Thread(target=_end_without_terminal, daemon=True).start()
        stop = (lambda: os.kill(number, signal.SIGINT)) if of_chorosrun else None
        sys.exit(TopApp(fetch, stop, lambda: of_chorosrun and os.getppid() != number).run())


def _end_without_terminal() -> None:
    """Ends the process once its terminal is gone, to which Textual waits for ever to write."""
    hang_up = select.poll()
    hang_up.register(0, 0)
    hang_up.poll()
    os._exit(0)
