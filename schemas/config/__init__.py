"""The configuration of a job: one section per part of the system, and its parser."""
