"""Playing games with a model that is served."""
