"""moebench: storage-streamed Mixture-of-Experts systems, measured and modeled in one table."""

__version__ = "0.1.0"
