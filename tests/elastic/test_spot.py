"""Notices that a cloud takes a spot machine away, from servers that answer as the clouds do."""

import json
import re
import signal
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from choros.elastic import spot
from harness import needs
from launch.launched import rank_script, run
from launch.test_agents import TRAINS

AZURE = {
    "Events": [
        {"EventType": "Freeze", "Resources": ["vm-1"]},
        {"EventType": "Preempt", "Resources": ["vm-2"]},
        {"EventType": "Preempt", "Resources": ["vm-2", "vm-1"]},
    ]
}
#: By cloud: how it is asked; what it answers while it takes no machine away, and when it does.
CLOUDS = {
    "aws": ("X-aws-ec2-metadata-token", (404, ""), (200, '{"action": "terminate"}')),
    "azure": ("Metadata", (200, json.dumps({"Events": AZURE["Events"][:2]})), (200, json.dumps(AZURE))),
    "gcp": ("Metadata-Flavor", (200, "FALSE"), (200, "TRUE")),
}
PATHS = {
    "aws": "/latest/meta-data/spot/instance-action",
    "azure": "/metadata/scheduledevents?api-version=2020-07-01",
    "gcp": "/computeMetadata/v1/instance/preempted",
}


@contextmanager
def served(cloud, is_taken):
    """A server of a cloud; its address."""
    header, no, yes = CLOUDS[cloud]

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            assert (self.path, self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) == ("/latest/api/token", "60")
            self.answer(200, "token")

        def do_GET(self):
            if self.path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                assert self.headers["Metadata"] == "true"
                self.answer(200, "vm-1")
                return
            assert self.path == PATHS[cloud]
            assert self.headers[header] in ("token", "true", "Google")
            try:
                self.answer(*(yes if is_taken() else no))
            except ConnectionAbortedError:
                self.close_connection = True

        def answer(self, code, text):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("cloud", "is_asked"), [*((cloud, False) for cloud in CLOUDS), ("gcp", True)])
def test_a_notice_of_each_cloud_becomes_a_signal(cloud, is_asked, monkeypatch):
    """But not in a rank that ends already: a second signal would kill it."""
    signals, questions = [], []

    def is_taken():
        questions.append(1)
        if len(questions) == 2:
            raise ConnectionAbortedError  # an answer that breaks off
        return len(questions) == 4

    monkeypatch.setattr(spot.os, "kill", lambda _, number: signals.append(number))
    monkeypatch.setattr(spot.durations, "SPOT_LOOK", 0.01)
    with served(cloud, is_taken) as address:
        monkeypatch.setitem(spot.ADDRESSES, cloud, address)
        spot._watch(cloud, lambda: is_asked)
    assert (len(questions), signals) == (4, [] if is_asked else [signal.SIGTERM])


def test_a_machine_without_that_cloud_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(spot.ADDRESSES, "gcp", "http://127.0.0.1:9")
    spot._watch("gcp", bool)
    assert "CHOROS_SPOT_NOTICES=gcp: no notices: http://127.0.0.1:9 does not answer" in caplog.text


@pytest.mark.slow
@needs("mpi4py")
def test_a_rank_whose_machine_is_taken_away_leaves_after_its_step(tmp_path):
    asked = threading.Event()

    def is_taken():
        asked.set()
        return True

    with served("gcp", is_taken) as address:
        own = (
            "from choros.elastic import spot\n"
            f"spot.ADDRESSES['gcp'] = {address!r}\n"
            "if rank != 1: os.environ['CHOROS_SPOT_NOTICES'] = 'none'  # it is on another machine\n"
        )
        script = rank_script(tmp_path / "s.py", own + TRAINS)
        flags = ("-np", 3, "--min-np", 2, "--spot-notices", "gcp")
        ended = run(*flags, sys.executable, script)
    assert ended.code == 0, ended.err
    assert asked.is_set()
    assert "the cloud takes this machine away: SIGTERM" in ended.err
    assert "this rank was asked to end by SIGTERM: it leaves after this step, and the others go on" in ended.err
    assert re.findall(r"weight (\S+) (\d)", ended.out) == [("40.0", "2")] * 2
