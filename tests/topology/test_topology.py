import pytest

from choros.topology import Topology


def test_ranks_of_uneven_hosts() -> None:
    """
    ::

        host a          host b          host c
        rank 0  rank 3  rank 1          rank 2  rank 4
    """
    hosts = ["a", "b", "c", "a", "c"]
    topologies = [Topology.from_hosts(hosts, rank) for rank in range(5)]
    assert [topology.local_rank for topology in topologies] == [0, 0, 0, 1, 1]
    assert [topology.local_size for topology in topologies] == [2, 1, 2, 2, 2]
    assert [topology.cross_rank for topology in topologies] == [0, 1, 2, 0, 1]
    assert [topology.cross_size for topology in topologies] == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(("hosts", "homogeneous"), [("aabb", True), ("abab", True), ("aab", False)])
def test_hosts_with_equally_many_ranks_are_homogeneous(hosts: str, homogeneous: bool) -> None:
    assert Topology.from_hosts(list(hosts), 0).is_homogeneous is homogeneous
