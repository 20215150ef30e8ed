"""The clocks of waiting: how long each process waits, for what, and what happens then. docs/waiting.md is made from it.

Users set limits by flags and variables (``settings.py``), but not these times. Tests shorten by a factor those that a
job waits for in full; limits that only end what hangs, and times in which others must answer, stay as they are.
"""

from __future__ import annotations

import os
from typing import Final, final

_LAUNCHER, _WRAPPER, _RANKS = "chorosrun", "The wrapper beside each rank", "Ranks"
_HOSTS, _SERVERS, _BENCH = "Connections between processes and hosts", "Parameter servers", "choros bench"
_DOCTOR, _VIEW, _MEMORY, _SPARK = "choros doctor", "choros top", "choros memory", "choros.spark"
_RAY = "choros.ray"

#: Only tests set this variable, for the processes that they start.
TEST_SCALE: Final = "CHOROS_TEST_TIME_SCALE"


@final
class Duration(float):
    """Seconds, with who waits for what, and what happens when they have passed.

    >>> LINGER.who, LINGER.waits
    ('chorosrun', 'for a rank whose script has ended, but not its process')
    """

    seconds: float
    who: str
    waits: str
    then: str

    def __new__(  # noqa: D102
        cls, seconds: float, who: str, waits: str, then: str, *, tests_shorten: bool = False
    ) -> Duration:
        scale = float(os.environ.get(TEST_SCALE, "1")) if tests_shorten else 1.0
        self = super().__new__(cls, seconds * scale)
        self.seconds, self.who, self.waits, self.then = seconds, who, waits, then
        return self


# chorosrun --------------------------------------------------------------------------------------

