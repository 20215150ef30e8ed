"""Compares the cells of the transparency matrix on real ranks, and writes ``docs/transparency.md``.

    python -m training.matrix_run [--frameworks torch jax] [--ranks 2 3] [--seconds 300]

Results are kept in files in ``docs/transparency``; cells that are there are not compared again. So a run can be
stopped, or limited by ``--seconds``, and continued; delete a file to compare its cells anew.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import platform
import sys
import time

import choros
from training.matrix import BOUND
from training.matrix_results import LIBRARIES, PAGE, PARTS, Part, Results, page

#: How many cells are compared for each rank between two writes of the file.
AT_ONCE = 18


def compare_part(part: Part, seconds: float) -> None:
    """Compares the cells that the part's file lacks, on the ranks of this job, for about this many seconds."""
    choros.init()
    from choros.parallel.objects import broadcast_object
    from training.matrix_cases import compare

    gc.freeze()  # frameworks: Keras collects garbage after each chunk
    end = time.monotonic() + seconds
    results = Results.read(part) if choros.rank() == 0 else None
    while True:
        cells = broadcast_object(results.missing(part)[:AT_ONCE] if results and time.monotonic() < end else [])
        if not cells:
            return
        found = compare(cells)
        if results:
            results = Results(versions_of(part), {**results.differences, **found})
            results.write(part)


def settings_of(part: Part) -> dict[str, str]:
    """Steps as small as these are compiled for longer than they run."""
    jax = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if part.framework == "jax" else {}
    return jax | ({"CHOROS_SHARD_STATE": "1"} if part.in_slices else {})


def versions_of(part: Part) -> str:
    names = {LIBRARIES[part.framework]: part.framework, "Keras": "keras", "NumPy": "numpy"}
    versions = [f"{name} {importlib.import_module(module).__version__}" for name, module in names.items()]
    settings = [f"{name}={value}" for name, value in settings_of(part).items()]
    return ", ".join([*versions, f"Python {platform.python_version()}", *settings])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3], choices=[2, 3])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="compare for about this long")
    arguments = parser.parse_args(argv)
    end = time.monotonic() + arguments.seconds
    for part in PARTS:
        chosen = part.framework in arguments.frameworks and part.ranks in arguments.ranks
        if chosen and Results.read(part).missing(part) and time.monotonic() < end:
            environ = {"KERAS_BACKEND": part.framework, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            choros.run(
                compare_part, (part, end - time.monotonic()), num_proc=part.ranks, env={**environ, **settings_of(part)}
            )
    results = {part: Results.read(part) for part in PARTS}
    for part, each in results.items():
        print(f"{part.file.name}: {len(each.differences)} of {len(part.cells)} combinations")
        for cell, difference in each.differences.items():
            if max(difference) > BOUND:
                print(f"  {cell}: weights {difference.weights:.1e}, history {difference.history:.1e}")
    if all(each.differences for each in results.values()):
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
