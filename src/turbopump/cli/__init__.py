"""The ``turbopump`` command. Importing it costs next to nothing: commands import what they need."""

import os
import sys
from importlib import import_module

_PIPE_CLOSED = 141
"""The exit code of a program whose reader closed the pipe: 128 + SIGPIPE."""

_BAD_INPUT = 2


def main() -> None:
    """Run the command line; ends the process."""
    _replace_closed_streams()
    _require_core()
    from turbopump.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        # Messages hold what terminals and files may not be able to.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="turbopump")
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError) or not _is_flushed():
            _end_unread()
        raise


def _require_core() -> None:
    """Report a core that was asked for and cannot be had as a line, not as a traceback."""
    if os.environ.get("TURBOPUMP_CORE"):
        try:
            import_module("turbopump.core")
        except (ImportError, ValueError) as error:
            sys.stderr.write(f"turbopump: {error}\n")
            sys.exit(_BAD_INPUT)


def _replace_closed_streams() -> None:
    from turbopump.machine.process import open_standard_streams

    open_standard_streams()
    # Python has None instead of a stream that was closed when it started.
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _is_flushed() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return False
    return True


def _end_unread() -> None:
    """Exit silently: the reader has closed the pipe, as `head` does."""
    # What is still in the buffer would fail once more when Python ends.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    sys.exit(_PIPE_CLOSED)
