"""The page about a job, and the command that makes it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from choros import cli
from choros.errors import ConfigError
from choros.launch.driver.job_record import RankRecord
from choros.launch.plan.arguments import Arguments
from choros.observe.progress import RankProgress
from choros.report.cli import read_record
from choros.report.page import (
    WrittenRecord,
    collectives_of,
    differences,
    figures_of,
    numbers_of,
    page_of,
    shown_ranks,
    step_times,
    text_of,
    waits,
    write_page,
)
from report.records import BEGAN, progress, read, record_of, written


class Reader(HTMLParser):
    """Reads a page, of which all elements are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "svg":
            assert dict(attrs)["role"] == "img"
            assert dict(attrs)["aria-label"]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def main(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("ranks", "drawings"), [(1, 5), (2, 6), (8, 6), (64, 6), (300, 6)])
def test_a_page_needs_nothing_else(ranks, drawings):
    page = page_of(read(record_of(ranks)))
    seen = Reader(page)
    assert seen.tags.count("svg") == drawings
    assert seen.addresses == []
    assert not {"script", "link", "img", "iframe", "b"} & {*seen.tags}
    assert not re.search(r"url\(|@import|nan|None", page)
    text = " ".join(seen.texts)
    assert "590 steps, 10 steps/s" in text
    assert "python train.py --name '<b>&'" in text
    assert "<i>back</i>" in text
    assert len(page) < 1_000_000
    assert page.count("<li><i ") < 30  # no 64 legends


def test_a_page_of_a_job_without_steps_says_so():
    text = " ".join(Reader(page_of(read(record_of(3, steps=False)))).texts)
    assert "No verdict: it needs 20 steps" in text
    assert text.count("No rank has made a step.") == 2
    assert "No rank has waited for another one." in text


def test_a_page_of_a_job_of_which_nothing_is_known():
    record = record_of(0)
    record.ranks[1], record.messages, record.ended, record.code = RankRecord("a", 7), [], None, None
    seen = Reader(page_of(read(record)))
    assert "svg" not in seen.tags
    assert "it still ran when this was written" in " ".join(" ".join(seen.texts).split())


def test_step_times_where_a_rank_was_lost_and_another_has_come():
    record = record_of(1)
    record.ranks[0] = rank = RankRecord("a", 1)
    for second, made in enumerate([10, 20, 40, 0, 5, 10], 1):
        rank.moments.note(progress(0, made), BEGAN + second)
    rank.moments.note(RankProgress(0, 20, seconds=4.0), BEGAN + 7)
    points = step_times(read(record).ranks[0])
    assert points[3] is None
    assert [at for at, _ in filter(None, points)] == [1, 2, 3, 5, 6, 7]
    assert [took for _, took in filter(None, points)] == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.3])


def test_a_clock_that_was_set_back():
    record = record_of(2)
    record.began += 1000
    record.ended = record.began - 10
    Reader(page_of(read(record)))


def test_waits_are_divided_by_the_steps_in_which_others_were_last():
    ranks = read(record_of(3)).ranks
    rows = waits(ranks)
    assert [sum(row) for row in rows] == pytest.approx([rank.progress.waiting for rank in ranks])
    assert [row[place] for place, row in enumerate(rows)] == [0, 0, 0]
    assert rows[0][1] / rows[0][2] == pytest.approx(590 / 29)
    equal = waits([replace(rank, progress=replace(rank.progress, prompt_steps=0)) for rank in ranks])
    assert equal[0] == pytest.approx([0, ranks[0].progress.waiting / 2, ranks[0].progress.waiting / 2])


def test_of_many_ranks_those_are_drawn_for_which_others_wait():
    record = record_of(100)
    record.ranks[99] = RankRecord("b", 9)
    record.ranks[99].moments.note(RankProgress(99, 590, 590, 59.0), BEGAN + 59)
    shown = [rank.number for rank in shown_ranks(read(record))]
    assert len(shown) == 64
    assert {1, 99} < {*shown}
    assert any("64 of 100 ranks" in text for figure in figures_of(read(record)) for _, text in figure.legend)


def test_numbers_are_those_of_the_verdict():
    record = read(record_of(2))
    numbers = {name: text_of(name, each) for name, each in numbers_of(record).items()}
    assert numbers["steps/s"] in record.lines[0]
    assert f"computing {numbers['computing']}" in record.lines[0]
    assert f"goodput {numbers['goodput']} " in record.lines[-1]


def test_collectives_are_those_of_all_ranks():
    record = read(record_of(3))
    assert collectives_of(record) == [("gradients", 3 * 590, 3 * 590_000), ("barrier", 3, 0)]
    assert text_of("given to collectives", numbers_of(record)["given to collectives"]) == "1.69 MiB"
    assert "1,770" in Reader(page_of(record)).texts


