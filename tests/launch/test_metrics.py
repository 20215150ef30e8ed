"""Numbers of a job for Prometheus."""

import json
import re
import socket
import sys
import threading
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from choros import durations
from choros.errors import ConfigError
from choros.launch.driver.job_record import JobRecord, served
from choros.launch.protocol.frames import Start
from choros.observe.progress import BUCKETS, RankProgress
from harness import needs
from launch.launched import Running, rank_script, run

pytestmark = needs("prometheus_client")


def record():
    written = JobRecord(["train"], 2, {})
    histogram = [0] * BUCKETS
    histogram[10:12] = 3, 2
    for rank in range(2):
        written.start(Start(rank, f"host-{rank}", 7))
        done = RankProgress(rank, 5, seconds=2.5, waiting=1.5, examples=40.0, histogram=histogram, memory=1 << 20)
        written.note(done)
    return written


def read(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def test_what_is_served():
    shown = []
    with served(record(), "127.0.0.1:0", shown.append):
        text = read(shown[0].rpartition(" ")[2])
    assert 'choros_steps_total{host="host-1",rank="1"} 5.0' in text
    assert 'choros_examples_total{host="host-0",rank="0"} 40.0' in text
    assert 'choros_step_part_seconds_total{host="host-0",part="waiting",rank="0"} 1.5' in text
    assert 'choros_memory_bytes{host="host-0",rank="0"} 1.048576e+06' in text
    assert 'choros_step_seconds_bucket{host="host-0",le="0.00063496",rank="0"} 3.0' in text
    assert 'choros_step_seconds_bucket{host="host-0",le="+Inf",rank="0"} 5.0' in text
    assert 'choros_step_seconds_sum{host="host-0",rank="0"} 2.5' in text
    assert "choros_ranks 2.0" in text
    with pytest.raises(OSError, match="refused"):
        read(shown[0].rpartition(" ")[2])


def test_who_connects_and_says_nothing_takes_few_threads_for_a_moment(monkeypatch):
    monkeypatch.setattr(durations, "METRICS_READ", 1.0)
    shown, before = [], threading.active_count()
    with served(record(), "127.0.0.1:0", shown.append), ExitStack() as stack:
        address = ("127.0.0.1", int(re.search(r":(\d+)/", shown[0])[1]))
        silent = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(40)]
        assert [each.recv(1) for each in silent[20:]] == [b""] * 20
        assert threading.active_count() - before < 20
        assert [each.recv(1) for each in silent] == [b""] * 40
        assert "choros_ranks 2.0" in read(shown[0].rpartition(" ")[2])


def test_the_dashboard_asks_for_what_is_served():
    panels = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())["panels"]
    asked = {name for panel in panels for each in panel["targets"] for name in re.findall(r"choros_\w+", each["expr"])}
    shown = []
    with served(record(), "0", shown.append):
        text = read(shown[0].rpartition(" ")[2])
    assert len(asked) >= 7
    assert [name for name in asked if not re.search(rf"^{name}[ {{]", text, re.MULTILINE)] == []


def test_no_address_serves_nothing():
    with served(record(), None, pytest.fail):
        pass


@pytest.mark.parametrize("text", ["", "port", "70000", "a:b:c", "localhost:"])
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="expected a port, such as 9100"), served(record(), text, pytest.fail):
        pass


def test_a_port_that_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"127.0.0.1:{port} cannot be opened: .*in use"),
            served(record(), str(port), pytest.fail),
        ):
            pass


@pytest.mark.slow
def test_a_job_that_is_watched(tmp_path):
    body = "import choros; choros.init(); choros.comm.global_process_set.communicator.barrier(); ready(); wait()"
    with Running("-np", 2, "--metrics-port", "0", sys.executable, rank_script(tmp_path / "s.py", body)) as job:
        job.wait_for(2, "ready")
        listening = [each for each in psutil.Process(job.process.pid).net_connections() if each.status == "LISTEN"]
        assert [each.laddr.ip for each in listening] == ["127.0.0.1"]
        assert "choros_ranks 2.0" in read(f"http://127.0.0.1:{listening[0].laddr.port}/metrics")
        job.signal(15)
        ended = job.end()
    assert re.search(r"chorosrun: metrics at http://127.0.0.1:\d+/metrics", ended.err)


@pytest.mark.slow
def test_a_job_is_not_started_if_the_port_is_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = run("-np", 1, "--metrics-port", other.getsockname()[1], sys.executable, "-c", "print('runs')")
    assert (ended.code, ended.out) == (ConfigError.exit_code, "")
    assert "cannot be opened" in ended.err
