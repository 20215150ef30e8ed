"""The program that each rank of ``choros.run`` runs: receives the function, calls it and sends back its result; and how
functions are packed.

::

    choros.run ──stdin──► rank 0 ──broadcast──► the other ranks
        ▲                                             │
        └── Result frames ◄── a pipe to the wrapper ◄─┘ the function's return value

No process listens on a port, and neither disk nor a command line holds the data. Unpickling the results is safe
because they come from processes that this process has started.
"""

import io
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any

import cloudpickle

from choros.errors import ConfigError
from choros.launch.protocol.wrapper_options import RESULT_FD
from choros.settings import VARIABLES
from choros.topology import detect

#: What cloudpickle raises, and what to do about it.
UNPICKLABLE = (pickle.PicklingError, TypeError, ValueError, AttributeError, NotImplementedError)
ADVICE = "Objects that hold threads, locks, files or compiled functions are created where they are used."


def pack(call: Callable[..., Any]) -> bytes:
    """Returns ``call`` as bytes, with this process's module path.

    >>> from functools import partial
    >>> unpack(pack(partial(max, 1, 2)))()
    2
    """
    pickled = io.BytesIO()
    if (main := sys.modules.get("__mp_main__")) is not None:  # that of a process of multiprocessing, as __main__ is
        cloudpickle.register_pickle_by_value(main)
    try:
        _CallPickler(pickled).dump(call)
    except UNPICKLABLE as error:
        raise ConfigError(f"what the ranks are to get cannot be sent: {error}. {ADVICE}") from error
    return pickle.dumps((list(sys.path), pickled.getvalue()))


def unpack(body: bytes, before: Sequence[str] = ()) -> Callable[[], Any]:
    """Returns the call in ``body``; modules are first looked for in ``before``, then where the process that packed it
    does.
    """
    path, call = pickle.loads(body)  # noqa: S301  (from the process that started this one)
    sys.path[:] = [*before, *(each for each in path if each not in before)]
    unpacked: Callable[[], Any] = pickle.loads(call)  # noqa: S301
    return unpacked


def reduce_code(code: CodeType) -> tuple[Any, ...]:
    """How code is pickled: with the name of its file, which cloudpickle leaves out; and for tracebacks and AutoGraph,
    with the lines of a file that the receiver may lack: of the script, and of a notebook's cells.
    """
    file = code.co_filename
    entry: tuple[Any, ...] = linecache.cache.get(file, ())
    is_cell = len(entry) > 1 and entry[1] is None
    is_own = is_cell or file == getattr(sys.modules["__main__"], "__file__", None)
    lines = linecache.getlines(file) if is_own else []
    return _code, (cloudpickle.Pickler.dispatch_table[CodeType](code)[1], file, lines)


def _code(by_cloudpickle: tuple[Any, ...], file: str, lines: list[str]) -> CodeType:
    if lines and not os.path.exists(file):
        _note_lines(file, lines)
    return CodeType(*by_cloudpickle).replace(co_filename=file)


def _note_lines(file: str, lines: list[str]) -> None:
    linecache.cache[file] = sum(map(len, lines)), None, lines, file


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: reduce_code})


def execute(source: str, file: str, values: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any] | None:
    """Runs a notebook's cell as the main module; returns rank 0's values of its variables ``results``."""
    _note_lines(file, source.splitlines(keepends=True))
    module = sys.modules["__main__"] = ModuleType("__main__")
    variables = vars(module)
    variables.update(values)
    exec(compile(source, file, "exec", dont_inherit=True), variables)  # noqa: S102  (the user's own code)
    if detect(os.environ).rank != 0:
        return None
    missing = [name for name in results if name not in variables]
    if missing:
        raise ConfigError(f"--result {','.join(results)}: on rank 0 the cell has not set {', '.join(missing)}: set it.")
    return {name: variables[name] for name in results}


def _receive() -> bytes:
    """Returns the packed call, which only rank 0 gets."""
    topology = detect(os.environ)
    body = sys.stdin.buffer.read() if topology.rank == 0 else None
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    if topology.size > 1 or VARIABLES["elastic"].read(os.environ):  # which may have other ranks later
        from choros.comm import init, shutdown
        from choros.parallel.objects import broadcast_object

        init()
        body = broadcast_object(body, root_rank=0, name="the function given to choros.run")
        shutdown()  # the function initialises choros itself
    if body is None:
        raise ConfigError("a rank that joins later cannot have what choros.run calls: it is larger than 256 MiB.")
    return body


def _send(result: Any) -> None:
    try:
        data = cloudpickle.dumps(result)
    except UNPICKLABLE as error:
        raise ConfigError(f"what the rank returns cannot be sent back: {error}. {ADVICE}") from error
    with open(int(os.environ.pop(RESULT_FD)), "wb") as pipe:
        pipe.write(data)


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that begins in the user's function."""
    here = os.path.dirname(os.path.dirname(__file__))
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename.startswith(here + os.sep):
        part = part.tb_next
    return part or trace


def main() -> None:
    """Runs the call that arrives on standard input."""
    sys.excepthook = traceback.print_exception  # which finds the lines of cells; Python's own reads files
    try:
        _send(unpack(_receive())())
    except Exception as error:  # noqa: BLE001  (the hook shows it)
        sys.excepthook(type(error), error.with_traceback(_of_the_user(error.__traceback__)), error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    main()
