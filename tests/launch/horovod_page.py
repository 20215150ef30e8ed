"""The tables of docs/horovod-launcher.md, from the tables that chorosrun reads. Run as a script, it writes them."""

from pathlib import Path

from choros.config import ENGINE, HOROVOD_UNUSED, VARIABLES
from choros.launch.plan.horovod_flags import HOROVOD_FLAGS, HorovodFlag, NoEffect, Sets
from choros.launch.plan.settings import horovod_variables
from choros.topology import Topology

PAGE = Path(__file__).parents[2] / "docs" / "horovod-launcher.md"


def page() -> str:
    """Returns the page, with its tables as they should be."""
    return filled(PAGE, {"flags": flags_table(), "variables": variables_table()})


def filled(page: Path, tables: dict[str, list[str]]) -> str:
    """Returns a page, of which ``<!-- NAME -->`` stands before each table."""
    return "<!-- ".join(_filled(part, tables) for part in page.read_text().split("<!-- "))


def _filled(part: str, tables: dict[str, list[str]]) -> str:
    name, _, rest = part.partition(" -->\n")
    if name not in tables:
        return part
    _, blank, text = rest.partition("\n\n")
    return f"{name} -->\n" + "\n".join(tables[name]) + blank + text


def flags_table() -> list[str]:
    """Returns a row for each flag."""
    head = ["| flag | in a file | here |", "|---|---|---|"]
    return head + [f"| {_names(flag)} | {_code(flag.keys[:1])} | {_here(flag)} |" for flag in HOROVOD_FLAGS]


def variables_table() -> list[str]:
    """Returns a row for each variable."""
    also_set = horovod_variables(Topology(), "", {ENGINE.name: "mpi"})
    rows = [
        f"| `{alias.name}` | read as `{variable.name}`: {variable.help.rstrip('.')}"
        f"{'; set for ranks for which MPI or Gloo is requested' if alias.name in also_set else ''} |"
        for variable in VARIABLES
        for alias in variable.aliases
    ]
    rows += [f"| `{name}` | set for each rank |" for name in horovod_variables(Topology(), "", {})]
    rows += [f"| `{name}` | no effect: {reason.rstrip('.')} |" for name, reason in HOROVOD_UNUSED.items()]
    return ["| variable | here |", "|---|---|", *rows]


def _names(flag: HorovodFlag) -> str:
    return _code(flag.on) + (f"; off: {_code(flag.off)}" if flag.off else "")


def _code(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _here(flag: HorovodFlag) -> str:
    does = flag.does
    if isinstance(does, Sets):
        return f"sets `{does.variable.name}`" + (f". {does.help}" if does.help else "")
    if isinstance(does, NoEffect):
        return f"no effect: {does.reason.rstrip('.')}"
    return "the same" + (f"; {does.note}" if does.note else "")


if __name__ == "__main__":
    PAGE.write_text(page())
