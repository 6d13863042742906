"""Disks, folders and processes of the machine that a process runs on."""
