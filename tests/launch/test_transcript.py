"""Conversion of a rank's output to frames."""

from choros.launch.protocol.frames import ERR, EVENTS, OUT, RESULT, Written, encode
from choros.launch.wrapper.rank_output import Transcript
from choros.observe.events import Event, Kind

TRACEBACK = b"Traceback (most recent call last):\n  x\nValueError: no\n"


def test_lines_of_both_streams():
    transcript = Transcript(3)
    assert list(transcript.feed(OUT, b"a\nb", 0.0)) == [Written(3, OUT, b"a\n")]
    assert list(transcript.feed(ERR, b"c\r", 0.0)) == []
    assert list(transcript.due(0.1)) == []
    assert list(transcript.due(0.5)) == [Written(3, OUT, b"b"), Written(3, ERR, b"c\r")]
    assert transcript.waits(0.5) == []


def test_a_final_traceback_is_held_back():
    transcript = Transcript(0)
    assert list(transcript.feed(ERR, b"before\n" + TRACEBACK + b"last", 0.0)) == [Written(0, ERR, b"before\n")]
    assert list(transcript.feed(ERR, b"", 0.1)) == []
    assert transcript.traceback == TRACEBACK.decode() + "last"
    assert not transcript.shown


def test_the_traceback_of_a_handled_exception_is_shown():
    transcript = Transcript(0)
    list(transcript.feed(ERR, TRACEBACK, 0.0))
    list(transcript.feed(OUT, b"still here\n", 0.1))
    assert 1.0 <= min(transcript.waits(0.1)) <= 1.1
    assert list(transcript.due(1.2)) == [Written(0, ERR, TRACEBACK)]
    assert (transcript.traceback, transcript.shown) == ("", TRACEBACK.decode().removesuffix("\n"))


def test_a_partial_line_waits_behind_a_traceback():
    transcript = Transcript(0)
    list(transcript.feed(ERR, TRACEBACK + b"piece", 0.0))
    assert list(transcript.due(0.9)) == []
    assert min(transcript.waits(0.9)) > 0
    assert list(transcript.due(5.0)) == [
        Written(0, ERR, TRACEBACK),
        Written(0, ERR, b"piece"),
    ]


def test_the_last_lines_are_kept():
    transcript = Transcript(0)
    list(transcript.feed(ERR, "".join(f"{i}\n" for i in range(50)).encode(), 0.0))
    assert transcript.tail.splitlines() == [str(i) for i in range(40, 50)]


def test_results_are_sent_in_chunks():
    frames = list(Transcript(1).feed(RESULT, b"x" * 100_000, 0.0))
    assert len(frames) > 2
    assert all(frame.stream == RESULT for frame in frames)
    assert b"".join(frame.data for frame in frames) == b"x" * 100_000


def test_a_message_of_several_lines_stays_with_its_traceback():
    transcript = Transcript(0)
    list(transcript.feed(ERR, TRACEBACK + b"more\nand more\n", 0.0))
    assert list(transcript.due(2.5)) == []
    assert transcript.traceback.endswith("and more")


def test_lines_that_arrive_together_share_a_frame():
    transcript = Transcript(0)
    assert list(transcript.feed(OUT, b"a\nb\n50%\rc\n\nd", 0.0)) == [Written(0, OUT, b"a\nb\n50%\rc\n\n")]
    assert list(transcript.feed(ERR, b"a\nb\n", 0.0)) == [Written(0, ERR, b"a\nb\n")]


def test_frames_are_not_long():
    """mpirun's time for a line grows with the square of its length."""
    for data in (b"x" * 79 + b"\n", b"1234567\r", b"x" * 2_000_000, b"\xff\x00\n", bytes(range(256))):
        transcript = Transcript(0)
        whole = data * (2_000_000 // len(data))
        frames = [
            frame for start in range(0, len(whole), 65536) for frame in transcript.feed(OUT, whole[start:][:65536], 0.0)
        ]
        assert max(len(encode(frame)) for frame in frames) < 64_000
        assert len(frames) < 100


def test_large_output_after_a_traceback_is_shown():
    """A rank that writes without a pause has handled the exception, and its output is not one frame of megabytes."""
    transcript = Transcript(0)
    frames = list(transcript.feed(ERR, TRACEBACK, 0.0))
    lines = b"".join(b"line %d\n" % i for i in range(100_000))
    for start in range(0, len(lines), 65536):
        frames += transcript.feed(ERR, lines[start : start + 65536], 0.0)
    frames += transcript.feed(ERR, b"", 0.0)
    assert b"".join(frame.data for frame in frames) == TRACEBACK + lines
    assert transcript.traceback == ""


def test_the_traceback_of_a_rank_that_an_exception_ends_is_held():
    transcript = Transcript(0)
    event = Event(Kind.RANK_CRASHED, "ValueError").to_json().encode() + b"\n"
    assert len(list(transcript.feed(EVENTS, event, 0.0))) == 1
    list(transcript.feed(ERR, TRACEBACK, 0.1))
    assert (list(transcript.due(1000.0)), transcript.waits(1000.0)) == ([], [])
    assert transcript.traceback == TRACEBACK.decode().removesuffix("\n")


def test_a_rank_that_logs_after_a_traceback_has_handled_the_exception():
    transcript = Transcript(0)
    list(transcript.feed(ERR, TRACEBACK, 0.0))
    shown = []
    for tenth in range(1, 60):
        shown += transcript.feed(ERR, b"log\n", tenth / 10)
        shown += transcript.due(tenth / 10)
    assert shown[0].data.startswith(b"Traceback")
    assert b"".join(frame.data for frame in shown).count(b"log") == 59


def test_the_tail_of_a_rank_that_writes_long_lines_is_short():
    transcript = Transcript(0)
    list(transcript.feed(ERR, (b"x" * 20_000 + b"\n") * 20, 0.0))
    assert len(transcript.tail) < 50_000
