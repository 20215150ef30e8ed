"""The end of a process whose threads serve the jobs of parameter servers."""

import subprocess
import sys

import pytest

#: A thread serves a connection, the other end of which is open or closed when the script ends; then it frees something.
SCRIPT = """
import sys, threading, time
from choros.parameter_server.cluster import end_at_exit
from choros.transport.channel import ChannelClosed, connect
from choros.transport.channel import Listener
from choros.transport.secret import Key

class Tensor:
    def __del__(self):
        time.sleep(0.3)
        print("freed", flush=True)

def serve(channel, first):
    end_at_exit(channel)
    tensor = Tensor()
    served.set()
    try:
        channel.receive()
    except ChannelClosed:
        print("closed", flush=True)

address, key, served = sys.argv[1], Key(bytes(32)), threading.Event()
listener = Listener(address, key, "ps 0", serve)
channel = connect(address, key, "worker 0", "ps 0", 20)
channel.send("hello")
served.wait(20)
if sys.argv[2] == "closed":
    channel.close()
"""


@pytest.mark.parametrize("other_end", ["open", "closed"])
def test_python_ends_after_the_threads_that_serve(tmp_path, other_end):
    argv = [sys.executable, "-c", SCRIPT, f"unix:{tmp_path}/ps", other_end]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\nfreed\n", "")
