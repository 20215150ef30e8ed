"""``choros deploy kubernetes``: what it prints is valid, and its Indexed Job trains in pods."""

import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate
import pytest
import yaml

from choros.deploy import KINDS, PodJob
from choros.errors import ConfigError
from launch.launched import rank_script
from launch.pods import indexed_job, several_pods
from launch.test_agents import TRAINS

FILES = Path(__file__).parents[2] / "deploy" / "kubernetes"


def fields(required=(), /, **properties):
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


NUMBER, TEXT = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}
#: The MPI operator's published schema of a job, v2beta1, but for the pods, whose schema is that of Kubernetes.
MPI_ROLE = fields(replicas=NUMBER, restartPolicy={"enum": ["Never", "OnFailure"]}, template=fields(spec={}))
MPI_JOB = fields(
    ("mpiReplicaSpecs",),
    launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
    mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
    mpiReplicaSpecs=fields(("Launcher",), Launcher=MPI_ROLE, Worker=MPI_ROLE),
    runLauncherAsWorker={"type": "boolean"},
    runPolicy=fields(
        activeDeadlineSeconds=NUMBER,
        backoffLimit=NUMBER,
        cleanPodPolicy={"enum": ["None", "Running", "All"]},
        managedBy=TEXT,
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=NUMBER,
    ),
    slotsPerWorker=NUMBER,
    sshAuthMountPath=TEXT,
)


def printed(*arguments):
    program = (sys.executable, "-c", "import sys; from choros.cli import main; main(sys.argv[1:])")
    argv = [*program, "deploy", "kubernetes", *map(str, arguments)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def jobs():
    return [
        PodJob("train", ("python", "train.py"), "choros", 4),
        PodJob("big", ("python", "a b.py", "--flag"), "registry/image:1", 16, gpus=8, least=8, claim="commits"),
    ]


@pytest.mark.parametrize("job", jobs(), ids=lambda job: job.name)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_kubernetes_itself_are_valid(kind, job):
    found = KINDS[kind](job, "00" * 16)
    own = [each for each in found if "kubeflow" not in each["apiVersion"] and "trainer" not in each["apiVersion"]]
    pods = [role["template"]["spec"] for role in roles(found[-1]).values()] if kind == "mpijob" else []
    if kind == "trainjob":
        (node,) = found[-2]["spec"]["template"]["spec"]["replicatedJobs"]
        pods.append(node["template"]["spec"]["template"]["spec"])
    own += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec} for spec in pods]
    assert own
    for each in own:
        kubernetes_validate.validate(each, "1.33", strict=True)


def roles(document):
    return document["spec"]["mpiReplicaSpecs"]


@pytest.mark.parametrize("job", jobs(), ids=lambda job: job.name)
def test_documents_of_kubeflow_are_valid(job):
    *_, runtime, train = KINDS["trainjob"](job, "00" * 16)
    for model, document in (
        (kubeflow.TrainerV1alpha1ClusterTrainingRuntime, runtime),
        (kubeflow.TrainerV1alpha1TrainJob, train),
    ):
        assert_kept(document, model.from_dict(document).to_dict())
    _, mpi = KINDS["mpijob"](job, "")
    jsonschema.validate(mpi["spec"], MPI_JOB)
    mpi["spec"]["slotsPerWorker"] = "1"
    with pytest.raises(jsonschema.ValidationError, match="is not of type 'integer'"):
        jsonschema.validate(mpi["spec"], MPI_JOB)


def assert_kept(given, kept, where=""):
    """What a model does not know, it drops."""
    if isinstance(given, dict):
        for name, value in given.items():
            assert name in kept, f"{where}/{name}"
            assert_kept(value, kept[name], f"{where}/{name}")
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            assert_kept(one, other, f"{where}[{number}]")
    else:
        assert given == kept, where


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_what_the_command_prints(kind):
    code, out, err = printed("--np", 4, "--kind", kind, "--min-np", 2, "--commit-claim", "commits")
    assert code == 0, err
    key = re.compile(r"key: [0-9a-f]{64}\n")
    text = (FILES / f"{kind}.yaml").read_text()
    assert text == key.sub("key: REPLACE  # by 64 hexadecimal digits\n", out)
    assert len(key.findall(out)) == (0 if kind == "mpijob" else 1)
    policy = next(each for each in yaml.safe_load_all(out) if each["kind"] == "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]


def expanded(text, environ):
    """What a container gets of an argument: variables for ``$(NAME)``, and ``$`` for ``$$``."""
    found = re.compile(r"\$(?:(\$)|\((.*?)\))")
    return found.sub(lambda match: match[1] or environ.get(match[2], match[0]), text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_arrives_as_it_was_given(kind):
    command = ["sh", "-c", "echo $$ $(CHOROS_SECRET) $HOME '$$(date)'; exec python train.py"]
    code, out, err = printed("--np", 4, "--kind", kind, *command)
    assert code == 0, err
    lists = re.findall(r"^( *)(?:command|args):\n((?:\1- .*\n|\1  .*\n)+)", out, re.MULTILINE)
    given = [yaml.safe_load(text) for _, text in lists if "train.py" in text]
    arrived = [[expanded(each, {"CHOROS_SECRET": "key"}) for each in argv][-3:] for argv in given]
    assert arrived == [command]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 6, "gpus": 4}, "do not fill pods of 4 GPUs"),
        ({"ranks": 6, "least": 4}, "--commit-claim"),
    ],
)
def test_jobs_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        PodJob("train", (), "choros", **given)


@pytest.mark.slow
def test_four_pods_of_an_indexed_job_train_and_one_that_is_killed_comes_back(tmp_path):
    ends = "if state.step == 39 and communicator.size < 4: time.sleep(0.1); state.commit(); continue"
    loop = "    while state.step < 40:\n"
    assert loop in TRAINS
    script = rank_script(tmp_path / "train.py", TRAINS.replace(loop, f"{loop}        {ends}\n"))
    code, out, _ = printed("--np", 4, "--min-np", 3, "--commit-claim", "c", sys.executable, script)
    assert code == 0
    secret, *_, job = yaml.safe_load_all(out)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (key,) = container["env"]
    assert (key["name"], key["valueFrom"]["secretKeyRef"]["name"]) == ("CHOROS_SECRET", secret["metadata"]["name"])
    commits = str(tmp_path / "commits")
    program, *flags = [commits if each == "/commits" else each for each in container["command"]]
    assert program == "chorosrun"
    with several_pods(tmp_path, job["spec"]["completions"], indexed_job) as pods:
        pods.start_all(*flags, secret=secret["stringData"]["key"])
        pods.until(lambda: "step 5 of 4" in pods.log(0))
        pods.kill(3)
        pods.until(lambda: re.search(r"step \d+ of 3", pods.log(0)))
        pods.start(3, *flags, secret=secret["stringData"]["key"])
        assert pods.codes() == [0] * 4, pods.logs()
        assert re.findall(r"weight (\S+) (\d)", pods.log(0)) == [("40.0", "4")] * 4
