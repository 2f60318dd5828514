"""The ladder of answers: which row or rule decides, that `explain` says so, and that nothing in a database can hurt."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

import cupyq
from cupyq import bands, db, devices, dispatch, kernels, predictor
from cupyq.errors import ArgumentError, IllegalConfig, NoDevice, NotInstalled, ShapeError, UnknownDevice
from cupyq.kernels import DequantConfig, Problem, W4A16Config, W8A8Config

DEVICE = devices.get("a100-sxm")
PROBLEM = Problem("w4a16", 16, 4096, 4096)
SLOW = W4A16Config(block_m=16, strips=1, warps_n=2, warps_k=2, stages=2)
FAST = W4A16Config(block_m=16, strips=2, warps_n=2, warps_k=2, stages=3)


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """A database of its own for each test, and a dispatcher that remembers nothing."""
    path = tmp_path / "tuning.db"
    monkeypatch.setenv("CUPYQ_DB", str(path))
    dispatch.reset()
    yield path
    dispatch.reset()


def add(file, problem=PROBLEM, config=FAST, device=DEVICE, **fields):
    """Record one verified trial, measured unless said otherwise."""
    values = {"source": "measured", "time_us": 10.0, "verified": True, **fields}
    with db.open(file) as store:
        store.add_trial(device=device, problem=problem, config=config, **values)
    dispatch.reset()


def choose(problem=PROBLEM, device=DEVICE):
    return dispatch.choose(problem, device)


# --- the ladder -------------------------------------------------------------------------------------------------------


def test_exact_measured_row_comes_first(path):
    add(path, config=SLOW, time_us=20.0)
    add(path, config=FAST, time_us=10.0)
    add(path, config=SLOW, time_us=1.0, source="predicted")
    choice = choose()
    assert (choice.rung, choice.path, choice.config, choice.time_us) == (dispatch.EXACT, "fused", FAST, 10.0)
    assert choice.tuned
    assert [r.taken for r in choice.rungs] == [True]


@pytest.mark.parametrize("m", [9, 12, 16])
def test_a_row_serves_its_whole_band(path, m):
    add(path)
    assert choose(PROBLEM.with_m(m)).rung == dispatch.EXACT


@pytest.mark.parametrize("m", [8, 17])
def test_other_bands_are_near_not_exact(path, m):
    add(path)
    choice = choose(PROBLEM.with_m(m))
    assert (choice.rung, choice.config, choice.time_us) == (dispatch.NEAREST, FAST, None)
    assert not choice.tuned
    assert "1 octaves away" in choice.rungs[-1].verdict


def test_the_nearest_shape_is_stated_with_its_distance(path):
    add(path, Problem("w4a16", 16, 8192, 4096), FAST)
    add(path, Problem("w4a16", 16, 16384, 4096), SLOW)
    choice = choose()
    assert choice.config == FAST
    assert choice.rungs[-1].verdict.startswith("N=8192, K=4096, M=16, 1 octaves away: 10 us measured at M=16")


def test_a_shape_too_far_away_says_nothing(path):
    add(path, Problem("w4a16", 16, 4096 * 16, 4096))
    choice = choose()
    assert choice.rung == dispatch.CLOSED_FORM
    assert "4 octaves away, is further than 3 octaves" in choice.rungs[1].verdict


def test_a_near_row_that_is_illegal_here_is_passed_over(path):
    split = replace(FAST, split_k=8)
    add(path, Problem("w4a16", 16, 256, 4096), split)
    add(path, Problem("w4a16", 16, 1024, 512), FAST)
    problem = Problem("w4a16", 16, 256, 512)
    assert kernels.check(split, problem, DEVICE) is not None
    assert choose(problem).config == FAST


@pytest.mark.parametrize("field", ["group_size", "symmetric", "dtype", "scale_dtype", "op"])
def test_rows_of_other_types_and_groups_do_not_count(path, field):
    values = {"group_size": 64, "symmetric": False, "dtype": "bfloat16", "scale_dtype": "bfloat16", "op": "w8a8-int8"}
    add(path, replace(PROBLEM, **{field: values[field]}), W8A8Config() if field == "op" else FAST)
    assert choose().rung == dispatch.CLOSED_FORM


def test_rows_of_another_device_do_not_count(path):
    add(path, device=devices.get("h100-sxm"))
    assert choose().rung == dispatch.CLOSED_FORM


def test_a_stale_row_is_never_exact(path):  # e8
    add(path, source_hash="0123456789abcdef")
    choice = choose()
    assert (choice.rung, choice.config) == (dispatch.STALE, FAST)
    assert not choice.tuned
    assert choice.rungs[0].verdict == "stale: kernel source"
    assert "changed since: kernel source" in choice.rungs[-1].verdict


def test_a_near_measured_row_goes_before_a_stale_one(path):
    add(path, config=SLOW, source_hash="0123456789abcdef")
    add(path, Problem("w4a16", 16, 8192, 4096), FAST)
    assert (choose().rung, choose().config) == (dispatch.NEAREST, FAST)


def test_a_predicted_row_goes_before_the_closed_form(path):
    add(path, source="predicted")
    choice = choose()
    assert (choice.rung, choice.config, choice.time_us) == (dispatch.PREDICTED, FAST, 10.0)
    assert "predicted at M=16" in choice.rungs[-1].verdict
    assert not choice.tuned


def test_unverified_rows_do_not_count(path):  # e1
    add(path, verified=False)
    assert choose().rung == dispatch.CLOSED_FORM


def test_without_rows_the_predictor_weighs_the_paths():
    small, large = choose(PROBLEM.with_m(1)), choose(PROBLEM.with_m(8192))
    assert (small.rung, small.path) == (dispatch.CLOSED_FORM, "fused")
    default = kernels.default(PROBLEM.with_m(1), DEVICE)
    assert 0 < small.time_us <= predictor.predict(default, PROBLEM.with_m(1), DEVICE).time_us
    for choice in (small, large):
        assert kernels.check(choice.config, choice.problem, DEVICE) is None
        assert "predicted at M=" in choice.rungs[-1].verdict
    assert choose(Problem("w4a16", 8192, 4096, 4096), devices.get("h200-sxm")).path == "dequant"


def test_without_a_predictor_the_default_answers(monkeypatch):
    def broken(*args, **kwargs):
        raise ArgumentError("out of order")

    monkeypatch.setattr("cupyq.predictor.predict", broken)
    choice = choose()
    assert (choice.rung, choice.config) == (dispatch.DEFAULT, kernels.default(PROBLEM, DEVICE))
    assert choice.rungs[-2].verdict == "cannot answer: out of order"


def test_the_dequant_path_is_chosen_by_its_row(path):
    add(path, PROBLEM.with_m(4096), DequantConfig(), path="dequant", time_us=100.0)
    add(path, PROBLEM.with_m(4096), W4A16Config(block_m=64), time_us=150.0)
    choice = choose(PROBLEM.with_m(4096))
    assert (choice.path, choice.config) == ("dequant", DequantConfig())


def test_fp16_is_a_yardstick_and_never_chosen(path):
    add(path, config=None, path="fp16", time_us=1.0)
    assert choose().rung == dispatch.CLOSED_FORM
    assert "fp16 (cuBLAS on weights that were never quantized): 1 us measured" in str(
        cupyq.explain(16, PROBLEM, DEVICE)
    )


def test_a_config_that_is_illegal_for_the_real_m_is_not_used(path):
    config = W8A8Config(block_m=8, warp_tokens=8, strips=1, warps_n=1, warps_k=2)
    problem = Problem("w8a8-int8", 2**14, 16 * 2**12, 4096)
    add(path, problem, config)
    huge = problem.with_m(2**31 - 1)
    reason = kernels.check(config, huge, DEVICE)
    assert reason is not None
    choice = choose(huge)
    assert choice.config != config
    assert choice.rungs[0].verdict.endswith(reason)


@pytest.mark.parametrize(("m", "kind"), [(1, "one launch"), (16, "two launches"), (512, "two launches")])
def test_activations_are_quantized_where_that_is_predicted_to_be_faster(m, kind):
    choice = choose(Problem("w8a8-int8", m, 4096, 4096))
    assert choice.config.fused == (kind == "one launch")
    verdict = choice.rungs[-1].verdict
    times = {name: float(t) for name, t in re.findall(r"(one launch|two launches) ([0-9.]+) us", verdict)}
    assert min(times, key=times.get) == kind
    assert len(times) == (1 if m > 16 else 2)


def test_scales_of_blocks_are_looked_up_like_any_other(path):
    problem = Problem("w8a8-fp8-block", 16, 4096, 4096)
    ada = devices.get("l4")
    config = kernels.default(problem, ada)
    add(path, problem, config, ada)
    choice = choose(problem, ada)
    assert (choice.rung, choice.config) == (dispatch.EXACT, config)
    told = str(cupyq.explain(16, problem, "l4"))
    assert "w8a8-fp8-block, K=4096, N=4096" in told
    near = choose(Problem("w8a8-fp8-block", 16, 4096, 5120), ada)
    assert near.rung == dispatch.NEAREST
    assert "--op w8a8-fp8-block" in dispatch.tune_command(problem, ada)


@pytest.mark.parametrize(("name", "op"), [("a100-sxm", "w8a8-fp8"), ("mi300x", "w4a16"), ("mi300x", "w8a8-int8")])
def test_where_no_kernel_runs_cupy_multiplies(name, op):
    choice = choose(Problem(op, 16, 4096, 4096), devices.get(name))
    assert (choice.rung, choice.path, choice.config) == (dispatch.DEFAULT, "dense", None)
    assert "no kernel runs here" in choice.rungs[-1].verdict


def test_int8_sums_that_could_overflow_are_not_left_to_the_kernel():  # a12
    assert choose(Problem("w8a8-int8", 16, 64, 140_000)).path == "dense"


# --- nothing in a database can hurt -----------------------------------------------------------------------------------


def test_no_database_no_warning(recwarn, path):
    assert choose().rung == dispatch.CLOSED_FORM
    assert not recwarn.list
    assert not path.exists()


@pytest.mark.parametrize(
    "content", [b"", b"not a database at all, but long enough to be one" * 40, b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_a_damaged_database_warns_and_answers(path, content):  # e9
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m in (1, 16, 64):
            assert choose(PROBLEM.with_m(m)).rung == dispatch.CLOSED_FORM
    assert len(caught) <= 1
    assert path.read_bytes() == content


def test_a_database_that_turns_bad_later_answers(path):
    add(path)
    assert choose().rung == dispatch.EXACT
    dispatch._choices.clear()
    dispatch._bands.clear()
    store = dispatch.open_store()

    def broken(*args, **kwargs):
        raise db.store.DatabaseError("disk I/O error")

    store.lookup = broken
    with pytest.warns(RuntimeWarning, match="the tuning database cannot be used .disk I/O error."):
        assert choose().rung == dispatch.CLOSED_FORM
    assert "the database cannot be used: disk I/O error" in choose().rungs[0].verdict


@pytest.mark.parametrize(
    "config",
    [
        {"family": "w4a16_mma", "block_m": 16, "from_the_future": 3},
        {"family": "w2a16"},
        {"block_m": 16},
        {},
        {"family": "w4a16_mma", "block_m": "large"},
        {"family": "w4a16_mma", "block_m": None, "strips": []},
    ],
)
def test_a_row_that_cannot_be_read_is_passed_over(path, config):
    add(path, config=config, source_hash="0123456789abcdef")
    choice = choose()
    assert choice.rung == dispatch.CLOSED_FORM
    assert choice.rungs[2].verdict.startswith(("its config cannot be read", "cannot run"))


def test_choices_are_remembered_until_reset(path):
    before = choose()
    assert choose() is before
    with db.open(path) as store:
        store.add_trial(device=DEVICE, problem=PROBLEM, config=FAST, source="measured", time_us=1.0, verified=True)
    assert choose() is before
    dispatch.reset()
    assert choose().rung == dispatch.EXACT


def test_one_answer_serves_a_band(monkeypatch):
    climbed = []
    real = dispatch.ladder.climb_down

    def counting(problem, device):
        climbed.append(problem.m)
        return real(problem, device)

    monkeypatch.setattr("cupyq.ladder.climb_down", counting)
    found = [choose(PROBLEM.with_m(m)) for m in (9, 10, 12, 16)]
    assert climbed == [16]
    assert [c.problem.m for c in found] == [9, 10, 12, 16]
    assert len({c.config for c in found}) == 1


def test_a_band_s_answer_that_is_illegal_for_an_m_is_not_used(path):
    stripes = replace(FAST, block_m=8, stages=2, ctas=3000)
    problem = Problem("w4a16", 128, 4096, 512)
    add(path, problem, stripes)
    assert choose(problem).config == stripes
    low = problem.with_m(65)
    assert kernels.check(stripes, low, DEVICE) is not None
    assert kernels.check(choose(low).config, low, DEVICE) is None
    assert choose(low).rung != dispatch.EXACT


@pytest.mark.parametrize(
    ("config", "row_path"),
    [(DequantConfig(), "fused"), (FAST, "dequant"), (kernels.QuantizeActivationsConfig(), "fused")],
    ids=str,
)
def test_a_row_whose_config_is_of_another_path_is_not_used(path, config, row_path):
    add(path, config=config, path=row_path)
    choice = choose()
    assert choice.rung == dispatch.CLOSED_FORM
    assert choice.rungs[0].verdict.startswith(f"cannot run M=16: path {row_path} has no")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 8192), ("k", 8192), ("m", 32), ("group_size", 64), ("symmetric", False), ("dtype", "bfloat16"),
        ("scale_dtype", "bfloat16"), ("op", "w8a16"),
    ],
)  # fmt: skip
def test_every_field_of_a_problem_is_part_of_its_key(path, field, value):  # e6
    add(path)
    assert choose().rung == dispatch.EXACT
    assert choose(replace(PROBLEM, **{field: value})).rung != dispatch.EXACT


@pytest.mark.parametrize("field", ["sms", "l2_bytes", "shared_per_sm", "memory_bytes", "dram_gbps"])
def test_a_card_of_the_same_name_with_other_parts_is_another_device(path, field):  # e8
    add(path)
    less = replace(DEVICE, **{field: getattr(DEVICE, field) // 2})
    assert less.name == DEVICE.name
    assert choose(PROBLEM, less).rung not in (dispatch.EXACT, dispatch.NEAREST, dispatch.STALE)


def test_distinct_m_leave_little_behind():
    for m in range(1, dispatch._CACHED_CHOICES + 500):
        choose(PROBLEM.with_m(m))
    assert len(dispatch._choices) <= dispatch._CACHED_CHOICES
    assert len(dispatch._bands) == 14  # 1, 2, 4, ... 8192


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Ship one preset for PROBLEM on DEVICE."""
    folder = tmp_path / "presets"
    folder.mkdir()
    monkeypatch.setattr("cupyq.db.presets.folder", lambda: folder)
    preset = db.presets.Writing(DEVICE.name, {})
    of_band = [(kernels.to_dict(SLOW), kernels.source_hash(SLOW, PROBLEM), 9.0)]
    preset.add(PROBLEM, [of_band if band == 16 else [] for band in bands.ends()])
    (folder / f"{DEVICE.name}.jsonl").write_text(preset.text())


