"""moebench: storage-streamed Mixture-of-Experts systems, measured and modeled in one table."""

from moebench.api import compare, run
from moebench.version import __version__

__all__ = ["__version__", "compare", "run"]
