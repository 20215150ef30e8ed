"""The findings as text, or as one JSON object."""

import json
from collections.abc import Mapping, Sequence

import click

from choros.doctor.facts import OK, PROBLEM, WARNING, Finding, MachineFacts

_COLOURS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}


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
    machines = {host: each.as_json() for host, each in facts.items()}
    return json.dumps({"runs": runs(findings), "findings": [vars(each) for each in findings], "machines": machines})
