import pytest

from choros.bench.cases import parse_sizes
from choros.errors import ConfigError
from choros.wording import bytes_text


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("7", (7,)),
        ("4KiB", (4096,)),
        ("4kib, 1 MiB", (4096, 1 << 20)),
        ("1MiB..256MiB", (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)),
        ("1MiB..3MiB", (1 << 20, 3 << 20)),
        ("4B,4B..4B", (4,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "4KB", "x", "1MiB,", "-4", "0", "1.5MiB", "1MiB..", "..1MiB"])
def test_the_error_for_an_invalid_size_shows_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="Write sizes like 4KiB"):
        parse_sizes(text)


def test_an_empty_range_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the range is empty"):
        parse_sizes("2MiB..1MiB")


@pytest.mark.parametrize("size", [1, 4096, 1 << 20, 3 << 30])
def test_formatted_sizes_can_be_parsed(size: int) -> None:
    assert parse_sizes(bytes_text(size)) == (size,)
