"""The broker: takes messages, keeps them, and hands them to those who wait.

`config` and `config_keys` say how it behaves. `topics`, `groups`, `offsets`, `clients` and
`queue_locks` are what it knows; the handlers of requests stand beside what they serve.
"""
