"""Requests of operators and their tools."""
