"""Shows what a run stored and what the certificate says; it computes nothing that was not stored.

`page.write_report` builds the page of a run (needs jinja2), `bound_table` prints the
bounds; each is imported by its path, so that neither needs what the other needs.
"""
