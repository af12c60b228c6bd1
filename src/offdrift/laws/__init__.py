"""Laws that every row of the method table passes, and that `offdrift methods FILE.py:NAME --check` holds others to."""
