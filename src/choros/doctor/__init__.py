"""``choros doctor``: says whether a job can run here, and what mends what is broken. Loaded only by its command.

::

    facts ─── MachineFacts ──► checks ── Finding ──┐
                   ▲                               ├──► cli ──► text or JSON, exit code
    hosts ◄─ ssh ──┴── hosts   of other machines ──┤
    job                        a job of two ranks ─┘

Facts are gathered without what they are about: each framework, and MPI, is imported in a process of its own.
"""
