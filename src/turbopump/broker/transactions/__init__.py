"""Transactional messages: visible when, and only when, their producer's transaction has committed.

A half message lies in a queue of its own until its producer commits or rolls back (`transactions`);
if the producer does not, it is asked (`checks`). An operation record marks a half message as done.
`half` decides and builds records, `ledger` tracks what is open; neither knows the store.
"""