SLOW_CHECK: Final = Duration(2.0, _LAUNCHER, "for the hosts' logins", "it says that it waits for them")
SLOW_START: Final = Duration(2.0, _LAUNCHER, "for the ranks to start", "it says which have not")
NAME: Final = Duration(6.0, _LAUNCHER, "for a host's name to be found", "the job fails: the host is not known")
LOGIN: Final = Duration(
    10.0, _LAUNCHER, "for a host's login, when an elastic job starts again", "it starts without that host"
)
AGENTS: Final = Duration(
    900.0, _LAUNCHER, "in a cluster that starts it on each host, for the other hosts", "the job fails: they are named"
)
AGENTS_SHOWN: Final = Duration(30.0, _LAUNCHER, "for them, between two lines that say so", "it says so again")
LEFT_LOOK: Final = Duration(
    0.2, _LAUNCHER, "on a host that leaves the job, for its ranks and mpirun's daemon to end", "it looks again"
)
AGENT_LOOK: Final = Duration(
    1.0, _LAUNCHER, "for chorosrun on the first host, if it is not there yet", "it looks again"
)
AGENT_PROOF: Final = Duration(5.0, _LAUNCHER, "in place of ssh, for chorosrun on the first host", "the command fails")
DISCOVERY: Final = Duration(30.0, _LAUNCHER, "for the script of --host-discovery-script", "the script counts as failed")
HOSTS_LOOK: Final = Duration(1.0, _LAUNCHER, "between two runs of that script", "it runs again", tests_shorten=True)
HOSTS_RETRY: Final = Duration(
    1.0, _LAUNCHER, "for hosts of an elastic job without enough", "it looks for hosts again", tests_shorten=True
)
GATE_LOOK: Final = Duration(0.001, _LAUNCHER, "between two looks at mpirun's sockets", "it looks again")
GATE_SPIN: Final = Duration(
    0.3, _LAUNCHER, "for mpirun's sockets, doing nothing else", "it starts the job and looks now and then"
)
CONNECT: Final = Duration(
    10.0,
    _LAUNCHER,
    "for MPI to connect ranks on several hosts, of an elastic job, that have all come",
    "it starts again",
)
CONFIRM: Final = Duration(
    1.0, _LAUNCHER, "for a rank that seems to wait in vain to report it again", "what it waits for counts as lost"
)
WAIT_REPORT: Final = Duration(
    5.0, _LAUNCHER, "for ranks that have not ended to say that they wait", "they count as ranks that linger"
)
LINGER: Final = Duration(
    60.0, _LAUNCHER, "for a rank whose script has ended, but not its process", "a report says so", tests_shorten=True
)
STACKS_OF_ALL: Final = Duration(6.0, _LAUNCHER, "for the stacks of ranks", "the report is shown without those missing")
VIEW_END: Final = Duration(3.0, _LAUNCHER, "for the live view to leave the terminal", "it sends SIGKILL")
RECORD: Final = Duration(2.0, _LAUNCHER, "as choros top, for chorosrun's answer", "what was shown stays")
SCREEN_LOOK: Final = Duration(0.2, _LAUNCHER, "for its output to be read", "it looks whether the job is to end")
STACKS_COMMAND: Final = Duration(20.0, _LAUNCHER, "as choros stacks, for chorosrun's answer", "the command fails")
SEND_AGAIN: Final = Duration(
    2.0, _LAUNCHER, "for rank 0 to get a part of choros.run's call", "it sends that part again", tests_shorten=True
)
MERGE: Final = Duration(
    0.08, _LAUNCHER, "for other ranks to print the same line", "the line is shown, with those that have printed it"
)
SHUTDOWN: Final = Duration(
    1.0, _LAUNCHER, "for the rank that called shutdown() while others go on, to end by itself", "the job is stopped"
)
LOST: Final = Duration(
    2.0, _LAUNCHER, "for all ranks to say whom they have lost, on several hosts", "it decides where the job goes on"
)
KILLED: Final = Duration(
    10.0,
    _LAUNCHER,
    "for the end of a rank that it killed",
    "the job ends: that host cannot be reached",
    tests_shorten=True,
)
MOVE: Final = Duration(
    2.0, _LAUNCHER, "for ranks to commit and end, when the hosts have changed", "it asks them again", tests_shorten=True
)
FAILURE_GRACE: Final = Duration(2.5, _LAUNCHER, "for ranks to end after a failure and SIGTERM", "it sends SIGKILL")
KILL_GRACE: Final = Duration(1.5, _LAUNCHER, "for ranks to end after SIGKILL", "mpirun is ended")
RELEASE: Final = Duration(3.0, _LAUNCHER, "for mpirun to end after its ranks", "it sends SIGTERM, and then SIGKILL")
DRAIN: Final = Duration(1.0, _LAUNCHER, "for mpirun's last output", "the job ends without it")
MPIRUN_END: Final = Duration(3.0, _LAUNCHER, "for mpirun to end after a signal", "it sends the next one")
MPIRUN_CHILDREN: Final = Duration(2.0, _LAUNCHER, "for what mpirun has started", "it sends SIGKILL")
CONTROL: Final = Duration(2.0, _LAUNCHER, "for a client, as choros stacks, to read", "the client is left")
METRICS_READ: Final = Duration(20.0, _LAUNCHER, "for who connects to --metrics-port to ask and read", "it is closed")

# the wrapper ------------------------------------------------------------------------------------

