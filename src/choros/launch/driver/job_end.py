"""How a job ended, and why it was stopped."""

import enum
import signal
from collections import deque
from dataclasses import dataclass, field

from choros.errors import PREEMPTED
from choros.launch.plan.job import Elastic
from choros.launch.plan.restart import Step
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.frames import Exit, Start
from choros.observe.events import INIT, Event, Kind

_MESSAGES = 400


class Reason(enum.Enum):
    """Why a job is stopped."""

    FAILURE = enum.auto()
    #: A rank waits for one that has ended, or ranks wait for each other.
    STUCK = enum.auto()
    #: A rank has ended without leaving the job, when the scripts of all had ended.
    OVER = enum.auto()
    #: Fewer ranks of an elastic job are left than it may have.
    TOO_FEW = enum.auto()
    #: A rank of an elastic job on several hosts has lost others, which may be alive: none goes on.
    LOST = enum.auto()
    #: The chief ended with 0, and other processes did not end within the grace period.
    DONE = enum.auto()
    INTERRUPT = enum.auto()
    TERMINATE = enum.auto()
    TIMEOUT = enum.auto()
    START_TIMEOUT = enum.auto()


def signal_name(number: int) -> str:
    """Returns the name of signal ``number``.

    >>> signal_name(9)
    'SIGKILL'
    """
    return next((known.name for known in signal.Signals if known == number), "a real-time signal")


@dataclass
class JobEnd:
    """How a job and its ranks ended; ``exits`` are in the order of their reports; ``reason``: why it was stopped.
    ``done``: the ranks whose scripts ended or were not needed any more; ``crashed``: those that an exception ends;
    ``together``: those that left with all others; ``newcomers``: those that were added, and not taken in by the others.
    ``stuck``, ``given_up``: why it was stopped, not restarted; ``move``: how to start it on the hosts of now, if they
    have changed; ``moves``: whether its ranks were asked to commit and to end for that.
    ``asked``: the last signal to chorosrun that asks for its end; 0: there was none.
    """

    size: int
    started: dict[int, Start] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    reason: Reason | None = None
    results: dict[int, bytearray] = field(default_factory=dict)
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    mpirun_code: int = 0
    roles: Roles = NO_ROLES
    waits: tuple[str, ...] = ()
    stuck: str = ""
    elastic: Elastic | None = None
    preempted: bool = False
    asked: int = 0
    unconnected: bool = False
    move: Step | None = None
    moves: bool = False
    done: set[int] = field(default_factory=set)
    crashed: set[int] = field(default_factory=set)
    initialized: set[int] = field(default_factory=set)
    together: set[int] = field(default_factory=set)
    newcomers: set[int] = field(default_factory=set)
    given_up: str = ""

    def note(self, rank: int, event: Event) -> None:
        """Records an event of ``rank``."""
        if event.kind is Kind.SCRIPT_ENDED:
            self.done.add(rank)
        if event.kind is Kind.RANK_CRASHED:
            self.crashed.add(rank)
        if event.kind is Kind.FINISHED:
            self.together.add(rank)
        if event.kind is Kind.WAITING and event.name == INIT:
            self.initialized.add(rank)
            self.together.discard(rank)
        if event.kind is Kind.RANK_JOINED:
            self.newcomers.discard(event.details.get("number"))

    def replace(self, rank: int) -> None:
        """Records that a new rank takes the place of ``rank``, and that the others have not taken it in yet."""
        self.exits.pop(rank, None)
        self.done.discard(rank)
        self.crashed.discard(rank)
        self.newcomers.add(rank)

    @property
    def hosts(self) -> set[str]:
        """The hosts on which ranks have started."""
        return {start.host for start in self.started.values()}

    @property
    def is_saving(self) -> bool:
        """Whether the job is being stopped, and its ranks may save before they end."""
        return self.reason in (Reason.INTERRUPT, Reason.TERMINATE, Reason.TIMEOUT)

    @property
    def members(self) -> set[int]:
        """The ranks of the job, those that were added to it among them."""
        return {*range(self.size), *self.started}

    @property
    def missing(self) -> set[int]:
        """The ranks that have not reported their end."""
        return self.members - self.exits.keys()

    @property
    def failures(self) -> list[Exit]:
        """The ends of ranks that have failed by themselves, in the order of their reports."""
        return [end for end in self.exits.values() if end.code and not end.stopped]

    @property
    def left(self) -> int:
        """The number of ranks that have not failed."""
        return len(self.members) - sum(end.code != PREEMPTED for end in self.failures)

    def has_finished(self, rank: int) -> bool:
        """Whether a rank has made the job's last step: it ended with 0, and did not leave while others went on."""
        end = self.exits.get(rank)
        if end is None or end.code != 0 or end.stopped:
            return False
        is_new = rank in self.started and self.started[rank].added
        return rank in self.together or (rank not in self.initialized and not is_new)

    @property
    def lost_mpirun(self) -> str:
        """How a signal of somebody else ended mpirun, as a sentence; empty if none did.
        Only SIGKILL counts: it handles others by ending the ranks without a word, or it or a rank's end explains them.
        """
        if self.mpirun_code < 0:
            return f"mpirun was killed by {signal_name(-self.mpirun_code)} (signal {-self.mpirun_code})"
        ends = self.exits.values()
        failed = self.elastic is None and bool(self.failures)
        ended_early = bool(self.missing) or any(end.stopped for end in ends)
        finished = any(map(self.has_finished, self.exits))
        is_cause = self.reason in (None, Reason.FAILURE) and not (failed or finished or self.messages)
        whole = len(self.started) >= self.size
        return "mpirun was ended by a signal" if self.mpirun_code and whole and ended_early and is_cause else ""

    @property
    def chief_is_done(self) -> bool:
        """Whether the job has a chief that ended with 0 before any other process failed."""
        chief = self.exits.get(0) if self.roles else None
        return chief is not None and chief.code == 0 and self.reason in (None, Reason.DONE)
