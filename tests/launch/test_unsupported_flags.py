"""Every flag of horovodrun is supported or is an error with a reason."""

import pytest
from click.testing import CliRunner

from choros.launch import cli
from choros.launch.plan.unsupported_flags import UNSUPPORTED, unsupported_flag_reason

#: horovodrun's flags, complete, with values that make sense.
HOROVODRUN = [
    *("-v", "--version", "-np=2", "--num-proc=2", "-cb", "--check-build", "--disable-cache"),
    *("--start-timeout=30", "--network-interfaces=a,b", "--network-interface=a", "--output-filename=d"),
    *("--verbose", "--config-file=c.yaml", "-p=22", "--ssh-port=22", "-i=key"),
    *("--ssh-identity-file=key", "--fusion-threshold-mb=64", "--cycle-time-ms=1"),
    *("--cache-capacity=1024", "--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    *("--hierarchical-allgather", "--no-hierarchical-allgather", "--torus-allreduce"),
    *("--no-torus-allreduce", "--autotune", "--no-autotune", "--autotune-log-file=f"),
    *("--autotune-warmup-samples=3", "--autotune-steps-per-sample=10"),
    *("--autotune-bayes-opt-max-samples=20", "--autotune-gaussian-process-noise=0.8", "--min-np=1"),
    *("--min-num-proc=1", "--max-np=2", "--max-num-proc=2", "--slots-per-host=2"),
    *("--elastic-timeout=600", "--reset-limit=1", "--blacklist-cooldown-range=1"),
    *("--timeline-filename=f", "--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    *("--no-stall-check", "--stall-check", "--stall-check-warning-time-seconds=60"),
    *("--stall-check-shutdown-time-seconds=0", "--mpi-threads-disable", "--no-mpi-threads-disable"),
    *("--mpi-args=x", "--tcp", "--binding-args=x", "--num-nccl-streams=1", "--thread-affinity=0"),
    *("--gloo-timeout-seconds=30", "--log-level=INFO", "--log-with-timestamp"),
    *("--log-without-timestamp", "-prefix-timestamp", "--prefix-output-with-timestamp"),
    *("--log-hide-timestamp", "--no-log-hide-timestamp", "-H=a:1", "--hosts=a:1", "-hostfile=f"),
    *("--hostfile=f", "--host-discovery-script=s", "--gloo", "--mpi", "--jsrun"),
]


@pytest.mark.parametrize("flag", HOROVODRUN)
def test_every_flag_of_horovodrun_is_known(flag):
    name = flag.split("=")[0]
    known = {name for option in cli.chorosrun.params for name in (*option.opts, *option.secondary_opts)}
    assert (name in known) != (name in UNSUPPORTED)


@pytest.mark.parametrize("flag", UNSUPPORTED)
def test_an_unsupported_flag_is_an_error_with_a_reason(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["-np", "2", flag, "1", "python", "x.py"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message == f"chorosrun: {flag}: {UNSUPPORTED[flag]}\n"
    assert message.rstrip().endswith(".")
    assert len(message) > 60


def test_flags_after_the_command_are_ignored():
    own = frozenset({"-np", "--env"})
    assert unsupported_flag_reason(["-np", "2", "python", "--gloo"], own) is None
    assert unsupported_flag_reason(["--env", "--gloo", "python"], own) is None
    assert unsupported_flag_reason(["--verbose", "--cycle-time-ms=3", "python"], own).startswith("--cycle-time-ms: ")
    assert unsupported_flag_reason(["--", "--gloo"], own) is None


def test_supported_and_unsupported_flags_do_not_overlap():
    supported = {name for option in cli.chorosrun.params for name in option.opts}
    assert not supported & UNSUPPORTED.keys()


def test_help():
    text = CliRunner().invoke(cli.chorosrun, ["--help"]).output
    for heading in ("Examples:", "Hosts:", "Output:", "Time:", "MPI:", "Signals:", "Exit codes:"):
        assert heading in text
    assert text.index("Examples:") < text.index("Hosts:") < text.index("Exit codes:")
    for option in cli.chorosrun.params:
        assert getattr(option, "hidden", False) or option.opts[0] in text or option.name == "command"
