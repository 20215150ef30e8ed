"""Which environment variables are forwarded."""

import pytest

from choros.errors import ConfigError
from choros.launch.plan.environment import allocated_slots, for_srun, forwarded, parse_variables


def test_variables_of_this_host_are_not_forwarded():
    local = {
        *("HOSTNAME", "PWD", "OLDPWD", "DISPLAY", "TMPDIR", "_", "SHLVL", "SSH_AUTH_SOCK", "SLURM_JOB_ID"),
        *("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PRTE_LAUNCHED", "XDG_RUNTIME_DIR", "BASH_FUNC_f%%", "a.b", "1X"),
    }
    common = {"PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "OMPI_MCA_btl", "NCCL_DEBUG", "KERAS_BACKEND", "_mine"}
    assert forwarded(local | common) == sorted(common)


def test_variables_on_the_command_line():
    environ = {"HERE": "1"}
    assert parse_variables(["A=b=c", "E=", "HERE"], environ) == {"A": "b=c", "E": "", "HERE": "1"}


@pytest.mark.parametrize("text", ["NOT_SET", "a b=1", "=1", ""])
def test_invalid_variables(text):
    with pytest.raises(ConfigError, match="--env"):
        parse_variables([text], {})


def test_a_value_is_not_repeated_in_the_error():
    with pytest.raises(ConfigError) as raised:
        parse_variables(["bad name=hush"], {})
    assert "hush" not in str(raised.value)


def test_slots_of_an_allocation(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\n")
    assert allocated_slots({}) is None
    assert allocated_slots({"SLURM_JOB_ID": "1"}) is None
    assert allocated_slots({"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "2(x2),1"}) == 5
    assert allocated_slots({"PBS_JOBID": "1", "PBS_NODEFILE": str(nodes)}) == 3
    assert allocated_slots({"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "4"}) == 4
    assert allocated_slots({"PE_HOSTFILE": "f", "NSLOTS": "6"}) == 6
    with pytest.raises(ConfigError, match=r"SLURM_TASKS_PER_NODE='\?' is not a list of counts"):
        allocated_slots({"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "?"})


def test_mpiruns_daemons_share_the_users_own_step_of_slurm():
    assert for_srun({"PATH": "/bin"}) == {}
    assert for_srun({"SLURM_JOB_ID": "1"}) == {"SLURM_OVERLAP": "1"}
    assert for_srun({"SLURM_JOB_ID": "1", "SLURM_OVERLAP": "0"}) == {"SLURM_OVERLAP": "0"}
