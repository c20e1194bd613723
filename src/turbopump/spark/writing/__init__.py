"""Writing rows to topics: columns and options, encoding, sending, removing duplicates."""