STACKS: Final = Duration(4.0, _WRAPPER, "for py-spy to read a stack of its rank", "the stack is missing")
GATE_KEY: Final = Duration(0.005, _WRAPPER, "for the key of mpirun's gate", "it looks again")
PARENT_LOOK: Final = Duration(
    0.5, _WRAPPER, "between two looks whether mpirun lives, where the kernel does not say it", "it looks again"
)
KILL_AGAIN: Final = Duration(0.1, _WRAPPER, "for a rank to end after mpirun's SIGTERM", "it kills the rank, each time")
ORPHANS: Final = Duration(0.5, _WRAPPER, "for processes that a rank has left behind", "they are killed")
ORPHANS_OF_FAILURE: Final = Duration(
    0.1, _WRAPPER, "for those of a rank that has failed, as others fail after it", "they are killed"
)
REPORT_AGAIN: Final = Duration(
    2.0, _WRAPPER, "for chorosrun to know of a rank's end", "it reports it again", tests_shorten=True
)
PROGRESS: Final = Duration(
    1.0, _WRAPPER, "between two reports of a rank's steps", "it sends the next one", tests_shorten=True
)
STUCK: Final = Duration(
    1.0, _WRAPPER, "for data of a rank to move, after a signal to end", "it reports that the rank waits"
)
BATCH: Final = Duration(0.002, _WRAPPER, "for more of a rank's output", "it sends what it has")
PARTIAL_LINE: Final = Duration(0.2, _WRAPPER, "for the rest of a line", "the part is shown: a prompt, a row of dots")
MESSAGE_PAUSE: Final = Duration(0.2, _WRAPPER, "for more of an error's message", "the message is complete")
PROXY_CONNECT: Final = Duration(10.0, _WRAPPER, "for mpirun to answer its rank", "the rank cannot start")
PROXY_PAUSE: Final = Duration(0.005, _WRAPPER, "between two connections to its socket", "it takes the next one")

# ranks ------------------------------------------------------------------------------------------

SLOW_CONNECT: Final = Duration(10.0, _RANKS, "for others to connect", "a message names those that are missing")
STORE_LOOK: Final = Duration(0.02, _RANKS, "for a value of another rank", "they look again")
FIRST_REPORT: Final = Duration(1.0, _RANKS, "for others in a collective", "they tell chorosrun for whom they wait")
NEXT_REPORT: Final = Duration(10.0, _RANKS, "in it still, and less in the first half minute", "they tell it again")
PATIENCE: Final = Duration(
    0.001, _RANKS, "for the call that came next in the last step", "another one that is queued begins"
)
NEWCOMER: Final = Duration(
    10.0, _RANKS, "for a thread that has never called a collective", "it counts as one that does not take part"
)
SPIN: Final = Duration(200e-6, _RANKS, "for others in a collective, and polls without a pause", "they sleep in between")
POLL: Final = Duration(20e-6, _RANKS, "then, between two polls, and later up to 1 ms", "they poll again")
SLEEPY: Final = Duration(50e-6, _RANKS, "for the core, when they yield it", "the core counts as shared")
EXCHANGE: Final = Duration(0.002, _RANKS, "for some bytes by Gloo on a busy machine", "nothing: a time to reckon with")
NAP: Final = Duration(0.1, _RANKS, "for Gloo, before looking whether a peer is lost", "they look, and wait again")
GATE_WATCH: Final = Duration(0.005, _RANKS, "between two looks whether a communicator is broken", "they look again")
LOSS_GRACE: Final = Duration(
    0.3, _RANKS, "for what a lost rank has sent before its end", "the wait fails: PeerLostError"
)
LOSS_REASON: Final = Duration(
    1.0, _RANKS, "for the news of a loss, when an engine fails", "the engine's own error is raised"
)
ANSWER: Final = Duration(1.0, _RANKS, "without chorosrun, for rank 0's answer", "rank 0 counts as stopped")
WAITS_WRITTEN: Final = Duration(
    1.5, _RANKS, "without chorosrun, for others to write that they wait", "a report may call them missing"
)
SPOT_LOOK: Final = Duration(
    5.0, _RANKS, "between two questions whether the cloud takes the machine away", "they ask again", tests_shorten=True
)
SPOT_FIRST: Final = Duration(150.0, _RANKS, "for its first answer", "they ask no more, with a warning")
SPOT_ANSWER: Final = Duration(5.0, _RANKS, "for a later one", "they ask again")
STRAGGLERS: Final = Duration(60.0, _RANKS, "without chorosrun, between two comparisons of speed", "they compare again")
STRAGGLERS_END: Final = Duration(0.8, _RANKS, "for the others' last steps, at the end", "they compare those that came")
FAREWELL: Final = Duration(5.0, _RANKS, "at the end of a job that has lost ranks, for the others", "they end alone")
FAREWELL_LOOK: Final = Duration(0.001, _RANKS, "between two looks for them", "they look again")
ADMISSION_LOOK: Final = Duration(0.05, _RANKS, "for new ranks, and new ranks for them", "they look again")
JOIN: Final = Duration(60.0, _RANKS, "as a new process, to become a rank", "the process ends")
ADMISSION: Final = Duration(
    20.0,
    _RANKS,
    "for MPI to connect a new process, although a rank was lost meanwhile",
    "the process ends",
    tests_shorten=True,
)
XLA_HEARTBEAT: Final = Duration(
    30.0, _RANKS, "of xla, for a sign of another", "it counts as dead, without other evidence"
)
XLA_SHUTDOWN: Final = Duration(10.0, _RANKS, "of xla, for the others to end, too", "they end alone")
PREEMPTION_LOOK: Final = Duration(1.0, _RANKS, "between two calls of termination_watcher_fn", "they call it again")
ABANDONED: Final = Duration(24 * 3600.0, _RANKS, "for another host to finish a file", "its temporary files are removed")
METRICS: Final = Duration(1.0, _RANKS, "between two reports of rank 0's loss and metrics", "it reports the next ones")

