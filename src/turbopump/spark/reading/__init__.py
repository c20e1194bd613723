"""Reading topics: options, planning on the driver, and the pulls of tasks."""
