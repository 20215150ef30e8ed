"""The arguments of chorosrun and choros.run; after validation they become a job and its limits. Each field is a row, of
which chorosrun's option is made (``options.py``), and the documentation of choros.run.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from choros.errors import ConfigError
from choros.launch.plan.environment import allocated_slots, check_allocation, in_allocation
from choros.launch.plan.flags import (
    FILE,
    SECONDS,
    SECONDS_OR_ZERO,
    SWITCH,
    Flag,
    Value,
    flag,
    variables_of,
    whole_numbers,
)
from choros.launch.plan.hosts import MOST_SLOTS, Host, parse_discovered, parse_hostfile, parse_hosts, total_slots
from choros.launch.plan.job import Elastic, Job, Limits, Ssh
from choros.launch.protocol.wrapper_options import WrapperOptions
from choros.observe.chaos import parse_faults
from choros.settings import VARIABLES, Config

#: Variables in which Kubernetes' MPI operator and other tools pass a host file to mpirun.
_DEFAULT_HOSTFILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")
_RESTARTS = 3
_RANKS = whole_numbers(1, MOST_SLOTS)
_LIMITS = Limits()
_ELASTIC = Elastic(1, 1)
_NAME_HOSTS = ("hosts", "hostfile", "host_discovery_script")
#: The arguments that make a job elastic, and those that only apply to such a job.
_MAKE_ELASTIC = ("min_num_proc", "max_num_proc", "host_discovery_script")
_ONLY_ELASTIC = ("elastic_timeout", "reset_limit", "cooldown_range")


@dataclass(frozen=True)
class Arguments:
    """The arguments, named as choros.run's and chorosrun's flags; ``in_python``: error messages name choros.run's.

    >>> Arguments(start_timeout=float("nan"))
    Traceback (most recent call last):
    choros.errors.ConfigError: --start-timeout nan: expected a finite number of seconds, more than 0.
    >>> Arguments(num_proc=0, in_python=True)
    Traceback (most recent call last):
    choros.errors.ConfigError: num_proc=0: expected a whole number from 1 to 1048576.
    """

    # fmt: off
    num_proc: int | None = flag(
        "Job", "-np -n --num-proc", own_names="-n", metavar="N", value=_RANKS,
        help="Number of ranks, or of workers with --ps. Default: the number of slots of the hosts, or of a "
        "scheduler's allocation; without either, the number of accelerators of this machine, at least 1.",
        python="Number of ranks. ``None``, as chorosrun without ``-np``: the number of slots of the hosts, or of a "
        "scheduler's allocation; without either, the number of accelerators of this machine, at least 1.",
        horovod="without it: the number of slots of the hosts, of a scheduler's allocation, or of accelerators")
    nproc_per_node: int | None = flag(
        "Job", "--nproc-per-node", metavar="N", value=_RANKS, python=None,
        help="Number of ranks on each host, instead of -np, as torchrun's.")
    ps: int | None = flag(
        "Job", "--ps", metavar="P", value=_RANKS, python=None,
        help="Start a job for ParameterServerStrategy: a chief, P parameter servers and -np workers, each with its "
        "role in TF_CONFIG. The job ends when the chief ends, with the chief's exit code.")
    max_restarts: int | None = flag(
        "Job", "--max-restarts", metavar="N", value=whole_numbers(0, MOST_SLOTS), python=None,
        help="With --ps: how many times a worker that was killed by a signal is restarted. Default: 3.")
    env: Mapping[str, str] = flag(
        "Job", "--env", default_factory=dict, multiple=True, metavar="KEY[=VALUE]",
        help="Set an environment variable for the ranks; may be given more than once. Ranks on other hosts "
        "inherit this host's environment without it.",
        python="Environment variables to set for the ranks; chorosrun's flags such as ``--timeline-filename`` set "
        "some.")
    min_num_proc: int | None = flag(
        "Elastic", "--min-np --min-num-proc", metavar="N", value=_RANKS, horovod="",
        help="Go on without ranks that die, as long as N are left. Default: -np, which makes a job elastic that "
        "--max-np or --host-discovery-script is given for.")
    max_num_proc: int | None = flag(
        "Elastic", "--max-np --max-num-proc", metavar="N", value=_RANKS, horovod="without it: as many as -np",
        help="Have no more than N ranks: new ones replace those that die. Default: -np.")
    host_discovery_script: str | None = flag(
        "Elastic", "--host-discovery-script", value=FILE, metavar="FILE",
        help="A program that prints the hosts of the job, one line `host:slots` for each; chorosrun runs it when the "
        "job starts, and with --commit-dir each second: the job goes on on the hosts that it prints.",
        horovod="with --commit-dir it is run each second")
    slots: int | None = flag(
        "Elastic", "--slots-per-host", metavar="N", value=_RANKS, horovod="",
        help="The slots of a host whose line has no number. Default: 1.")
    elastic_timeout: float | None = flag(
        "Elastic", "--elastic-timeout", metavar="SECONDS", value=SECONDS,
        help="How long to wait for hosts with slots for --min-np ranks when some were lost. Default: "
        f"{_ELASTIC.timeout:g}.",
        horovod="how long chorosrun waits for hosts with enough slots when some were lost")
    reset_limit: int | None = flag(
        "Elastic", "--reset-limit", metavar="N", value=whole_numbers(0, MOST_SLOTS),
        help="How many new ranks may take the places of lost ones, and how many times the job may be started again "
        "when mpirun, a host or a link was lost. Default: no limit.",
        horovod="how many new ranks take the places of lost ones, and how many times chorosrun starts the job again")
    cooldown_range: Sequence[int] | None = flag(
        "Elastic", "--blacklist-cooldown-range", metavar="MIN MAX", value=whole_numbers(0, MOST_SLOTS), nargs=2,
        help="For how many seconds a host that was lost three times is left out: MIN, twice as long each further time, "
        "at most MAX. Default: for the rest of the job.",
        horovod="for hosts that have been lost three times")
    commit_dir: str | os.PathLike[str] | None = flag(
        "Elastic", "--commit-dir", metavar="DIR", variable=VARIABLES["commit_dir"], text=os.path.abspath)
    commit_steps: int | None = flag(
        "Elastic", "--commit-steps", metavar="N", value=whole_numbers(0, 10**9), variable=VARIABLES["commit_steps"])
    chaos: str | None = flag(
        "Elastic", "--chaos", metavar="FAULTS", variable=VARIABLES["chaos"])
    hosts: str | None = flag(
        "Hosts", "-H --hosts", metavar="HOST:SLOTS,...", horovod="",
        help="The hosts, with the number of slots (ranks) of each, such as a:4,b:4. Default: this machine.")
    hostfile: str | os.PathLike[str] | None = flag(
        "Hosts", "-hostfile --hostfile", value=FILE, metavar="FILE", horovod="",
        help="A file of hosts, one line `host slots=N` for each.")
    ssh_port: int | None = flag(
        "Hosts", "-p --ssh-port", metavar="PORT", value=whole_numbers(1, 65535), horovod="",
        help="The port of the hosts' ssh servers.")
    ssh_identity_file: str | None = flag(
        "Hosts", "-i --ssh-identity-file", metavar="FILE", help="The private key for ssh.", horovod="")
    ssh_command: str | None = flag(
        "Hosts", "--ssh-command", metavar="PROGRAM",
        help="A program to use instead of ssh, with its arguments; it is called as PROGRAM HOST COMMAND...")
    network_interfaces: Sequence[str] = flag(
        "Hosts", "--network-interfaces --network-interface", default=(), multiple=True, metavar="NAME,...",
        help="Communicate only through these interfaces: names that exist on every host, or networks such as "
        "10.0.0.0/24. May be given more than once.",
        python="Communicate only through these interfaces: names that exist on every host, or networks such as "
        '``"10.0.0.0/24"``; as ``["eth0", "eth1"]`` or ``"eth0,eth1"``.',
        horovod="also networks, such as `10.0.0.0/24`; both may be given more than once")
    tcp: bool = flag(
        "Hosts", "--tcp", default=False, value=SWITCH, horovod="",
        help="Communicate only through TCP, even if a faster network exists.")
    prefix_output: bool | None = flag(
        "Output", "--prefix-output / --no-prefix-output", value=SWITCH,
        help="Prefix every line with [rank], or [role] with --ps. Default: with more than one rank.",
        python="Prefix every line with ``[rank]``. Default: with more than one rank.")
    merge_output: bool | None = flag(
        "Output", "--merge-output / --no-merge-output", value=SWITCH,
        help="Show equal lines that several ranks write on standard error within a moment as one line with the prefix "
        "[0-3]. Default: with a prefix, unless CHOROS_MERGE_OUTPUT=0.")
    prefix_output_with_timestamp: bool = flag(
        "Output", "-prefix-timestamp --prefix-output-with-timestamp", default=False, value=SWITCH, horovod="",
        help="Begin every line with the date and time.")
    output_dir: str | os.PathLike[str] | None = flag(
        "Output", "--output-dir --output-filename", own_names="--output-dir", metavar="DIR", horovod="",
        help="Also write each rank's output to DIR/rank.N/stdout and stderr on this machine; with --ps, to "
        "DIR/chief, DIR/ps.N and DIR/worker.N.",
        python="Also write each rank's output to ``rank.N/stdout`` and ``stderr`` in this directory.")
    report: str | os.PathLike[str] | None = flag(
        "Output", "--report", metavar="FILE",
        help="Write a page about the job to FILE.html at its end, and its numbers to FILE.json: where the time went, "
        "who waited for whom, and what happened.")
    metrics_port: str | None = flag(
        "Output", "--metrics-port", metavar="[ADDRESS:]PORT", value=Value("a port"),
        help="Where Prometheus finds the job's numbers while it runs: at http://localhost:PORT/metrics; other machines "
        "only if ADDRESS is one of this machine, or 0.0.0.0.",
        python="Where Prometheus finds the job's numbers while it runs: a port, or an address and a port.")
    view: bool = flag(
        "Output", "--view", default=False, value=SWITCH, python=None,
        help="Show the running job on the terminal: progress, rates, what each rank's time goes to. q leaves the view, "
        "not the job; through a pipe, output is shown as lines. choros top shows the same in another terminal.")
    verbose: bool = flag(
        "Output", "--verbose", default=False, value=SWITCH, horovod="",
        help="Show the mpirun command, each rank's settings and mpirun's messages.")
    timeout: float | None = flag(
        "Time", "--timeout", default=_LIMITS.run, metavar="SECONDS", value=SECONDS,
        help="Stop the job after this time.")
    start_timeout: float | None = flag(
        "Time", "--start-timeout", metavar="SECONDS", value=SECONDS, horovod="",
        help=f"How long connecting to the hosts and starting the ranks may take. Default: CHOROS_START_TIMEOUT, "
        f"or {_LIMITS.start:g}.")
    grace_period: float = flag(
        "Time", "--grace-period", default=_LIMITS.grace, metavar="SECONDS", value=SECONDS_OR_ZERO,
        help="How long ranks may take to end after SIGINT or SIGTERM.")
    exit_timeout: float | None = flag(
        "Time", "--exit-timeout", default=_LIMITS.exit_of_all, metavar="SECONDS", value=SECONDS,
        help=f"How long ranks may take to end after their scripts. Default: {_LIMITS.exit:g} while all others wait or "
        "have ended; no limit while all ranks take their time.")
    mpirun: str | None = flag(
        "MPI", "--mpirun", metavar="PATH", help="The mpirun to use. Default: the one installed with choros.")
    mpi_args: str = flag(
        "MPI", "--mpi-args", default="", metavar="ARGUMENTS", horovod="",
        help='Additional arguments for mpirun, in quotes: --mpi-args="..."',
        python="Additional arguments for mpirun, in one text.")
    binding_args: str = flag(
        "MPI", "--binding-args", default="", metavar="ARGUMENTS", horovod="",
        help="mpirun's arguments for binding and mapping, instead of choros' own binding to whole cores.")
    # fmt: on
    in_python: bool = False

    def __post_init__(self) -> None:
        for each in FLAGS.values():
            value = getattr(self, each.dest)
            if each.value.is_number and not (value is None and each.default is None):
                each.check(value, in_python=self.in_python)
        for name in ("commit_dir", "host_discovery_script", "output_dir"):
            if getattr(self, name) is not None and not os.fspath(getattr(self, name)):
                raise self._invalid(name, "it is empty. Is a variable in it not set?")
        if self.report is not None and not Path(self.report).name:
            raise self._invalid("report", "it names no file.")
        self._check_elastic()
        if self.nproc_per_node is not None and (self.num_proc, self.ps) != (None, None):
            raise ConfigError("--nproc-per-node replaces -np, and -np alone is the number of workers with --ps.")
        if self.merge_output and self.prefix_output is False:
            raise self._invalid("merge_output", "lines are merged only if a prefix says which ranks wrote them.")
        if self.max_restarts is not None and not self.ps:
            raise ConfigError(
                "--max-restarts applies only to the workers of a job with parameter servers: add --ps, or leave it out."
            )
        if self.ssh_command is not None and (self.ssh_port, self.ssh_identity_file) != (None, None):
            raise self._invalid(
                "ssh_command",
                f"it replaces ssh, so {self._spelled('ssh_port')} and {self._spelled('ssh_identity_file')} have no "
                "effect: give them as its own arguments, such as 'ssh -p 2222 -i key'.",
            )
        for item in self.env.items():
            if not all(isinstance(text, str) for text in item):
                raise ConfigError(
                    f"env={dict([item])!r}: the name and the value of an environment variable must be strings."
                )

    def job(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        own_names: Callable[[], frozenset[str]],
        count_accelerators: Callable[[], int],
        options: WrapperOptions | None = None,
        *,
        discover: Callable[[str], str] | None = None,
    ) -> Job:
        """Returns the job that runs ``command``, which a host file or a scheduler in ``environ`` may give its hosts.
        ``own_names`` is called only if hosts are given, ``count_accelerators`` only if neither ranks nor hosts are.
        """
        hosts = self._discovered(discover) if self.host_discovery_script else self._hosts(environ)
        size = self._size(hosts, environ, count_accelerators)
        elastic = self._elastic(size)
        names = own_names() if hosts else frozenset()
        restarts = (_RESTARTS if self.max_restarts is None else self.max_restarts) if self.ps else 0
        given = [self.network_interfaces] if isinstance(self.network_interfaces, str) else self.network_interfaces
        interfaces = dict.fromkeys(name for text in given for part in text.split(",") if (name := part.strip()))
        return Job(
            command=tuple(command),
            size=size,
            hosts=hosts,
            remote=tuple(host for host in hosts if host.name not in names),
            environment=self._environment(elastic, size, environ),
            ssh=Ssh(self.ssh_port, self.ssh_identity_file, self._split("ssh_command")),
            network_interfaces=tuple(interfaces),
            tcp=self.tcp,
            mpi_args=self._split("mpi_args"),
            binding_args=self._split("binding_args"),
            options=replace(
                options or WrapperOptions(), bind=not self.binding_args, restarts=restarts, elastic=elastic is not None
            ),
            servers=self.ps or 0,
            elastic=elastic,
        )

    @property
    def names_hosts(self) -> bool:
        """Whether the arguments say where the ranks run."""
        return any(getattr(self, name) is not None for name in _NAME_HOSTS)

    @property
    def report_files(self) -> tuple[Path, Path] | None:
        """The files that ``report`` means: the record and the page."""
        if self.report is None:
            return None
        file = Path(self.report)
        return file.with_suffix(".json"), file.with_suffix(".html") if file.suffix in ("", ".json") else file

    def limits(self, environ: Mapping[str, str]) -> Limits:
        """Returns the time limits, some of which are variables in ``environ``."""
        ranks = {**environ, **self.env}
        config = Config.from_environ(ranks)
        _, start = VARIABLES["start_timeout"].given(ranks)
        return Limits(
            start=self.start_timeout or (config.start_timeout if start else _LIMITS.start),
            run=self.timeout,
            grace=self.grace_period,
            exit=_LIMITS.exit if self.exit_timeout is None else self.exit_timeout,
            exit_of_all=self.exit_timeout,
            stall=config.stall_seconds,
            stall_shutdown=config.stall_shutdown_seconds,
            verdict=config.verdict,
        )

    def prefix(self, size: int) -> bool:
        """Returns whether output lines are prefixed with the rank in a job of ``size`` ranks."""
        return size > 1 if self.prefix_output is None else self.prefix_output

    def merge(self, size: int, environ: Mapping[str, str]) -> bool:
        """Returns whether equal lines of the ``size`` ranks are merged."""
        wanted = VARIABLES["merge_output"].read(environ) if self.merge_output is None else self.merge_output
        return wanted and size > 1 and self.prefix(size)

    def _size(self, hosts: Sequence[Host], environ: Mapping[str, str], count_accelerators: Callable[[], int]) -> int:
        """Returns the number of processes: as requested, else slots of given or allocated hosts, accelerators, or 1."""
        if self.nproc_per_node is not None:
            return self.nproc_per_node * max(1, len(hosts))
        if self.num_proc is None:
            slots = total_slots(hosts) or allocated_slots(environ) or 0
            if hosts or slots > 1:
                return slots
        return self._with_servers(self.num_proc or count_accelerators() or 1)

    @property
    def processes(self) -> int | None:
        """How many processes are requested, with the chief and the servers of a job that has some."""
        return None if self.num_proc is None else self._with_servers(self.num_proc)

    def _with_servers(self, workers: int) -> int:
        return workers + (1 + self.ps if self.ps else 0)

    def _check_elastic(self) -> None:
        is_elastic = any(getattr(self, name) is not None for name in _MAKE_ELASTIC)
        making = " or ".join(map(self._spelled, _MAKE_ELASTIC))
        for name in _ONLY_ELASTIC:
            if getattr(self, name) is not None and not is_elastic:
                raise ConfigError(f"{self._spelled(name)} applies only to elastic jobs: add {making}, or leave it out.")
        if self.slots is not None and self.host_discovery_script is None:
            script = self._spelled("host_discovery_script")
            raise ConfigError(f"{self._spelled('slots')} applies only to hosts of {script}. Write -H name:slots.")
        if is_elastic and self.ps:
            raise ConfigError(
                f"--ps: a job with parameter servers is not elastic: its workers may come and go. Leave out {making}; "
                "--max-restarts says how many times a worker is restarted."
            )
        given = [name for name in _NAME_HOSTS if getattr(self, name) is not None]
        if len(given) > 1:
            both = " and ".join(map(self._spelled, given))
            raise ConfigError(f"{both} both name hosts: give only one of them.")

    def _discovered(self, discover: Callable[[str], str] | None) -> tuple[Host, ...]:
        script = self.host_discovery_script or ""
        where = f"{self._spelled('host_discovery_script')} {script}"
        hosts = parse_discovered(discover(script) if discover else "", self.slots, where)
        if not hosts:
            raise ConfigError(f"{where}: it prints no host. Let it print a line `host:slots` for each.")
        return hosts

    def _elastic(self, size: int) -> Elastic | None:
        if not any(getattr(self, name) is not None for name in _MAKE_ELASTIC):
            return None
        least = size if self.min_num_proc is None else self.min_num_proc
        most = size if self.max_num_proc is None else self.max_num_proc
        if not least <= size <= most:
            bound, wrong = (f"--min-np {least}", "fewer") if size < least else (f"--max-np {most}", "more")
            raise ConfigError(
                f"{bound}: the job starts with {wrong} ranks, -np {size}. Give --min-np <= -np <= --max-np."
            )
        script, cooldown = self.host_discovery_script, self.cooldown_range
        return Elastic(
            least,
            most,
            timeout=_ELASTIC.timeout if self.elastic_timeout is None else self.elastic_timeout,
            resets=self.reset_limit,
            script=None if script is None else os.fspath(script),
            slots=self.slots,
            cooldown=None if cooldown is None else (cooldown[0], cooldown[1]),
        )

    def _environment(self, elastic: Elastic | None, size: int, environ: Mapping[str, str]) -> dict[str, str]:
        if self.chaos is not None:
            parse_faults(self.chaos, size)  # an error here, not in every rank
        given = variables_of(FLAGS.values(), vars(self))
        if self.commit_steps and not VARIABLES["commit_dir"].read({**environ, **self.env, **given}):
            steps, missing = self._spelled("commit_steps"), self._spelled("commit_dir")
            raise ConfigError(f"{steps} {self.commit_steps}: no directory for the commits is given. Add {missing}.")
        timeline = VARIABLES["timeline"].read({**environ, **self.env})
        if timeline and os.path.abspath(timeline) in map(os.path.abspath, self.report_files or ()):
            raise self._invalid("report", f"it would write its own {timeline} over the timeline: name another file.")
        return {**self.env, **given, **(elastic.variables() if elastic else {})}

    def _hosts(self, environ: Mapping[str, str]) -> tuple[Host, ...]:
        named = (environ[name] for name in _DEFAULT_HOSTFILES if environ.get(name))
        hostfile = next(named, None) if self.hostfile is None else self.hostfile
        hosts: tuple[Host, ...] = ()
        if self.hosts is not None:
            hosts = parse_hosts(self.hosts)
        elif hostfile is not None:
            hosts = parse_hostfile(Path(hostfile))
        if not hosts:
            check_allocation(environ)
        ranks = self.nproc_per_node
        if ranks is None:
            return hosts
        if not hosts and in_allocation(environ):
            raise self._invalid("nproc_per_node", "in a scheduler's allocation, give -np, or name the hosts with -H.")
        small = [str(host) for host in hosts if host.slots < ranks]
        if small:
            raise self._invalid("nproc_per_node", f"fewer slots have {', '.join(small)}. Give more: name:slots.")
        return tuple(replace(host, slots=ranks) for host in hosts)

    def _split(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(shlex.split(getattr(self, name) or ""))
        except ValueError as error:
            raise self._invalid(
                name, f"it cannot be split into arguments ({error}). Close every quotation mark."
            ) from error

    def _invalid(self, name: str, expected: str) -> ConfigError:
        return FLAGS[name].invalid(getattr(self, name), expected, in_python=self.in_python)

    def _spelled(self, name: str) -> str:
        return FLAGS[name].spelled(in_python=self.in_python)


#: The rows, by the names of the fields.
FLAGS: Mapping[str, Flag] = {
    each.name: each.metadata["flag"]._replace(argument=each.name) for each in fields(Arguments) if each.metadata
}
