"""The configuration of a job: a section for each part of the system, and how a file becomes one."""
