"""Every number of a profile has a unit and a source, and interpolation stays within what was declared."""

from __future__ import annotations

import copy
import pickle

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench import geometry, hardware
from moebench.hardware import NUMBERS, HardwareError, ReadCurve
from moebench.machine import Machine, detect, environment
from moebench.plugins import load_plugins

SHIPPED = (
    "m4pro",
    "m2_16gb",
    "rtx5090_32gb",
    "rtx5070ti_flashmoe",
    "a5000_24gb",
    "snapdragon_8_elite",
    "snapdragon_8_elite_gen5",
    "snapdragon_8_gen3",
    "rtx5090_ssd_llama",
    "rtx5090_ssd_llama_32gb",
    "snapdragon_8_elite_ufs2",
    "snapdragon_8_elite_sd",
)
OPTIONAL = [name for name, (_, needed) in NUMBERS.items() if needed == "none"]


@pytest.fixture
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    return yaml.safe_load(load_plugins().hardware_path("m4pro").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_load_and_name_things_that_exist(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    registry = load_plugins()
    profile = hardware.load(registry.hardware_path(name))
    assert profile.id == name
    assert profile.model in registry.models
    assert profile.engine in registry.engines
    assert profile.constants().name == profile.stack
    for quantity in profile.quantities.values():
        assert quantity.kind in hardware.SOURCES
        assert len(quantity.text) > 5
    assert profile.unified == ("bandwidth.h2d_gb_s" not in profile.quantities)
    assert pickle.loads(pickle.dumps(profile)) == profile


def leaves(data):
    for name in NUMBERS:
        section, key = name.split(".")
        if key in data[section]:
            yield data[section], key, name
    for stack, body in data["stacks"].items():
        for key in body:
            yield body, key, f"stacks.{stack}.{key}"


@pytest.mark.parametrize("missing", ["unit", "source"])
def test_a_number_without_unit_or_source_is_refused_wherever_it_stands(data, missing):
    count = 0
    for index in range(len(list(leaves(data)))):
        broken = copy.deepcopy(data)
        holder, key, name = list(leaves(broken))[index]
        del holder[key][missing]
        with pytest.raises(HardwareError, match=name):
            hardware.from_dict(broken, "x.yaml")
        count += 1
    assert count >= 12


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (24, "value, unit, source"),
        ({"value": 24, "unit": "GB", "source": "datasheet: x y z"}, "must be in GiB"),
        ({"value": 24, "unit": "GiB", "source": "rumour: x"}, "datasheet, paper, measured, estimate"),
        ({"value": 24, "unit": "GiB", "source": "datasheet:"}, "datasheet, paper, measured, estimate"),
        ({"value": "24", "unit": "GiB", "source": "datasheet: x"}, "must be a number"),
        ({"value": -1, "unit": "GiB", "source": "datasheet: x"}, "at least 0"),
        ({"value": float("nan"), "unit": "GiB", "source": "datasheet: x"}, "must be a number"),
        ({"value": True, "unit": "GiB", "source": "datasheet: x"}, "must be a number"),
    ],
)
def test_a_bad_number_says_what_is_wrong(data, entry, word):
    data["memory"]["ram_gib"] = entry
    with pytest.raises(HardwareError, match=word):
        hardware.from_dict(data, "x.yaml")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(extra=1),
        lambda d: d.pop("title"),
        lambda d: d["memory"].update(rom_gib=1),
        lambda d: d["memory"].pop("reserve_gib"),
        lambda d: d.update(unified=False),  # a device of its own needs link and device memory
        lambda d: d.update(stack="none"),
        lambda d: d["read_curve"].pop("source"),
        lambda d: d["read_curve"].update(unit="MB/s"),
        lambda d: d["read_curve"]["rows"].pop(),
        lambda d: d["read_curve"]["depths"].reverse(),
    ],
)
def test_an_incomplete_profile_is_one_clear_line(data, spoil):
    spoil(data)
    with pytest.raises(HardwareError) as caught:
        hardware.from_dict(data, "x.yaml")
    assert str(caught.value).startswith("x.yaml")
    assert "\n" not in str(caught.value)


axes = st.lists(st.integers(1, 10**5), min_size=1, max_size=4, unique=True).map(
    lambda xs: tuple(float(x) for x in sorted(xs))
)


@st.composite
def curves(draw):
    sizes, depths = draw(axes), draw(axes)
    rates = st.floats(0.001, 20)
    rows = tuple(tuple(draw(rates) for _ in depths) for _ in sizes)
    return ReadCurve(sizes, depths, rows, "measured", "made up")


