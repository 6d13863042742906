"""The APIs that agent programs speak, as canonical messages and back. Pure; no HTTP."""
