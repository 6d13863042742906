"""Data of runs for pages and the REST interface, from the broker and the run folder."""
