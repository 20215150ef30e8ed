"""A memcpy on every rank, without communication: the lower bound of the time to sum two arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.bench.cases import GroupedCase
from choros.bench.channel import Prepare, Task, serve


def join() -> Prepare:
    """Communicates with no other process."""

    def prepare(case: Any) -> Task:
        case = case.joined if isinstance(case, GroupedCase) else case
        source = np.empty(case.items, case.dtype)
        target = np.zeros_like(source)

        def run(units: int) -> None:
            for _ in range(units):
                np.copyto(target, source)

        return Task(run, before=lambda: source.fill(1))

    return prepare


if __name__ == "__main__":
    serve(join)
