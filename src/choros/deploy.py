"""The command ``choros deploy``: prints the description of a job for the scheduler of a cluster, filled in.

::

    kind       who starts the pods                    how ranks start in them
    job        Kubernetes itself: an Indexed Job      agents (launch/agents): a headless service is enough
    trainjob   Kubeflow Trainer v2                    agents; its torch policy says which pod is the first one
    mpijob     Kubeflow's MPI operator                ssh, with keys and a hostfile of the operator
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import yaml

from choros.errors import ConfigError
from choros.launch.processes.directories import SHARED_MEMORY
from choros.settings import VARIABLES

Document = dict[str, Any]

#: In each container: commits, which pods share; and the key in the Secret.
_COMMITS, _KEY = "/commits", "key"
#: A user without rights, whom the container's image has.
_USER = 1000
#: How many seconds ranks that are asked to end may take to commit, and their pods to end after that.
_COMMITTING, _ENDING = 100, 20
#: What chorosrun ends with if the job can go on: a host or too many ranks were lost, or pods deleted. Any other code
#: ends the job, and the pods' logs stay.
_GOES_ON = [68, 69, 75, 137, 143]
_RUNTIME = "choros-distributed"


@dataclass(frozen=True)
class PodJob:
    """A command on ``ranks`` ranks, with ``gpus`` of a pod, one for each rank in it; without, a pod is a rank.
    ``least``: with how many it goes on if pods are lost, ``None`` if it starts again. ``claim``: the persistent volume
    for commits, which all pods can write.
    """

    name: str
    command: tuple[str, ...]
    image: str
    ranks: int
    gpus: int = 0
    least: int | None = None
    claim: str = ""

    def __post_init__(self) -> None:
        if self.gpus and self.ranks % self.gpus:
            raise ConfigError(
                f"--np {self.ranks} --gpus-per-pod {self.gpus}: the ranks do not fill pods of {self.gpus} GPUs. Give a "
                f"multiple of {self.gpus}."
            )
        if self.least is not None and not self.claim:
            raise ConfigError(
                "--min-np: pods that are lost are made up for from the last commit: name the PersistentVolumeClaim "
                "for commits with --commit-claim."
            )

    @property
    def pods(self) -> int:
        """The number of pods."""
        return self.ranks // (self.gpus or 1)

    def argv(self, *flags: str) -> list[str]:
        """The command of a pod, with further flags of chorosrun; Kubernetes makes ``$`` of ``$$``."""
        elastic = [] if self.least is None else ["--min-np", str(self.least)]
        commits = ["--commit-dir", _COMMITS, "--grace-period", str(_COMMITTING)] if self.claim else []
        literal = [each.replace("$", "$$") for each in self.command]
        return ["chorosrun", *flags, "-np", str(self.ranks), *elastic, *commits, *literal]


def _indexed_job(job: PodJob, secret: str) -> list[Document]:
    labels = {"app": job.name}
    spec = {"subdomain": job.name, "restartPolicy": "Never", **_pod_spec(job, "train", job.argv())}
    spec["containers"][0] |= {"env": [_key_variable(job)]}
    # Pods look for the first one before they are ready.
    service = {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}
    indexed = {
        "completionMode": "Indexed",
        "completions": job.pods,
        "parallelism": job.pods,
        "backoffLimit": 4 * job.pods,  # the pods of a job fail together
        **_policies(),
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }
    return [
        _key_of(job, secret),
        _document("v1", "Service", job.name, service),
        _only_own_pods(job, labels),
        _document("batch/v1", "Job", job.name, indexed),
    ]


def _document(api: str, kind: str, name: str, spec: Mapping[str, Any]) -> Document:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _policies() -> Document:
    """What the ends of pods mean: the exit code of the first one is the job's."""
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    failed = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": _GOES_ON}}
    return {
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {"rules": [disrupted, failed]},
    }


