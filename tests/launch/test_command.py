"""Job → command line and environment, for each MPI implementation."""

import sys
from dataclasses import replace

import pytest

from choros.errors import ConfigError
from choros.launch.plan.command import plan
from choros.launch.plan.hosts import parse_hosts
from choros.launch.plan.job import Elastic, Job, Ssh
from choros.launch.plan.mpi_implementations import INTEL_MPI, MPICH, OPEN_MPI_4, OPEN_MPI_5, Mpirun
from choros.launch.protocol.wrapper_options import WrapperOptions
from choros.launch.wrapper import __main__ as wrapper

WRAPPER = (sys.executable, "-I", "-S", wrapper.__file__)
COMMAND = ("python", "train.py", "--lr", "0.1")


def planned(job, implementation=None, environ=(), root=False):
    mpirun = Mpirun("/bin/mpirun", implementation or OPEN_MPI_5, "")
    return plan(job, mpirun, dict(environ), name="j1", session="/tmp/s", root=root)


def argv_of(job, implementation=None, environ=(), root=False):
    return planned(job, implementation, environ, root).argv


def options_of(job):
    return WrapperOptions.parse(argv_of(job)[-len(COMMAND) - 1])


LOCAL = Job(COMMAND, 4)
REMOTE_HOSTS = parse_hosts("a:2,b:2")
REMOTE = Job(
    COMMAND,
    4,
    hosts=REMOTE_HOSTS,
    remote=REMOTE_HOSTS,
    ssh=Ssh(port=2222),
    network_interfaces=("eth0", "eth1"),
    tcp=True,
)
ENVIRON = {"PATH": "/bin", "SECRET": "hush", "HOSTNAME": "me", "SSH_TTY": "/dev/pts/1"}


def test_open_mpi_5_on_one_host():
    assert argv_of(LOCAL) == (
        *("/bin/mpirun", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
        *("--prtemca", "prte_local_tmpdir_base", "/tmp/s", "-np", "4"),
        *(*WRAPPER, '{"gated":true}', *COMMAND),
    )


def test_ranks_of_one_host_communicate_through_loopback():
    """The daemons of mpirun refuse it."""
    argv = argv_of(replace(LOCAL, network_interfaces=("lo",)))
    assert "prte_if_include" not in argv
    assert argv[argv.index("btl_tcp_if_include") :][:2] == ("btl_tcp_if_include", "lo")
    assert "prte_if_include" in argv_of(replace(REMOTE, network_interfaces=("lo",)))


def test_open_mpi_5_on_remote_hosts():
    assert argv_of(REMOTE, environ=ENVIRON, root=True) == (
        *("/bin/mpirun", "--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
        *("--prtemca", "prte_local_tmpdir_base", "/tmp/s"),
        *("--prtemca", "plm_ssh_agent", "ssh -o BatchMode=yes -p 2222", "--prtemca", "plm_ssh_no_tree_spawn", "1"),
        *("--prtemca", "oob_tcp_keepalive_time", "1", "--prtemca", "oob_tcp_keepalive_intvl", "1"),
        *("--prtemca", "oob_tcp_keepalive_probes", "3"),
        *("--prtemca", "prte_if_include", "eth0,eth1", "--mca", "btl_tcp_if_include", "eth0,eth1"),
        *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "-H", "a:2,b:2"),
        *("-x", "CHOROS_JOB", "-x", "GLOO_SOCKET_IFNAME", "-x", "NCCL_SOCKET_IFNAME", "-x", "PATH", "-x", "SECRET"),
        *("-np", "4", *WRAPPER, "{}", *COMMAND),
    )


@pytest.mark.parametrize("ssh", [Ssh(identity_file="/my keys/id"), Ssh(command=("/my programs/login",))])
def test_a_login_with_spaces_would_be_one_to_another_host(ssh):
    with pytest.raises(ConfigError, match="that have no spaces"):
        argv_of(replace(REMOTE, ssh=ssh))


def test_no_shell_of_another_host_gets_what_it_would_execute():
    with pytest.raises(ConfigError, match="shells of other hosts"):
        OPEN_MPI_5.arguments(REMOTE, "/tmp/$(touch ran)/choros-session-a", root=False, forward=[], silence=3.0)


@pytest.mark.parametrize("implementation", [OPEN_MPI_5, OPEN_MPI_4])
def test_an_mpi_at_a_path_with_spaces_starts_ranks_on_this_host_alone(implementation):
    mpirun = Mpirun("/my environments/choros/bin/mpirun", implementation, "")
    arguments = {"environ": {}, "name": "j1", "session": "/tmp/s", "root": False}
    assert plan(LOCAL, mpirun, **arguments).argv[0] == mpirun.path
    with pytest.raises(ConfigError, match="path without spaces"):
        plan(REMOTE, mpirun, **arguments)


@pytest.mark.parametrize(("seconds", "questions"), [("2", "3"), ("29.6", "30")])
def test_mpiruns_daemons_wait_for_a_silent_host_as_long_as_ranks_do(seconds, questions):
    argv = argv_of(replace(REMOTE, environment={"CHOROS_UNREACHABLE_SECONDS": seconds}))
    assert argv[argv.index("oob_tcp_keepalive_probes") + 1] == questions


def test_open_mpi_4_on_remote_hosts():
    assert argv_of(REMOTE, OPEN_MPI_4, ENVIRON) == (
        *("/bin/mpirun", "--bind-to", "none", "--map-by", "slot", "--oversubscribe"),
        *("--mca", "orte_local_tmpdir_base", "/tmp/s"),
        *("--mca", "ess_base_forward_signals", "SIGALRM,SIGABRT,SIGURG,SIGUSR1,SIGUSR2,SIGPROF"),
        *("--mca", "plm_rsh_agent", "ssh -o BatchMode=yes -p 2222", "--mca", "plm_rsh_no_tree_spawn", "1"),
        *("--mca", "oob_tcp_keepalive_time", "1", "--mca", "oob_tcp_keepalive_intvl", "1"),
        *("--mca", "oob_tcp_keepalive_probes", "3"),
        *("--mca", "oob_tcp_if_include", "eth0,eth1", "--mca", "btl_tcp_if_include", "eth0,eth1"),
        *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "-H", "a:2,b:2"),
        *("-x", "CHOROS_JOB", "-x", "GLOO_SOCKET_IFNAME", "-x", "NCCL_SOCKET_IFNAME", "-x", "PATH", "-x", "SECRET"),
        *("-np", "4", *WRAPPER, "{}", *COMMAND),
    )


