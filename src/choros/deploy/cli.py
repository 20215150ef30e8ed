"""The command ``choros deploy``: prints the description of a job, filled in."""

import secrets
from typing import Any

import click
import yaml

from choros.deploy.kubernetes import KINDS, PodJob


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
