"""``choros bench``: choros and its peers, measured in one run, in turns.

::

    cli ─► allreduce, train, overhead     which contenders there are, and what each burst does
              │
              ▼
           contest ─► team ─► channel     rounds; a contender's processes; what they are told
              │         └───► start       how its users would start it
              ▼
           figures ─► report, plot, model

Nothing imports this package.
"""
