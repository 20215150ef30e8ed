"""Hosts on the command line and in files."""

import socket

import pytest

from choros.errors import ConfigError
from choros.launch.driver.machine import own_names, run_script
from choros.launch.plan.hosts import Host, parse_hostfile, parse_hosts, ranks_per_host, total_slots


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (Host("a", 1),)),
        ("a:4,b:2", (Host("a", 4), Host("b", 2))),
        (" a:1 , b.example.org:8 ", (Host("a", 1), Host("b.example.org", 8))),
        ("10.0.0.1:2", (Host("10.0.0.1", 2),)),
        ("a:1,b:1,a:2", (Host("a", 3), Host("b", 1))),
    ],
)
def test_hosts(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a:", "a:x", "a:1,,b:1", "a:0", "-oProxyCommand=x", "a b:1", "a;b"])
def test_invalid_hosts(text):
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text)


def test_ipv6_addresses_are_not_cut():
    with pytest.raises(ConfigError, match="takes no IPv6 address, such as fe80::1: give the host a name"):
        parse_hosts("a:2,[fe80::1]:2")


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\na slots=4\nb:2   # short\n\nc\nd slots = 3 max_slots=9\n")
    assert parse_hostfile(file) == (Host("a", 4), Host("b", 2), Host("c", 1), Host("d", 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [("a slots=x\n", "line 1"), ("a\nb c\n", "line 2"), ("# none\n", "no host"), ("a:0\n", "no slots")],
)
def test_invalid_hostfile(tmp_path, content, message):
    file = tmp_path / "hosts"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse_hostfile(file)


def test_hostfile_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("hosts", "size", "counts"),
    [("a:2,b:2", 4, (2, 2)), ("a:2,b:2", 3, (2, 1)), ("a:4,b:2", 3, (3,)), ("a:1,b:2,c:1", 4, (1, 2, 1))],
)
def test_one_host_is_filled_after_the_other(hosts, size, counts):
    assert ranks_per_host(parse_hosts(hosts), size) == counts
    assert sum(counts) == size <= total_slots(parse_hosts(hosts))


def test_this_machine_has_names():
    assert {"localhost", "127.0.0.1", socket.gethostname()} <= own_names()


def test_a_discovery_script_that_does_not_print_utf_8(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text('#!/bin/sh\nprintf "a:2\\n\\351\\n"\nprintf "refus\\351\\n" >&2\nexit ${1:-0}\n')
    script.chmod(0o755)
    assert run_script(str(script)).splitlines() == ["a:2", "\N{REPLACEMENT CHARACTER}"]
    script.write_text(script.read_text().replace("${1:-0}", "3"))
    with pytest.raises(ConfigError, match=r"it ended with exit code 3: refus.$"):
        run_script(str(script))
