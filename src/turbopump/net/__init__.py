"""Sockets around the wire: connections, servers, routers, pools. Knows commands, not topics."""
