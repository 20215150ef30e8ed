"""The page about a job: the record that ``--report`` writes, as one HTML file. Loaded only when one is written.

::

    FILE.json ──► record ── Record ──► figures ── Figure ──► page ──► FILE.html
                               │          └── drawing: SVG    ▲
                               └──► numbers ── of two jobs ───┘

The page needs no network and no script: a browser opens it anywhere, also years later.
"""
