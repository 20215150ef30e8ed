"""How fast the ranks' output arrives: through chorosrun, against the mpirun that it starts, alone.

    python benchmarks/output/main.py --rounds 5
    python benchmarks/output/main.py --ranks 2 --streams err --kinds "lines of 400 bytes" --block 8192
    python benchmarks/output/main.py --ranks 2 --hosts a:1,b:1 --ssh-command ./reach        # hosts with one clock

All ranks begin to write at one moment. This process reads both streams of mpirun or chorosrun from pipes and takes the
time until the last byte. In every round, mpirun, chorosrun and chorosrun with ``--output-dir`` take turns; the table
has the medians of megabytes per second, and chorosrun's as a part of mpirun's. A rank prints each line by itself, or,
with ``--block``, writes many at once, as programs with buffers do.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
import time

from choros.launch.driver.machine import Mpirun, detect_mpirun

#: What ranks write again and again, and how many megabytes of it in all. mpirun keeps what has no newline, and copies
#: it with every read.
KINDS = {
    "lines of 10 bytes": (b"x" * 9 + b"\n", 4),
    "lines of 80 bytes": (b"x" * 79 + b"\n", 30),
    "lines of 400 bytes": (b"x" * 399 + b"\n", 60),
    "lines of 4000 bytes": (b"x" * 3999 + b"\n", 60),
    "64 KiB without newline": (b"x" * (1 << 16), 2),
    "progress bars": (b"\r" + b"x" * 59, 1),
}
STREAMS = ("out", "err")
#: Python and MPI's launcher have started by then, on one host and on several.
START_SECONDS, START_SECONDS_OF_HOSTS = 1.5, 4.0


def write(stream: str, data: bytes, count: int, at: float) -> None:
    """What each rank does."""
    if time.monotonic() > at:
        sys.exit("A rank started too late: other processes use the machine.")
    file = sys.stdout if stream == "out" else sys.stderr
    # Equal lines of two ranks on standard error would be merged.
    text = data.decode().replace("x", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    end = "\n" if text.endswith("\n") else ""
    time.sleep(at - time.monotonic())
    for _ in range(count):
        print(text.removesuffix("\n"), end=end, file=file, flush=not end)


def seconds(command: list[str], at: float, nbytes: int) -> float:
    """Returns the time from ``at`` until the last of at least ``nbytes`` bytes has arrived."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, bufsize=0, **pipes) as process:
        unread = [pipe.fileno() for pipe in (process.stdout, process.stderr) if pipe is not None]
        for pipe in unread:
            os.set_blocking(pipe, False)
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        received, last, end = 0, at, b""
        while unread:
            time.sleep(0.001)  # to wake up for every write of mpirun would slow mpirun down
            for pipe in list(unread):
                try:
                    data = os.read(pipe, 1 << 20)
                except BlockingIOError:
                    continue
                if not data:
                    unread.remove(pipe)
                    continue
                received, last, end = received + len(data), time.monotonic(), data[-500:]
    if process.returncode or received < nbytes:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}, {received} of {nbytes} bytes: {end.decode()}")
    return last - at


def contenders(mpirun: Mpirun, directory: str, hosts: str, ssh: str) -> dict[str, list[str]]:
    """The commands to compare, without the number of ranks and what they run."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    where = ["-H", hosts] if hosts else []
    chorosrun = [sys.executable, "-m", "choros.launch.cli", *where, *(["--ssh-command", ssh] if ssh else [])]
    where += ["--prtemca", "plm_ssh_agent", ssh] if ssh else []
    return {
        "mpirun": [mpirun.path, *root, "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", *where],
        "chorosrun": chorosrun,
        "with --output-dir": [*chorosrun, "--output-dir", directory],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", nargs="+", default=STREAMS, choices=STREAMS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--block", type=int, default=0, help="write blocks of about this many bytes at once")
    parser.add_argument("--hosts", default="", help="as chorosrun's -H")
    parser.add_argument("--ssh-command", default="", help="as chorosrun's")
    parser.add_argument("--write", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        stream, kind, count, at = arguments.write
        data = KINDS[kind][0]
        write(stream, data * max(1, arguments.block // len(data)), int(count), float(at))
        return
    mpirun = detect_mpirun()
    start = START_SECONDS_OF_HOSTS if arguments.hosts else START_SECONDS
    os.environ.update(mpirun.environment())
    with tempfile.TemporaryDirectory() as directory:
        commands = contenders(mpirun, directory, arguments.hosts, arguments.ssh_command)
        print("| ranks | stream | what | mpirun | " + " | ".join(f"{name} | ÷" for name in [*commands][1:]) + " |")
        print("|---" * (2 * len(commands) + 2) + "|")
        for ranks in arguments.ranks:
            for stream in arguments.streams:
                for kind in arguments.kinds:
                    data, megabytes = KINDS[kind]
                    block = len(data) * max(1, arguments.block // len(data))
                    count = int(megabytes * 1e6 / block / ranks)
                    program = [sys.executable, __file__, "--block", str(arguments.block), "--write", stream, kind]
                    times: dict[str, list[float]] = {name: [] for name in commands}
                    for _ in range(arguments.rounds):
                        for name, command in commands.items():
                            at = time.monotonic() + start
                            argv = [*command, "-np", str(ranks), *program, str(count), str(at)]
                            times[name].append(seconds(argv, at, count * ranks * block))
                    speeds = {name: megabytes / statistics.median(each) for name, each in times.items()}
                    alone = speeds.pop("mpirun")
                    cells = " | ".join(f"{speed:.3g} | {speed / alone:.2f}" for speed in speeds.values())
                    print(f"| {ranks} | std{stream} | {kind} | {alone:.3g} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
