"""Writing rows to topics: what a row may have, how it is sent, how duplicates are told apart."""
