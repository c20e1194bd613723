"""What touches every byte of every message: frames, headers, records, properties, hashes.

There are two versions with the same functions and types. `turbopump.core.reference` is plain
Python and defines what is right; `turbopump.core.compiled` is built from Cython where a C compiler
is available, and must equal it. ``TURBOPUMP_CORE`` chooses one: ``plain`` or ``compiled``; without
it, the compiled one runs if it has been built. Neither knows sockets, files or clocks, and neither
trusts its input: every length is checked before it is used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from turbopump.core import reference
from turbopump.errors import InvalidArgument

if TYPE_CHECKING:
    from turbopump.core.reference import *  # noqa: F403 - the names of either version
else:
    CORE = os.environ.get("TURBOPUMP_CORE", "")
    if CORE not in {"", "plain", "compiled"}:
        raise InvalidArgument(f"TURBOPUMP_CORE must be plain or compiled, got {CORE!r}")
    chosen = reference
    if CORE != "plain":
        try:
            import turbopump.core.compiled as chosen
        except ImportError as error:
            if CORE == "compiled":
                raise ImportError(
                    "TURBOPUMP_CORE=compiled, but the compiled core cannot be loaded; install a C"
                    f" compiler and Python's headers, and install turbopump again: {error}"
                ) from error
    globals().update({name: getattr(chosen, name) for name in reference.__all__})

__all__ = reference.__all__
