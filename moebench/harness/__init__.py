"""One cell is one run of one system on one machine with one workload; here cells are planned, built and run."""

from moebench.harness.compare import Arm, arms, run_arms
from moebench.harness.run import run

__all__ = ["Arm", "arms", "run", "run_arms"]