def test_two_jobs(tmp_path, capsys):
    before, after = written(tmp_path / "a.json", record_of(2)), written(tmp_path / "b.json", record_of(2, step=0.05))
    assert main("report", "--compare", before, after) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^steps/s +10 +20 +\+100 %$", printed, re.MULTILINE)
    assert re.search(r"^waiting for other ranks +20 % +20 % +\+0 points$", printed, re.MULTILINE)
    assert f"{tmp_path / 'a-b.html'} is written" in printed
    assert Reader((tmp_path / "a-b.html").read_text()).tags.count("svg") == 12


def test_a_job_and_one_of_which_nothing_is_known():
    rows = {name: text for name, _, _, text in differences(read(record_of(2)), read(record_of(0)))}
    assert rows["steps/s"] == rows["goodput"] == "–"
    assert rows["steps"] == "-100 %"


def test_the_command_makes_the_page_again(tmp_path, capsys):
    record = written(tmp_path / "run.json", record_of(2))
    assert main("report", record) == 0
    assert main("report", record, "-o", tmp_path / "other.html") == 0
    assert (tmp_path / "run.html").read_text() == (tmp_path / "other.html").read_text()
    assert main("report", record, "-o", record) == 2
    assert "would be lost" in capsys.readouterr().err
    assert read_record(record).size == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<html>", "is no record of a job: JSONDecodeError"),
        ("[]", "is no record of a job"),
        ('{"format": 1}', "is no record of a job: KeyError: 'began'"),
        ('{"format": 2}', "is a record of format 2; this choros reads format 1."),
        ('{"format": 1, "began": NaN}', "is no record of a job: ValueError: NaN is no number"),
        ('{"format": 1, "began": 0, "ranks": []}', "is no record of a job: AttributeError"),
        ("[" * 100_000, "is no record of a job: RecursionError"),
        (None, "cannot be read: No such file or directory. Give the FILE.json that chorosrun --report"),
    ],
)
def test_a_file_that_is_no_record(tmp_path, content, said):
    file = tmp_path / "run.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_record(file)


def test_lists_of_different_lengths(tmp_path):
    record = record_of(1).to_json()
    record["ranks"]["0"]["steps"].pop()
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="rank 0 has lists of different lengths"):
        read_record(tmp_path / "run.json")


def test_a_goodput_of_which_parts_are_missing(tmp_path):
    record = record_of(1).to_json() | {"goodput": {}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="is no record of a job: KeyError: 'seconds'"):
        read_record(tmp_path / "run.json")


def test_a_page_in_the_place_of_the_record(tmp_path, capsys):
    file = written(tmp_path / "run.json", record_of(1))
    link = tmp_path / "link.html"
    link.symlink_to(file)
    for page in (file, tmp_path / "." / "run.json", link):
        assert main("report", file, "-o", page) == 2
        assert "is the record itself, and would be lost" in capsys.readouterr().err
    read_record(file)


def test_two_jobs_of_one_name(tmp_path, capsys):
    files = [tmp_path / name / "run.json" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        written(file, record_of(1))
    assert main("report", "--compare", *files) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.split() == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"), "difference"]


def test_a_loop_whose_batches_have_no_number_of_examples():
    record = record_of(2)
    for rank in record.ranks.values():
        rank.moments = type(rank.moments)()
        for second in (1, 30, 59):
            made = progress(0, 10 * second)
            rank.moments.note(replace(made, examples=float(made.steps)), BEGAN + second)
    assert numbers_of(read(record))["examples/s"] is None


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    assert main("report", written(tmp_path / "run.json", record_of(1)), "-o", tmp_path / "none" / "run.html") == 2
    assert "run.html cannot be written: No such file or directory. Name a file" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["a.json", "b.json"], ["--compare", "a.json"]])
def test_another_number_of_files(given, capsys):
    assert main("report", *given) == 2
    assert "given: choros report FILE.json, or choros report --compare A.json B.json" in capsys.readouterr().err


def test_names_in_other_encodings(tmp_path):
    record = record_of(1)
    record.command = ["python", b"caf\xe9.py".decode("utf-8", "surrogateescape")]
    write_page(tmp_path / "run.html", page_of(WrittenRecord.of(record.to_json())))
    assert "caf?.py" in (tmp_path / "run.html").read_text()


def test_without_jinja2_the_numbers_are_written(tmp_path):
    script = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from report.records import record_of\n"
        "from choros.launch.plan.arguments import Arguments\n"
        "record_of(2).write(*Arguments(report=sys.argv[1]).report_files, print)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "run.html"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "pip install 'choros[report]'" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(("given", "page"), [("run", "run.html"), ("run.json", "run.html"), ("run.htm", "run.htm")])
def test_names_of_files(tmp_path, given, page):
    record_of(1).write(*Arguments(report=str(tmp_path / given)).report_files, print)
    assert {each.name for each in tmp_path.iterdir()} == {"run.json", page}


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast():
    style = page_of(read(record_of(1))).partition("</style>")[0]
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        ground = _luminance(colours.pop("ground"))
        for name, colour in colours.items():
            lighter, darker = sorted([_luminance(colour), ground], reverse=True)
            least = {"text": 4.5, "quiet": 4.5, "rule": 1}.get(name, 3)
            assert (lighter + 0.05) / (darker + 0.05) >= least, name