def _only_own_pods(job: PodJob, labels: Mapping[str, str]) -> Document:
    """mpirun and ranks listen for one another, and believe who reaches their ports."""
    spec = {
        "podSelector": {"matchLabels": dict(labels)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": dict(labels)}}]}],
    }
    return _document("networking.k8s.io/v1", "NetworkPolicy", job.name, spec)


def _train_job(job: PodJob, secret: str) -> list[Document]:
    pods = {"spec": {"restartPolicy": "Never", **_pod_spec(job, "node", None)}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    of_any_size = {"backoffLimit": 1000, **_policies(), "template": pods}
    node = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": of_any_size}}
    runtime = f"{_RUNTIME}-{job.claim}" if job.claim else _RUNTIME  # the same for all jobs of a claim
    trainer: Document = {
        "numNodes": job.pods,
        "numProcPerNode": job.gpus or 1,
        "image": job.image,
        "command": job.argv()[:1],
        "args": job.argv()[1:],
        "env": [_key_variable(job)],
    }
    if job.gpus:
        devices = {"nvidia.com/gpu": job.gpus}
        trainer["resourcesPerNode"] = {"requests": devices, "limits": dict(devices)}
    api = "trainer.kubeflow.org/v1alpha1"
    training = {
        "mlPolicy": {"numNodes": 1, "torch": {}},  # sets the variables PET_…
        "template": {"spec": {"replicatedJobs": [node]}},
    }
    return [
        _key_of(job, secret),
        _only_own_pods(job, {"jobset.sigs.k8s.io/jobset-name": job.name}),
        _document(api, "ClusterTrainingRuntime", runtime, training),
        _document(api, "TrainJob", job.name, {"runtimeRef": {"name": runtime}, "trainer": trainer}),
    ]


def _mpi_job(job: PodJob, secret: str) -> list[Document]:
    del secret  # the operator gives the pods keys for ssh
    server = ["/usr/sbin/sshd", "-De", "-f", "/home/choros/.sshd_config"]
    slots = str(job.gpus or 1)
    hosts = ["--hostfile", "/etc/mpi/hostfile"]
    if job.least is not None:  # pods that come and go
        hosts = ["--host-discovery-script", "/etc/mpi/discover_hosts.sh", "--slots", slots]
    replicas = {
        "Launcher": (1, _pod_spec(job, "launcher", job.argv(*hosts), with_gpus=False)),
        "Worker": (job.pods, _pod_spec(job, "worker", server)),
    }
    spec = {
        "slotsPerWorker": job.gpus or 1,
        "mpiImplementation": "OpenMPI",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "sshAuthMountPath": "/home/choros/.ssh",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 4},
        "mpiReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
            for role, (count, pod) in replicas.items()
        },
    }
    return [
        _only_own_pods(job, {"training.kubeflow.org/job-name": job.name}),
        _document("kubeflow.org/v2beta1", "MPIJob", job.name, spec),
    ]


def _key_of(job: PodJob, secret: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{job.name}-key"},
        "immutable": True,  # pods that come later must have the key of the others
        "stringData": {_KEY: secret},
    }


def _key_variable(job: PodJob) -> Document:
    source = {"secretKeyRef": {"name": f"{job.name}-key", "key": _KEY}}
    return {"name": VARIABLES["secret"].name, "valueFrom": source}


def _pod_spec(job: PodJob, container: str, command: Sequence[str] | None, *, with_gpus: bool = True) -> Document:
    """A pod of one container; ``None`` for a command that the job gives."""
    memory: Mapping[str, Any] = {"emptyDir": {"medium": "Memory"}}
    volumes = [("memory", str(SHARED_MEMORY), memory)]
    if job.claim:
        volumes.append(("commits", _COMMITS, {"persistentVolumeClaim": {"claimName": job.claim}}))
    image: Document = {"name": container, "image": "choros"}  # the job has the image of a runtime
    if command is not None:
        image |= {"image": job.image, "command": list(command)}
    if job.gpus and with_gpus and command is not None:
        image["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    image["volumeMounts"] = [{"name": name, "mountPath": path} for name, path, _ in volumes]
    return {
        "terminationGracePeriodSeconds": _COMMITTING + _ENDING,  # SIGTERM: ranks commit
        "securityContext": {"runAsUser": _USER, "runAsNonRoot": True, "fsGroup": _USER},
        "containers": [image],
        "volumes": [{"name": name, **source} for name, _, source in volumes],
    }


#: By kind, what returns the documents to be applied for a job; the text is the key of its processes.
KINDS: Mapping[str, Callable[[PodJob, str], list[Document]]] = {
    "job": _indexed_job,
    "trainjob": _train_job,
    "mpijob": _mpi_job,
}


@click.group()
def deploy() -> None:
    """Describes a job for the scheduler of a cluster, filled in, to be read and changed before it is submitted."""


@deploy.command(context_settings={"max_content_width": 110, "allow_interspersed_args": False})
@click.option("-np", "--np", "ranks", type=click.IntRange(1), required=True, help="The number of ranks.")
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="job",
    show_default=True,
    help="job: an Indexed Job, which every cluster has; trainjob: of Kubeflow Trainer v2; mpijob: its MPI operator's.",
)
@click.option(
    "--image", default="choros", show_default=True, help="The image, as deploy/kubernetes/Containerfile makes one."
)
@click.option("--name", default="train", show_default=True, help="The job's name.")
@click.option(
    "--gpus-per-pod",
    "gpus",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Pods have so many GPUs and ranks. Without GPUs, each pod is a rank.",
)
@click.option("--min-np", "least", type=click.IntRange(1), help="Go on without pods that are lost, as chorosrun's.")
@click.option(
    "--commit-claim",
    "claim",
    default="",
    metavar="CLAIM",
    help="A PersistentVolumeClaim that all pods can write: training goes on from its commits.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def kubernetes(kind: str, command: tuple[str, ...], **given: Any) -> None:
    """Prints what a job that runs COMMAND needs on Kubernetes.

    \b
    Example:
      choros deploy kubernetes --np 8 --gpus-per-pod 4 --image registry/train python train.py | kubectl apply -f -

    Without COMMAND it is `python train.py`. The key with which the pods know each other is made anew each time.
    """
    job = PodJob(command=command or ("python", "train.py"), **given)
    click.echo(yaml.safe_dump_all(KINDS[kind](job, secrets.token_hex(32)), sort_keys=False), nl=False)
