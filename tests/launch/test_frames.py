"""Frames, the line buffer and the traceback buffer."""

import pytest

from choros.launch.protocol.frames import Exit, FrameReader, Result, Start, Text, decode, encode
from choros.launch.wrapper.line_buffer import LineBuffer
from choros.launch.wrapper.traceback_buffer import TracebackBuffer


@pytest.mark.parametrize(
    "frame",
    [
        Start(0, "host", 7),
        Text(1, "out", "hello"),
        Text(1, "err", "50%", "\r"),
        Text(2, "out", "\x1e{}\n\r\x00 ünïcode 🎉", ""),
        Text(0, "out", b"\xff\xfe\x80".decode("utf-8", "surrogateescape")),
        Result(3, "AAAA"),
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
    "line", [b"", b"hello", b"\x1e", b"\x1enull", b'\x1e{"kind":"none"}', b'\x1e{"kind":"text"}', b"\x1e{", b"\x1e[1]"]
)
def test_lines_that_are_not_frames(line):
    assert decode(line) is None


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], [("a", "\n"), ("b", "\n")]),
        ([b"a", b"b\n"], [("ab", "\n")]),
        ([b"a\r\nb\n"], [("a", "\n"), ("b", "\n")]),
        ([b"a\r", b"\nb\n"], [("a", "\n"), ("b", "\n")]),
        ([b" 1%\r 2%\r", b" 3%\n"], [(" 1%", "\r"), (" 2%", "\r"), (" 3%", "\n")]),
        ([b"\n\n"], [("", "\n"), ("", "\n")]),
        ([b"end"], [("end", "")]),
        ([b"end\r"], [("end", "\r")]),
    ],
)
def test_lines(chunks, lines):
    buffer = LineBuffer()
    got = [line for chunk in chunks for line in buffer.feed(chunk, now=0.0)]
    assert got + buffer.flush() == lines


def test_a_partial_line_is_passed_on_after_a_moment():
    buffer = LineBuffer()
    assert buffer.feed(b"Name? ", now=10.0) == []
    assert buffer.due(now=10.1) == []
    assert 0 < buffer.wait(now=10.1) < 0.2
    assert buffer.due(now=10.3) == [("Name? ", "")]
    assert buffer.wait(now=10.3) is None


def test_a_character_in_two_chunks_keeps_its_bytes():
    first, second = "é".encode()[:1], "é".encode()[1:]
    buffer = LineBuffer()
    texts = [text for chunk in (first, second) for text, _ in (buffer.feed(chunk, 0.0) or buffer.flush())]
    assert "".join(texts).encode("utf-8", "surrogateescape") == "é".encode()


def test_a_line_without_end_is_cut():
    assert sum(len(text) for text, _ in LineBuffer().feed(b"x" * 200_000, 0.0)) >= 131072


TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no"]


def held(lines, buffer=None):
    buffer = buffer or TracebackBuffer()
    return buffer, [shown for line in lines for shown in buffer.add(line, now=0.0)]


def test_ordinary_lines_pass():
    assert held(["a", "b"])[1] == ["a", "b"]


def test_a_traceback_is_held():
    buffer, shown = held(["a", *TRACEBACK, "during exit"])
    assert shown == ["a"]
    assert buffer.held == [*TRACEBACK, "during exit"]
    assert not buffer.shown


def test_a_rank_that_stays_silent_may_be_shutting_down():
    buffer, _ = held(TRACEBACK)
    assert buffer.due(now=2.5) == []
    assert buffer.due(now=3.1) == TRACEBACK
    assert buffer.shown


def test_a_rank_that_continues_has_handled_the_exception():
    buffer, _ = held(TRACEBACK)
    buffer.alive(now=0.5)
    assert buffer.due(now=1.4) == []
    assert buffer.due(now=1.6) == TRACEBACK
    assert held(["after"], buffer)[1] == ["after"]


def test_the_next_traceback_is_held_again():
    buffer, _ = held(TRACEBACK)
    buffer.due(now=4.0)
    assert held(TRACEBACK, buffer)[1] == []
    assert not buffer.shown


def test_frames_among_mpiruns_messages_in_chunks_of_any_size():
    frames = [Start(0, "host", 7), Text(0, "out", "a\nb"), Exit(0, "host", 0)]
    stream = b"mpirun: \n" + encode(frames[0]) + b"no newline" + encode(frames[1]) + encode(frames[2]) + b"bye"
    for size in (1, 7, 1000):
        reader = FrameReader()
        got = [item for start in range(0, len(stream), size) for item in reader.feed(stream[start : start + size])]
        assert [*got, *reader.end(), *reader.end()] == ["mpirun: ", frames[0], "no newline", *frames[1:], "bye"]
