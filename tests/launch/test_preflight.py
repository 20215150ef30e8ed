"""The check that remote hosts can be reached."""

import time
from pathlib import Path

import pytest

from choros.errors import HostUnreachable, LaunchError
from choros.launch.driver.output import shown_if_slow
from choros.launch.driver.preflight import ask_all, check_hosts
from choros.launch.plan.hosts import parse_hosts
from choros.launch.plan.job import Ssh


@pytest.fixture
def reach(tmp_path):
    """A replacement of ssh: hosts named ``good…`` accept the login, ``hang…`` do not answer, others refuse it."""
    script = tmp_path / "reach"
    script.write_text(
        '#!/bin/sh\ncase $1 in good*) exit 0;; twin*) printf "n\\nboot\\n7\\n"; exit 0;; hang*) exec sleep 30;; '
        'latin*) printf "refus\\351 $1\\n" >&2; exit 255;; *) echo "no $1" >&2; exit 255;; esac\n'
    )
    script.chmod(0o755)
    return Ssh(command=(str(script),))


def test_all_hosts_accept_the_login(reach):
    check_hosts(parse_hosts("good1,good2"), reach, 10)


def test_two_names_of_one_machine(reach):
    with pytest.raises(HostUnreachable, match=r"twin1 and twin2 are one machine .* hostname n: .*-H twin1:SLOTS"):
        check_hosts(parse_hosts("good,twin1,twin2"), reach, 10)


def test_hosts_that_refuse_are_named(reach):
    with pytest.raises(HostUnreachable, match=r"2 of 3 hosts cannot be reached \(bad1: no bad1; bad2: no bad2\)"):
        check_hosts(parse_hosts("bad1,good,bad2"), reach, 10)


def test_a_refusal_that_is_not_utf_8(reach):
    with pytest.raises(HostUnreachable, match=r"cannot be reached \(latin: refus. latin\)"):
        check_hosts(parse_hosts("latin"), reach, 10)


def test_many_hosts_are_counted(reach):
    with pytest.raises(HostUnreachable, match=r"bad3: no bad3; bad4: no bad4; and 95 more\)"):
        check_hosts(parse_hosts(",".join(f"bad{i}" for i in range(1, 100))), reach, 30)


def test_a_host_that_does_not_answer_is_not_awaited(reach):
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match=r"the host cannot be reached \(hang: no answer within 1 s"):
        check_hosts(parse_hosts("hang"), reach, 1)
    assert time.monotonic() - began < 25


def test_the_error_says_what_to_check(reach):
    with pytest.raises(HostUnreachable, match=f"without a prompt: {reach.command[0]} bad true"):
        check_hosts(parse_hosts("bad"), reach, 10)


def test_no_ssh_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no ssh client is installed on this machine"):
        check_hosts(parse_hosts("a"), Ssh(), 5)


def test_no_such_program():
    with pytest.raises(LaunchError, match="--ssh-command /none: no such program"):
        check_hosts(parse_hosts("a"), Ssh(command=("/none",)), 5)


def test_names_that_do_not_exist(monkeypatch):
    monkeypatch.setattr("choros.launch.driver.preflight._has_address", lambda name: False)
    monkeypatch.setattr("shutil.which", lambda name: Path("/bin") / name)
    with pytest.raises(HostUnreachable, match="no such name"):
        check_hosts(parse_hosts("nohost-1.invalid"), Ssh(), 20)


def test_no_thread_can_be_started(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with shown_if_slow("", 0, print):
        assert ask_all(["a"], str, 10) == ({}, {"a": "can't start new thread"})
