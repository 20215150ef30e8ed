"""Where ranks listen."""

import pytest

from choros.transport.address import (
    LOOPBACK,
    Place,
    address_towards,
    choose_address,
    is_loopback,
    outward_address,
    this_host,
)

ADDRESSES = {
    "one host": ([Place("a", "10.0.0.1"), Place("a", "10.0.0.1")], [LOOPBACK, LOOPBACK]),
    "two hosts": ([Place("a", "10.0.0.1"), Place("b", "10.0.0.2")], ["10.0.0.1", "10.0.0.2"]),
    "IPv6": ([Place("a", "fd00::1"), Place("b", "fd00::2")], ["fd00::1", "fd00::2"]),
    "a host whose own name is loopback": (
        [Place("a", "127.0.1.1"), Place("a", "127.0.0.1"), Place("b", "10.0.0.2")],
        [None, None, "10.0.0.2"],
    ),
}


@pytest.mark.parametrize(("places", "chosen"), ADDRESSES.values(), ids=ADDRESSES)
def test_address_is_that_which_others_reach(places: list[Place], chosen: list[str | None]) -> None:
    assert [choose_address(places, rank) for rank in range(len(places))] == chosen


def test_this_host_has_one_name_and_an_address_of_its_own() -> None:
    assert this_host() == this_host()
    assert address_towards(outward_address()) == outward_address()
    assert is_loopback(address_towards(LOOPBACK))
