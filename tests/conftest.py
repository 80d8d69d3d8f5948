"""Shared by all tests: no deadlines, no plugins from outside, packs and profiles in a folder of their own."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

from hypothesis import settings

settings.register_profile("moebench", deadline=None)
settings.load_profile("moebench")
os.environ.setdefault("MOEBENCH_PLUGINS", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Under nohup and in the background of a shell signals come ignored, and children would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
if "MOEBENCH_HOME" not in os.environ:
    os.environ["MOEBENCH_HOME"] = made = tempfile.mkdtemp(prefix="moebench-tests-")
    own = os.getpid()
    atexit.register(lambda: os.getpid() == own and shutil.rmtree(made, ignore_errors=True))
