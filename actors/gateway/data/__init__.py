"""What pages and REST interface show of a run, read from the broker and the run folder."""
