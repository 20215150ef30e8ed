"""The tables of docs/horovod-launcher.md and docs/chorosrun.md, from the rows that chorosrun reads.

Run as a script, it writes them.
"""

from pathlib import Path

from choros.launch.options import ALL_FLAGS, OF_HOROVODRUN
from choros.launch.plan.arguments import FLAGS
from choros.launch.plan.environment import horovod_variables
from choros.launch.plan.flags import Flag
from choros.settings import HOROVOD_UNUSED, VARIABLES, Variable
from choros.topology import Topology

DOCS = Path(__file__).parents[2] / "docs"
HOROVODS, CHOROSRUNS = DOCS / "horovod-launcher.md", DOCS / "chorosrun.md"


def pages() -> dict[Path, str]:
    """Returns the pages, with their tables as they should be."""
    return {
        HOROVODS: filled(HOROVODS, {"flags": horovods_flags(), "variables": horovods_variables()}),
        CHOROSRUNS: filled(CHOROSRUNS, {"flags": chorosruns_flags(), "variables": chorosruns_variables()}),
    }


def filled(page: Path, tables: dict[str, list[str]]) -> str:
    """Returns a page, of which ``<!-- NAME -->`` stands before each table."""
    return "<!-- ".join(_filled(part, tables) for part in page.read_text().split("<!-- "))


def _filled(part: str, tables: dict[str, list[str]]) -> str:
    name, _, rest = part.partition(" -->\n")
    if name not in tables:
        return part
    _, blank, text = rest.partition("\n\n")
    return f"{name} -->\n" + "\n".join(tables[name]) + blank + text


def horovods_flags() -> list[str]:
    """Returns a row for each flag."""
    head = ["| flag | in a file | here |", "|---|---|---|"]
    return head + [f"| {_names(flag)} | {_code(flag.keys[:1])} | {_here(flag)} |" for flag in OF_HOROVODRUN]


def horovods_variables() -> list[str]:
    """Returns a row for each variable."""
    also_set = horovod_variables(Topology(), "", {VARIABLES["engine"].name: "mpi"})
    rows = [
        f"| `{alias}` | read as `{variable.name}`: {variable.help.rstrip('.')}"
        f"{'; set for ranks for which MPI or Gloo is requested' if alias in also_set else ''} |"
        for variable in VARIABLES.values()
        for alias in variable.aliases
    ]
    rows += [f"| `{name}` | set for each rank |" for name in horovod_variables(Topology(), "", {})]
    rows += [f"| `{name}` | no effect: {reason.rstrip('.')} |" for name, reason in HOROVOD_UNUSED.items()]
    return ["| variable | here |", "|---|---|", *rows]


def chorosruns_flags() -> list[str]:
    """Returns a row for each flag that help lists, below the name of its group."""
    groups: dict[str, list[str]] = {}
    for flag in ALL_FLAGS:
        metavar = f" `{flag.metavar}`" if flag.metavar else ""
        names = _code([*flag.on, *flag.off]) + metavar
        if flag.group:
            groups.setdefault(flag.group, []).append(f"| {names} | {_argument(flag)} | {flag.help} |")
    rows = [row for group, rows in groups.items() for row in (f"| **{group}** | | |", *rows)]
    return ["| flag | in `choros.run` | |", "|---|---|---|", *rows]


def _argument(flag: Flag) -> str:
    of_both = flag.dest in FLAGS and flag.python is not None
    return f"`{flag.dest}`" if of_both or flag.dest in ("use_gloo", "use_mpi") else ""


def chorosruns_variables() -> list[str]:
    """Returns a row for each variable."""
    rows = [f"| `{each.name}` | {_values(each)} | {_meaning(each)} |" for each in VARIABLES.values()]
    return ["| variable | values | meaning |", "|---|---|---|", *rows]


def _values(variable: Variable) -> str:
    if variable.choices:
        return _code(variable.choices)
    return f"{variable.unit}, {variable.default}" if variable.unit and variable.default else variable.unit


def _meaning(variable: Variable) -> str:
    link = f": [{variable.page}]({variable.page})" if variable.page else ""
    flags = [flag.on[0] for flag in ALL_FLAGS if flag.variable is variable and flag.group]
    return f"{variable.help.rstrip('.')}{f' ({_code(flags)})' if flags else ''}{link}"


def _names(flag: Flag) -> str:
    on = [name for name in flag.on if name not in flag.own_names.split()]
    return _code(on) + (f"; off: {_code(flag.off)}" if flag.off else "")


def _code(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _here(flag: Flag) -> str:
    if flag.no_effect:
        return f"no effect: {flag.no_effect.rstrip('.')}"
    if flag.variable is not None:
        return f"sets `{flag.variable.name}`" + (f". {flag.help}" if flag.help else "")
    notes = [f"also {_code(flag.own_names.split())}"] if flag.own_names else []
    return "; ".join(["the same", *notes, *([flag.horovod] if flag.horovod else [])])


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
