"""What a rank writes becomes frames."""

from choros.launch.protocol.frames import Result, Text
from choros.launch.wrapper.transcript import ERR, OUT, RESULT, Transcript

TRACEBACK = b"Traceback (most recent call last):\n  x\nValueError: no\n"


def test_lines_of_both_streams():
    script = Transcript(3)
    assert list(script.feed(OUT, b"a\nb", 0.0)) == [Text(3, OUT, "a")]
    assert list(script.feed(ERR, b"c\r", 0.0)) == []
    assert list(script.due(0.1)) == []
    assert list(script.due(0.5)) == [Text(3, OUT, "b", ""), Text(3, ERR, "c", "\r")]
    assert script.waits(0.5) == []


def test_the_traceback_it_dies_of_is_kept():
    script = Transcript(0)
    assert list(script.feed(ERR, b"before\n" + TRACEBACK + b"last", 0.0)) == [Text(0, ERR, "before")]
    assert list(script.feed(ERR, b"", 0.1)) == []
    assert script.traceback == TRACEBACK.decode() + "last"
    assert not script.shown


def test_the_traceback_it_survives_is_shown():
    script = Transcript(0)
    list(script.feed(ERR, TRACEBACK, 0.0))
    list(script.feed(OUT, b"still here\n", 0.1))
    assert 1.0 <= min(script.waits(0.1)) <= 1.1
    assert [frame.text for frame in script.due(1.2)] == TRACEBACK.decode().splitlines()
    assert (script.traceback, script.shown) == ("", True)


def test_a_piece_of_a_line_waits_behind_a_traceback():
    script = Transcript(0)
    list(script.feed(ERR, TRACEBACK + b"piece", 0.0))
    assert list(script.due(0.9)) == []
    assert min(script.waits(0.9)) > 0
    assert [frame.text for frame in script.due(5.0)] == [*TRACEBACK.decode().splitlines(), "piece"]


def test_the_last_lines_are_kept():
    script = Transcript(0)
    list(script.feed(ERR, "".join(f"{i}\n" for i in range(50)).encode(), 0.0))
    assert script.tail.splitlines() == [str(i) for i in range(40, 50)]


def test_results_come_in_pieces():
    frames = list(Transcript(1).feed(RESULT, b"x" * 100_000, 0.0))
    assert len(frames) == 3
    assert all(isinstance(frame, Result) for frame in frames)


def test_a_message_of_several_lines_is_one_with_its_traceback():
    script = Transcript(0)
    list(script.feed(ERR, TRACEBACK + b"more\nand more\n", 0.0))
    assert list(script.due(2.5)) == []
    assert script.traceback.endswith("and more")
