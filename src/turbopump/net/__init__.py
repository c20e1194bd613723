"""Connections, servers, routers and pools. Knows commands, not topics.

Read in this order: connections run over a `network`; `request_protocol` is what the two kinds of
them share, `connection` for event loops and `blocking_connection` for threads. `router` finds the
handler of a request, `server` accepts connections, `pool` and `blocking_pool` open them.
`deadlines`, `admission`, `serving`, `inbox` and `outbox` are the parts of a connection; `limits`
says how large each may grow.
"""
