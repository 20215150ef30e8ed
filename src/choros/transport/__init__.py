"""Communication between the processes of a job outside MPI.

::

    chorosrun ── pipes ── mpirun ── pipes ── wrapper ── pipes ── rank          loop, signal_pipe
        to chorosrun: frames, lines on standard output (launch/protocol); to ranks: signals, and rank 0's standard input

    chief ──── TCP ────► worker                                                channel, listener, handshake,
      └─────── TCP ────► parameter server ◄──── TCP ──── worker                secret

    choros bench ◄── Unix socket ── each process of each contender             channel, listener, loop

    rank 0 of the torch engine ◄── TCP ── all ranks                            channel, listener, address
        the key-value store (comm/store), where ranks exchange their addresses

Frames are lines, since mpirun forwards them. Every message over a socket is sent by a ``Channel``: one length-prefixed
framing, on a connection whose ends have proved their names to each other, and that they have the job's key.

A wait ends at a deadline or when the peer has ended, which a channel or the end of a pipe reports.

Import from the modules. This package imports none of them: a wrapper, one per rank, needs the loop only.
"""
