"""Communication engines, one per file, imported only when selected.

An engine is a module with ``start(topology, comm)``, which returns a ``Communicator`` of all ranks, or of those in the
list ``comm`` (``Communicator.only``), and this rank's ``Topology``; and with ``finalize()``, called when the process
ends. Its name is one of ``ENGINE.choices`` in ``config.py``; a rule in ``comm/selection.py`` selects it where none is
requested.
"""
