"""Runs several examples one after the other in the same process, so that their tests share the start of a framework.

::

    chorosrun -np 2 python several.py mnist_mirrored --epochs 1 --- fashion_mnist_custom_loop --epochs 2

TensorFlow is not installed as far as the other frameworks can see.
"""

import itertools
import os
import sys

from harness import ROOT

if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None

sys.path.insert(0, str(ROOT / "examples"))
for separates, words in itertools.groupby(sys.argv[1:], lambda word: word == "---"):
    if not separates:
        sys.argv = list(words)
        __import__(sys.argv[0]).main()
