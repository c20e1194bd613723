"""Runs real processes through kills, damage, hostile peers and full disks, and counts messages.

``scripts/torture`` calls it. The accounting does not rely on the product: senders and consumers
append to their own journal files, and the journals are compared at the end.
"""
