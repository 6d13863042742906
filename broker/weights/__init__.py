"""The weights of a job as they travel: versions, whole or as differences."""