@settings(max_examples=80, deadline=None)
@given(curves(), st.floats(1, 1e9), st.floats(0.5, 1e6), st.floats(0.5, 1e6))
def test_reads_never_get_slower_with_depth_and_stay_within_the_curve(curve, nbytes, one, other):
    shallow, deep = (curve.gb_s(nbytes, depth) for depth in sorted((one, other)))
    flat = [rate for row in curve.rows for rate in row]
    assert shallow <= deep * (1 + 1e-9)
    assert min(flat) * (1 - 1e-9) <= shallow
    assert deep <= max(flat) * (1 + 1e-9)


def test_interpolation_meets_the_points_and_is_logarithmic_between():
    curve = ReadCurve((64.0, 256.0), (1.0, 4.0), ((1.0, 4.0), (4.0, 16.0)), "measured", "made up")
    assert curve.gb_s(64 * 1024, 1) == pytest.approx(1.0)
    assert curve.gb_s(256 * 1024, 4) == pytest.approx(16.0)
    assert curve.gb_s(128 * 1024, 1) == pytest.approx(2.0)
    assert curve.gb_s(128 * 1024, 2) == pytest.approx(4.0)


def test_latency_is_depth_over_throughput(data):
    profile = hardware.from_dict(data, "x")
    assert profile.read_latency_s(10**6, 4) == pytest.approx(4 * 10**6 / profile.read_gb_s(10**6, 4) / 1e9)


def test_numbers_have_short_names_and_unknown_ones_are_errors(data):
    profile = hardware.from_dict(data, "x")
    assert profile.ram_gib == profile.number("memory.ram_gib") == 24
    with pytest.raises(HardwareError, match="h2d_gb_s"):
        profile.number("bandwidth.h2d_gb_s")
    with pytest.raises(AttributeError):
        profile.nonsense
    with pytest.raises(HardwareError, match="mlx_python"):
        profile.constants("cuda")


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_number_that_not_every_machine_gives_is_refused_only_when_asked_for(data, name):
    section, key = name.split(".")
    unit = NUMBERS[name][0]
    data[section].pop(key, None)
    without = hardware.from_dict(data, "x")
    for ask in (lambda: without.number(name), lambda: getattr(without, key)):
        with pytest.raises(HardwareError, match=f"declares no {name}.*in {unit}") as caught:
            ask()
        assert "\n" not in str(caught.value)
    data[section][key] = {"value": 3, "unit": unit, "source": "estimate: for a test"}
    assert getattr(hardware.from_dict(data, "x"), key) == 3
    data[section][key]["unit"] = "furlongs"
    with pytest.raises(HardwareError, match=f"must be in {unit}"):
        hardware.from_dict(data, "x")


def test_machines_with_on_chip_memory_say_how_it_is_filled():
    registry = load_plugins()
    stages = {"memory.on_chip_mib", "bandwidth.on_chip_gb_s", "storage.map_us"}
    profiles = [hardware.load(registry.hardware_path(name)) for name in SHIPPED]
    having = [profile for profile in profiles if stages & set(profile.quantities)]
    assert having
    for profile in having:
        assert stages <= set(profile.quantities)
        assert profile.on_chip_gb_s <= profile.device_gb_s  # what it is filled from


def test_an_unknown_number_lists_the_known_ones(data):
    with pytest.raises(HardwareError, match=r"'compute\.fp8'.*compute\.int4_tflops"):
        hardware.from_dict(data, "x").number("compute.fp8")


def test_constants_of_another_machine_are_marked(data):
    transferred = hardware.from_dict(data, "x").constants("mlx_python").transferred
    assert transferred == {"layer_floor_us": "m2_16gb"}


def test_a_profile_matches_its_machine_only(data):
    profile = hardware.from_dict(data, "x")
    assert profile.matches(Machine("Apple M4 Pro", "", 24.0))
    assert not profile.matches(Machine("Apple M4 Pro", "", 48.0))
    assert not profile.matches(Machine("Apple M2", "", 24.0))
    data["match"] = None
    assert not hardware.from_dict(data, "x").matches(Machine("Apple M4 Pro", "", 24.0))


def test_this_machine_is_described_without_names():
    import getpass
    import platform

    machine, text = detect(), str(environment())
    assert machine.cpu
    assert machine.ram_gib > 0.1
    assert platform.python_version() in text
    for private in (platform.node(), getpass.getuser()):
        assert private not in text.split() or len(private) < 3


def parameters(shape) -> int:
    return shape.keys * shape.expert_parameters + shape.dense_parameters


