"""The catalogue, and specs read from a (here imitated) live card."""

import dataclasses
import sys
import types

import pytest

from cupyq import devices
from cupyq.devices import GIB, MIB
from cupyq.errors import ArgumentError, IllegalConfig, NoDevice, NotInstalled, UnknownDevice

KERNEL_NAMES = [name for name in devices.names() if devices.get(name).runs_kernels]

# Attributes as drivers report them: clocks in kHz, the memory clock that of the rated data rate.
H200 = {
    "MultiProcessorCount": 132,
    "ClockRate": 1980000,
    "MemoryClockRate": 3201000,
    "GlobalMemoryBusWidth": 6144,
    "L2CacheSize": 60 * MIB,
    "MaxSharedMemoryPerMultiprocessor": 233472,
    "MaxSharedMemoryPerBlockOptin": 232448,
    "MaxThreadsPerMultiProcessor": 2048,
    "MaxBlocksPerMultiprocessor": 32,
    "MaxRegistersPerMultiprocessor": 65536,
}
A100 = H200 | {
    "MultiProcessorCount": 108,
    "ClockRate": 1410000,
    "MemoryClockRate": 1593000,
    "GlobalMemoryBusWidth": 5120,
    "L2CacheSize": 40 * MIB,
    "MaxSharedMemoryPerMultiprocessor": 167936,
    "MaxSharedMemoryPerBlockOptin": 166912,
}
RTX_4090 = H200 | {
    "MultiProcessorCount": 128,
    "ClockRate": 2520000,
    "MemoryClockRate": 10501000,
    "GlobalMemoryBusWidth": 384,
    "L2CacheSize": 72 * MIB,
    "MaxSharedMemoryPerMultiprocessor": 102400,
    "MaxSharedMemoryPerBlockOptin": 101376,
    "MaxThreadsPerMultiProcessor": 1536,
    "MaxBlocksPerMultiprocessor": 24,
}


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_listed_fp16_rate_follows_from_the_sms_and_the_clock(name):
    spec = devices.get(name)
    full = spec.sms * spec.limits.tensor_fma * 2 * spec.clock_ghz / 1e3
    expected = full / 2 if "GeForce" in spec.title else full
    tolerance = 0.09 if "clock_ghz" in spec.unsure else 0.013
    assert spec.fp16_tflops == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_int8_is_twice_the_full_fp16_rate(name):
    spec = devices.get(name)
    factor = 4 if "GeForce" in spec.title else 2
    assert spec.int8_tops == pytest.approx(factor * spec.fp16_tflops, rel=0.02)


@pytest.mark.parametrize(
    ("name", "shared", "block", "blocks", "threads"),
    [
        ("t4", 64, 64, 16, 1024),
        ("a100-sxm", 164, 163, 32, 2048),
        ("a10", 100, 99, 16, 1536),
        ("orin-agx-64", 164, 163, 16, 1536),
        ("l4", 100, 99, 24, 1536),
        ("h100-sxm", 228, 227, 32, 2048),
        ("b200", 228, 227, 32, 2048),
        ("rtx-5090", 100, 99, 24, 1536),
    ],
)
def test_limits_of_each_compute_capability(name, shared, block, blocks, threads):
    spec = devices.get(name)
    got = (spec.shared_per_sm, spec.shared_per_block, spec.blocks_per_sm, spec.threads_per_sm, spec.registers_per_sm)
    assert got == (shared * 1024, block * 1024, blocks, threads, 65536)


def test_every_name_is_its_own_key_and_unique():
    assert len(set(devices.names())) == len(devices.names()) == 21
    assert all(devices.get(name).name == name for name in devices.names())


def test_get_forgives_case_and_separators():
    assert devices.get(" RTX_4090 ") is devices.get("rtx 4090") is devices.get("rtx-4090")


@pytest.mark.parametrize(("wrong", "near"), [("a100", "a100-sxm"), ("h100-sxn", "h100-sxm"), ("rtx4090", "rtx-4090")])
def test_unknown_names_come_with_the_nearest(wrong, near):
    with pytest.raises(UnknownDevice, match=near):
        devices.get(wrong)


