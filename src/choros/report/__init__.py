"""The page about a job: the record that ``--report`` writes, as one HTML file. Loaded only when one is written.

::

    FILE.json ──► record ──► figures ── as SVG, by drawing ──► page ──► FILE.html
                    │                                           ▲
                    └──────► numbers ── of one job, or of two ──┘

The page needs no network and no script: a browser opens it anywhere, also years later.
"""