def test_a_preset_answers_before_there_is_a_database(path, ship, recwarn):
    choice = choose()
    assert (choice.rung, choice.config, choice.preset, choice.source) == (dispatch.PREDICTED, SLOW, True, "predicted")
    assert choice.rungs[0].verdict == "there is no database"
    assert not path.exists()
    assert not recwarn.list
    lines = str(cupyq.explain(16, PROBLEM, DEVICE)).splitlines()
    assert "from    exact predicted row, 9 us predicted, preset" in lines
    assert any(line.startswith("> 4. exact predicted row: 9 us predicted at M=16, a preset") for line in lines)


def test_a_database_that_appears_is_seen_by_the_next_problem(path, ship):
    assert choose().preset
    with db.open(path) as store:
        other = PROBLEM.with_m(64)
        fields = {"source": "measured", "time_us": 5.0, "verified": True}
        store.add_trial(device=DEVICE, problem=other, config=FAST, **fields)
    assert choose(PROBLEM.with_m(64)).rung == dispatch.EXACT


@pytest.mark.filterwarnings("ignore::cupyq.db.DatabaseWarning")
def test_a_preset_answers_beside_a_damaged_database(path, ship):
    path.write_bytes(b"not a database at all, but long enough to be one" * 40)
    assert choose().preset


