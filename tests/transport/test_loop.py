"""The loop, with real pipes, sockets, signals and time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from choros.transport.loop import Loop, SignalPipe, wake_only


@pytest.fixture
def loop():
    loop = Loop(poll_seconds=0.02)
    yield loop
    loop.close()


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as reads, os.fdopen(writer, "wb", 0) as writes:
        yield reads, writes


def never():
    return False


def test_a_readable_descriptor_is_called(loop, pipe):
    reads, writes = pipe
    got = []
    loop.on_readable(reads, lambda: got.append(reads.read(100)))
    assert not loop.run(never, seconds=0.05)
    assert got == []
    writes.write(b"hello")
    assert loop.run(lambda: bool(got), seconds=5)
    assert got == [b"hello"]


def test_the_end_of_a_pipe_is_readable(loop, pipe):
    reads, writes = pipe
    got = []

    def read():
        got.append(reads.read(100))
        loop.forget(reads)

    loop.on_readable(reads, read)
    writes.close()
    assert loop.run(lambda: bool(got), seconds=5)
    assert not loop.run(never, seconds=0.05)
    assert got == [b""]


def test_a_writable_socket_is_called(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        left = [b"x" * 65536] * 40

        def write():
            if not left:
                loop.forget(ours)
                theirs.shutdown(socket.SHUT_WR)
                return
            sent = ours.send(left[0])
            left[0] = left[0][sent:]
            if not left[0]:
                left.pop(0)

        received = 0

        def read():
            nonlocal received
            received += len(theirs.recv(65536))

        loop.on_writable(ours, write)
        loop.on_readable(theirs, read)
        assert loop.run(lambda: received == 40 * 65536, seconds=10)


def test_a_descriptor_that_a_callback_forgets_is_not_called(loop):
    pairs = [os.pipe() for _ in range(2)]
    called = []
    for _, writer in pairs:
        os.write(writer, b"x")

    def forget_all():
        called.append(1)
        for reader, _ in pairs:
            loop.forget(reader)

    for reader, _ in pairs:
        loop.on_readable(reader, forget_all)
    loop.run(never, seconds=0.05)
    assert called == [1]
    for descriptor in (end for pair in pairs for end in pair):
        os.close(descriptor)


def test_the_condition_is_checked_first(loop):
    loop.set_deadline("never", 0.0, lambda: pytest.fail("ran"))
    assert loop.run(lambda: True, seconds=0.0)


def test_run_ends_at_its_time_limit(loop):
    began = time.monotonic()
    assert not loop.run(never, seconds=0.1)
    assert 0.1 <= time.monotonic() - began < 25


def test_a_condition_without_a_descriptor_is_polled(loop):
    over = threading.Event()
    timer = threading.Timer(0.1, over.set)
    timer.start()
    assert loop.run(over.is_set, seconds=5)
    timer.join()


def test_deadlines_expire_in_order_and_once(loop):
    called = []
    for name, seconds in (("b", 0.1), ("a", 0.05), ("c", 0.15)):
        loop.set_deadline(name, seconds, lambda name=name: called.append(name))
    loop.run(never, seconds=0.3)
    assert called == ["a", "b", "c"]


def test_a_deadline_ends_the_wait_long_before_the_next_poll():
    loop, called = Loop(poll_seconds=30), []
    loop.set_deadline("soon", 0.05, lambda: called.append("soon"))
    began = time.monotonic()
    assert loop.run(lambda: bool(called))
    assert time.monotonic() - began < 5
    loop.close()


def test_deadlines_are_cancelled_and_replaced(loop):
    called = []
    loop.set_deadline("a", 0.02, lambda: called.append("first"))
    loop.set_deadline("a", 0.05, lambda: called.append("second"))
    loop.set_deadline("b", 0.05, lambda: called.append("cancelled"))
    loop.cancel("b", "unknown")
    loop.run(never, seconds=0.15)
    assert called == ["second"]
    loop.set_deadline("a", 0.02, lambda: called.append("all"))
    loop.cancel_all()
    loop.run(never, seconds=0.1)
    assert called == ["second"]


def test_an_action_may_cancel_and_replace_deadlines_due_at_the_same_time(loop):
    called = []

    def first():
        called.append("first")
        loop.cancel("cancelled")
        loop.set_deadline("replaced", 0.05, lambda: called.append("later"))

    loop.set_deadline("first", 0.0, first)
    loop.set_deadline("cancelled", 0.0, lambda: called.append("cancelled"))
    loop.set_deadline("replaced", 0.0, lambda: called.append("at once"))
    loop.run(never, seconds=0.15)
    assert called == ["first", "later"]


def test_a_repeated_action_ends_when_cancelled(loop):
    called = []

    def count():
        called.append(1)
        if len(called) == 3:
            loop.cancel("count")

    loop.repeat("count", 0.01, count)
    assert loop.run(lambda: len(called) == 3, seconds=10)
    loop.run(never, seconds=0.05)
    assert len(called) == 3


def test_an_error_of_a_callback_propagates(loop):
    loop.set_deadline("fails", 0.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run(never, seconds=1)


def test_signals_wake_the_loop():
    loop, got = Loop(poll_seconds=30), []
    before = signal.getsignal(signal.SIGUSR1)
    with SignalPipe({signal.SIGUSR1: wake_only, signal.SIGUSR2: wake_only}) as signals:
        loop.on_readable(signals, lambda: got.extend(signals.read()))
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert loop.run(lambda: bool(got), seconds=10)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert loop.run(lambda: len(got) == 2, seconds=10)
        assert signals.read() == []
        timer.join()
    loop.close()
    assert got == [signal.SIGUSR1, signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_handler_runs_immediately_and_its_deadline_applies():
    loop, called = Loop(poll_seconds=30), []
    handler = lambda _number, _frame: loop.set_deadline("from the handler", 0.05, lambda: called.append("due"))  # noqa: E731
    with SignalPipe({signal.SIGUSR1: handler}) as signals:
        loop.on_readable(signals, lambda: called.append(signals.read()))
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert loop.run(lambda: "due" in called, seconds=10)
        timer.join()
    loop.close()
    assert called == [[signal.SIGUSR1], "due"]


def test_no_signal_is_caught_in_another_thread():
    before = signal.getsignal(signal.SIGUSR1)
    seen = []

    def use():
        with SignalPipe({signal.SIGUSR1: wake_only}) as signals:
            seen.extend([signal.getsignal(signal.SIGUSR1), signals.read()])

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [before, []]


def test_the_loop_imports_little():
    """The wrapper of each rank imports the loop, and pays for its imports."""
    check = (
        "import sys; import choros.transport.loop\n"
        "print(*(name for name in sys.modules if name.startswith('choros.')))\n"
        "print(*sys.modules)"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    ours, everything = map(set, map(str.split, done.stdout.splitlines()))
    assert ours == {"choros.transport", "choros.transport.loop"}
    assert not everything & {"numpy", "pickle", "hmac", "ssl", "socket", "logging", "inspect", "subprocess"}
