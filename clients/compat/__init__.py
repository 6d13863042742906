"""OpenTinker's keys and arguments, and what stands for them here."""
