"""What a rank writes becomes frames."""

from choros.launch.protocol.frames import Result, Text, encode
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
    assert list(script.due(1.2)) == [Text(0, ERR, TRACEBACK.decode().removesuffix("\n"))]
    assert (script.traceback, script.shown) == ("", True)


def test_a_piece_of_a_line_waits_behind_a_traceback():
    script = Transcript(0)
    list(script.feed(ERR, TRACEBACK + b"piece", 0.0))
    assert list(script.due(0.9)) == []
    assert min(script.waits(0.9)) > 0
    assert list(script.due(5.0)) == [
        Text(0, ERR, TRACEBACK.decode().removesuffix("\n")),
        Text(0, ERR, "piece", ""),
    ]


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


def test_lines_that_come_together_share_a_frame():
    script = Transcript(0)
    assert list(script.feed(OUT, b"a\nb\n50%\rc\n\nd", 0.0)) == [
        Text(0, OUT, "a\nb"),
        Text(0, OUT, "50%", "\r"),
        Text(0, OUT, "c\n"),
    ]
    assert list(script.feed(ERR, b"a\nb\n", 0.0)) == [Text(0, ERR, "a\nb")]


def test_frames_are_not_long():
    """mpirun's time for a line grows with the square of its length."""
    for data in (b"x" * 79 + b"\n", b"x" * 2_000_000, b"\xff\x00\n"):
        script = Transcript(0)
        whole = data * (2_000_000 // len(data))
        frames = [
            frame for start in range(0, len(whole), 65536) for frame in script.feed(OUT, whole[start:][:65536], 0.0)
        ]
        assert max(len(encode(frame)) for frame in frames) < 400_000
        assert len(frames) < 100


def test_much_output_after_a_traceback_is_shown():
    """A rank that writes without a pause has survived it, and what it writes is not one line of megabytes."""
    script = Transcript(0)
    frames = list(script.feed(ERR, TRACEBACK, 0.0))
    lines = b"".join(b"line %d\n" % i for i in range(100_000))
    for start in range(0, len(lines), 65536):
        frames += script.feed(ERR, lines[start : start + 65536], 0.0)
    frames += script.feed(ERR, b"", 0.0)
    assert "\n".join(frame.text for frame in frames).encode() + b"\n" == TRACEBACK + lines
    assert (script.traceback, script.shown) == ("", True)


def test_a_rank_that_logs_forever_after_a_traceback_has_survived_it():
    script = Transcript(0)
    list(script.feed(ERR, TRACEBACK, 0.0))
    shown = []
    for tenth in range(1, 60):
        shown += script.feed(ERR, b"log\n", tenth / 10)
        shown += script.due(tenth / 10)
    assert shown[0].text.startswith("Traceback")
    assert "\n".join(frame.text for frame in shown).count("log") == 59


def test_the_tail_of_a_rank_that_writes_long_lines_is_short():
    script = Transcript(0)
    list(script.feed(ERR, (b"x" * 20_000 + b"\n") * 20, 0.0))
    assert len(script.tail) < 50_000