def test_a_hopeless_name_lists_them_all():
    with pytest.raises(UnknownDevice, match=r"known: t4, .*tpu-v5e"):
        devices.get("")


@pytest.mark.parametrize("name", ["mi300x", "tpu-v5e"])
def test_roofline_only_entries_refuse_kernel_work(name):
    spec = devices.get(name)
    assert "rooflines only" in spec.refusal
    with pytest.raises(IllegalConfig, match="rooflines only"):
        _ = spec.arch
    with pytest.raises(IllegalConfig, match=spec.title):
        spec.require_kernels()


def test_specs_are_frozen_and_name_their_arch():
    spec = devices.get("rtx-5090")
    assert (spec.arch, spec.compute_capability, spec.refusal) == ("sm_120", "12.0", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.sms = 1


def test_tensor_rates_by_dtype():
    spec = devices.get("a100-sxm")
    assert (spec.tensor_tops("bfloat16"), spec.tensor_tops("int8")) == (312.0, 624.0)
    with pytest.raises(ArgumentError, match=r"A100.*fp8"):
        spec.tensor_tops("fp8")
    with pytest.raises(ArgumentError, match="float64"):
        spec.tensor_tops("float64")


def test_fields_from_secondary_sources_are_marked():
    assert devices.get("l40s").unsure == ("l2_bytes",)
    assert devices.get("h100-pcie").unsure == ("clock_ghz",)
    assert devices.get("a10").unsure == ()


def test_a_locked_clock_scales_tensor_rates_only():
    base = devices.get("a10").with_clock(0.885)
    assert base.fp16_tflops == pytest.approx(125 * 0.885 / 1.695)
    assert (base.dram_gbps, base.fp8_tflops) == (600.0, None)
    with pytest.raises(ArgumentError, match="clock_ghz"):
        base.with_clock(0)


def test_identity_ignores_the_name_and_sees_a_slice():
    spec = devices.get("a100-sxm")
    assert dataclasses.replace(spec, name="other", title="other").identity == spec.identity
    assert dataclasses.replace(spec, sms=42).identity != spec.identity


def test_a_compute_capability_newer_than_the_table_gets_the_nearest_older_limits():
    assert devices.limits_of((12, 1)) == devices.LIMITS[(12, 0)]
    with pytest.raises(UnknownDevice, match=r"6\.1"):
        devices.limits_of((6, 1))


def test_a_card_older_than_any_kernel_has_a_spec_and_says_why_it_runs_none():
    spec = spec_of((7, 0), {**H200, "MultiProcessorCount": 80}, 16, "Tesla V100")
    assert "need 7.5 or newer" in spec.refusal
    assert spec.fp16_tflops > 0


@pytest.mark.parametrize(("missing", "field"), [("MemoryClockRate", "dram_gbps"), ("ClockRate", "clock_ghz")])
def test_a_clock_that_the_driver_hides_is_guessed_and_said_to_be(missing, field):
    attributes = {**H200, "MultiProcessorCount": 48, missing: 0}
    spec = spec_of((12, 1), attributes, 120, "NVIDIA GB10")
    assert getattr(spec, field) > 0
    assert spec.unsure == (field,)


def spec_of(cc, attributes, memory_gib, title="NVIDIA Test"):
    return devices.from_attributes(cc, attributes, int(memory_gib * GIB), title, 0)


def test_a_live_h200_is_known_by_what_it_is():
    spec = spec_of((9, 0), H200, 139.8)
    assert (spec.name, spec.live, spec.ordinal) == ("h200-sxm", True, 0)
    assert spec.dram_gbps == pytest.approx(2 * 3.201e9 * 6144 / 8 / 1e9)
    assert spec.fp16_tflops == pytest.approx(132 * 2048 * 2 * 1.98 / 1e3)
    assert spec.fp8_tflops == pytest.approx(2 * spec.fp16_tflops)


def test_bandwidth_tells_the_two_a100_80gb_apart():
    assert spec_of((8, 0), A100, 79.2).name == "a100-sxm"
    assert spec_of((8, 0), A100 | {"MemoryClockRate": 1512000}, 79.2).name == "a100-pcie"
    assert spec_of((8, 0), A100 | {"MemoryClockRate": 1215000}, 39.4).name == "a100-40gb"


def test_a_mig_slice_is_not_taken_for_the_whole_card():
    spec = spec_of((8, 0), A100 | {"MultiProcessorCount": 42}, 19.6, title="NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert spec.name == "nvidia-a100-sxm4-80gb-mig-3g-40gb"
    assert spec.fp16_tflops == pytest.approx(42 * 1024 * 2 * 1.41 / 1e3)


def test_geforce_halves_fp32_accumulation_but_not_int8():
    spec = spec_of((8, 9), RTX_4090, 23.6)
    assert spec.name == "rtx-4090"
    assert spec.fp16_tflops == pytest.approx(165.2, rel=1e-3)
    assert (spec.int8_tops / spec.fp16_tflops, spec.fp8_tflops / spec.fp16_tflops) == pytest.approx((4, 2))
    unknown = spec_of((8, 9), RTX_4090 | {"MultiProcessorCount": 76}, 15.6, title="NVIDIA GeForce RTX 4080")
    assert unknown.fp16_tflops == pytest.approx(76 * 256 * 2 * 2.52 / 1e3)


def test_a_driver_that_hides_the_clocks_leaves_the_catalogue_s():
    hidden = {key: value for key, value in A100.items() if "Clock" not in key}
    spec = spec_of((8, 0), hidden, 39.4)
    assert (spec.name, spec.clock_ghz, spec.dram_gbps) == ("a100-40gb", 1.41, 1555.0)
    part = spec_of((8, 0), hidden | {"MultiProcessorCount": 13}, 39.4, "NVIDIA A100 MIG 1g")  # not in the catalogue
    assert (part.clock_ghz > 0, part.dram_gbps > 0, part.unsure) == (True, True, ("clock_ghz", "dram_gbps"))


class FakeRuntime:
    def __init__(self, count, error=None):
        self.count, self.error = count, error

    def getDeviceCount(self):
        if self.error:
            raise self.error
        return self.count

    def getDevice(self):
        return self.count - 1

    def getDeviceProperties(self, ordinal):
        return {"name": b"NVIDIA H200", "totalGlobalMem": int(139.8 * GIB), "major": 9, "minor": 0}


class FakeDevice:
    attributes = H200

    def __init__(self, ordinal):
        self.id = ordinal


@pytest.fixture
def fake_cupy(monkeypatch):
    def install(runtime):
        module = types.ModuleType("cupy")
        module.cuda = types.SimpleNamespace(runtime=runtime, Device=FakeDevice)
        monkeypatch.setitem(sys.modules, "cupy", module)

    devices._read_live.cache_clear()
    yield install
    devices._read_live.cache_clear()


def test_live_reads_the_card_of_an_ordinal(fake_cupy):
    fake_cupy(FakeRuntime(2))
    spec = devices.live(1)
    assert (spec.name, spec.title, spec.ordinal, spec.cc) == ("h200-sxm", "NVIDIA H200", 1, (9, 0))
    assert devices.live(1) is spec
    assert devices.live_count() == 2
    with pytest.raises(NoDevice, match="ordinal is 2"):
        devices.live(2)


def test_resolve_takes_whatever_names_a_device(fake_cupy):
    fake_cupy(FakeRuntime(2))
    spec = devices.get("l4")
    assert devices.resolve(spec) is spec
    assert devices.resolve("l4") is spec
    assert [devices.resolve(d).ordinal for d in ("cuda:1", "cuda", 0, None)] == [1, 0, 0, 1]


def test_no_driver_is_no_device(fake_cupy):
    fake_cupy(FakeRuntime(0, RuntimeError("cudaErrorInsufficientDriver")))
    assert devices.live_count() == 0
    with pytest.raises(NoDevice, match="InsufficientDriver"):
        devices.live()


def test_no_cupy_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert devices.live_count() == 0
    with pytest.raises(NotInstalled, match="cupyq\\[cuda13\\]"):
        devices.live()
    with pytest.raises(NotInstalled):
        devices.resolve()
