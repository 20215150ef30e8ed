"""The arguments of chorosrun and choros.run: the same names, defaults, checks and jobs."""

import inspect
import re
from dataclasses import fields

import pytest

from choros.errors import ConfigError
from choros.launch import cli
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.horovod_flags import HOROVOD_FLAGS
from choros.launch.plan.hosts import Host
from choros.launch.plan.job import Limits
from choros.launch.protocol.wrapper_options import WrapperOptions
from choros.launch.run import run

DEFAULTS = {each.name: each.default for each in fields(Arguments)}


def job(accelerators=0, names=("here",), environ=None, **given):
    return Arguments(**given).job(["x"], environ or {}, lambda: frozenset(names), lambda: accelerators)


def test_chorosrun_and_run_have_the_same_arguments_and_defaults():
    flags = {option.name: option for option in cli.chorosrun.params}
    horovods = {flag.dest for flag in HOROVOD_FLAGS}
    only_flags = {"command", "config_file", "dry_run", "version", "check_build"}
    assert flags.keys() - only_flags - horovods == DEFAULTS.keys() - {"in_python"}
    parameters = inspect.signature(run).parameters
    only_runs = {
        "func",
        "args",
        "kwargs",
        "output_filename",
        "network_interface",
        "executable",
        "np",
        "min_np",
        "max_np",
    }
    in_both = DEFAULTS.keys() - {"in_python", "ps", "max_restarts", "nproc_per_node", "view"}
    assert parameters.keys() - only_runs - horovods == in_both
    for name in in_both - {"num_proc", "env"}:
        assert (parameters[name].default or None) == (DEFAULTS[name] or None), name
    context = cli.chorosrun.make_context("chorosrun", ["true"])
    assert cli.arguments_of(context.params) == Arguments()


def test_the_help_of_run_describes_all_arguments_by_their_names():
    names = list(inspect.signature(run).parameters)
    assert re.findall(r"^    (\w+): ", run.__doc__, re.MULTILINE)[: len(names)] == names
    assert "--" not in run.__doc__.replace("--timeline-filename", "")


def test_the_allocation_of_a_scheduler_is_the_default():
    two_hosts = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert job(environ=two_hosts).size == 4
    assert job(environ=two_hosts, num_proc=2).size == 2
    assert job(environ=two_hosts, ps=1).size == 4
    assert job(environ=two_hosts, hosts="here:1").size == 1
    assert job(2, environ={**two_hosts, "SLURM_TASKS_PER_NODE": "1"}).size == 2


@pytest.mark.parametrize(
    ("given", "accelerators", "size"),
    [
        ({}, 0, 1),
        ({}, 4, 4),
        ({"hosts": "a:2,b:3"}, 4, 5),
        ({"num_proc": 3}, 4, 3),
        ({"ps": 2, "num_proc": 4}, 0, 7),
        ({"ps": 1, "hosts": "a:4"}, 0, 4),
    ],
)
def test_number_of_processes(given, accelerators, size):
    assert job(accelerators, **given).size == size


def test_a_job():
    made = job(hosts="here:1,there:1", mpi_args="--mca 'a b' c", network_interfaces="eth0, eth1")
    assert made.remote == (Host("there", 1),)
    assert (made.mpi_args, made.network_interfaces) == (("--mca", "a b", "c"), ("eth0", "eth1"))
    assert job(network_interfaces=["eth0", "eth1,eth0", ""]).network_interfaces == ("eth0", "eth1")


def test_ranks_on_each_host():
    assert job(nproc_per_node=3).size == 3
    made = job(nproc_per_node=2, hosts="here:4,there:2")
    assert (made.size, made.hosts) == (4, (Host("here", 2), Host("there", 2)))
    with pytest.raises(ConfigError, match="--nproc-per-node 3: fewer slots have there:2"):
        job(nproc_per_node=3, hosts="here:4,there:2")
    with pytest.raises(ConfigError, match="--nproc-per-node 2: in a scheduler's allocation, give -np, or name the"):
        job(nproc_per_node=2, environ={"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2)"})


def test_options_of_the_wrappers():
    assert job().options == WrapperOptions()
    assert job(binding_args="--bind-to core").options == WrapperOptions(bind=False)
    assert job(ps=1, num_proc=1).options == WrapperOptions(restarts=3)


