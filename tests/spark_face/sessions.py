"""A Spark cluster of two executors with one slot each, on this machine, as processes of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

#: All processes of the cluster, ranks too, have this variable, with the cluster's mark.
MARK = "CHOROS_TEST_SPARK_CLUSTER"
MASTER = "local-cluster[2,1,1024]"


def missing() -> str | None:
    """Why there can be no cluster; ``None`` if there can."""
    absent = [name for name in ("pyspark", "pyarrow", "pandas") if importlib.util.find_spec(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: pip install 'choros[spark]'"
    if shutil.which("java") is None:
        return "needs Java: apt-get install openjdk-17-jre-headless"
    return None


class Cluster:
    """The cluster; ``session`` is Spark's."""

    def __init__(self, session, mark: str) -> None:
        self.session = session
        self.context = session.sparkContext
        self._mark = mark

    def processes(self) -> list[psutil.Process]:
        """All processes that executors have started, and the executors."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def executors(self) -> list[psutil.Process]:
        """The executors' JVMs."""
        return [process for process in self.processes() if process.name() == "java"]

    def ranks(self) -> list[psutil.Process]:
        """The processes of jobs: programs beside tasks, mpirun, wrappers, ranks."""
        return [process for process in self.processes() if "choros" in " ".join(process.cmdline())]

    def starting_executor(self) -> psutil.Process:
        """The executor on whose machine mpirun runs."""
        programs = [each for each in self.ranks() if "choros.spark.host" in each.cmdline()]
        (program,) = [each for each in programs if any(map(_is_mpirun, each.children()))]
        return next(each for each in program.parents() if each.name() == "java")


def _is_mpirun(process: psutil.Process) -> bool:
    return os.path.basename(process.cmdline()[0]) in ("mpirun", "prterun")


@contextmanager
def cluster(directory: Path, master: str = MASTER, **configuration: str) -> Iterator[Cluster]:
    """A block in which there is a cluster, whose last process has ended afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyspark's imports
        from pyspark.sql import SparkSession

    mark = uuid.uuid4().hex
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    values = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        f"spark.executorEnv.{MARK}": mark,
        **configuration,
    }
    builder = SparkSession.builder.master(master).appName("choros")
    for name, value in values.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    application = session.sparkContext.applicationId
    own = Cluster(session, mark)
    try:
        yield own
    finally:
        session.stop()
        _, alive = psutil.wait_procs(own.processes(), timeout=30)
        for process in alive:
            process.kill()
        import pyspark

        shutil.rmtree(Path(pyspark.__file__).parent / "work" / application, ignore_errors=True)
        assert not alive, alive
