"""The merger of lines that several ranks write: a pure function of the time and what the ranks have written."""

import random

import pytest

from choros.launch.driver.output import LineMerger, Lines
from choros.launch.protocol.frames import Written

LATER = 1.0


def merged(*texts, size=2, now=0.0):
    """What is shown of texts that arrive together, stream after stream, and of what is held at the end."""
    merger = LineMerger(size)
    shown = [lines for text in texts for lines in merger.add(text, now)]
    return [*shown, *merger.due(LATER)]


def err(rank, data):
    return Written(rank, "err", data)


def test_equal_lines_become_one():
    merger = LineMerger(3)
    assert merger.add(err(2, b"a\nb\n"), 0.0) == []
    assert merger.add(err(0, b"a\n"), 0.01) == []
    assert merger.add(err(1, b"a\n"), 0.02) == [Lines((0, 1, 2), "err", b"a\n")]
    assert merger.add(err(1, b"b\n"), 0.02) == []
    assert merger.due(0.07) == []
    assert merger.due(0.081) == [Lines((1, 2), "err", b"b\n")]
    assert merger.add(err(0, b"b\n"), 0.082) == []
    assert merger.flush() == [Lines((0,), "err", b"b\n")]


def test_the_wait_is_that_of_the_first_line():
    merger = LineMerger(2)
    assert merger.wait(0.0) is None
    merger.add(err(0, b"a\n"), 10.0)
    merger.add(err(0, b"b\n"), 10.05)
    assert merger.wait(10.05) == pytest.approx(0.03)
    assert merger.wait(99.0) == 0.0
    assert merger.due(10.09) == [Lines((0,), "err", b"a\n")]
    assert merger.wait(10.09) == pytest.approx(0.04)


def test_lines_of_one_rank_are_not_merged_with_each_other():
    assert merged(err(0, b"a\na\n"), err(1, b"a\n")) == [Lines((0, 1), "err", b"a\n"), Lines((0,), "err", b"a\n")]
    assert merged(err(0, b"a\na\n"), err(1, b"a\na\n")) == [Lines((0, 1), "err", b"a\na\n")]


def test_no_rank_changes_the_order_of_its_lines():
    assert merged(err(0, b"a\nb\n"), err(1, b"b\na\n")) == [
        Lines((0,), "err", b"a\n"),
        Lines((0, 1), "err", b"b\n"),
        Lines((1,), "err", b"a\n"),
    ]


def test_standard_output_passes_at_once_but_not_before_earlier_lines():
    merger = LineMerger(2)
    assert merger.add(Written(0, "out", b"a\n"), 0.0) == [Lines((0,), "out", b"a\n")]
    merger.add(err(0, b"warning\n"), 0.0)
    assert merger.add(Written(1, "out", b"of another rank\n"), 0.0) == [Lines((1,), "out", b"of another rank\n")]
    assert merger.add(Written(0, "out", b"b\n"), 0.0) == []
    assert merger.add(err(1, b"warning\n"), 0.0) == [Lines((0, 1), "err", b"warning\n"), Lines((0,), "out", b"b\n")]


@pytest.mark.parametrize(
    "data", [b"Name? ", b"1%\r", b"1%\r2%\n", b"\r1%\n", b"1%\r\r\n2%\r\n" * 60], ids=["prompt", *"abc", "many lines"]
)
def test_partial_lines_and_progress_bars_are_not_merged(data):
    assert merged(err(0, data), err(1, data)) == [Lines((rank,), "err", data) for rank in range(2)]


def test_the_rest_of_a_partial_line_is_not_merged():
    texts = [err(rank, data) for data in (b"loading ", b"..", b".\ndone\n") for rank in range(2)]
    shown = merged(*texts)
    assert shown[-3:] == [Lines((0,), "err", b".\n"), Lines((1,), "err", b".\n"), Lines((0, 1), "err", b"done\n")]


