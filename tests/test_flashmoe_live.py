"""FlashMoE on a model that computes: whatever the nets say and when, the bits are those of everything resident."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import Watch
from flashmoe_fixtures import random_nets, system
from test_live_identity import Lab

from moebench.systems.flashmoe import FlashMoeConfig
from moebench.systems.flashmoe.nets import Nets


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("flashmoe"), "int4")


@pytest.fixture(scope="module")
def resident(lab):
    return lab.run(full=True)


def contrary(nets: Nets) -> Nets:
    """Nets whose scores have the opposite order: what they would keep leaves first."""
    last = nets.experts if nets.kind == "joint" else 1
    weights = nets.weights.copy()
    weights[:, -(nets.hidden + 1) * last :] *= -1
    return Nets(nets.kind, nets.experts, nets.hidden, weights)


@pytest.mark.parametrize("kind", ["joint", "shared"])
@pytest.mark.parametrize(("late", "host", "clock"), [(True, 0, "wall"), (False, 0, "wall"), (True, 6, "virtual")])
@pytest.mark.parametrize("room", [0, 2])  # slots beyond one token's demand, per layer
def test_outputs_are_those_of_everything_resident(lab, resident, kind, late, host, clock, room):
    shape = lab.geometry
    slots = shape.layers * (shape.top_k + room)
    nets = random_nets(kind, shape.layers, shape.experts)
    for chosen in (nets, contrary(nets)):
        plugin, watch = system(FlashMoeConfig(late=late), chosen, shape, slots), Watch()
        tokens, logits = lab.run([plugin, watch], slots, "per_layer", host=host, clock=clock, late=late)
        assert tokens == resident[0]
        assert np.array_equal(logits, resident[1])
        counted = plugin.report()
        assert (counted["policy_seconds"] > 0) == (clock == "wall"), (
            "the modeled machine of the tests waits for nothing"
        )
        assert sum(map(len, plugin.gone)) == counted["evictions"] > 0
        if not host:
            assert counted["evictions"] == sum(r.evictions for r in watch.records)
