"""``choros bench``: measures choros and its peers in one run, in interleaved rounds.

::

    cli ─► allreduce, train                  the contenders, and the work of a trial
              │
              ▼
             run ─► process_group ─► channel  rounds of trials; a contender's processes; messages to them
              │         └──────────► contender  and the commands with which its users start it
              ▼
           figures ─► report

    cli ─► startup                           processes that live for one trial
    cli ─► memory                            ranks that train once, and the peak of their memory

Only ``forecast`` and ``memory``, which print such tables too, import this one.
"""
