"""The addresses at which ranks listen."""

import pytest

from choros.transport.address import (
    LOOPBACK,
    Location,
    address_towards,
    is_loopback,
    outward_address,
    own_address,
    this_host,
)

ADDRESSES = {
    "one host": ([Location("a", "10.0.0.1"), Location("a", "10.0.0.1")], [LOOPBACK, LOOPBACK]),
    "two hosts": ([Location("a", "10.0.0.1"), Location("b", "10.0.0.2")], ["10.0.0.1", "10.0.0.2"]),
    "IPv6": ([Location("a", "fd00::1"), Location("b", "fd00::2")], ["fd00::1", "fd00::2"]),
    "a host whose own name is loopback": (
        [Location("a", "127.0.1.1"), Location("a", "127.0.0.1"), Location("b", "10.0.0.2")],
        ["to 10.0.0.2", "to 10.0.0.2", "10.0.0.2"],
    ),
}


@pytest.mark.parametrize(("locations", "chosen"), ADDRESSES.values(), ids=ADDRESSES)
def test_the_chosen_address_can_be_reached_by_other_ranks(
    locations: list[Location], chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("choros.transport.address.address_towards", lambda other: f"to {other}")
    assert [own_address(locations, rank) for rank in range(len(locations))] == chosen


def test_this_host_has_one_name_and_its_own_address() -> None:
    assert this_host() == this_host()
    assert address_towards(outward_address()) == outward_address()
    assert is_loopback(address_towards(LOOPBACK))