@pytest.mark.parametrize(
    ("name", "expert_mib", "pack_gib", "drafting_layers"),
    [  # arXiv 2609.18110; a pack holds the dense weights and the drafting layer too, at other bits per weight
        ("kimi-k2.7-code", 23.625, 543.6, 0),
        ("deepseek-v4-flash", 12.75, 145.4, 0),
        ("glm-5.2", 20.25, 401.0, 1),
    ],
)
def test_experts_are_as_large_as_published_and_fill_the_published_pack(name, expert_mib, pack_gib, drafting_layers):
    shape = geometry.load(load_plugins().model_path(name))
    assert shape.expert_bytes == expert_mib * 2**20
    assert shape.slot_bytes == shape.expert_bytes  # whole pages, so an extent wastes nothing
    layers = shape.layers + drafting_layers
    rest = pack_gib * 2**30 - layers * shape.experts * shape.expert_bytes
    assert 4.5 <= rest * 8 / shape.dense_parameters <= 10  # bits that are left for each of the other weights


def test_routed_experts_alone_are_as_large_as_a_published_expert_pack():
    shape = geometry.load(load_plugins().model_path("deepseek-v4-flash"))
    assert shape.routed_bytes == pytest.approx(147.18e9, rel=1e-4)  # lmsys.org/blog/2026-08-29-sglang-ssd-expert-pack


def test_shipped_geometries_give_the_published_sizes():
    registry = load_plugins()
    shape = geometry.load(registry.model_path("qwen3.6-35b-a3b"))
    assert shape.expert_bytes == 1_769_472
    assert shape.routed_bytes == pytest.approx(18.12e9, rel=1e-3)
    assert shape.routed_bytes + shape.dense_bytes == pytest.approx(19.5e9, rel=2e-3)
    ling = geometry.load(registry.model_path("ling-3.0-tiny-8b"))
    assert ling.routed_bytes + ling.dense_bytes == pytest.approx(4_508_697_328, rel=1e-6)
    counts = {"qwen3-30b-a3b": 30_532_122_624, "olmoe-1b-7b": 6_919_161_856, "mixtral-8x7b": 46_702_792_704}
    for name, count in (counts | {"deepseek-v2-lite": 15_706_484_224}).items():
        assert parameters(geometry.load(registry.model_path(name))) == count
    # rounded as published, in billions
    rounded = {"kimi-k2.7-code": 1026, "deepseek-v4-flash": 284, "glm-5.2": 744, "lfm2-24b-a2b": 24}
    for name, billions in (rounded | {"gemma-4-26b-a4b": 25.2, "ernie-4.5-21b-a3b": 21.8}).items():
        found = parameters(geometry.load(registry.model_path(name))) / 1e9
        assert found == pytest.approx(billions, abs=0.5 if isinstance(billions, int) else 0.05)
    assert all(geometry.load(registry.model_path(name)).sources for name in registry.models)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("stack", ["native"], "stack"),
        ("stack", None, "stack"),
        ("title", None, "title"),
        ("stacks", [], "stacks"),
        ("stacks.native", None, "native"),
        ("memory", None, "memory"),
        ("match", "Apple", "match"),
        ("match", {"board": "x"}, "match"),
        ("match.cpu", "(", "match.cpu"),
        ("match.cpu", 5, "match.cpu"),
        ("match.ram_gib", 16, "match.ram_gib"),
        ("match.ram_gib", [16], "match.ram_gib"),
        ("match.ram_gib", ["a", "b"], "match.ram_gib"),
        ("read_curve.depths", ["one"], "read_curve.depths"),
        ("read_curve.sizes_kib", None, "read_curve.sizes_kib"),
        ("read_curve.rows", 3, "read_curve.rows"),
        ("read_curve.rows", [[1, "x"]], "read_curve.rows"),
        ("bandwidth.device_gb_s.value", 0, "bandwidth.device_gb_s"),
        ("bandwidth.dram_gb_s.value", 0, "bandwidth.dram_gb_s"),
        ("storage.write_gb_s.value", 0, "storage.write_gb_s"),
        ("compute.int4_tflops.value", 0, "compute.int4_tflops"),
        ("compute.bf16_tflops.value", "fast", "compute.bf16_tflops"),
    ],
)
def test_a_broken_field_is_one_line_that_names_file_and_field(data, field, value, named, tmp_path):
    *path, last = field.split(".")
    holder = data
    for key in path:
        holder = holder[key]
    holder[last] = value
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(HardwareError) as caught:
        hardware.load(file)
    assert str(file) in str(caught.value)
    assert named in str(caught.value).removeprefix(str(file))
    assert "\n" not in str(caught.value)


def test_a_zero_in_the_read_curve_is_refused(data):
    data["read_curve"]["rows"][0][0] = 0
    with pytest.raises(HardwareError, match=r"read_curve\.rows"):
        hardware.from_dict(data, "test")
