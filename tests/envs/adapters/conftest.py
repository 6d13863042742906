"""Let tests, and the worker processes that they start, import the small environments by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
