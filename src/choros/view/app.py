"""The view on a terminal, by Textual: polls the record, and shows it. All else is pure."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from textwrap import wrap
from typing import Any, ClassVar, final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.geometry import Size
from textual.widgets import Static

from choros import durations
from choros.errors import LaunchError
from choros.observe.progress import PARTS
from choros.view.snapshot import JobView, RankView, bar, cells, curve, rate, rates, view_of
from choros.wording import bytes_text

#: Rates are those since so many records ago.
_RECORDS = 4
#: Also without colours they differ.
_STYLES = dict(zip(PARTS, ("█ green", "▓ yellow", "· white", "▒ blue", "c magenta", "r red"), strict=True))
_RATE_CELLS, _NUMBER_CELLS = 8, 7
#: On a lower terminal, the head is short.
_HIGH = 24


@final
class TopApp(App[None]):
    """Shows what ``fetch`` returns, a job's record. Ctrl-C leaves, and calls ``stop``, if there is one; the view of a
    chorosrun that has ``ended`` leaves, too.
    """

    CSS = """
    #head { height: auto; max-height: 50%; }
    #head, #ranks > Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #ranks { height: 2fr; min-height: 3; border-top: solid $primary; scrollbar-size-vertical: 1; }
    #log { height: 1fr; min-height: 2; border-top: solid $primary; scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar = [Binding("q", "quit", priority=True), Binding("ctrl+c", "leave", priority=True)]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        fetch: Callable[[], dict[str, Any]],
        stop: Callable[[], None] | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._stop = stop
        self._ended = ended
        self._records: deque[dict[str, Any]] = deque(maxlen=_RECORDS)
        self._shown: JobView | None = None
        self._problem = "waits for chorosrun …"
        self._texts: dict[str, Text] = {}

    def compose(self) -> ComposeResult:
        """Head, ranks and log, one below the other; the latter two scroll."""
        yield Static(id="head")
        with VerticalScroll(id="ranks"):
            yield Static()
        with VerticalScroll(id="log"):
            yield Static()

    async def on_mount(self) -> None:
        """Begins."""
        ends = {signal.SIGTERM: self.exit, signal.SIGHUP: self.exit, signal.SIGINT: self.action_leave}
        for number, end in ends.items():
            asyncio.get_running_loop().add_signal_handler(number, end)
        self.query_one("#log").anchor()  # follows the end, until the user scrolls
        self.set_interval(durations.VIEW_LOOK, self.poll)
        await self.poll()

    def on_resize(self, event: Resize) -> None:
        """Shows all in the new size."""
        self._show(event.size)

    async def poll(self) -> None:
        """Fetches the record, and shows it."""
        if self._ended():
            self.exit()
            return
        try:
            record = await asyncio.to_thread(self._fetch)
        except LaunchError as error:
            self._problem = "the job has ended, or chorosrun does not answer" if self._records else self._problem
            self.log(error)
        else:
            self._problem = ""
            self._shown = view_of(record, time.time(), self._records[0] if self._records else None)
            self._records.append(record)
        self._show(self.size)

    def action_leave(self) -> None:
        """Ctrl-C, which the terminal does not make a signal of now."""
        self.exit()
        if self._stop is not None and not self._ended():  # its number may be another process' by then
            self._stop()

    def _show(self, size: Size) -> None:
        view, width = self._shown, size.width
        if view is None:
            self._fill("#head", Text(self._problem, style="bold"))
            return
        self._fill("#head", head_text(view, width, high=size.height >= _HIGH, problem=self._problem))
        self._fill("#ranks > Static", ranks_text(view, width - 1))
        self._fill("#log > Static", log_text(view))

    def _fill(self, name: str, text: Text) -> None:
        """Shows ``text`` in a widget, if it is another; a layout, which takes longest, only if it has other lines."""
        shown = self._texts.get(name)
        if text != shown:
            self._texts[name] = text
            lines = -1 if shown is None else shown.plain.count("\n")
            self.query_one(name, Static).update(text, layout=text.plain.count("\n") != lines)


def head_text(view: JobView, width: int, *, high: bool, problem: str = "") -> Text:
    """What runs, how far it is and how fast, what holds it back, and its metrics."""
    lines = [Text(problem, style="bold red")] if problem else []
    lines.append(Text(view.title, style="bold"))
    if view.fit:
        lines.append(Text.assemble((bar(view.done, max(4, width - len(view.fit) - 1)), "green"), f" {view.fit}"))
    lines.append(Text(rates(view), style="cyan"))
    verdict = [part for line in view.verdict for part in wrap(line, width)] if high else view.verdict[-2:-1]
    lines += [Text(line, style="yellow") for line in verdict] or [Text("no verdict yet", style="bright_black")]
    longest = max((len(name) for name in view.metrics), default=0)
    for name, values in list(view.metrics.items())[: 6 if high else 2]:
        said = f"{name:{longest}} {values[-1]:>9.4g} "
        lines.append(Text.assemble((said, "bold"), (curve(values, width - len(said)), "cyan")))
    return Text("\n").join(lines)


def ranks_text(view: JobView, width: int) -> Text:
    """A line for each rank: its rate as a bar, and the shares of its time."""
    hosts = max((4, *(len(rank.host) for rank in view.ranks))) + 1
    number = max((4, *(len(str(rank.number)) for rank in view.ranks)))
    left = width - number - 1 - _RATE_CELLS - _NUMBER_CELLS - 13
    hosts = hosts if left - hosts >= 20 else 0
    by_steps = view.steps_per_second > 0 and view.examples_per_second == 0  # examples are not counted
    unit = "steps/s" if by_steps else "examples/s"
    rates = [rank.steps_per_second if by_steps else rank.examples_per_second for rank in view.ranks]
    most = max(rates, default=0.0) or 1.0
    signs = [f"{_STYLES[name][0]} {name}" for name in PARTS if _is_spent(view, name)]
    heading = f"{'rank':{number}} {'host':{hosts}.{hosts}}{unit:<{_RATE_CELLS + _NUMBER_CELLS + 1}} "
    legend = Text(heading if len(heading) + len(" ".join(signs)) <= width else "rank ")
    legend.append(" ".join(signs))
    for name in PARTS:
        legend.highlight_words([f"{_STYLES[name][0]} {name}"], _STYLES[name][2:])
    lines = [legend]
    for rank, each in zip(view.ranks, rates, strict=True):
        lines.append(_rank_text(rank, number, hosts, each, each / most, left - hosts))
    return Text("\n").join(lines)


def _is_spent(view: JobView, name: str) -> bool:
    return any(rank.shares is not None and rank.shares[name] >= 0.005 for rank in view.ranks)


def _rank_text(rank: RankView, number: int, hosts: int, per_second: float, share: float, width: int) -> Text:
    line = Text(f"{rank.number:>{number}} {rank.host:{hosts}.{hosts}}")
    line.append(bar(share, _RATE_CELLS), style="cyan")
    line.append(f" {rate(per_second):>{_NUMBER_CELLS}} ")
    for name, count in cells(rank.shares, width).items() if rank.shares else ():
        line.append(_STYLES[name][0] * count, style=_STYLES[name][2:])
    if not rank.shares:
        line.append("no steps yet".ljust(width), style="bright_black")
    line.append(f" {bytes_text(rank.memory):>9}")
    return line


def log_text(view: JobView) -> Text:
    """The last lines of the output, then the last message, as it was maybe long ago."""
    lines = [Text(each, style="yellow" if each.startswith("chorosrun: ") else "") for each in view.output]
    lines += [Text(each.partition("\n")[0], style="yellow") for each in view.messages[-1:]]
    return Text("\n").join(lines)
