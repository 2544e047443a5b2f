"""Show what the bridge does: one status document, as metrics, a page, a live table and logs.

The daemon's thread builds the document and hands it over whole; whoever shows it only reads.
"""
