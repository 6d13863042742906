"""Reinforcement learning of language models as a service.

`tinkermq.clients` submits runs and plays served models, `tinkermq.envs` holds games.
"""

from .schemas.version import VERSION as __version__

__all__ = ["__version__"]
