"""What a recorded job would take on ranks that are not rented yet: ``choros forecast``. Loaded only when it runs.

::

    run.json ── workload.py ──► compute, its spread, buckets ──┐
    --net    ── cli.py      ──► α and β of the links ──────────┤
                                                               ├─ model.py ──► seconds of a step ──► cli.py
    settings ── costs.py    ──► seconds of an exchange ────────┘
"""
