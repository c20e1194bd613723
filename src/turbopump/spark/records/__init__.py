"""Decoding stored records into Arrow columns: finding records, fields, properties, schema."""
