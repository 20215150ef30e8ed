"""Jobs on a Ray of several machines: one that comes, one that dies, and the end of Ray."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from harness import TESTS
from ray_face.machines import machines, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.mark.timeout(500)
def test_machines():
    with tempfile.TemporaryDirectory(prefix="ray") as name, machines(Path(name), 3) as found:
        directory = Path(name)  # a short path, for Ray's sockets
        script = TESTS / "ray_face" / "machines_script.py"
        with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
            driver = found.start(0, sys.executable, str(script), found.network.hosts[0], name, stdout=out, stderr=err)

        def said():
            return (directory / "out").read_text() + (directory / "err").read_text()[-6000:]

        def until(condition, seconds=150):  # other tests run beside this one
            wait_until(lambda: condition() or driver.poll() is not None, seconds, said)
            assert driver.poll() is None, said()

        def returned(what):
            lines = [line for line in (directory / "out").read_text().splitlines() if line.startswith(f'{{"{what}"')]
            return json.loads(lines[0])[what] if lines else None

        sizes = directory / "sizes"
        until((directory / "middle").exists)
        for ranks in returned("where"):
            assert [each[:4] for each in ranks] == [[0, 2, 1, 2], [1, 2, 1, 2]]
            assert sorted(ranks[0][4]) == ["machine-0", "machine-1"]
        found.start_ray(2)
        until(lambda: sizes.exists() and "3" in sizes.read_text())
        found.power_off(1)
        until(lambda: returned("trained"))
        for report in returned("trained"):
            assert report["counts"] == [report["epochs"]], report
            assert report["size"] == 2
        until(lambda: all((directory / f"asleep{rank}").exists() for rank in range(2)))
        for number in (0, 2):
            found.stop_ray(number)
        for number in (0, 2):
            wait_until(lambda number=number: not found.left(number), 20, lambda number=number: found.left(number))
        driver.wait(20)
