"""A standalone cluster of Spark on several machines: network namespaces with names of their own, one worker in each."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launch.namespaces import several_hosts
from spark_face.sessions import cluster

#: As ``launch.pods``: its own shared memory, name and temporary files.
_MACHINE = 'mount -t tmpfs tmpfs /dev/shm; hostname {name}; exec "$@"'


@contextmanager
def machines(directory: Path, count: int = 2):
    """A block in which there is a cluster on ``count`` machines, each of which has one slot."""
    import pyspark

    home = Path(pyspark.__file__).parent
    with several_hosts(directory, count) as network, ExitStack() as stack:
        master_address = ".".join([*network.hosts[0].split(".")[:3], "1"])
        environ = {**os.environ, "SPARK_LOCAL_IP": master_address, "SPARK_HOME": str(home)}
        port = 17077
        master = ["org.apache.spark.deploy.master.Master", "--host", master_address, "--port", str(port)]
        _start(stack, [str(home / "bin" / "spark-class"), *master, "--webui-port", "0"], environ, directory / "master")
        for number, (address, namespace) in enumerate(zip(network.hosts, network.namespaces, strict=True)):
            temporary = tempfile.mkdtemp(dir=directory)
            own = {**environ, "SPARK_LOCAL_IP": address, "TMPDIR": temporary, "SPARK_LOCAL_DIRS": temporary}
            unshare = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            inside = ["sh", "-c", _MACHINE.format(name=f"machine-{number}"), "sh"]
            worker = [
                "org.apache.spark.deploy.worker.Worker",
                "--host",
                address,
                "-c",
                "1",
                "-m",
                "2g",
                "-d",
                temporary,
            ]
            command = [
                str(home / "bin" / "spark-class"),
                *worker,
                "--webui-port",
                "0",
                f"spark://{master_address}:{port}",
            ]
            argv = ["ip", "netns", "exec", namespace, *unshare, *inside, *command]
            _start(stack, argv, own, directory / f"worker-{number}")
        old = os.environ.get("SPARK_LOCAL_IP")
        os.environ["SPARK_LOCAL_IP"] = master_address
        try:
            with cluster(directory, f"spark://{master_address}:{port}", **{"spark.driver.host": master_address}) as own:
                yield own
        finally:
            os.environ.pop("SPARK_LOCAL_IP")
            if old is not None:
                os.environ["SPARK_LOCAL_IP"] = old


def _start(stack: ExitStack, argv: list[str], environ: dict[str, str], log: Path) -> None:
    with log.open("wb") as file:
        process = subprocess.Popen(argv, env=environ, stdout=file, stderr=file, cwd=log.parent)
    stack.callback(process.wait)
    stack.callback(process.kill)
    time.sleep(1)
