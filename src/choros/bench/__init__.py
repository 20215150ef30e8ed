"""``choros bench``: measures choros and its peers in one run, in interleaved rounds.

::

    cli ─► allreduce, train, overhead        the contenders, and the work of a trial
              │
              ▼
             run ─► process_group ─► channel  rounds of trials; a contender's processes; messages to them
              │         └──────────► start    the launch commands of each contender's users
              ▼
           figures ─► report, plot, model

    cli ─► startup                           processes that live for one trial

No other package imports this one.
"""
