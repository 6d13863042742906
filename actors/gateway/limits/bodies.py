"""How large the body of a request may be, by its route."""

MAX_INFERENCE_BYTES = 8 << 20
MAX_PROGRAM_BYTES = 1 << 30
"""Of programs with the key of an episode: beyond the bound of their own endpoints, which say so in
the words of the API that was called, a body is dropped as it comes."""
MAX_CONFIG_BYTES = 1 << 20
MAX_FORM_BYTES = 16 << 10
_CONFIGS = frozenset({"/submit", "/api/v1/jobs", "/api/v1/check"})


def max_body_bytes(path: str) -> int:
    """Return the size of the largest body that is read: conversations may hold images."""
    if path.startswith(("/v1/", "/tinker/")):
        return MAX_INFERENCE_BYTES
    return MAX_CONFIG_BYTES if path in _CONFIGS else MAX_FORM_BYTES
