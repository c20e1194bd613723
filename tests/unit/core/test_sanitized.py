"""The other tests of the core, with the compiled one built with AddressSanitizer and UBSan.

Input is in memory of exactly its size (see `cores.exact`), and the interpreter's own allocator is
off, so that each object is known to the sanitizer: any access beyond one ends the process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cores import SANITIZED

ROOT = Path(__file__).parents[3]
SEEDS = int(os.environ.get("TURBOPUMP_FUZZ_SEEDS", "3"))
"""Each is another run of all generators; set it for a longer search."""
TIMEOUT_S = 1200


def sanitizer() -> str | None:
    """Return the path of the compiler's AddressSanitizer; None if there is none."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc"))), None)
    if compiler is None:
        return None
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # A name without a directory was not found.
    return found if Path(found).is_absolute() else None


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Build the sanitized core; return the environment to test it in."""
    preloaded = sanitizer()
    if preloaded is None:
        pytest.skip("there is no C compiler with AddressSanitizer (libasan)")
    build = [sys.executable, str(ROOT / "hatch_build.py"), "--sanitize"]
    built = subprocess.run(build, capture_output=True, text=True, cwd=ROOT, check=False)
    if built.returncode:
        pytest.skip(f"the sanitized core cannot be built: {built.stderr.strip()}")
    return {
        **os.environ,
        SANITIZED: built.stdout.strip(),
        "LD_PRELOAD": preloaded,
        # The interpreter keeps what lives until it ends.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        # Everything else runs on the plain core.
        "TURBOPUMP_CORE": "plain",
    }


READ_BEYOND = """
import ctypes, sys
sys.path.insert(0, "tests")
import cores
assert cores.compiled.CORE_NAME == "compiled"
data = cores.exact(b"x" * 100)
ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(data.obj)), 101)
"""


@pytest.mark.long
def test_the_sanitizer_is_in_use(environment: dict[str, str]) -> None:
    assert b"__asan_report_load" in Path(environment[SANITIZED]).read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", READ_BEYOND],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "heap-buffer-overflow" in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_access_beyond_a_buffer(environment: dict[str, str], seed: int) -> None:
    tests = [str(path) for path in Path(__file__).parent.glob("test_*.py")]
    tests = sorted(path for path in tests if path != __file__)
    options = ["--quiet", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--hypothesis-seed={seed}",
         "--hypothesis-profile=fuzz", *tests],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
