"""Epochs of process sets."""

from choros.comm import ProcessSet
from choros.comm.membership import Membership


def test_every_registration_is_an_epoch() -> None:
    process_set = ProcessSet([1, 0])
    assert process_set.membership is None
    for epoch in range(3):
        process_set.register(1, [0, 1], None)
        assert process_set.membership == Membership(epoch, (0, 1))
        process_set.unregister()
        assert process_set.membership == Membership(epoch, (0, 1))
