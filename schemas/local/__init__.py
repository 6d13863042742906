"""Disks, folders, processes and experiment trackers of the machine that a process runs on."""
