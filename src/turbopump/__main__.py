"""``python -m turbopump`` is the ``turbopump`` command."""

from turbopump.cli import main

main()
