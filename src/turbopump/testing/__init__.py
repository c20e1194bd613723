"""What tests need to run hours of a cluster in milliseconds: virtual time, memory network."""
