"""What a server process does for itself."""

from __future__ import annotations

import platform

from turbopump.cli.life_cycle import keep_freed_memory


def test_freed_memory_is_kept_where_the_c_library_can() -> None:
    is_gnu = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() == is_gnu
