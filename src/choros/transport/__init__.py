"""How the processes of a job speak to each other outside MPI.

::

    chorosrun ── pipes ── mpirun ── pipes ── wrapper ── pipes ── rank          loop, signal_pipe
        frames: lines on standard output (launch/protocol); back: signals, and rank 0's standard input

    chief ◄─── TCP ───── worker                                                channel, listener, secret,
      └─────── TCP ────► parameter server ◄──── TCP ──── worker                remote_errors
        messages of distribute/coordinator and distribute/parameter_server

    choros bench ◄── Unix socket ── each process of each contender             channel, listener, loop
        messages of bench/channel

    rank 0 of the torch engine ◄── TCP ── the other ranks                      address, endpoint
        torch's own store of keys (comm/store), where ranks learn each other's addresses

Frames are lines, since mpirun carries them. Every message over a socket is a ``Channel``'s: one framing, with lengths
in front, on a connection whose ends have proved to each other that they have the job's key. Only the store speaks
torch's own protocol.

A wait ends at a deadline, or when the other end is gone, which a channel, or the end of a pipe, reports.

Import from the modules. This package imports none of them: a wrapper, one beside each rank, needs the loop alone.
"""
