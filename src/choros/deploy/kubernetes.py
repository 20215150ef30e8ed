"""Jobs on Kubernetes: each kind of job as the documents that describe it. Pure.

::

    kind       who starts the pods                    how ranks start in them
    job        Kubernetes itself: an Indexed Job      agents (launch/agents): a headless service is enough
    trainjob   Kubeflow Trainer v2                    agents; its torch policy says which pod is the first one
    mpijob     Kubeflow's MPI operator                ssh, with keys and a hostfile of the operator
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros.errors import ConfigError
from choros.launch.processes.directories import SHARED_MEMORY
from choros.settings import VARIABLES

Document = dict[str, Any]

#: In each container: commits, which pods share; and the key in the Secret.
_COMMITS, _KEY = "/commits", "key"
#: A user without rights, whom the container's image has.
_USER = 1000
#: How long pods that are deleted may take to commit.
_TERMINATION = 120
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
        """The command of a pod, with further flags of chorosrun."""
        elastic = [] if self.least is None else ["--min-np", str(self.least)]
        commits = ["--commit-dir", _COMMITS] if self.claim else []
        return ["chorosrun", *flags, "-np", str(self.ranks), *elastic, *commits, *self.command]


def documents(kind: str, job: PodJob, secret: str) -> list[Document]:
    """Returns what is to be applied for a ``job`` of one of ``KINDS``; ``secret`` is the key of its processes."""
    return KINDS[kind](job, secret)


def _indexed_job(job: PodJob, secret: str) -> list[Document]:
    labels = {"app": job.name}
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "subdomain": job.name,
            "restartPolicy": "OnFailure",
            **_pod_spec(job, "train", job.argv()),
        },
    }
    return [
        _key_of(job, secret),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": job.name},
            # Pods look for the first one before they are ready.
            "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": job.name},
            # mpirun and ranks listen for one another, and believe who reaches their ports.
            "spec": {
                "podSelector": {"matchLabels": labels},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name},
            "spec": {
                "completionMode": "Indexed",
                "completions": job.pods,
                "parallelism": job.pods,
                "backoffLimit": 4 * job.pods,  # the pods of a job fail together
                "successPolicy": {"rules": [{"succeededIndexes": "0"}]},  # its exit code is the job's
                "template": template,
            },
        },
    ]


def _train_job(job: PodJob, secret: str) -> list[Document]:
    pod = {"template": {"spec": _pod_spec(job, "node", None)}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": pod}}
    trainer: Document = {
        "numNodes": job.pods,
        "numProcPerNode": job.gpus or 1,
        "image": job.image,
        "command": job.argv()[:1],
        "args": job.argv()[1:],
    }
    if job.gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    return [
        _key_of(job, secret),
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "ClusterTrainingRuntime",
            "metadata": {"name": _RUNTIME},
            "spec": {
                "mlPolicy": {"numNodes": 1, "torch": {}},  # sets the variables PET_…
                "template": {"spec": {"replicatedJobs": [node]}},
            },
        },
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {"runtimeRef": {"name": _RUNTIME}, "trainer": trainer},
        },
    ]


def _mpi_job(job: PodJob, secret: str) -> list[Document]:
    del secret  # the operator gives the pods keys for ssh
    server = ["/usr/sbin/sshd", "-De", "-f", "/home/choros/.sshd_config"]
    launcher = _pod_spec(job, "launcher", job.argv("--hostfile", "/etc/mpi/hostfile"), with_key=False, with_gpus=False)
    replicas = {
        "Launcher": (1, launcher),
        "Worker": (job.pods, _pod_spec(job, "worker", server, with_key=False)),
    }
    return [
        {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": {"name": job.name},
            "spec": {
                "slotsPerWorker": job.gpus or 1,
                "mpiImplementation": "OpenMPI",
                "launcherCreationPolicy": "WaitForWorkersReady",
                "sshAuthMountPath": "/home/choros/.ssh",
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 4},
                "mpiReplicaSpecs": {
                    role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": spec}}
                    for role, (count, spec) in replicas.items()
                },
            },
        }
    ]


def _key_of(job: PodJob, secret: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{job.name}-key"},
        "stringData": {_KEY: secret},
    }


def _pod_spec(
    job: PodJob, container: str, command: Sequence[str] | None, *, with_key: bool = True, with_gpus: bool = True
) -> Document:
    """A pod of one container; ``None`` for a command that the job gives."""
    memory: Mapping[str, Any] = {"emptyDir": {"medium": "Memory"}}
    volumes = [("memory", str(SHARED_MEMORY), memory)]
    if job.claim:
        volumes.append(("commits", _COMMITS, {"persistentVolumeClaim": {"claimName": job.claim}}))
    image: Document = {"name": container, "image": job.image}
    if command is not None:
        image["command"] = list(command)
    if with_key:
        source = {"secretKeyRef": {"name": f"{job.name}-key", "key": _KEY}}
        image["env"] = [{"name": VARIABLES["secret"].name, "valueFrom": source}]
    if job.gpus and with_gpus:
        image["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    image["volumeMounts"] = [{"name": name, "mountPath": path} for name, path, _ in volumes]
    return {
        "terminationGracePeriodSeconds": _TERMINATION,  # SIGTERM: ranks commit
        "securityContext": {"runAsUser": _USER, "runAsNonRoot": True, "fsGroup": _USER},
        "containers": [image],
        "volumes": [{"name": name, **source} for name, _, source in volumes],
    }


#: By kind, what describes a job.
KINDS: Mapping[str, Callable[[PodJob, str], list[Document]]] = {
    "job": _indexed_job,
    "trainjob": _train_job,
    "mpijob": _mpi_job,
}
