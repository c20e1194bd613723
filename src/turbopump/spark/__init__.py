"""The data pipeline on Spark: source, sink, consumer and ready-made pipelines."""
