"""``choros stacks``: prints the Python stacks of all ranks of a running job."""

import click

from choros import durations
from choros.errors import LaunchError
from choros.launch.processes.control import running_jobs, text_of


@click.command(context_settings={"max_content_width": 110})
@click.argument("job", type=int, required=False)
def stacks(job: int | None) -> None:
    """Prints what every rank of a running job does: its process, whether it waits, and the stacks of its threads.

    JOB is the PID of its chorosrun on this host, or of the Python process that called choros.run; it can be left out if
    only one job of yours runs here. The ranks are not interrupted.
    """
    jobs = running_jobs()
    if job is None and len(jobs) != 1:
        which = f"give one of {', '.join(map(str, sorted(jobs)))}" if jobs else _NONE
        raise LaunchError(f"choros stacks: {len(jobs)} jobs of yours run on this host: {which}.")
    if job is not None and job not in jobs:
        which = f"those that run: {', '.join(map(str, sorted(jobs)))}" if jobs else _NONE
        raise LaunchError(f"choros stacks {job}: {job} is not the PID of a chorosrun of yours on this host; {which}.")
    number = next(iter(jobs)) if job is None else job
    try:
        click.echo(text_of(jobs[number], durations.STACKS_COMMAND), nl=False)
    except OSError as error:
        raise LaunchError(f"choros stacks {number}: chorosrun does not answer: {error}.") from error


_NONE = "start it with chorosrun, and run this command on the host of chorosrun, with the same TMPDIR"
