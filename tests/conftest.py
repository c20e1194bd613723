"""For all tests."""

from __future__ import annotations

import signal

# Started in the background, a shell lets its children ignore Ctrl-C, and theirs; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
