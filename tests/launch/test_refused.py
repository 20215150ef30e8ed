"""Every flag of horovodrun works or is refused with a sentence."""

import pytest
from click.testing import CliRunner

from choros.launch import cli
from choros.launch.plan.unsupported_flags import REFUSED, refusal

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
    assert (name in known) != (name in REFUSED)


@pytest.mark.parametrize("flag", REFUSED)
def test_a_refusal_is_a_sentence_and_exit_code_2(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["-np", "2", flag, "1", "python", "x.py"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == f"chorosrun: {flag}: {REFUSED[flag]}\n"
    assert said.rstrip().endswith(".")
    assert len(said) > 60


def test_flags_of_the_command_are_its_own():
    own = frozenset({"-np", "--env"})
    assert refusal(["-np", "2", "python", "--gloo"], own) is None
    assert refusal(["--env", "--gloo", "python"], own) is None
    assert refusal(["--verbose", "--cycle-time-ms=3", "python"], own).startswith("--cycle-time-ms: ")
    assert refusal(["--", "--gloo"], own) is None


def test_refused_and_accepted_do_not_overlap():
    accepted = {name for option in cli.chorosrun.params for name in option.opts}
    assert not accepted & REFUSED.keys()


def test_help_teaches():
    text = CliRunner().invoke(cli.chorosrun, ["--help"]).output
    for heading in ("Examples:", "Where:", "Output:", "Time:", "MPI:", "Signals:", "Exit codes:"):
        assert heading in text
    assert text.index("Examples:") < text.index("Where:") < text.index("Exit codes:")
    for option in cli.chorosrun.params:
        assert getattr(option, "hidden", False) or option.opts[0] in text or option.name == "command"
