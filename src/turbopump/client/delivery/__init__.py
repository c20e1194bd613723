"""The fourth stage: call the listener, act on its answer."""
