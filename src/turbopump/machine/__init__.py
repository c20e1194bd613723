"""The machine that a server or client runs on: disk, background jobs, clock, chance, process.

Store, broker, name server and client receive a `Machine` and use nothing else of the operating
system. `turbopump.testing` gives them one in memory and in virtual time, with faults.
"""

from turbopump.machine.background import Background, Threads, Worker
from turbopump.machine.files import Files
from turbopump.machine.machine import Machine

__all__ = ["Background", "Files", "Machine", "Threads", "Worker"]
