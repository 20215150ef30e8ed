"""The ``choros doctor`` command, which is ``chorosrun --check-build``, too: it asks one part after the other."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from choros import durations
from choros.doctor.checks import OK, PROBLEM, WARNING, Finding, check_machine
from choros.doctor.facts import MachineFacts, gather, working_directory
from choros.doctor.hosts import check_others
from choros.doctor.job import try_job
from choros.launch.driver.machine import own_names, run_script
from choros.launch.driver.output import shown_if_slow, use_colour
from choros.launch.options import PARAMETERS
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.hosts import Host

_HELP = """\
Says whether a job can run on this machine, and with -H on other hosts, and how to mend what is broken.

\b
Examples:
  choros doctor                      this machine: frameworks, MPI, memory, limits, a job of two ranks
  choros doctor -H a:4,b:4           also hosts a and b: logins, versions, clocks, ports, a job on both
  choros doctor --json > doctor.json for a program, or for a report of an error

Each finding is ok, a warning (a job runs, but less well) or a problem (a job does not run), with the command or
setting that mends it. `chorosrun --check-build` prints the same.

\b
Exit codes:
  0         a job could run here; there may be warnings
  1         a job could not run here
  2         invalid arguments
  130, 143  ended by Ctrl-C, by SIGTERM
"""
_COLOURS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}
_ARGUMENTS = ("hosts", "hostfile", "ssh_port", "ssh_identity_file", "ssh_command", "mpirun")


@click.command(
    help=_HELP,
    params=[
        *(each for each in PARAMETERS if each.name in _ARGUMENTS),
        click.Option(["--json", "in_json"], is_flag=True, help="Print one JSON object: docs/doctor.md describes it."),
    ],
)
def doctor(in_json: bool, **given: Any) -> int:
    """See ``_HELP``."""
    return examine(Arguments(**given), in_json=in_json)


def examine(arguments: Arguments, *, in_json: bool = False) -> int:
    """Examines this machine and the hosts in ``arguments``, prints the findings, and returns the exit code."""
    job = arguments.job(["true"], os.environ, own_names, count_accelerators=int, discover=run_script)
    with _progress("this machine: importing frameworks and MPI"):
        here = gather(working_directory(), arguments.mpirun)
    facts = {"localhost": here}
    others: list[Finding] = []
    if job.remote:
        with _progress("other hosts: logins, facts, ports"):
            others, there = check_others(job, here)
        facts |= there
    with _progress("a job that averages an array"):
        tried = try_job(arguments, job.hosts if runs(others) else [Host("localhost")])
    findings = [*check_machine(here), tried, *others]
    text = (as_json if in_json else as_text)(findings, facts)
    click.echo(text, color=use_colour(os.environ, os.isatty(1)))
    return 0 if runs(findings) else 1


def _progress(what: str) -> AbstractContextManager[None]:
    return shown_if_slow(f"choros doctor: {what} …", durations.DOCTOR_PROGRESS, partial(click.echo, err=True))


def runs(findings: Sequence[Finding]) -> bool:
    """Returns whether a job could run: there may be warnings, but no problem."""
    return all(finding.level != PROBLEM for finding in findings)


def as_text(findings: Sequence[Finding], facts: Mapping[str, MachineFacts]) -> str:
    """Returns the findings, each machine's below its name, with colours, which ``click.echo`` removes for a pipe."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for host in dict.fromkeys(finding.host for finding in findings):
        name = facts[host].name if host in facts else ""
        lines += [click.style(f"{host} ({name})" if name and name != host else host, bold=True)]
        for finding in findings:
            if finding.host == host:
                level = click.style(f"{finding.level:7}", fg=_COLOURS[finding.level])
                lines.append(f"  {level}  {finding.check:{width}}  {finding.text}")
                lines += [f"  {'':7}  {'':{width}}  → {finding.fix}"] if finding.fix else []
        lines.append("")
    return "\n".join([*lines, _verdict(findings)])


def _verdict(findings: Sequence[Finding]) -> str:
    """Returns the last line.

    >>> _verdict([Finding("ports", WARNING, "Slow.")])
    'A job can run here: no problem, 1 warning.'
    """
    levels = [finding.level for finding in findings]
    counts = ", ".join(_count(levels.count(level), level) for level in (PROBLEM, WARNING))
    return f"A job can{'' if runs(findings) else 'not'} run here: {counts}."


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' * (number > 1)}"


def as_json(findings: Sequence[Finding], facts: Mapping[str, MachineFacts]) -> str:
    """Returns one JSON object: whether a job could run, all findings, and the facts of each machine by its name."""
    machines = {host: asdict(each) for host, each in facts.items()}
    return json.dumps({"runs": runs(findings), "findings": [vars(each) for each in findings], "machines": machines})
