"""The ``turbopump`` command. Importing it costs next to nothing: commands import what they need."""

import os
import sys

_PIPE_CLOSED = 141
"""The exit code of a program whose reader closed the pipe: 128 + SIGPIPE."""


def main() -> None:
    """Run the command line; ends the process."""
    from turbopump.cli.app import app

    _replace_closed_streams()
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
