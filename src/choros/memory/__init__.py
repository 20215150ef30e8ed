"""What each rank needs in memory, for any number of ranks: ``choros memory``. Loaded only when it runs.

::

    cli ─── a process of its own ──► subject ─► objects     a script until its third step, or a file;
     │      ◄─── a file: JSON ──────                        the bytes of what it trains
     ▼
    model                                                   pure: bytes of a rank, for n ranks
"""
