"""Every hook is called in a run, with the arguments that it documents: one plugin that implements all of them."""

from __future__ import annotations

import inspect
import json
import sys

import numpy as np
import pytest
from harness_fixtures import MINI, SHORT, install_plugin

import moebench
from moebench import hookspecs
from moebench.cli import main
from moebench.engine.view import RecordingView, View
from moebench.geometry import Geometry
from moebench.hookcheck import ARGUMENTS
from moebench.step import PHASES, Routing, Step

SOURCE = """
from pathlib import Path
import numpy as np
from moebench.draft import Acceptance, chain
from moebench.hookcheck import ARGUMENTS, REGISTRY_HOOKS
from moebench.hookspecs import hookimpl
from moebench.systemspec import Equipment, Handling, SystemSpec

CALLS = []

def answer(name, values):
    view, point = values.get("view"), values.get("point")
    if name == "prefetch" and isinstance(point, int):  # it is on its way when the next layer's demand is known
        return (point + 1) % view.geometry.layers * view.geometry.experts + np.arange(view.geometry.experts)
    if name == "draft":
        return chain([5, 6])
    if name == "relayout" and view.resident([0, 1]).all():
        return 0, 1
    return {"report": {"calls": len(CALLS)}, "predicted": {}}.get(name)

class Every:
    pass

for name, given in ARGUMENTS.items():
    if name not in REGISTRY_HOOKS:
        scope = {"CALLS": CALLS, "answer": answer}
        inside = ", ".join(f"{word}={word}" for word in given)
        exec(f"def {name}({', '.join(('self', *given))}):\\n"
             f"    CALLS.append(({name!r}, dict({inside})))\\n"
             f"    return answer({name!r}, dict({inside}))", scope)
        setattr(Every, name, hookimpl(scope[name]))

def equip(config, target):
    return Equipment(acceptance=Acceptance((0.5, 0.2), 1, "made up"))

def register_one(register, name, **handling):
    register(SystemSpec(name, "T", "s", lambda config, run: Every(), equip=equip,
                        handling=lambda config: Handling(**handling)))

@hookimpl
def register_systems(register):
    CALLS.append(("register_systems", {"register": register}))
    register_one(register, "plain")
    register_one(register, "placing", on_host=True)
    register_one(register, "moving", relocation_bytes=1 << 30)

@hookimpl
def register_models(register):
    CALLS.append(("register_models", {"register": register}))
    register(Path(__file__).with_name("mini.yaml"))

@hookimpl
def register_hardware(register):
    CALLS.append(("register_hardware", {"register": register}))
    register(Path(__file__).with_name("toaster.yaml"))

@hookimpl
def register_io(register):
    CALLS.append(("register_io", {"register": register}))
    register("pigeon", lambda pack: None)
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """What was called: replays on one memory and on two, with writes; a model that drafts; a recording."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("every")
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("MOEBENCH_PLUGINS", "every")
        (folder / "mini.yaml").write_text(json.dumps(MINI))
        (folder / "toaster.yaml").write_text("{}")
        module = install_plugin(folder, "every", SOURCE)
        replay = {"model": "mini", "hw": "m4pro", "quality": "none", **SHORT}
        rows = [
            *moebench.run(system="plain", budget="0.4", **replay),
            *moebench.run(system="placing", budget="0.9", device_budget="0.3", **{**replay, "hw": "rtx5090_32gb"}),
            *moebench.run(system="moving", budget="0.4", **{**replay, "hw": "snapdragon_8_gen3"}),
            *moebench.run(system="plain", model="tinymoe", hw="m4pro", quality="none", warmup_tokens=1,
                          workload={"requests": 1, "new_tokens": 4}),
        ]  # fmt: skip
        assert [row.error for row in rows] == [None] * len(rows)
        record = ["trace", "record", "out=trace.safetensors", "system=plain", "requests=1", "new_tokens=3"]
        assert main(record) == 0
        yield sys.modules[module].CALLS
        del sys.modules[module]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_is_called_with_what_it_documents(calls, name):
    made = [given for hook, given in calls if hook == name]
    assert made, f"no run called {name}: add one to the fixture that does"
    kinds = {"step": Step, "native": Routing, "view": View | RecordingView}
    for given in made:
        assert list(given) == list(inspect.signature(getattr(hookspecs, name)).parameters)
        assert all(isinstance(given[word], kind) for word, kind in kinds.items() if word in given)


def test_a_run_calls_every_kind_of_pass(calls):
    phases = {PHASES[given["step"].phase] for name, given in calls if name == "end_step"}
    assert phases == set(PHASES)


def test_keys_are_of_the_layer_that_demands_them(calls):
    for name, given in calls:
        if name == "acquired":
            keys = np.asarray(given["keys"])
            assert len(given["ready"]) == len(keys)
            assert (np.diff(keys) > 0).all()


def test_a_recorders_view_offers_what_a_runs_view_does():
    view = RecordingView(Geometry(**MINI))
    for name, what in vars(View).items():
        if not name.startswith("_"):
            offered = getattr(view, name)
            if inspect.isfunction(what):
                assert [*inspect.signature(what).parameters][1:] == [*inspect.signature(offered).parameters]
