"""Logs of each framework: `table` lists them all, `translate` makes rows of the plain schema."""
