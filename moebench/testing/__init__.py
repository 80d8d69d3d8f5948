"""The conformance suite: what every system must keep, run with ``pytest --pyargs moebench.testing --system=ID``."""
