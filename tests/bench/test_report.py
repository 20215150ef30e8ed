import json
from pathlib import Path

import pytest

from choros.bench.allreduce import tables
from choros.bench.figures import Trial, allreduce_terms, ratios, summarise, trial_of
from choros.bench.report import (
    Row,
    check_files,
    check_writable,
    compare,
    plain_text,
    plot_rows,
    plot_sizes,
    scaling_title,
    show,
    write_json,
)
from choros.bench.train import overhead_tables
from choros.errors import ConfigError
from choros.wording import seconds_text

PNG = b"\x89PNG"


def summary(best: float, median: float, cpu: float) -> dict[str, float]:
    return {"best_s": best, "median_s": median, "cpu_s": cpu}


def row(peer: str, best: float, bytes_: int = 1 << 24, ranks: int = 2, bench: str = "allreduce") -> Row:
    about = {"bench": bench, "peer": peer, "ranks": ranks, **summary(best, 2 * best, 3 * best)}
    return {**about, "bytes": bytes_, "dtype": "float32", "model": "U-Net", "arrays": 26}


def test_a_run_lasts_from_the_last_start_to_the_last_end() -> None:
    first = ((0.0, 10.0), (2.0, 14.0), 4.0)
    second = ((1.0, 9.0), (3.0, 12.0), 2.0)
    assert trial_of([first, second], units=1) == Trial(seconds=3.0, cpu_s=3.0)


def test_summary_and_ratios() -> None:
    ours = summarise([Trial(2.0, 1.0), Trial(1.0, 5.0), Trial(4.0, 3.0)])
    assert ours == summary(1.0, 2.0, 3.0)
    assert ratios(summary(3.0, 4.0, 1.5), ours) == (3.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.99e-7, "0.999 µs"), (1.25e-5, "12.5 µs"), (0.001, "1 ms"), (0.5, "500 ms"), (75, "75 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_table_has_all_three_ratios() -> None:
    rows = [row("choros", 1e-3), row("mpi4py", 2e-3)]
    assert plain_text(compare("sums", [("16 MiB", rows)], notes=["a note"])).splitlines() == [
        "sums",
        "          best  median   CPU  best÷  median÷  CPU÷",
        "16 MiB",
        "  choros  1 ms    2 ms  3 ms",
        "  mpi4py  2 ms    4 ms  6 ms   2.00     2.00  2.00",
        "a note",
    ]


def test_a_table_without_choros_has_no_ratios() -> None:
    assert plain_text(compare("", [("", [row("mpi4py", 1.0)])])).splitlines()[3] == "  mpi4py   1 s     2 s  3 s"


def test_output_other_than_a_terminal_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    table = compare("sums", [("16 MiB", [row("choros", 1e-3)])])
    show(table)
    assert capsys.readouterr().out == plain_text(table) + "\n"


def test_the_notes_of_allreduce() -> None:
    rows = [row("choros", 1e-3), row("memcpy", 8e-4), row("choros", 2e-5, 4096), row("memcpy", 1e-6, 4096)]
    rows += [row("choros", 1.1, bench="grouped"), row("choros, any array", 1.0, bench="grouped")]
    single, grouped = tables(rows)
    assert "16 MiB: 80% of a memcpy's speed (median 80%)" in single.notes
    assert not any(note.startswith("4 KiB") for note in single.notes)
    assert any(note.startswith("α-β model of choros: α = ") for note in single.notes)
    assert grouped.notes[0] == "U-Net: 26 gradients, 16 MiB: 1.10 times one allreduce of the same bytes (median 1.10)"


def test_the_notes_of_overhead() -> None:
    facts = {"framework": "jax", "model": "cnn", "batch": 8, "images_per_s": 1.0}
    figures = {("choros", 2): 1.25, ("choros", 1): 1.0, ("plain Keras", 1): 0.5, ("plain Keras", 2): 0.625}
    rows = [{"peer": peer, "ranks": ranks, **summary(t, t, t), **facts} for (peer, ranks), t in figures.items()]
    steps, _ = overhead_tables("training step", rows)
    assert [note.split(": ", 1)[1] for note in steps.notes] == [
        "time of choros, 1 rank / plain Keras: best 2.000, median 2.000, CPU 2.000",
        "speed of choros, 2 ranks / 1 rank: best 1.600, median 1.600, CPU 1.600",
        "what the machine allows: plain Keras, twice / once: best 1.600, median 1.600, CPU 1.600",
    ]


def test_json_is_written_atomically(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_json(file, {"machine": {"cores": 2}, "rows": [row("choros", 1.0)]})
    written = json.loads(file.read_text())
    assert list(written) == ["machine", "rows"]
    assert {"bench", "peer", "ranks", "best_s", "median_s", "cpu_s", "bytes", "dtype"} <= written["rows"][0].keys()
    assert list(tmp_path.iterdir()) == [file]


def test_files_that_cannot_be_written_are_rejected_at_the_start(tmp_path: Path) -> None:
    check_writable("--json", tmp_path / "new")
    for device in ("/dev/null", "/dev/stdout"):
        check_writable("--json", Path(device))
    for path in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable("--json", path)


def test_a_picture_of_a_kind_that_is_not_known(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_files(tmp_path / "steps.PNG", None)
    with pytest.raises(ConfigError, match=r"steps\.foo: the name of a picture ends in one of .*\.png"):
        check_files(tmp_path / "steps.foo", None)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row(peer, ranks * sum(allreduce_terms(2, size)) * 1e-9, size, ranks)
        for peer in ("choros", "mpi4py")
        for size in (1 << 20, 1 << 24)
        for ranks in (1, 2, 4)
    ]
    plot_sizes(rows, tmp_path / "scaling.png", cores=2)
    plot_sizes([row for row in rows if row["ranks"] == 2], tmp_path / "contenders.png", cores=2)
    plot_rows([("cnn", rows[:2])], tmp_path / "steps.png", "steps")
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.iterdir())


def test_the_title_of_the_plot_names_oversubscribed_ranks() -> None:
    assert scaling_title([1, 2], cores=2) == "allreduce by choros"
    assert scaling_title([2, 4, 8], cores=2) == "allreduce by choros; 4 and 8 ranks share 2 cores"
