"""Jobs that are started as Horovod's users start them."""

import json
import sys

import pytest

from choros.errors import LaunchError
from choros.launch.run import run as choros_run
from launch.launched import rank_script, run

pytestmark = pytest.mark.slow


def names_of(prefix):
    import os

    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def test_a_configuration_file_and_flags_without_effect(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "params:\n  fusion_threshold_mb: 1\n  cycle_time_ms: 2\n"
        "autotune:\n  enabled: true\n  log_file: here\nlogging:\n  level: info\n"
    )
    script = rank_script(
        tmp_path / "script.py",
        "import choros\n"
        "choros.init()\n"
        "names = ['RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE']\n"
        "print(*(os.environ['HOROVOD_' + name] for name in names))\n"
        "assert os.environ['HOROVOD_HOSTNAME']\n"
        "from choros.comm.context import global_process_set\n"
        "print('chunk', global_process_set.communicator.chunk_bytes)\n",
    )
    ended = run(
        *(
            "-np2",
            "--network-interfaces",
            "lo",
            "--config-file",
            config,
            "--autotune-log-file",
            tmp_path / "tuned.csv",
            "--num-nccl-streams",
            "2",
        ),
        *("--prefix-output-with-timestamp", "--log-with-timestamp", "--timeline-filename", tmp_path / "timeline.json"),
        *(sys.executable, script),
        env={"HOROVOD_CCL_CACHE": "1"},
    )
    assert ended.code == 0, ended.err
    lines = [line.split(" ", 2) for line in ended.out.splitlines()]
    assert all(len(date) == 10 and len(time) == 8 for date, time, _ in lines)
    assert sorted(line for *_, line in lines) == [
        *("[0] 0 2 0 2 0 1", "[0] chunk 1048576", "[1] 1 2 1 2 0 1", "[1] chunk 1048576"),
    ]
    said = [line for line in ended.err.splitlines() if line.startswith("chorosrun: ")]
    assert [line.partition(" has no effect: ")[0] for line in said] == [
        "chorosrun: --cycle-time-ms",
        "chorosrun: --num-nccl-streams",
    ]
    assert ended.err.count(" choros: HOROVOD_CCL_CACHE has no effect: oneCCL is not used.") == 1
    rows = (tmp_path / "tuned.csv").read_text().splitlines()
    assert rows[0] == "chunk_bytes,window_bytes,block_bytes,array_bytes,seconds"
    assert {row.split(",")[0] for row in rows[1:]} == {"1048576"}  # given, so it is not tuned
    assert rows[-1].endswith(",chosen,")
    assert json.loads((tmp_path / "timeline.json").read_text())


def test_gloo(tmp_path):
    script = rank_script(
        tmp_path / "script.py",
        "import choros\n"
        "from choros.comm.context import global_process_set\n"
        "choros.init()\n"
        "requested = [os.environ[name] for name in ('HOROVOD_CONTROLLER', 'HOROVOD_CPU_OPERATIONS')]\n"
        "print(global_process_set.communicator.engine, choros.size(), *requested)\n",
    )
    ended = run("-n", "2", "--gloo", "--no-prefix-output", sys.executable, script, env={"CHOROS_ENGINE": "mpi"})
    assert (ended.code, ended.out) == (0, "torch 2 gloo gloo\n" * 2), ended.err


def test_gradients_that_are_not_fused(tmp_path):
    script = rank_script(
        tmp_path / "script.py",
        "import numpy as np\n"
        "import choros\n"
        "from choros.comm import fusion\n"
        "from choros.parallel.reduce.plan import ReduceConfig\n"
        "from choros.parallel.reduce.reducer import GradientReducer\n"
        "plan, seen = fusion.plan_fusion, []\n"
        "fusion.plan_fusion = lambda layout, groups, *rest: seen.append(groups) or plan(layout, groups, *rest)\n"
        "choros.init()\n"
        "gradients = [np.full(3, rank, np.float32), np.full(70000, rank, np.float64), np.full((), rank, np.float32)]\n"
        "reduced = GradientReducer(ReduceConfig()).reduce(gradients, examples=1)\n"
        "assert all((each == 0.5).all() for each in reduced), reduced\n"
        "assert seen == [[[0], [1], [2]]], seen\n"
        "print(choros.rank())\n",
    )
    ended = run("-np", "2", "--fusion-threshold-mb", "0", sys.executable, script)
    assert (ended.code, sorted(ended.out.split())) == (0, ["0", "1", "[0]", "[1]"]), ended.err


def test_a_wait_that_takes_too_long_ends_the_job(tmp_path):
    script = rank_script(
        tmp_path / "script.py",
        "import choros\n"
        "from choros.comm.context import global_process_set\n"
        "choros.init()\n"
        "if rank == 1:\n    time.sleep(600)\n"
        "global_process_set.communicator.barrier()\n",
    )
    shutdown = ("--stall-check-warning-time-seconds", "2", "--stall-check-shutdown-time-seconds", "4")
    ended = run("-np", "2", *shutdown, sys.executable, script)
    assert ended.code == 70, ended.err
    first, *_, end = [line for line in ended.err.splitlines() if " has waited " in line]
    assert first.startswith("chorosrun: rank 0 has waited ")
    assert end.endswith(", longer than CHOROS_STALL_SHUTDOWN_SECONDS=4; the job was stopped.")


def test_the_arguments_of_horovod_run(tmp_path, capsys):
    variables = choros_run(
        names_of,
        ("HOROVOD_",),
        num_proc=2,
        start_timeout=60,
        disable_cache=True,
        output_filename=tmp_path,
        use_mpi=True,
        executable=sys.executable,
        env={"CHOROS_STALL_SECONDS": "30"},
    )
    assert [each["HOROVOD_RANK"] for each in variables] == ["0", "1"]
    assert (tmp_path / "rank.1" / "stdout").exists()
    assert capsys.readouterr().err.splitlines()[0] == (
        "choros.run: disable_cache has no effect: chorosrun checks the hosts at every start and caches nothing."
    )


def test_a_failure_is_a_runtime_error():
    with pytest.raises(RuntimeError, match="modulo by zero") as raised:
        choros_run(divmod, (1, 0))
    assert isinstance(raised.value, LaunchError)
