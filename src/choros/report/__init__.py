"""The page about a job: the record that ``--report`` writes, as one HTML file. Loaded only when one is written.

::

    FILE.json ──► record ──► figures ── as SVG, by drawing ──► page, with the main numbers ──► FILE.html

The page needs no network and no script: a browser opens it anywhere, also years later.
"""
