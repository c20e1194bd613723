"""Clients: producers and consumers, and the session that those of one process share."""
