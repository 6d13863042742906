"""Files of ours on disks that may be full."""