# connections ------------------------------------------------------------------------------------

PROOF: Final = Duration(20.0, _HOSTS, "for the other process to prove that it has the job's key", "it is closed")
CONNECT_AGAIN: Final = Duration(0.1, _HOSTS, "after a listener that was full", "a process connects again")
LISTENER_PAUSE: Final = Duration(0.05, _HOSTS, "for files, when the system has none left", "it accepts again")
ENDPOINT_LOOK: Final = Duration(0.02, _HOSTS, "for a listener that is not there yet", "a process connects again")
SILENCE_LOOK: Final = Duration(0.25, _HOSTS, "between two looks whether hosts answer", "they are looked at again")
LEAST_SILENCE: Final = Duration(
    2.0, _HOSTS, "for a silent host at least, whatever CHOROS_UNREACHABLE_SECONDS says", "it is asked once more"
)
QUESTION: Final = Duration(0.25, _HOSTS, "for a silent host's answer to a new connection", "its ranks count as lost")
REACTION: Final = Duration(0.75, _HOSTS, "from suspicion to error", "nothing: a time to reckon with")
NEW_CONNECTIONS: Final = Duration(
    2.0, _HOSTS, "between two looks for MPI's new connections", "they are looked for again"
)

# parameter servers ------------------------------------------------------------------------------

SERVERS_SLOW: Final = Duration(10.0, _SERVERS, "for the chief", "a message says so")
SERVERS_LOOK: Final = Duration(0.25, _SERVERS, "for an answer, before a look whether the wait is long", "they look")
SERVERS_END: Final = Duration(5.0, _SERVERS, "for their threads to end", "they end without them")
WORKERS_END: Final = Duration(10.0, _SERVERS, "of the chief, at its exit, for workers to know of it", "the chief ends")
WORKER_CONNECT: Final = Duration(1.0, _SERVERS, "of the chief, for a worker", "it tries again, until the start's limit")
WORKERS_LOOK: Final = Duration(0.05, _SERVERS, "of the chief, for a worker that is gone", "it tries again")
WORKERS_COMPARED: Final = Duration(60.0, _SERVERS, "between two comparisons of workers", "they are compared again")
QUEUE_LOOK: Final = Duration(0.5, _SERVERS, "for functions, before a look whether workers are left", "they look")

# choros bench -----------------------------------------------------------------------------------