def test_a_host_file_named_by_the_environment(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert job(environ={"OMPI_MCA_orte_default_hostfile": str(tmp_path / "hosts")}).hosts == (Host("a", 2),)


@pytest.mark.parametrize(
    ("given", "value", "merges"),
    [
        ({}, None, True),
        ({}, "1", True),
        ({}, "0", False),
        ({"merge_output": True}, "0", True),
        ({"merge_output": False}, None, False),
        ({"prefix_output": False}, None, False),
    ],
)
def test_whether_equal_lines_are_merged(given, value, merges):
    environ = {} if value is None else {"CHOROS_MERGE_OUTPUT": value}
    assert Arguments(**given).merge(2, environ) is merges
    assert not Arguments(**given).merge(1, environ)


def test_limits():
    assert Arguments().limits({}) == Limits()
    assert Arguments(timeout=5, start_timeout=2, grace_period=0, exit_timeout=9).limits({}) == Limits(2, 5, 0, 9, 9)
    assert (Arguments().limits({}).exit, Arguments().limits({}).exit_of_all) == (300, None)


def test_limits_of_the_environment():
    environ = {"HOROVOD_START_TIMEOUT": "7", "HOROVOD_STALL_CHECK_TIME_SECONDS": "8"}
    limits = Arguments(env={"CHOROS_STALL_SHUTDOWN_SECONDS": "9"}).limits(environ)
    assert (limits.start, limits.stall, limits.stall_shutdown) == (7, 8, 9)
    assert Arguments(start_timeout=2).limits({**environ, "CHOROS_START_TIMEOUT": "3"}).start == 2
    assert Arguments().limits({**environ, "CHOROS_START_TIMEOUT": "3"}).start == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_proc": 0}, "-np 0: expected a whole number from 1 to "),
        ({"num_proc": True}, "-np True: expected a whole number"),
        ({"num_proc": 10**30}, "expected a whole number"),
        ({"ssh_port": 70_000}, "--ssh-port 70000: expected a whole number from 1 to 65535"),
        ({"timeout": float("nan")}, "--timeout nan: expected a finite number of seconds, more than 0"),
        ({"start_timeout": float("inf")}, "--start-timeout inf: expected a finite number"),
        ({"start_timeout": True}, "--start-timeout True: expected a finite number"),
        ({"nproc_per_node": 2, "num_proc": 2}, "--nproc-per-node replaces -np"),
        ({"start_timeout": 0}, "--start-timeout 0: expected"),
        ({"grace_period": -1}, "--grace-period -1: expected a finite number of seconds, 0 or more"),
        ({"hosts": "a", "hostfile": "b"}, "--hosts and --hostfile both name hosts: give only one of them"),
        ({"merge_output": True, "prefix_output": False}, "--merge-output True: lines are merged only if a prefix"),
        ({"max_restarts": 1}, "--max-restarts applies only to the workers"),
        ({"env": {"A": 1}}, r"env=\{'A': 1\}: the name and the value of an environment variable must be strings"),
        ({"num_proc": 0, "in_python": True}, "^num_proc=0: expected"),
        ({"start_timeout": -1, "in_python": True}, "^start_timeout=-1: expected"),
    ],
)
def test_invalid_values(given, message):
    with pytest.raises(ConfigError, match=message):
        Arguments(**given)


@pytest.mark.parametrize("name", ["mpi_args", "binding_args"])
def test_arguments_with_an_open_quotation_mark(name):
    with pytest.raises(ConfigError, match=r"No closing quotation\)\. Close every quotation mark"):
        job(**{name: "'"})


@pytest.mark.parametrize("slots", ["9" * 10, "9" * 5000])
def test_more_slots_than_any_machine_has(slots):
    with pytest.raises(ConfigError, match="host a has more than 1048576 slots"):
        job(hosts=f"a:{slots}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"func": "nope"}, "expected a function"),
        ({"num_proc": 0}, "num_proc=0: expected a whole number"),
        ({"output_dir": "a", "output_filename": "b"}, "two names of one argument"),
        ({"use_gloo": True, "use_mpi": True}, "Gloo and MPI are two engines"),
        ({"timeout": float("inf")}, "timeout=inf: expected"),
        ({"report": "/"}, "report='/': it names no file"),
        ({"report": "a/r.html", "env": {"CHOROS_TIMELINE": "./a/r.json"}}, "own ./a/r.json over the timeline"),
        *(({name: ""}, f"{name}='': it is empty") for name in ("commit_dir", "output_dir", "host_discovery_script")),
    ],
)
def test_run_starts_nothing_with_invalid_arguments(given, message, monkeypatch):
    monkeypatch.setattr("choros.launch.run.launch", None)
    with pytest.raises(ConfigError, match=message):
        run(**{"func": print, **given})


def test_run_has_no_other_arguments():
    with pytest.raises(TypeError, match=r"^choros.run\(\) got an unexpected keyword argument 'max_restarts'$"):
        run(print, max_restarts=1)  # chorosrun's only


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["-np", "two"], {}, "'two' is not a valid whole number"),
        (["--start-timeout", "inf"], {}, "--start-timeout inf: expected a finite number of seconds"),
        (["--report", "r", "--timeline-filename", "r.json"], {}, "--report r: it would write its own r.json over the"),
        (["--spot-notices", "foo"], {}, "'foo' is not one of none, aws, azure, gcp. It, or --spot-notices, sets the"),
        ([], {"CHOROS_START_TIMEOUT": "nan"}, "CHOROS_START_TIMEOUT='nan' is not a number of seconds above 0"),
        ([], {"CHOROS_COMPARE_EVERY": "0.5"}, "CHOROS_COMPARE_EVERY='0.5' is not a whole number of steps of 0 or more"),
        ([], {"SLURM_JOB_ID": "1", "SLURM_HET_SIZE": "some"}, "this allocation of SLURM has some components"),
        ([], {"HOROVOD_START_TIMEOUT": "soon"}, "HOROVOD_START_TIMEOUT='soon' is not a number of seconds above 0"),
    ],
)
def test_chorosrun_reports_invalid_arguments(arguments, environ, message, monkeypatch, capsys):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "true"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
