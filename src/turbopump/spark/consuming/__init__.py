"""What happens on executors when `SparkConsumer` handles messages."""
