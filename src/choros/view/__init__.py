"""``choros top`` and ``chorosrun --view``: what a running job does, from chorosrun's record. Its ranks are not asked.

::

    chorosrun ── record, once a second ──► snapshot.py ── JobView ──► app.py    on a terminal
                                                              └─────► text.py   through a pipe
"""
