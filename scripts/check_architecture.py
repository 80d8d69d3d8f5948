"""Hold the built wheel to the architecture contract in pyproject.toml.

    python scripts/check_architecture.py [SOURCE]

The source tree maps folders into the package, which import linters do not see; the installed wheel has the package as
users get it. Prints the linter's report; exit code 0 when every contract is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LEFTOVERS = (".*", "build", "results", "reports", "__pycache__", "*.egg-info")


def main(source: Path) -> int:
    """Build ``source`` into a wheel, unpack it in an empty folder and lint it there."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "source"  # a copy, so that leftovers of earlier builds are in no wheel
        shutil.copytree(source, tree, ignore=shutil.ignore_patterns(*LEFTOVERS))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", scratch, str(tree)]
        subprocess.run(wheel, check=True)
        site = Path(scratch) / "site"
        (built,) = Path(scratch).glob("*.whl")
        subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(built)], check=True)
        lint = "import sys; from importlinter.cli import lint_imports as f; sys.exit(f(sys.argv[1], no_cache=True))"
        config = str((source / "pyproject.toml").resolve())
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run([sys.executable, "-c", lint, config], cwd=site, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
