"""Communication between the processes of a job outside MPI: docs/design/messages.md draws who speaks to whom.

Frames are lines, since mpirun forwards them. Every message over a socket is sent by a ``Channel``: one length-prefixed
framing, on a connection whose ends have proved their names to each other, and that they have the job's key.

A wait ends at a deadline or when the peer has ended, which a channel or the end of a pipe reports.

Import from the modules. This package imports none of them: a wrapper, one per rank, needs the loop only.
"""
