import sys

import pytest

from choros.errors import ConfigError
from choros.launch.plan.environment import MEMORY, allocator_settings
from launch.launched import run


def nowhere(library: str) -> None:
    return None


def test_glibc_keeps_its_pages_unless_the_user_has_set_it():
    assert allocator_settings({}, "linux") == MEMORY
    assert allocator_settings({"MALLOC_ARENA_MAX": "4"}, "linux") == {}
    assert allocator_settings({}, "darwin") == {}


def test_another_allocator_is_preloaded_after_the_users_libraries():
    environ = {"CHOROS_ALLOCATOR": "jemalloc", "LD_PRELOAD": "/lib/own.so", "MALLOC_CONF": "stats_print:true"}
    settings = allocator_settings(environ, "linux", "/lib/lib{}.so.2".format)
    assert settings == {"LD_PRELOAD": "/lib/own.so /lib/libjemalloc.so.2"}


def test_a_missing_allocator_is_an_error_that_says_how_to_install_it():
    with pytest.raises(ConfigError, match="apt install libjemalloc2"):
        allocator_settings({"CHOROS_ALLOCATOR": "jemalloc"}, "linux", nowhere)
    with pytest.raises(ConfigError, match="CHOROS_ALLOCATOR='mine' is not one of glibc, jemalloc"):
        allocator_settings({"CHOROS_ALLOCATOR": "mine"}, "linux", nowhere)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has these allocators")
def test_ranks_do_not_start_without_the_requested_allocator():
    ended = run("-np", "2", "--env", "CHOROS_ALLOCATOR=mine", sys.executable, "-c", "print('ran')")
    assert ended.code != 0
    assert "CHOROS_ALLOCATOR='mine' is not one of" in ended.err
    assert "ran" not in ended.out
