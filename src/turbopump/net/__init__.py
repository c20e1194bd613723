"""Sockets around the wire: connections, servers, routers, pools. Knows commands, not topics.

Read in this order: `network` is what connections run over, `connection` is one of them, `router`
finds the function for a request, `server` takes connections and `pool` makes them. `deadlines`,
`admission`, `serving` and `outbox` are the parts of a connection; `limits` says how large each may
grow.
"""
