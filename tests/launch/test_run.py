"""choros.run: a function on several ranks."""

import math
import subprocess
import sys
import threading
from functools import partial

import pytest

from choros.errors import ConfigError, JobTimeout, WorkerFailed
from choros.launch.bootstrap import unpack
from choros.launch.run import pack, run

pytestmark = pytest.mark.slow


def add_rank(base, *, plus):
    import choros

    choros.init()
    print("rank", choros.rank(), "of", choros.size())
    return base + plus + choros.rank()


def fail_on_one(rank):
    import os
    import time

    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == rank:
        raise KeyError("on purpose")
    time.sleep(60)


def sleep():
    import time

    time.sleep(60)


def leave():
    raise SystemExit(0)


def train_until_there_are(ranks, rows):
    import torch

    import choros.torch as hvd
    from choros.distribute import MirroredStrategy

    hvd.init()
    MirroredStrategy()
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.5, momentum=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    path = hvd.broadcast_object("runs/5" if hvd.rank() == 0 else None)
    state = hvd.elastic.ObjectState(steps=0)

    @hvd.elastic.run
    def train(state):
        while hvd.size() < ranks:
            hvd.allgather_object(hvd.rank())
            state.steps += 1
            state.commit()

    train(state)
    return hvd.rank(), hvd.size(), len(rows), path


def test_results_in_order(capsys, tmp_path):
    assert run(add_rank, (10,), {"plus": 100}, num_proc=2, output_dir=tmp_path) == [110, 111]
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "rank 1 of 2\n"


def test_large_arguments_and_results():
    factor = 3
    data = bytes(range(256)) * 16384
    lengths = run(lambda given: (given * factor)[-8 * 1024 * 1024 :], (data,), num_proc=2)
    assert lengths == [(data * factor)[-8 * 1024 * 1024 :]] * 2


def test_a_job_of_one_rank_grows():
    rows = bytes(2 << 20)
    results = run(train_until_there_are, (2, rows), num_proc=1, min_num_proc=1, max_num_proc=2, hosts="localhost:2")
    assert results == [(rank, 2, len(rows), "runs/5") for rank in range(2)]


def test_one_rank_needs_no_mpi():
    assert run(math.sqrt, (16.0,)) == [4.0]


def test_characters_are_whole(capsys):
    run(lambda: print("a" + 200000 * "é"))
    assert capsys.readouterr().out == "a" + 200000 * "é" + "\n"


def test_environment_is_set():
    assert run(lambda: __import__("os").environ["CHOROS_TEST_VALUE"], num_proc=1, env={"CHOROS_TEST_VALUE": "x"}) == [
        "x"
    ]


def test_a_rank_that_fails():
    with pytest.raises(WorkerFailed) as raised:
        run(fail_on_one, (1,), num_proc=2)
    error = raised.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert error.host
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert "choros/launch" not in error.traceback
    assert error.traceback.endswith("KeyError: 'on purpose'")
    assert str(error).startswith(
        f"rank 1 on {error.host} failed with exit code 1 (KeyError); the other rank was stopped."
    )


def test_a_job_that_takes_too_long():
    with pytest.raises(JobTimeout, match=r"timeout=2 s"):
        run(sleep, timeout=2, grace_period=1)


def test_a_function_that_does_not_return():
    with pytest.raises(Exception, match="rank 0 ended before the function had returned"):
        run(leave)


def test_from_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(run(math.sqrt, (4.0,))))
    thread.start()
    thread.join(60)
    assert results == [[2.0]]


def test_from_a_process_of_multiprocessing(tmp_path):
    """The main module of a spawned process has a name of its own, under which ranks do not find its functions."""
    script = tmp_path / "main.py"
    script.write_text("""
import multiprocessing, choros

def rank():
    choros.init()
    return choros.rank()

def child(queue):
    queue.put(choros.run(rank, num_proc=2))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join()
    print(queue.get(timeout=1))
""")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[0, 1]\n", ended.stderr


def test_hosts_are_given_once():
    with pytest.raises(ConfigError, match="give only one of them"):
        run(sleep, hosts="a:1", hostfile="f")


def test_a_call_is_unpacked_as_it_was_packed():
    assert unpack(pack(partial(lambda a, b=0: a + b, 1, b=2)))() == 3
