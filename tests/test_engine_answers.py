"""What a plugin returns, and what goes wrong inside it, is one line that names hook, pass and layer: a failed row."""

from __future__ import annotations

import re

import numpy as np
import pytest
from harness_fixtures import SHORT, mini, plugin  # noqa: F401 - fixtures

import moebench
from moebench.engine.answers import keys_of, mask_of, routing_of
from moebench.engine.hooks import Hooks
from moebench.errors import PluginError
from moebench.hookspecs import hookimpl
from moebench.step import Routing

HEAD = """
import numpy as np
from moebench.hookspecs import hookimpl
from moebench.step import Routing
from moebench.systemspec import Handling, SystemSpec

@hookimpl
def register_systems(register):
    register(SystemSpec("odd", "Odd", "s", lambda config, run: Odd(), handling=lambda config: Handling()))

class Odd:
    @hookimpl
"""
FAILED = r"hook evict of mb_test_odd\.Odd failed at pass \d+ \(\w+\), layer \d: KeyError: 'x' \(mb_test_odd\.py:\d+\)"
ODD = {  # what it does -> (its hook, what the line says)
    "raises": ("evict(self, need, candidates): return {}['x']", FAILED),
    "raises at the start": ("begin_step(self): 1 / 0", r"hook begin_step .* at pass 0 \(prefill\): ZeroDivisionError"),
    "too few": ("evict(self): return []", "evict held back too much"),
    "floats": ("evict(self, need, candidates): return candidates[:need] * 1.0", "evict returned an array of float"),
    "a mask": ("evict(self, need, candidates): return np.arange(len(candidates)) < need", "whole numbers"),
    "one twice": ("evict(self, need, candidates): return [candidates[0]] * max(2, need)", "distinct"),
    "no key": ("prefetch(self): return [10**6]", "prefetch returned expert 1000000; keys are .* 0 to 63"),
    "below zero": ("prefetch(self): return np.array([-3])", "prefetch returned expert -3"),
    "ragged": ("prefetch(self): return [[1, 2], [3]]", "prefetch returned"),
    "text": ("stage(self): return 'abc'", "stage returned 'abc'"),
    "long mask": ("admit(self, keys): return [True] * (len(keys) + 1)", "admit returned .* a bool for each of the"),
    "keys as mask": ("admit(self, keys): return keys", "admit returned"),
    "no routing": ("route(self, native): return native.experts", "layer 0: route returned .* a Routing"),
    "other experts": ("route(self, native): return Routing(native.experts + 16, None)", "here 0 to 15"),
    "other rows": ("route(self, native): return Routing(native.experts[:1], None)", "for each row of the pass"),
    "a number": ("plan_reads(self): return 3", "plan_reads returned 3"),
    "loses one": ("plan_reads(self, keys): return keys[1:]", "it may only reorder and group"),
    "no choice": ("order_compute(self): return 'x'", "order_compute returned"),
    "not finite": ("report(self): return {'rate': float('nan')}", "report returned .*nan.* finite number"),
    "no such hook": ("evct(self): pass", r"Odd\.evct: unknown hook 'evct' \(did you mean evict\?\)"),
    "no such argument": ("evict(self, victims): pass", "evict takes victims: the hook evict gives tier, need"),
    "no mark": ("admit(self): pass\n    def evict(self): return []", "has the name of a hook and no @hookimpl"),
}


@pytest.mark.parametrize("what", ODD)
def test_it_is_one_line_in_a_failed_row(mini, plugin, what):  # noqa: F811
    source, said = ODD[what]
    plugin("odd", f"{HEAD}    def {source}")
    (row,) = moebench.run(system="odd", model="mini", hw="m4pro", budget="0.4", quality="none", **SHORT)
    assert row.status == "failed"
    assert re.search(said, row.error), row.error
    assert "\n" not in row.error


def test_no_opinion_is_what_a_system_without_hooks_does(mini, plugin):  # noqa: F811
    none = "\n    @hookimpl\n".join(
        f"    def {name}(self): pass"
        for name in ("evict", "route", "prefetch", "cancel", "stage", "admit", "plan_reads", "order_compute", "demote")
    )
    plugin("odd", HEAD + none)
    plugin("bare", HEAD.replace("odd", "bare").replace("    @hookimpl\n", "    pass\n"))
    same = {"model": "mini", "hw": "m4pro", "budget": "0.4", "quality": "none", **SHORT}
    odd, bare = (moebench.run(system=name, **same)[0] for name in ("odd", "bare"))
    assert odd.status == bare.status == "ok", odd.error
    for name in ("hit_rate", "ssd_mib_per_token", "reads_per_token"):
        assert odd.metrics[name].value == bare.metrics[name].value


@pytest.mark.parametrize("answer", [[], np.zeros(0), np.zeros(0, np.int64), (), [3, 1], np.array([3, 1], np.int16)])
def test_keys_in_any_list_or_array_are_taken_in_their_order(answer):
    assert keys_of("evict", answer, 4) == [int(key) for key in answer]


NO_KEYS = (None, 3, {1, 2}, {"a": 1}, np.zeros((2, 0)), [True, False], ["1"], [1.0], [4], [-1])


@pytest.mark.parametrize("answer", NO_KEYS)
def test_what_is_no_list_of_keys_is_refused(answer):
    with pytest.raises(PluginError, match="evict returned"):
        keys_of("evict", answer, 4)


def test_masks_are_bools_of_the_right_length():
    assert mask_of("admit", np.array([True, False]), 2) == mask_of("admit", [True, False], 2) == [True, False]
    for wrong in ([True], [1, 0], [[True, False]], "ab"):
        with pytest.raises(PluginError, match="a bool for each of the 2 keys"):
            mask_of("admit", wrong, 2)


def test_a_routing_may_leave_slots_empty():
    some = Routing(np.array([[0, -1], [3, 1]]), None)
    assert routing_of(some, 2, 4) is some
    for ids in (np.array([[0, -2], [3, 1]]), np.array([[0, 4], [3, 1]]), [[0, 1], [2, 3]], np.zeros((2, 2))):
        with pytest.raises(PluginError, match="route returned experts"):
            routing_of(Routing(ids, None), 2, 4)


class Base:
    @hookimpl(specname="evict")
    def oldest(self, need, candidates):
        return candidates[:need]

    @hookimpl
    def admit(self, keys, view=None):
        return None

    def helper(self, need):
        return need


def test_hooks_may_have_other_names_fewer_arguments_and_helpers_beside_them():
    hooks = Hooks([Base()])
    assert hooks.evict("device", 1, np.arange(3), None).tolist() == [0]
    assert hooks.admit([1], None) is None
    with pytest.raises(PluginError, match="is a class"):
        Hooks([Base])