BENCH_CALLS: Final = Duration(0.02, _BENCH, "a trial of collectives, which is repeated", "the trial ends")
BENCH_STEPS: Final = Duration(2.0, _BENCH, "a trial of training steps", "the trial ends")
BENCH_PROGRESS: Final = Duration(2.0, _BENCH, "a run", "it shows progress")
BENCH_PROGRESS_LINE: Final = Duration(10.0, _BENCH, "between two lines of progress, without a terminal", "the next one")
BENCH_STARTUP: Final = Duration(120.0, _BENCH, "a trial of a start", "the trial has failed")
BENCH_START: Final = Duration(240.0, _BENCH, "for processes to start", "the contender has failed")
BENCH_CONNECT: Final = Duration(10.0, _BENCH, "of its processes, for the coordinator", "they fail")
BENCH_BARRIER: Final = Duration(600.0, _BENCH, "of its processes, for each other", "they fail")
BENCH_ANSWER: Final = Duration(600.0, _BENCH, "for timings", "the contender has failed")
BENCH_LOOK: Final = Duration(0.25, _BENCH, "between two looks at its processes", "it looks again")
BENCH_GRACE: Final = Duration(5.0, _BENCH, "for its processes to end", "they are ended")
BENCH_CLEANUP: Final = Duration(2.0, _BENCH, "for its processes to end, after SIGTERM", "they are killed")

# choros doctor ----------------------------------------------------------------------------------

DOCTOR_PROGRESS: Final = Duration(2.0, _DOCTOR, "for a part of its checks", "it says for which")
DOCTOR_PROGRAM: Final = Duration(10.0, _DOCTOR, "for nvidia-smi and ompi_info", "it goes on without the answer")
DOCTOR_IMPORTS: Final = Duration(120.0, _DOCTOR, "for the imports of frameworks", "those that last count as broken")
DOCTOR_LOGIN: Final = Duration(10.0, _DOCTOR, "for the hosts' logins", "those without an answer count as unreachable")
DOCTOR_HOST: Final = Duration(150.0, _DOCTOR, "for the facts of hosts", "choros cannot be run on those without")
DOCTOR_REACH: Final = Duration(10.0, _DOCTOR, "for a host to connect to all others", "those left are not reached")
DOCTOR_JOB: Final = Duration(60.0, _DOCTOR, "for its job of two ranks", "the job has failed")

# choros.ray -------------------------------------------------------------------------------------

RAY_CONNECT: Final = Duration(30.0, _RAY, "in a rank, for the executor", "the rank fails")
RAY_CONNECT_ACTOR: Final = Duration(5.0, _RAY, "in a rank, for its actor", "it asks for another one")
RAY_MORE: Final = Duration(2.0, _RAY, "for more actors than an elastic job needs to start", "it starts without them")
RAY_LOOK: Final = Duration(1.0, _RAY, "between two looks at actors and nodes", "it looks again")
RAY_END: Final = Duration(20.0, _RAY, "for the ranks to end", "they are killed")

# choros.spark -----------------------------------------------------------------------------------

SPARK_LOOK: Final = Duration(0.2, _SPARK, "between two looks at how many slots Spark has", "it looks again")
SPARK_EXECUTORS: Final = Duration(
    30.0,
    _SPARK,
    "in an elastic job that has lost an executor, for another one in its place",
    "the stage is tried again with fewer tasks",
    tests_shorten=True,
)

# choros memory ----------------------------------------------------------------------------------

MEMORY_PROGRESS: Final = Duration(2.0, _MEMORY, "for a script's third step, or a model's file", "it says so")

# choros top -------------------------------------------------------------------------------------

VIEW_LOOK: Final = Duration(1.5, _VIEW, "between two looks at a job", "it shows what has changed")
VIEW_RECENT: Final = Duration(5.0, _VIEW, "for news of a rank", "its speed is that of the time before")


def table() -> dict[str, Duration]:
    """All durations by their names, in the order above."""
    return {name: value for name, value in globals().items() if isinstance(value, Duration)}
