"""The view's app without a terminal: windows of several sizes, many ranks, answers that do not come."""

import asyncio
import copy

from textual.widgets import Static

from choros.errors import LaunchError
from choros.view.app import TopApp
from view.test_snapshot import record_of


def rows(app, name):
    """The lines of the part ``name`` of the screen."""
    return str(app.query_one(f"#{name} Static" if name != "head" else "#head", Static).render()).splitlines()


def run(check, fetch, size):
    """Calls ``check`` with an app that has shown what ``fetch`` returns."""

    async def shown():
        app = TopApp(fetch)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await check(app, pilot)
        return app.return_code

    return asyncio.run(shown())


def many(ranks):
    """A record of so many ranks."""
    record = record_of(*range(1, 30), batch=50)
    record["size"] = ranks
    record["ranks"] = {str(rank): copy.deepcopy(record["ranks"][str(rank % 2)]) for rank in range(ranks)}
    return record


def test_many_ranks_scroll_in_a_small_window():
    async def check(app, pilot):
        ranks = app.query_one("#ranks")
        assert len(rows(app, "ranks")) == 65
        assert max(map(len, rows(app, "ranks"))) == 59
        assert rows(app, "ranks")[0] == "rank host  examples/s       █ computing ▓ loading · waiting"
        assert len(rows(app, "head")) <= 6
        assert ranks.max_scroll_y > 50
        ranks.scroll_end(animate=False)
        await pilot.pause()
        assert ranks.is_vertical_scroll_end
        assert app.query_one("#log").region.bottom == 15
        await pilot.press("q")

    assert run(check, lambda: many(64), (60, 15)) == 0


def test_a_loop_whose_batches_have_no_number_of_examples_has_steps():
    record = many(2)
    for rank in record["ranks"].values():
        rank["examples"] = list(map(float, rank["steps"]))

    async def check(app, pilot):
        lines = rows(app, "ranks")
        assert lines[0].startswith("rank host  steps/s")
        assert all(" 10.0 " in line for line in lines[1:])
        await pilot.press("q")

    assert run(check, lambda: record, (60, 15)) == 0


def test_a_high_window_has_the_whole_verdict():
    async def check(app, pilot):
        head = rows(app, "head")
        assert head[0].startswith("2 ranks on 2 hosts")
        assert "epoch 2 of 4" in head[1]
        assert sum("input-bound" in line or "goodput" in line for line in head) == 2

    run(check, lambda: many(2), (100, 40))


def test_a_window_can_be_tiny():
    async def check(app, pilot):
        assert rows(app, "head")[0].startswith("64 ranks")

    run(check, lambda: many(64), (12, 5))


def test_what_was_shown_stays_when_no_answer_comes():
    answers = [many(2)]

    def fetch():
        if not answers:
            raise LaunchError("no answer")
        return answers.pop()

    async def check(app, pilot):
        await app.poll()
        assert rows(app, "head")[0] == "the job has ended, or chorosrun does not answer"
        assert len(rows(app, "ranks")) == 3

    run(check, fetch, (80, 24))


def test_the_view_waits_for_its_first_answer():
    def fetch():
        raise LaunchError("no answer")

    async def check(app, pilot):
        assert rows(app, "head") == ["waits for chorosrun …"]
        await pilot.press("ctrl+c")

    assert run(check, fetch, (80, 24)) == 0
