"""A simulator: a cluster under faults, decided by a seed, and checks of the guarantees.

Run it with ``python -m turbopump.testing.simulate``, see docs/guide/simulation.md.
"""