@pytest.mark.parametrize(
    ("implementation", "binding"), [(MPICH, ("-bind-to", "none")), (INTEL_MPI, ("-genv", "I_MPI_PIN", "0"))]
)
def test_hydra_on_remote_hosts(implementation, binding):
    job = Job(COMMAND, 4, hosts=REMOTE_HOSTS, remote=REMOTE_HOSTS)
    assert argv_of(job, implementation, ENVIRON) == (
        *("/bin/mpirun", *binding, "-hosts", "a:2,b:2", "-launcher", "ssh", "-launcher-exec", "ssh"),
        *("-genvlist", "CHOROS_JOB,PATH,SECRET", "-n", "4", *WRAPPER, "{}", *COMMAND),
    )


def test_hydra_takes_no_arguments_of_ssh():
    with pytest.raises(ConfigError, match=r"ssh -o BatchMode=yes -p 2222: MPICH's and Intel's mpirun take a program"):
        argv_of(REMOTE, MPICH)


def test_values_are_in_the_environment_only():
    command = planned(Job(COMMAND, 2, hosts=REMOTE_HOSTS, remote=REMOTE_HOSTS, environment={"TOKEN": "s3cret"}))
    assert command.environ["TOKEN"] == "s3cret"
    assert "TOKEN" in command.argv
    assert not any("s3cret" in argument for argument in command.argv)


def test_nothing_is_forwarded_without_remote_hosts():
    assert "-x" not in argv_of(Job(COMMAND, 2, hosts=parse_hosts("localhost:2")), environ=ENVIRON)


def test_variables_are_forwarded_in_a_schedulers_allocation():
    assert "-x" in argv_of(LOCAL, environ={**ENVIRON, "SLURM_JOB_ID": "7"})


def test_the_users_binding_replaces_the_default():
    job = Job(COMMAND, 2, binding_args=("--bind-to", "socket"), options=WrapperOptions(bind=False))
    assert argv_of(job)[1:3] == ("--bind-to", "socket")
    assert "--map-by" not in argv_of(job)
    assert not options_of(job).bind


def test_the_users_arguments_are_before_the_number_of_ranks():
    argv = argv_of(Job(COMMAND, 2, mpi_args=("--mca", "pml", "ucx")))
    assert argv[: argv.index(sys.executable)][-5:] == ("--mca", "pml", "ucx", "-np", "2")


@pytest.mark.parametrize(("hosts", "ranks"), [("a:2,b:1", [2, 1]), ("a:2,b:2", ()), ("a:3", ())])
def test_wrappers_get_the_ranks_per_host_if_they_differ(hosts, ranks):
    parsed = parse_hosts(hosts)
    job = Job(COMMAND, sum(host.slots for host in parsed), hosts=parsed, remote=parsed)
    assert options_of(job).ranks_per_host == ranks


def test_a_rank_of_another_launcher_can_start_jobs():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMIX_SERVER_URI": "x", "RANK": "0", "TF_CONFIG": "{}"}
    environ |= {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "HOME": "/root"}
    assert planned(LOCAL, environ=environ).environ == {
        "SLURM_PROCID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_OVERLAP": "1",
        "HOME": "/root",
        "CHOROS_JOB": "j1",
    }


def test_a_job_of_a_rank_of_an_elastic_one_is_as_its_own_arguments_say():
    outer = {**Elastic(least=1, most=4, resets=2).variables(), "CHOROS_SPAWN": "[]", "CHOROS_COMMIT_DIR": "/c"}
    environ = {**outer, "CHOROS_JOB": "j0", "CHOROS_OVERLAP": "1"}
    assert planned(LOCAL, environ=environ).environ == {"CHOROS_JOB": "j1", "CHOROS_OVERLAP": "1"}
    assert planned(LOCAL, environ=outer).environ == {**outer, "CHOROS_JOB": "j1"}  # the user's own


def test_options_are_parsed_as_they_were_written():
    options = WrapperOptions(bind=False, call=True, ranks_per_host=[3, 1], restarts=2)
    assert WrapperOptions.parse(str(options)) == options