def test_explain_says_that_a_row_of_another_path_is_a_preset(path, ship):
    add(path, config=DequantConfig(), path="dequant", time_us=4.0)
    text = str(cupyq.explain(16, PROBLEM, DEVICE))
    assert "from    exact measured row, 4 us measured\n" in text
    assert "  fused (one kernel on packed weights): 9 us predicted (a preset)" in text


# --- one config for every M -------------------------------------------------------------------------------------------


def test_one_config_serves_every_m():
    found = [dispatch.choose_invariant(PROBLEM.with_m(m), DEVICE) for m in (1, 3, 16, 100, 5000, 20_000)]
    [config] = {choice.config for choice in found}
    assert config.ctas == 0
    assert {choice.rung for choice in found} == {dispatch.INVARIANT}
    assert {choice.source for choice in found} == {"predicted"}
    for choice in found:
        assert kernels.check(config, choice.problem, DEVICE) is None


@pytest.mark.parametrize("m", [1, 16, 4096])
def test_stripes_are_never_batch_invariant(path, m):
    for band in (1, 16, 4096):
        add(path, PROBLEM.with_m(band), W4A16Config(block_m=8, warps_k=2, stages=2, ctas=216))
    assert choose(PROBLEM.with_m(m)).config.ctas == 216
    assert dispatch.choose_invariant(PROBLEM.with_m(m), DEVICE).config.ctas == 0


