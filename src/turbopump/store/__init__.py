"""The durable log: commit log, consume queues and key index. Synchronous, one writer."""
