"""Asynchronous training: variables are stored on parameter servers and updated whenever a gradient arrives.

::

      chief ── functions, batches ──► worker ── pull / push ──► ps 0, ps 1, …
        ▲       (the chief)             │                         │ shards of variables, a Keras optimizer each
        └── results, metrics ───────────┘                         ▼
        └──────────────────────── pull, when no function runs ────────┘
"""

from choros.parameter_server.strategy import ParameterServerStrategy, Server

__all__ = ["ParameterServerStrategy", "Server"]