def test_lines_of_one_rank_alone_do_not_keep_those_behind_them_apart():
    assert merged(err(0, b"I am 0\na\n"), err(1, b"I am 1\nand 1\na\n")) == [
        Lines((0,), "err", b"I am 0\n"),
        Lines((1,), "err", b"I am 1\nand 1\n"),
        Lines((0, 1), "err", b"a\n"),
    ]


def test_lines_with_other_ends_are_equal_only_to_their_like():
    assert merged(err(0, b"a\r\n"), err(1, b"a\r\n")) == [Lines((0, 1), "err", b"a\r\n")]


def test_no_more_is_held_than_can_be_searched():
    merger = LineMerger(2)
    shown = [lines for i in range(10) for lines in merger.add(err(0, b"%d\n" % i * 20), 0.0)]
    assert b"".join(lines.data for lines in shown) == b"".join(b"%d\n" % i * 20 for i in range(7))


@pytest.mark.parametrize("data", [b"a\n" * 51, b"a" * 9000 + b"\n"])
def test_much_output_at_once_passes_unread(data):
    merger = LineMerger(2)
    assert merger.add(err(0, data), 0.0) == [Lines((0,), "err", data)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"2026-01-31 12:00:00.123456: I x.cc:1] a\n", b"2026-01-31 12:00:00.323456: I x.cc:1] a\n"),
        (b"I0000 00:00:1769860800.123456   1234 x.cc:1] a\n", b"I0000 00:00:1769860800.923456   77 x.cc:1] a\n"),
        (b"[W131 12:00:00.123 x.cpp:1] a\n", b"[W131 12:00:00.123 x.cpp:1] a\n"),
        (b"[W0131 12:00:00.123 x.cpp:1] a\n", b"[W0131 12:00:01.2 x.cpp:1] a\n"),
        (b"WARNING:2026-01-31 12:00:00,123:jax:1: a\n", b"WARNING:2026-01-31 12:00:00,500:jax:1: a\n"),
    ],
)
def test_the_time_and_the_thread_of_a_logger_make_no_difference(first, second):
    assert merged(err(1, first), err(0, second)) == [Lines((0, 1), "err", first)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"I0000 00:00:1769860800.1   1 x.cc:1] a\n", b"W0000 00:00:1769860800.1   1 x.cc:1] a\n"),
        (b"WARNING:2026-01-31 12:00:00: a\n", b"ERROR:2026-01-31 12:00:00: a\n"),
        (b"loss 0.123\n", b"loss 0.124\n"),
        (b"saved at 2026-01-31 12:00:00\n", b"saved at 2026-01-31 12:00:01\n"),
    ],
)
def test_all_else_does(first, second):
    assert merged(err(0, first), err(1, second)) == [Lines((0,), "err", first), Lines((1,), "err", second)]


def test_a_long_line_without_words_is_read_in_no_time():
    assert merged(err(0, b"=" * 8000 + b"\n"))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_ranks_write_arrives_in_order_and_in_time(seed):
    """Lines of few letters, partial lines and bars, in chunks of any size, on both streams."""
    dice, size = random.Random(seed), 3
    merger, written, shown, now = LineMerger(size), {rank: [] for rank in range(size)}, [], 0.0
    for _ in range(300):
        now += dice.choice((0.0, 0.001, 0.03))
        stream, rank = dice.choice(("err", "err", "out")), dice.randrange(size)
        data = "".join(dice.choices("ab\r\n", weights=(4, 4, 1, 6), k=dice.choice((1, 5, 20)))).encode()
        written[rank].append((stream, data, now))
        shown += [(lines, now) for lines in merger.add(Written(rank, stream, data), now)]
        assert merger.wait(now) is None or merger.wait(now) < 0.081
    shown += [(lines, now) for lines in merger.flush()]
    assert merger.wait(now) is None
    for rank, texts in written.items():
        mine = [(lines.stream, lines.data) for lines, _ in shown if rank in lines.ranks]
        assert _joined(mine) == _joined((stream, data) for stream, data, _ in texts)


def _joined(texts):
    """The bytes of a rank, each with its stream, as chunks may be cut elsewhere."""
    return [(stream, byte) for stream, data in texts for byte in data]
