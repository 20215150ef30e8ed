"""Variables that live on servers, and are updated as gradients come.

::

      chief ── functions, batches ──► worker ── pull / push ──► ps 0, ps 1, …
        ▲       (coordinator/)          │                         │ shards of variables, a Keras optimizer each
        └── results, metrics ───────────┘                         ▼
        └──────────────────────── pull, when nothing runs ────────┘
"""

from choros.distribute.parameter_server.strategy import ParameterServerStrategy

__all__ = ["ParameterServerStrategy"]
