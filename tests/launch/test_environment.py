"""Which environment variables are forwarded."""

import pytest

from choros.errors import ConfigError
from choros.launch.plan.environment import forwarded, parse_variables


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
