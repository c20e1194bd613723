"""The remoting protocol's side of the broker: requests in, answers out.

A handler reads a `Command`, calls the domain (`broker/send.py`, `pull.py`, `retries.py`, …) with a
typed request, and turns the outcome into an answer. The domain knows neither commands nor
connections, so another protocol can be served beside this one.
"""
