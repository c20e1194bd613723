"""Reading topics: options, positions, plans, and the pulls of a task."""
