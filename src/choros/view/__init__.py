"""``choros top`` and ``chorosrun --view``: what a running job does, from chorosrun's record. Its ranks are not asked.

::

    chorosrun ── record, every 1.5 s ───► snapshot.py ── JobView ──► app.py     on a terminal
                                                └─────── texts ────► a pipe
"""
