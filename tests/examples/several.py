"""Runs several examples one after the other in the same process, so that their tests share the start of a framework.

::

    chorosrun -np 2 python several.py mnist_mirrored --epochs 1 --- fashion_mnist_custom_loop --epochs 2

On the other frameworks importing TensorFlow fails as if it were not installed.
"""

import itertools
import os
import sys

from harness import ROOT

if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None

sys.path.insert(0, str(ROOT / "examples"))
for is_separator, group in itertools.groupby(sys.argv[1:], lambda argument: argument == "---"):
    if not is_separator:
        sys.argv = list(group)
        __import__(sys.argv[0]).main()
