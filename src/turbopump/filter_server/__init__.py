"""Filter servers: processes beside a broker that run the code filters of its consumers."""
