"""moebench: storage-streamed Mixture-of-Experts systems, measured and modeled in one table."""

from moebench.api import compare, run
from moebench.results import load_results
from moebench.version import __version__

__all__ = ["__version__", "compare", "load_results", "run"]
