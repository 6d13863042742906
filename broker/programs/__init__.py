"""Programs of the host: nats-server, systemd, and what a process is told at its start."""
