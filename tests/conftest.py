"""For all tests."""

from __future__ import annotations

import signal

# In the background, a shell lets its children ignore Ctrl-C, and theirs too; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
