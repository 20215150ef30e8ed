"""A rank of the doctor's job: an allreduce of 1 MiB, whose sum it knows."""

import numpy as np

import choros
from choros.parallel.ops import allreduce


def main() -> None:
    """Fails if the ranks' average is not what it must be."""
    choros.init()
    average = allreduce(np.full(1 << 18, choros.rank(), np.float32))
    expected = (choros.size() - 1) / 2
    if not (average == expected).all():
        raise SystemExit(f"the average of the ranks' numbers is {average[0]}, and must be {expected}")


if __name__ == "__main__":
    main()
