"""A replay gives the same bytes whatever kernels a processor chooses and whatever its last digits are."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from replayed_rows import digest, replayed

SYSTEMS = ("lru", "flashmoe", "moe_infinity", "specprefetch", "ssd_llama", "edge0", "bigmomo")
PROCESSORS = {
    "old": {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR", "OPENBLAS_CORETYPE": "Nehalem"},
    "haswell": {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR", "OPENBLAS_CORETYPE": "Haswell"},
}
LIBM = "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F,-AVX2_Usable,-FMA_Usable"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A home of its own for the tests and the processes they start; no plugins from outside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEBENCH_PLUGINS", "")
        patch.setenv("MOEBENCH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def here(home):
    """Hashes by system of the rows as this process replays them."""
    return {name: digest(replayed(name)) for name in SYSTEMS}


def elsewhere(**environment: str) -> dict[str, str]:
    """Hashes by system of rows that were replayed in a process with this environment."""
    command = [sys.executable, str(Path(__file__).with_name("replayed_rows.py")), *SYSTEMS]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="these variables switch kernels of x86-64 processors")
def test_rows_are_the_same_bytes_on_older_processors(here):
    assert elsewhere(**PROCESSORS["old"], GLIBC_TUNABLES=LIBM) == here
    assert elsewhere(**PROCESSORS["haswell"]) == here


def off_by_one(function, towards):
    """The function with its results moved by one unit in the last place, as another library may give them."""
    return lambda *args: np.nextafter(function(*args), towards)


@pytest.mark.parametrize("towards", [-math.inf, math.inf])
def test_the_last_digit_of_a_function_reaches_no_row(monkeypatch, here, towards):
    for module, names in ((math, ("exp", "log")), (np, ("exp", "log2", "log"))):
        for name in names:
            monkeypatch.setattr(module, name, off_by_one(getattr(module, name), towards))
    assert {name: digest(replayed(name)) for name in SYSTEMS} == here


def test_the_hash_would_see_a_drive_that_is_a_millionth_faster(monkeypatch, here):
    exp = math.exp
    monkeypatch.setattr(math, "exp", lambda x: exp(x) * (1 + 1e-6))  # what the read curve gives
    assert digest(replayed("lru")) != here["lru"]
