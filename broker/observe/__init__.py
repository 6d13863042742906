"""What is measured of a run: time, spans, metrics, advice, and the trackers that show them."""
