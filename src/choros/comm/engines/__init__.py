"""Communication engines, one per file, imported only when selected (row ``engine`` of ``settings.py``, or a rule in
``selection.py``). Each has ``start(topology, comm)``, which returns a ``Communicator`` of all ranks, or of those
in the list ``comm``, and this rank's ``Topology``; and ``finalize()``, called when the process ends.
"""
