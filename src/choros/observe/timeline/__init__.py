"""The timeline of a job: what each rank did when, in one file that Perfetto opens.

::

    rank 0 ── events ──► FILE.json.parts/rank-0.jsonl ──┐ at the end, through the engine ┌─► FILE.json
    rank 1 ── events ──► FILE.json.parts/rank-1.jsonl ──┘ (``choros.comm.recording``)    │
                                │                                                        │
                                └── after a crash: chorosrun, or ``choros timeline`` ────┘

Each rank writes its *part* as events happen, so a rank that is killed leaves all that it did. Ranks do not communicate
while they record. At the end rank 0 receives all parts, from any host, and merges them: it aligns the hosts' clocks
(``clocks.py``), pairs events (``trace.py``) and writes Chrome's trace format (``chrome.py``). If the job does not come
to that, the parts are merged where they lie.
"""
