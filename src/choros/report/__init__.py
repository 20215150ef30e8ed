"""The page about a job: the record that ``--report`` writes, as one HTML file. Loaded only when one is written.

::

    FILE.json ──► cli ──► page: the main numbers, and figures as SVG, by drawing ──► FILE.html

The page needs no network and no script: a browser opens it anywhere, also years later.
"""
