import json

import pytest

from choros.errors import ConfigError
from choros.topology import Master, find_master


def tf_config(**cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}


ADDR = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
STEP = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "5", "SLURM_STEP_NODELIST": "n[08-09]", "SLURM_PROCID": "3"}
MASTERS = {
    "MASTER_ADDR and MASTER_PORT": (ADDR, "torchrun", Master("a", 29500)),
    "torchrun's agent": ({**ADDR, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun", Master("a", 29500, True)),
    "torchrun without its agent": ({**ADDR, "TORCHELASTIC_USE_AGENT_STORE": "False"}, "torchrun", Master("a", 29500)),
    "no address": ({"MASTER_PORT": "29500"}, "torchrun", None),
    "TF_CONFIG, first worker": (tf_config(worker=["a:1", "b:2"]), "TF_CONFIG", Master("a", 1)),
    "TF_CONFIG, the chief is rank 0": (tf_config(worker=["a:1"], chief=["c:3"]), "TF_CONFIG", Master("c", 3)),
    "TF_CONFIG beside another launcher's": ({**ADDR, **tf_config(worker=["b:1"])}, "TF_CONFIG", Master("b", 1)),
    "srun": (STEP, "srun", Master("n08", 23405)),
    "srun, one host": ({**STEP, "SLURM_STEP_NODELIST": "n08"}, "srun", Master("127.0.0.1", 23405)),
    "srun, port": ({**STEP, "MASTER_PORT": "29500"}, "srun", Master("n08", 29500)),
    "srun, address": ({**STEP, **ADDR}, "srun", Master("a", 29500)),
    "srun, rank 0 elsewhere, address": (
        {**STEP, **ADDR, "SLURM_PROCID": "0", "SLURM_NODEID": "1"},
        "srun",
        Master("a", 29500),
    ),
    "srun without its list of hosts": ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, "srun", None),
    "another launcher in a step of SLURM": (STEP, "torchrun", None),
    "TF_CONFIG, IPv6": (tf_config(worker=["[fd00::1]:1"]), "TF_CONFIG", Master("fd00::1", 1)),
}


@pytest.mark.parametrize(("environ", "launcher", "master"), MASTERS.values(), ids=MASTERS)
def test_master(environ: dict[str, str], launcher: str, master: Master | None) -> None:
    assert find_master(environ, launcher) == master


@pytest.mark.parametrize(
    ("environ", "launcher", "fragment"),
    [
        ({"MASTER_ADDR": "a"}, "torchrun", "MASTER_ADDR='a' and MASTER_PORT=''"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, "torchrun", "MASTER_PORT='x'"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "torchrun", "1 … 65535"),
        ({**STEP, "MASTER_PORT": "x"}, "srun", "MASTER_PORT='x' is not a port"),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "1"}, "srun", "rank 0 is not on n08, the first host"),
        ({**STEP, "SLURM_STEP_NODELIST": "n["}, "srun", "SLURM_STEP_NODELIST='n[' is not a list of hosts"),
        (tf_config(worker=["a", "b:1"]), "TF_CONFIG", "Of worker 0, 'a' is no address"),
        (tf_config(worker=["a:http"]), "TF_CONFIG", "'a:http' is no address"),
    ],
)
def test_invalid_address_is_an_error_that_names_it(environ: dict[str, str], launcher: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_master(environ, launcher)
    assert fragment in str(raised.value)


def test_str_is_the_address() -> None:
    assert [str(Master("a", 1)), str(Master("fd00::1", 1))] == ["a:1", "[fd00::1]:1"]
