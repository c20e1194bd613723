"""Stored records as Arrow columns: the schema, and how it is filled, column by column."""
