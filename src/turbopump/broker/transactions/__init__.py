"""Transactional messages: visible when, and only when, their producer's transaction has committed.

A half message lies in a queue of its own until its producer commits or rolls back (`transactions`);
if the producer does not, it is asked (`checks`). An operation record says that a half message is
dealt with. `half` decides and makes records, `ledger` keeps account; neither knows the store.
"""
