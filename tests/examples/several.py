"""Runs several examples one after the other in the same process, so that their tests share the start of a framework.

::

    chorosrun -np 2 python several.py mnist_mirrored --epochs 1 --- fashion_mnist_custom_loop --epochs 2

They are those of ``examples/`` and ``compat/horovod/examples/``; a line with its arguments precedes the output of each.
On the other frameworks importing TensorFlow fails as if it were not installed.
"""

import itertools
import os
import sys

from harness import ROOT

if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "compat" / "horovod" / "examples")]
for is_separator, group in itertools.groupby(sys.argv[1:], lambda argument: argument == "---"):
    if not is_separator:
        sys.argv = list(group)
        print("#", *sys.argv, flush=True)
        __import__(sys.argv[0]).main()
