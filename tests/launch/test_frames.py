"""Frames, the line buffer and the traceback buffer."""

import pytest

from choros.launch.protocol.frames import RESULT, Exit, FrameReader, Start, Written, decode, encode
from choros.launch.wrapper.rank_output import LineBuffer, TracebackBuffer


@pytest.mark.parametrize(
    "frame",
    [
        Start(0, "host", 7),
        Written(1, "out", b"hello\n"),
        Written(1, "err", b"50%\r"),
        Written(2, "out", "\x1e{}\n\r\x00 ünïcode 🎉".encode()),
        Written(0, "out", b"with the byte that stands for a newline\x1c\n\x1c\x1e\n"),
        Written(0, "out", bytes(number for number in range(256) if number != 200) * 2),
        Written(0, "out", bytes(range(256)) + b"\x1cs\x1csn\x1c\x1cn\n"),
        Written(3, RESULT, b"\x80\x04\n\x1e\x1f"),
        Exit(0, "host", 137, signal=9, stopped=True, traceback="Traceback\n  x", tail="t", seconds=0.5),
    ],
)
def test_frames_are_decoded_as_they_were_encoded(frame):
    line = encode(frame)
    assert line.startswith(b"\x1e")
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line.rstrip(b"\n")) == frame


@pytest.mark.parametrize(
    "line",
    [b"", b"hello", b"\x1e", b"\x1enull", b'\x1e{"kind":"none"}', b'\x1e{"kind":"Written"}', b"\x1e{", b"\x1e[1]"],
)
def test_lines_that_are_not_frames(line):
    assert decode(line) is None


@pytest.mark.parametrize(
    ("chunks", "passed"),
    [
        ([b"a\nb\n"], [b"a\nb\n"]),
        ([b"a", b"b\n"], [b"", b"ab\n"]),
        ([b"a\r\nb\n"], [b"a\r\nb\n"]),
        ([b"a\r", b"\nb\n"], [b"", b"a\r\nb\n"]),
        ([b" 1%\r 2%\r", b" 3%\n"], [b" 1%\r", b" 2%\r 3%\n"]),
        ([b"\n\n"], [b"\n\n"]),
        ([b"end"], [b""]),
        ([b"end\r"], [b""]),
    ],
)
def test_lines(chunks, passed):
    buffer = LineBuffer()
    assert [buffer.feed(chunk, now=0.0) for chunk in chunks] == passed
    assert b"".join(passed) + buffer.flush() == b"".join(chunks)


def test_a_partial_line_is_passed_on_after_a_moment():
    buffer = LineBuffer()
    assert buffer.feed(b"Name? ", now=10.0) == b""
    assert buffer.due(now=10.1) == b""
    assert 0 < buffer.wait(now=10.1) < 0.2
    assert buffer.due(now=10.3) == b"Name? "
    assert buffer.wait(now=10.3) is None


def test_a_line_without_end_is_passed_on():
    buffer = LineBuffer()
    assert buffer.feed(b"x" * 200_000, 0.0) + buffer.flush() == b"x" * 200_000
    assert buffer.feed(b"x" * 200_000, 0.0)


TRACEBACK = b'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no\n'


def held(data, buffer=None):
    buffer = buffer or TracebackBuffer()
    return buffer, buffer.add(data, now=0.0)


def test_ordinary_lines_pass():
    assert held(b"a\nb\n")[1] == b"a\nb\n"
    assert held(b"it says: Traceback (most recent call last):\n")[1].startswith(b"it says")


@pytest.mark.parametrize("before", [b"", b"a\n", b" 50%\r"])
@pytest.mark.parametrize("group", [b"", b"  + Exception Group "])
def test_a_traceback_is_held(before, group):
    buffer, shown = held(before + group + TRACEBACK + b"during exit\n")
    assert shown == before
    assert buffer.held == group + TRACEBACK + b"during exit\n"
    assert not buffer.shown


def test_a_rank_that_stays_silent_may_be_shutting_down():
    buffer, _ = held(TRACEBACK)
    assert buffer.due(now=2.5) == b""
    assert buffer.due(now=3.1) == TRACEBACK
    assert buffer.shown == TRACEBACK
    buffer.add(b"more\n", now=4.0)
    assert not buffer.shown


def test_a_rank_that_an_exception_ends_may_take_any_time():
    buffer, _ = held(TRACEBACK)
    buffer.crashed()
    assert buffer.wait(now=100.0) is None
    assert buffer.due(now=100.0) == b""
    assert held(b"x" * 200_000, buffer)[1].startswith(TRACEBACK)


def test_a_rank_that_continues_has_handled_the_exception():
    buffer, _ = held(TRACEBACK)
    buffer.alive(now=0.5)
    assert buffer.due(now=1.4) == b""
    assert buffer.due(now=1.6) == TRACEBACK
    assert held(b"after\n", buffer)[1] == b"after\n"


def test_the_next_traceback_is_held_again():
    buffer, _ = held(TRACEBACK)
    buffer.due(now=4.0)
    assert held(TRACEBACK, buffer)[1] == b""
    assert not buffer.shown


def test_frames_among_mpiruns_messages_in_chunks_of_any_size():
    frames = [Start(0, "host", 7), Written(0, "out", b"a\nb\n"), Exit(0, "host", 0)]
    stream = b"mpirun: \n" + encode(frames[0]) + b"no newline" + encode(frames[1]) + encode(frames[2]) + b"bye"
    for size in (1, 7, 1000):
        reader = FrameReader()
        got = [item for start in range(0, len(stream), size) for item in reader.feed(stream[start : start + size])]
        assert [*got, *reader.feed(b""), *reader.feed(b"")] == ["mpirun: ", frames[0], "no newline", *frames[1:], "bye"]
