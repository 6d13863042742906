"""What a job may read and write on the disks of the pool: links in model folders, run folders."""
