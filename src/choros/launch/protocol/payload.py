"""The payload: the function call of ``choros.run``, on its way to rank 0 through mpirun's standard input.

::

    chorosrun ── a line ──► mpirun ──► wrapper of rank 0 ── its bytes ──► standard input of the rank
        ▲                                   │
        └───────── Received(count) ◄────────┘   then the next line; the one after the last byte is empty

To another host, mpirun forwards only up to 4096 bytes at once: more is lost, or arrives in part again and again
(openpmix/prrte#2532 and #2580); and at times it begins late (openpmix/openpmix#4025). So one line is under way, with
a number and a checksum, and is sent again until it has arrived.
"""

import binascii

#: The bytes of a line's data: the line has less than 4096, which a pipe takes, and mpirun forwards, as a whole.
LINE_BYTES = 3000


def encode_line(payload: bytes, number: int) -> bytes:
    r"""Returns the line of this number, from 0 to ``line_count(payload) - 1``.

    >>> encode_line(b"call", 0)
    b'\n0 cc8e2f3e Y2FsbA==\n'
    """
    data = payload[number * LINE_BYTES : (number + 1) * LINE_BYTES]
    return b"\n%d %08x %s\n" % (number, binascii.crc32(data), binascii.b2a_base64(data, newline=False))


def line_count(payload: bytes) -> int:
    """Returns the number of lines, the empty one at the end included.

    >>> line_count(b""), line_count(bytes(LINE_BYTES)), line_count(bytes(LINE_BYTES + 1))
    (1, 2, 3)
    """
    return -(-len(payload) // LINE_BYTES) + 1


def decode_line(line: bytes) -> tuple[int, bytes] | None:
    r"""Returns the number and the data of a line without its ends; ``None`` if it is damaged.

    >>> decode_line(encode_line(b"call", 0).strip(b"\n"))
    (0, b'call')
    >>> decode_line(b"0 cc8e2f3e Y2Fs") is None
    True
    """
    try:
        number, checksum, encoded = line.split(b" ")
        data = binascii.a2b_base64(encoded)
        return (int(number), data) if binascii.crc32(data) == int(checksum, 16) else None
    except ValueError:
        return None
