"""The division of cores among ranks."""

import os

import pytest

from choros.launch.plan import cores as module
from choros.launch.plan.cores import Share, divide, physical_cores, processor_quota, share_of
from choros.launch.plan.environment import MEMORY, THREADS, rank_settings

FOUR = [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("cores", "local_size", "shares"),
    [
        (FOUR, 1, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (FOUR, 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (FOUR, 3, [(0, 4), (1, 5), (2, 3, 6, 7)]),
        (FOUR, 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (FOUR, 5, [(), (), (), (), ()]),
        ([(0,), (1,)], 2, [(0,), (1,)]),
    ],
)
def test_each_rank_has_whole_cores_and_no_core_has_two_ranks(cores, local_size, shares):
    given = [divide(cores, rank, local_size) for rank in range(local_size)]
    assert [share.bind for share in given] == shares
    assert all(share.oversubscribed == (local_size > len(cores)) for share in given)
    assert all(share.threads == max(1, len(share.bind) // len(cores[0])) for share in given)


@pytest.mark.parametrize(("quota", "threads", "oversubscribed"), [(8.0, 2, False), (2.0, 1, False), (1.5, 1, True)])
def test_a_quota_may_be_less_than_the_visible_cores(quota, threads, oversubscribed):
    assert divide(FOUR, 0, 2, quota) == Share((0, 1, 4, 5), threads, oversubscribed)


def sysfs(directory, siblings, packages):
    for cpu, (threads, package) in enumerate(zip(siblings, packages, strict=True)):
        topology = directory / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(threads + "\n")
        (topology / "physical_package_id").write_text(f"{package}\n")
    return directory


def test_threads_of_a_core_stay_together(tmp_path):
    root = sysfs(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2, [0, 0, 1, 1] * 2)
    assert physical_cores(range(8), root) == FOUR


def test_cores_are_sorted_by_socket(tmp_path):
    root = sysfs(tmp_path, ["0", "1", "2", "3"], [0, 1, 0, 1])
    assert physical_cores(range(4), root) == [(0,), (2,), (1,), (3,)]


def test_ranges_of_siblings(tmp_path):
    assert physical_cores(range(4), sysfs(tmp_path, ["0-1", "0-1", "2-3", "2-3"], [0] * 4)) == [(0, 1), (2, 3)]


def test_only_allowed_cores(tmp_path):
    root = sysfs(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2, [0] * 8)
    assert physical_cores([1, 5, 6], root) == [(1, 5), (6,)]


def test_a_kernel_that_does_not_report_siblings(tmp_path):
    assert physical_cores([3, 1], tmp_path) == [(1,), (3,)]


@pytest.mark.parametrize(
    ("text", "quota"), [("200000 100000", 2.0), ("50000 100000", 0.5), ("max 100000", None), ("", None)]
)
def test_quota(tmp_path, text, quota):
    (tmp_path / "cpu.max").write_text(text)
    assert processor_quota(tmp_path) == quota


def test_quota_of_cgroup_v1(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert processor_quota(tmp_path) == 3.0


def test_every_thread_pool_is_sized():
    settings = rank_settings({}, Share((0, 1, 2), 3), "linux")
    assert {name: settings[name] for name in THREADS} == dict.fromkeys(THREADS, "3")
    assert settings["NPROC"] == "3"
    assert settings["PYTHONUNBUFFERED"] == "1"
    assert settings.keys() >= MEMORY.keys()
    assert "OMPI_MCA_mpi_yield_when_idle" not in settings


def test_the_users_settings_stay():
    user = {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": "", "MALLOC_ARENA_MAX": "4"}
    settings = rank_settings(user, Share((0,), 1), "linux")
    assert not settings.keys() & (user.keys() | MEMORY.keys())
    assert settings["NPROC"] == "2", "XLA needs a thread besides the one that waits for other ranks"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux binds")
@pytest.mark.parametrize(
    ("own", "parents", "share"),
    [
        (4, 4, Share((), 2)),  # a container's
        (1, 4, Share((), 1)),  # mpirun has bound this process
        (1, 1, Share((), 1, oversubscribed=True)),
    ],
)
def test_without_binding_ranks_share_what_their_parent_may_use(monkeypatch, own, parents, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(parents if pid else own)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(module, "physical_cores", lambda allowed: [(each,) for each in allowed])
    monkeypatch.setattr(module, "processor_quota", lambda: None)
    assert share_of(1, 2, bind=False) == share


def test_waiting_ranks_yield_if_the_host_is_oversubscribed():
    assert rank_settings({}, Share((), 1, oversubscribed=True))["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_allocator_settings_are_only_for_linux():
    assert not rank_settings({}, Share((0,), 1), "darwin").keys() & MEMORY.keys()


def test_fabrics_are_excluded_on_one_host():
    share = Share(bind=(0,), threads=1)
    assert rank_settings({}, share, one_host=True)["OMPI_MCA_btl"] == "self,sm"  # which listen nowhere
    assert rank_settings({}, share, one_host=True, elastic=True)["OMPI_MCA_btl"] == "^ofi,uct"
    assert "OMPI_MCA_btl" not in rank_settings({}, share)
    assert rank_settings({}, share, has_memory=False)["OMPI_MCA_btl"] == "^sm"
    assert rank_settings({}, share, one_host=True, has_memory=False)["OMPI_MCA_btl"] == "^ofi,uct,sm"
    assert "OMPI_MCA_btl" not in rank_settings({"OMPI_MCA_btl": "self,sm"}, share, one_host=True)
