"""Plain Keras: each process trains independently."""

from __future__ import annotations

from typing import Any

import keras

from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.keras_training import compiled, fit_task


def join() -> Prepare:
    """Communicates with no other process."""

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        return fit_task(compiled(case.model), case, case.batch)

    return prepare


if __name__ == "__main__":
    serve(join)
