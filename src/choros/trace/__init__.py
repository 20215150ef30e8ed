"""The timeline of a job: what each rank did when, in one file that Perfetto opens. Loaded only when one is read.

::

    rank 0 ── events ──► FILE.json.parts/rank-0.jsonl ──┐ at the end, through the engine ┌─► FILE.json
    rank 1 ── events ──► FILE.json.parts/rank-1.jsonl ──┘ (``choros.comm.recording``)    │
                                │                                                        │
                                └── after a crash: chorosrun, or ``choros timeline`` ────┘

Each rank writes its *part* as events happen (``choros.observe.timeline``), so a killed rank leaves all that it did;
recording needs no messages. At the end rank 0 receives all parts, aligns the hosts' clocks and pairs events
(``trace.py``), and writes Chrome's format (``files.py``). If a job ends sooner, they are merged where they lie.
"""
