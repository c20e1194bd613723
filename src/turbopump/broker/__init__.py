"""The broker: accepts messages, stores them, and delivers them to consumers.

`config` and `config_keys` define its settings. `topics`, `groups`, `offsets`, `clients` and
`queue_locks` hold its state. `handlers` serves the requests of clients, `admin` those of operators.
"""
