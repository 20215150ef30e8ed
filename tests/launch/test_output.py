"""The ranks' output on the screen and in files."""

import io

import pytest

from choros.errors import ConfigError
from choros.launch.driver.output import LineMerger, Output, open_files, use_colour
from choros.launch.plan.roles import Roles
from choros.launch.protocol.frames import Written


def shown(frames, **how):
    out, err = io.BytesIO(), io.BytesIO()
    output = Output(out.write, err.write, prefix=how.get("prefix", True), colour=how.get("colour", False))
    for frame in frames:
        output.write(frame)
    output.finish()
    return out.getvalue(), err.getvalue()


def test_lines_have_their_rank():
    frames = [Written(0, "out", b"a\n"), Written(1, "err", b"b\n"), Written(1, "out", b"c\n")]
    assert shown(frames) == (b"[0] a\n[1] c\n", b"[1] b\n")


def test_without_prefix_bytes_are_unchanged():
    raw = b"\xff\x80 50%\r100%\nend"
    frames = [Written(0, "out", raw[:7]), Written(0, "out", raw[7:])]
    assert shown(frames, prefix=False) == (raw + b"\n", b"")


def test_a_line_of_one_rank_is_not_broken_by_another():
    frames = [Written(0, "out", b".."), Written(0, "out", b".."), Written(1, "out", b"x\n"), Written(0, "out", b".\n")]
    assert shown(frames)[0] == b"[0] ....\n[1] x\n[0] .\n"


def test_progress_bars_are_recognisable():
    frames = [Written(0, "out", b"1%\r"), Written(1, "out", b"1%\r"), Written(0, "out", b"2%\n")]
    assert shown(frames)[0] == b"[0] 1%\r[1] 1%\r[0] 2%\n"
    assert shown(frames, colour=True)[0].count(b"\x1b[K\r") == 2


def test_progress_bars_that_begin_with_a_carriage_return():
    frames = [Written(0, "out", b"\r"), Written(0, "out", b"1%"), Written(0, "out", b"\r"), Written(0, "out", b"2%\n")]
    assert shown(frames)[0] == b"[0] 1%\r[0] 2%\n"


def test_lines_of_one_frame_all_have_their_rank():
    frames = [Written(1, "out", b"a\n\nb\n"), Written(0, "out", b"c"), Written(0, "out", b"d\ne\n")]
    assert shown(frames)[0] == b"[1] a\n[1] \n[1] b\n[0] cd\n[0] e\n"
    assert shown(frames[:1], colour=True)[0].count(b"\x1b[33m[1] \x1b[0m") == 3
    assert shown(frames[:1], prefix=False)[0] == b"a\n\nb\n"


def test_roles(tmp_path):
    out, roles = io.BytesIO(), Roles(servers=1, workers=1)
    files = open_files(tmp_path, 3, roles)
    output = Output(out.write, out.write, prefix=True, colour=False, roles=roles, files=files)
    for rank in range(3):
        output.write(Written(rank, "out", b"a\n"))
    output.close()
    assert out.getvalue() == b"[chief] a\n[ps 0] a\n[worker 0] a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chief", "ps.0", "worker.0"]


def test_the_screen_merges_equal_lines_and_the_files_have_those_of_each_rank(tmp_path):
    out, err = io.BytesIO(), io.BytesIO()
    files = open_files(tmp_path, 3)
    output = Output(out.write, err.write, prefix=True, colour=True, files=files, merger=LineMerger(3))
    for rank in range(3):
        output.write(Written(rank, "err", b"warning\n"))
    assert err.getvalue() == b"[0-2] warning\n"  # no rank's colour
    output.write(Written(1, "err", b"held\n"))
    assert 0 < output.due_after() < 0.1
    output.write_due()
    output.show("chorosrun: after all that is held")
    assert output.due_after() is None
    output.write(Written(2, "err", b"last\n"))
    output.close()
    assert err.getvalue().splitlines()[1:] == [
        b"\x1b[33m[1] \x1b[0mheld",
        b"chorosrun: after all that is held",
        b"\x1b[32m[2] \x1b[0mlast",
    ]
    assert [(tmp_path / f"rank.{rank}" / "stderr").read_bytes() for rank in range(3)] == [
        b"warning\n",
        b"warning\nheld\n",
        b"warning\nlast\n",
    ]


def test_colour():
    assert shown([Written(1, "out", b"a\n")], colour=True)[0] == b"\x1b[33m[1] \x1b[0ma\n"


@pytest.mark.parametrize(
    ("environ", "terminal", "colour"),
    [({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False)],
)
def test_colour_only_where_it_is_wanted(environ, terminal, colour):
    assert use_colour(environ, terminal) is colour


@pytest.mark.parametrize("link", ["rank.0", "rank.0/stdout"])
def test_no_file_is_written_where_a_link_points(tmp_path, link):
    target = tmp_path / "target"
    (target if link == "rank.0" else tmp_path).mkdir(exist_ok=True)
    (tmp_path / "logs" / link).parent.mkdir(parents=True)
    (tmp_path / "logs" / link).symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be created"):
        open_files(tmp_path / "logs", 1)
    assert not target.exists() or not list(target.iterdir())


def test_files(tmp_path):
    files = open_files(tmp_path / "new" / "logs", 2)
    output = Output(io.BytesIO().write, io.BytesIO().write, prefix=True, colour=False, files=files)
    output.write(Written(0, "out", b" 1%\r"))
    output.write(Written(0, "out", b"end\n"))
    output.write_to_file(0, "Traceback …")
    output.close()
    logs = tmp_path / "new" / "logs"
    assert (logs / "rank.0" / "stdout").read_bytes() == b" 1%\rend\n"
    assert (logs / "rank.0" / "stderr").read_text() == "Traceback …\n"
    assert (logs / "rank.1" / "stdout").read_bytes() == b""
