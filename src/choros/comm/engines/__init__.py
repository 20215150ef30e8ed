"""Communication engines, one per file, imported only when selected (row ``engine`` of ``settings.py``, or a rule in
``selection.py``); names of parts begin with their engine's. Each has ``start(topology, comm)``, which returns a
``Communicator`` of all ranks, or of those in the list ``comm``, and this rank's ``Topology``; and ``finalize()``, for
the end of the process.
"""
