"""The Tinker API over HTTP, for programs written with its SDK."""
