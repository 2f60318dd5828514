"""Making presets: the search comes near a sweep, kernels are true, verified and shared, and stale files are told."""

import dataclasses
import json
import math
import re

import pytest
from click.testing import CliRunner

import cupyq.db
from cupyq import bands, devices, kernels, predictor
from cupyq.db import checking, cli, making, presets, searching
from cupyq.errors import UnknownDevice, VerificationError
from cupyq.kernels import Problem

H100 = devices.get("h100-sxm")
SHAPES = [(1024, 512)]
SHIPPED = presets.folder()  # before a fixture hides it


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The presets of one shape on one device, made in this process, not verified."""
    folder = tmp_path_factory.mktemp("presets")
    of = [problem for problem in making.problems(SHAPES) if problem.symmetric and problem.op != "w8a8-fp8"]
    one = making.make_one("h100-sxm", of, making.Kernels())
    making._write(folder, one)
    return folder, one


@pytest.fixture
def shipped(made, monkeypatch):
    monkeypatch.setattr(presets, "folder", lambda: made[0])
    return presets.read("h100-sxm")


@pytest.mark.parametrize(
    ("op", "group", "m", "n", "k"),
    [("w4a16", 128, 1, 6144, 4096), ("w4a16", 128, 64, 1152, 896), ("w8a8-int8", -1, 256, 4096, 14336)],
)
def test_the_search_comes_near_a_sweep(op, group, m, n, k):
    problem = Problem(op, m, n, k, group)
    search = searching.Search(problem, H100)
    ranked = search.descend([kernels.default(problem, H100)], searching.domain(problem, H100), wide=True)
    sweep = min(search.time(config) for config in kernels.configs(problem, H100))
    assert search.time(ranked[0]) <= 1.10 * sweep
    times = [search.time(config) for config in ranked]
    assert times == sorted(times)
    assert max(times) < math.inf


def test_every_row_is_of_a_legal_current_kernel_without_spills(shipped, made):
    rows = list(shipped.rows())
    assert len(rows) == made[1].rows >= 2 * len(bands.ends())
    for row in rows:
        problem = Problem(**row.problem)
        config = kernels.from_dict(row.found.config)
        assert searching.legal(config, problem, H100)
        assert row.source_hash == kernels.source_hash(config, problem)
    assert {row.found.source for row in rows} == {"predicted"}


def test_times_are_the_full_model_s(shipped):
    kernel = making.Kernels()
    row = shipped.row(Problem("w4a16", 1, 512, 1024), 64, ("fused",))
    problem = Problem(**row.problem)
    compiled = kernel.get(kernels.from_dict(row.found.config), problem, H100)
    full = predictor.predict(kernels.from_dict(row.found.config), problem, H100, compiled=compiled).time_us
    assert row.found.time_us == float(f"{full:.4g}")


def test_a_preset_beats_what_dispatch_would_do_without_it(made):
    default = [kernels.default(Problem("w4a16", m, 512, 1024), H100) for m in (16, 256)]
    kernel = making.Kernels()
    maker = making.Maker(H100, kernel)
    for config in default:
        problem = Problem("w4a16", 16 if config is default[0] else 256, 512, 1024)
        chosen = maker.best(problem)
        assert chosen[1] <= making.full_model(config, problem, H100, kernel) * (1 + 2 * making.TIE)


def test_crossover_of_presets(shipped, tmp_path):
    with cupyq.db.open(tmp_path / "t.db") as store:
        four, eight = store.crossover(presets=True, device="h100-sxm")
        assert store.crossover() == []
        assert store.crossover(presets=True, device="h100-sxm", op="w8a8-int8") == [eight]
        assert len(store.best(presets=True, band=16)) == 2
    assert (four["op"], four["source"], four["bands"], four["stale"]) == ("w4a16", "predicted", 15, False)
    assert four["against"].keys() == {"dequant", "fp16", "w8a8-int8"}
    assert (eight["op"], list(eight["against"])) == ("w8a8-int8", ["fp16"])


def test_the_header_says_what_the_file_was_made_from(shipped):
    header = shipped.header
    assert header.keys() == {"preset", "device", "cupyq", "nvrtc", "made", "configs", "kernels"}
    assert header["made"].keys() == {"kernels", "predictor", "by"}
    assert all(re.fullmatch(r"[0-9a-f]{16,}", digest) for digest in header["made"].values())
    assert len({json.dumps(config) for config in header["configs"]}) == len(header["configs"])


def test_current_presets_pass_the_check(shipped):
    assert checking.check("h100-sxm") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: re.sub(r'"kernels":\[\[0,"\w{8}', '"kernels":[[0,"00000000', text), "source has changed since"),
        (lambda text: re.sub(r"\[(\d+),(\d)", r"[\1,9\2", text.partition("\n")[2]), "was predicted to take"),
        (lambda text: text.replace('"stages":', '"stages_of_old":'), "fields of a .* config do not fit"),
        (lambda text: re.sub(r'"split_k":\d', '"split_k":7', text), "is not legal any more"),
    ],
    ids=["source", "time", "config", "legal"],
)
def test_a_file_that_is_not_current_names_the_command_that_mends_it(made, tmp_path, monkeypatch, change, said):
    text = made[1].text
    changed = change(text)
    if not changed.startswith('{"preset'):
        changed = text.partition("\n")[0] + "\n" + changed
    assert changed != text
    (tmp_path / "h100-sxm.jsonl").write_text(changed)
    monkeypatch.setattr(presets, "folder", lambda: tmp_path)
    (sentence,) = checking.check("h100-sxm")[:1]
    assert re.search(said, sentence)
    assert sentence.startswith("preset h100-sxm: ")
    assert sentence.endswith("mend it with: make presets (or: python -m cupyq.db presets)")


def test_one_command_makes_verifies_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "VARIANTS", making.VARIANTS[2:3])
    monkeypatch.setattr("cupyq.tuner.workloads.model_shapes", lambda model: SHAPES)
    monkeypatch.setattr(making, "_processes", _Here)
    verified = []
    real = making.verify
    # Two of them in the emulator: each takes a second.
    monkeypatch.setattr(
        making, "verify", lambda use: verified.append(use) or (real(use) if len(verified) < 3 else None)
    )
    arguments = ["presets", "--device", "a10", "--device", "rtx-3090", "--model", "minilm", "-o", str(tmp_path)]
    result = CliRunner().invoke(cli.cli, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a10.jsonl", "rtx-3090.jsonl"]
    assert verified
    assert f"{len(verified)} kernels verified in the emulator" in result.stderr


def test_a_kernel_that_is_wrong_keeps_every_file_from_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "VARIANTS", making.VARIANTS[2:3])
    monkeypatch.setattr(making, "_processes", _Here)
    monkeypatch.setattr(making, "verify", lambda use: f"{use.config}: wrong")
    with pytest.raises(VerificationError, match=r"kernels are wrong, so nothing is written: W8A8Config.*: wrong"):
        making.make(["a100-sxm"], tmp_path, SHAPES)
    assert list(tmp_path.iterdir()) == []


def test_a_config_whose_smaller_launch_is_illegal_gives_way_to_one_that_can_be_verified():
    config = kernels.W4A16Config(
        block_m=16, strips=1, warps_n=2, warps_k=4, warp_k=128, stages=4, split_k=1, scale="sums", ctas=128
    )
    problem, device, made = Problem("w4a16", 512, 384, 384), devices.get("rtx-4090"), making.Kernels()
    assert kernels.check(config, problem, device) is None
    assert kernels.check(*making.small_launch(config, problem), device) is not None
    other = dataclasses.replace(config, ctas=0)
    maker = making.Maker(device, made)
    assert maker._choose([config, other], problem)[0] == other
    assert maker._choose([config], problem) is None


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(UnknownDevice, match="h100-sxn"):
        making.make(["h100-sxn"], tmp_path)


class _Here:
    """A pool of processes that works in this one, so that what a test replaced counts."""

    def __init__(self, jobs):
        from concurrent.futures import ThreadPoolExecutor

        self.pool = ThreadPoolExecutor(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown()

    def submit(self, *arguments):
        return self.pool.submit(*arguments)

    def map(self, function, items, chunksize=1):
        return map(function, items)


@pytest.fixture
def repository(monkeypatch):
    monkeypatch.setattr(presets, "folder", lambda: SHIPPED)


@pytest.mark.parametrize("name", presets.names())
def test_the_presets_that_ship_are_current(repository, name):
    """Runs once for each file of db/presets."""
    assert checking.check(name) == []


def test_presets_ship_for_every_device_or_for_none(repository):
    assert presets.names() in ([], sorted(making.device_names()))
    size = sum(presets.file_of(name).stat().st_size for name in presets.names())
    assert size < 3_000_000, "what everybody downloads"
