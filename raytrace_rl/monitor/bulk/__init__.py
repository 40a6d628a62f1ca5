"""Large runs as columns: spool files to NumPy arrays, and the report over those. Needs NumPy, of the ``report`` extra.

What a span is, `raytrace_rl._decode` alone says, and what a report is, the modules over rows say; here the same answers
are had without a Python object for each span. ``tests/test_bulk_*`` hold the two against each other.
"""
