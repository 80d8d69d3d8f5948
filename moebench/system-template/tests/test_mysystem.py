"""mysystem keeps the rules of moebench, and its mechanism does what README.md says."""

import subprocess
import sys

import moebench

REPLAY = {
    "hw": "m4pro",
    "model": "olmoe-1b-7b",
    "quality": "none",
    "workload": {"requests": 2, "prompt_tokens": 32, "new_tokens": 64},
}


def mib_per_token(**options):
    """What a modeled run reads from storage for each token."""
    (row,) = moebench.run(system="mysystem", **REPLAY, **options)
    assert row.status == "ok", row.error
    return row.metrics["ssd_mib_per_token"].value


def test_it_passes_the_conformance_suite():
    suite = [sys.executable, "-m", "pytest", "-q", "--pyargs", "moebench.testing", "--system=mysystem"]
    assert subprocess.run(suite, check=False).returncode == 0


def test_the_order_of_layers_saves_reads():
    assert mib_per_token() < mib_per_token(**{"system.order": 0.0})
