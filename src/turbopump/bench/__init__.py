"""Measure producing, consuming and latency against a running cluster."""