def test_explain_shows_the_cost_of_batch_invariance():
    explanation = cupyq.explain(1, PROBLEM, DEVICE, batch_invariant=True)
    text = str(explanation)
    assert "from    one config for every M, " in text
    assert "order of answers" not in text
    assert explanation.cost in text
    assert re.search(
        r"cost    ([\d.]+) us against ([\d.]+) us for \w+ chosen for M=1 alone, [\d.]+ times as long", text
    )


def test_batch_invariance_needs_a_kernel():
    with pytest.raises(
        IllegalConfig, match=r"batch_invariant=True needs a kernel of cupyq for w8a8-fp8 on NVIDIA A100"
    ):
        cupyq.explain(16, Problem("w8a8-fp8", 16, 4096, 4096), "a100-sxm", batch_invariant=True)


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_one_warning_for_each_untuned_weight(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m in (1, 16, 4000):
            dispatch.warn_untuned(choose(PROBLEM.with_m(m)))
    assert {w.category for w in caught} == {dispatch.UntunedWarning}
    assert [str(w.message) for w in caught] == [
        "w4a16, K=4096, N=4096, group_size=128, symmetric, float16 is not tuned for NVIDIA A100 SXM 80 GB "
        "(M=1 goes by: predictor). It works; to make it fast, run: "
        "python -m cupyq.tune --op w4a16 --k 4096 --n 4096 --group-sizes=128 --device a100-sxm"
    ]
    with pytest.warns(dispatch.UntunedWarning):
        dispatch.warn_untuned(choose(replace(PROBLEM, group_size=64)))


def test_no_warning_when_tuned(path, recwarn):
    add(path)
    dispatch.warn_untuned(choose())
    assert not recwarn.list


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem("w4a16", 7, 100, 200, -1, False, "bfloat16", "bfloat16"),
        Problem("w8a8-fp8", 3000, 128, 64),
    ],
)
@pytest.mark.parametrize("every_band", [True, False])
def test_the_tune_command_is_one_that_tune_accepts(problem, every_band):
    tune = pytest.importorskip("cupyq.tune")
    words = dispatch.tune_command(problem, DEVICE, every_band).split()
    assert words[:3] == ["python", "-m", "cupyq.tune"]
    values = tune.cli.make_context("tune", words[3:], resilient_parsing=False).params
    assert (values["one_k"], values["one_n"], values["device"]) == (problem.k, problem.n, "a100-sxm")
    assert values["ops"] == problem.op
    assert values["dtype"] == problem.dtype
    assert (values["batches"] is None) == every_band
    if problem.op == "w4a16":
        assert (values["group_sizes"], values["asymmetric"]) == (str(problem.group_size), not problem.symmetric)


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_reads_well(path):
    add(path, Problem("w4a16", 16, 8192, 4096), FAST)
    add(path, config=DequantConfig(), path="dequant", source="predicted", time_us=44.0)
    text = str(cupyq.explain(12, PROBLEM, device="a100-sxm"))
    lines = text.splitlines()
    assert lines[:2] == [
        "w4a16, K=4096, N=4096, group_size=128, symmetric, float16, M=12 (band 9 to 16)",
        "on NVIDIA A100 SXM 80 GB (a100-sxm, 8.0, not in this machine)",
    ]
    assert "path    fused: one kernel on packed weights" in lines
    assert f"config  {FAST}" in lines
    assert "from    nearest measured row" in lines
    assert "  1. exact measured row: none in the database" in lines
    assert any(line.startswith("> 2. nearest measured row: N=8192, K=4096, M=16, 1 octaves away") for line in lines)
    assert "  5. predictor: not needed" in lines
    assert "  dequant (dequantize, then cuBLAS): 44 us predicted" in lines
    assert any(line.startswith("  fp16 (cuBLAS on weights that were never quantized): ") for line in lines)
    assert lines[-1] == (
        "tune it with: python -m cupyq.tune --op w4a16 --k 4096 --n 4096 --m 12 --group-sizes=128 --device a100-sxm"
    )


