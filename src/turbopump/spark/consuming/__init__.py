"""Running the handler of a `SparkConsumer` on executors."""
