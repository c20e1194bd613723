"""Runs real processes through kills, damage, hostile peers and full disks, and counts messages.

``scripts/torture`` calls it. The accounting does not rely on the product: senders and consumers
append to journal files of their own, and the journals are compared at the end.
"""