def test_explain_of_a_tuned_problem_asks_for_no_tuning(path):
    add(path)
    explanation = cupyq.explain(16, PROBLEM, DEVICE)
    assert explanation.choice.tuned
    assert "tune it with" not in str(explanation)
    assert "from    exact measured row, 10 us" in str(explanation)


def test_explain_takes_a_weight():
    qw = cupyq.quantize(np.ones((256, 64), np.float32), group_size=32, symmetric=False, scale_dtype="bfloat16")
    problem = cupyq.explain(5, qw, "h200-sxm", dtype="bfloat16").choice.problem
    assert problem == Problem("w4a16", 5, 64, 256, 32, False, "bfloat16", "bfloat16")
    assert "band 8193 and above" in str(cupyq.explain(9000, qw, "h200-sxm"))


def test_explain_refuses_what_it_cannot_explain(monkeypatch):
    with pytest.raises(UnknownDevice, match="h100"):
        cupyq.explain(16, PROBLEM, "h100-sxmm")
    with pytest.raises(ShapeError, match="m is 0"):
        cupyq.explain(0, PROBLEM, DEVICE)
    with pytest.raises(ArgumentError, match=r"qw must be a QuantizedWeight or a kernels\.Problem, got int"):
        cupyq.explain(16, 5, DEVICE)


def test_explain_without_a_device_needs_one():
    if devices.live_count():
        pytest.skip("a CUDA device is here")
    with pytest.raises((NoDevice, NotInstalled)):
        cupyq.explain(16, PROBLEM)
