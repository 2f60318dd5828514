"""The doctor, on machines it is told of: each state, and the command that mends it."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import replace

import pytest

from cupyq import compiler, db, devices, doctor
from cupyq.compiler import cache, sass
from cupyq.errors import NotInstalled
from fake_cupy import FakeCuPy

ARCHS = (75, 80, 86, 89, 90, 100, 120)
LIBRARIES = "nvidia-cublas nvidia-cuda-nvrtc nvidia-cuda-runtime"


def nvrtc_of(version, archs=ARCHS):
    return types.SimpleNamespace(getVersion=lambda: version, getSupportedArchs=lambda: list(archs))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set up a machine: a driver, distributions of CuPy, cards; return its checks by name."""
    monkeypatch.setenv("CUPYQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupy-cache"))
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "data" / "tuning.db"))

    monkeypatch.setattr(doctor, "import_cublas", lambda: None)
    monkeypatch.setattr(doctor, "header_folder", lambda: "/cuda/include")

    def machine(
        driver="13.0", found=("cupy-cuda13x 14.2.0",), cards=("h100-sxm",), nvrtc=(13, 0), cupy=None, archs=ARCHS
    ):
        fake = FakeCuPy(cards, run=False) if cupy is None else cupy
        fake.cuda.nvrtc = nvrtc_of(nvrtc, archs)
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setattr(doctor, "driver_version", lambda: driver)
        monkeypatch.setattr(doctor, "distributions", lambda: dict(each.split() for each in found))
        devices._read_live.cache_clear()
        return {check.name: check for check in doctor.examine()}

    yield machine
    devices._read_live.cache_clear()


def fields(check):
    return check.state, check.said, check.mend


def test_a_machine_that_has_everything(machine):
    found = machine()
    assert {check.state for check in found.values()} <= {doctor.OK, doctor.NOTE}
    assert fields(found["driver"]) == ("ok", "runs CUDA 13.0 and older", None)
    assert fields(found["CuPy"]) == ("ok", "cupy-cuda13x 14.2.0", None)
    assert fields(found["CuPy's NVRTC"]) == ("ok", "13.0", None)
    assert fields(found["headers"]) == ("ok", "/cuda/include", None)
    assert fields(found["cuBLAS"]) == ("ok", "CuPy can load it", None)
    assert fields(found["GPU 0"]) == (
        "ok", "NVIDIA H100 SXM 80 GB, 9.0, 132 SMs, 80 GiB; h100-sxm in the catalogue", None
    )  # fmt: skip


def test_a_machine_without_a_gpu_is_fine(machine):
    found = machine(driver=None, found=())
    assert all(check.state in (doctor.OK, doctor.NOTE) for check in found.values())
    assert "not run" in found["driver"].said
    assert fields(found["CuPy"]) == (
        "note", "not installed; without a GPU it is not needed", "pip install 'cupyq[cuda13]'"
    )  # fmt: skip
    assert not [name for name in found if name.startswith("GPU")]
    assert "include nothing" in found["headers"].said
    assert "cuBLAS" not in found


@pytest.mark.parametrize(("driver", "extra"), [("12.4", "cuda12"), ("13.1", "cuda13"), ("14.0", "cuda13")])
def test_a_driver_without_cupy(machine, driver, extra):
    state, said, mend = fields(machine(driver, found=())["CuPy"])
    assert (state, mend) == ("problem", f"pip install 'cupyq[{extra}]'")
    assert "no kernel can run" in said


def test_two_variants_of_cupy(machine):  # f2
    both = ("cupy-cuda12x 14.1.0", "cupy-cuda13x 14.2.0")
    state, said, mend = fields(machine("12.8", both, nvrtc=(12, 8))["CuPy"])
    assert state == "warning"
    assert said.startswith("cupy-cuda12x 14.1.0, cupy-cuda13x 14.2.0: they overwrite")
    assert mend == f"pip uninstall -y cupy-cuda12x cupy-cuda13x {LIBRARIES} && pip install 'cupyq[cuda12]'"
    assert machine("13.0", both)["CuPy"].mend == (
        "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupyq[cuda13]'"
    )


@pytest.mark.parametrize(
    ("driver", "found", "said", "mend"),
    [
        ("12.4", "cupy-cuda13x 14.2.0", "is for CUDA 13, and the driver runs CUDA 12.4",
         f"pip uninstall -y cupy-cuda13x {LIBRARIES} && pip install 'cupyq[cuda12]'"),
        ("13.0", "cupy-cuda13x 13.6.0", "14.0 or newer is needed", "pip install -U 'cupyq[cuda13]'"),
        ("12.0", "cupy-cuda12x 13.6.0", "14.0 or newer is needed", "pip install -U 'cupyq[cuda12]'"),
        ("13.0", "cupy-cuda12x 13.6.0", "14.0 or newer is needed", "pip install -U 'cupyq[cuda12]'"),
    ],
)  # fmt: skip
def test_a_cupy_that_does_not_fit(machine, driver, found, said, mend):
    check = machine(driver, (found,))["CuPy"]
    assert (check.state, check.mend) == ("problem", mend)
    assert said in check.said


def test_a_cupy_of_cuda_12_on_a_newer_driver_is_fine(machine):
    assert machine("13.0", ("cupy-cuda12x 14.0.0rc1",), nvrtc=(12, 9))["CuPy"].state == "ok"


@pytest.mark.parametrize(("numpy", "fits"), [("2.0.2", False), ("2.1.1", False), ("2.1.2", True), ("2.2.0rc1", True)])
def test_a_numpy_with_which_cupy_has_no_bfloat16(machine, monkeypatch, numpy, fits):
    monkeypatch.setattr(doctor, "_version", lambda name: numpy)
    check = machine().get("NumPy")
    if fits:
        assert check is None
    else:
        assert fields(check) == (
            "warning", f"{numpy}: CuPy has bfloat16 with NumPy 2.1.2 or newer only", "pip install -U 'numpy>=2.1.2'"
        )  # fmt: skip
    assert "NumPy" not in machine(driver=None, found=())


def test_an_old_driver(machine):
    assert fields(machine("11.8")["driver"])[:2] == ("problem", "the driver runs CUDA 11.8; cupyq needs 12.0 or newer")


def test_cupy_that_cannot_be_imported(machine, monkeypatch):
    def broken():
        raise ImportError("libcudart.so.13:\n cannot open shared object file")

    monkeypatch.setattr(doctor, "import_cupy", broken)
    found = machine()
    assert found["CuPy"].state == "problem"
    assert "cannot be imported: libcudart.so.13: cannot open" in found["CuPy"].said
    assert found["CuPy"].mend == "pip install --force-reinstall cupy-cuda13x"


def test_nvrtc_newer_than_the_driver(machine):  # d5
    state, said, mend = fields(machine("12.4", ("cupy-cuda12x 14.2.0",), nvrtc=(13, 0))["CuPy's NVRTC"])
    assert (state, mend) == ("problem", f"pip uninstall -y {LIBRARIES} && pip install 'cupyq[cuda12,offline12]'")
    assert "cannot load" in said
    mend = machine("13.0", nvrtc=(14, 0))["CuPy's NVRTC"].mend
    assert mend == f"pip uninstall -y {LIBRARIES} && pip install 'cupyq[cuda13,offline]'"


def test_cupy_without_its_nvrtc(machine):
    fake = FakeCuPy(("h100-sxm",), run=False)
    del fake.cuda.nvrtc
    fake.cuda = LosesNvrtc(**vars(fake.cuda))
    found = machine("12.4", ("cupy-cuda12x 14.2.0",), cupy=fake)
    assert fields(found["CuPy's NVRTC"]) == (
        "problem", "cannot be loaded: no libnvrtc.so.12",
        "pip uninstall -y nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 && pip install 'cupyq[cuda12]'",
    )  # fmt: skip
    assert found["GPU 0"].state == "ok"


class LosesNvrtc(types.SimpleNamespace):
    """`cupy.cuda` where no library of NVRTC is found."""

    def __getattribute__(self, name):
        if name == "nvrtc":
            raise RuntimeError("no libnvrtc.so.12")
        return super().__getattribute__(name)


# Which command brings a library back: that of the CuPy which is there, so that no second CuPy comes with it.
AGAIN = pytest.mark.parametrize(
    ("driver", "cupy", "gone", "extra"),
    [
        ("13.0", "cupy-cuda13x 14.2.0", "{0}", "cuda13"),
        ("12.4", "cupy-cuda12x 14.2.0", "{0} {0}-cu12", "cuda12"),
        ("13.0", "cupy-cuda12x 14.2.0", "{0} {0}-cu12", "cuda12"),
        ("12.4", "cupy 14.2.0", "{0} {0}-cu12", "cuda12"),
    ],
)


@AGAIN
def test_headers_that_are_missing(machine, monkeypatch, driver, cupy, gone, extra):
    monkeypatch.setattr(doctor, "header_folder", lambda: None)
    state, said, mend = fields(machine(driver, (cupy,), nvrtc=(12, 9))["headers"])
    assert state == "problem"
    assert "CuPy compiles no kernel without them" in said
    assert mend == f"pip uninstall -y {gone.format('nvidia-cuda-runtime')} && pip install 'cupyq[{extra}]'"
    assert machine(None, (cupy,))["headers"].state == "note"


@AGAIN
def test_cublas_that_is_missing(machine, monkeypatch, driver, cupy, gone, extra):
    def missing():
        raise ImportError('Failure finding "libcublasLt.so.13": No such file\n  listdir("/usr/lib"):\n    libm.so')

    monkeypatch.setattr(doctor, "import_cublas", missing)
    state, said, mend = fields(machine(driver, (cupy,), nvrtc=(12, 9))["cuBLAS"])
    assert state == "problem"
    assert said == (
        "CuPy cannot load it, so the paths dequant and fp16 cannot run: "
        'Failure finding "libcublasLt.so.13": No such file'
    )
    assert mend == f"pip uninstall -y {gone.format('nvidia-cublas')} && pip install 'cupyq[{extra}]'"
    assert "cuBLAS" not in machine(None, (cupy,))


def test_cublas_and_headers_are_looked_for_as_cupy_does(monkeypatch):
    """CuPy's package of libraries loads one when its name is asked for; the headers go by the name "cudart"."""
    asked = []

    class Libraries(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            asked.append(name)
            raise ImportError("Failure finding libcublasLt.so.13")

    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", Libraries("cupy_backends.cuda.libs"))
    with pytest.raises(ImportError, match="libcublasLt"):
        doctor.import_cublas()
    pathfinder = types.ModuleType("cuda.pathfinder")
    pathfinder.find_nvidia_header_directory = {"cudart": "/cuda/include"}.get
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    assert (asked, doctor.header_folder()) == (["cublas"], "/cuda/include")
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    assert doctor.header_folder() is None


def test_nvrtc_that_is_missing(machine, monkeypatch):  # d1
    def missing():
        raise NotInstalled("cuda-bindings is not installed: pip install 'cupyq[offline]'")

    monkeypatch.setattr(compiler, "archs", missing)
    found = machine(driver=None, found=())["NVRTC"]
    assert (found.state, found.mend) == ("warning", "pip install 'cupyq[offline]'")
    assert "cuda-bindings is not installed" in found.said
    assert machine("12.4", ("cupy-cuda12x 14.2.0",))["NVRTC"].mend == "pip install 'cupyq[offline12]'"


def test_nvdisasm_that_is_missing(machine, monkeypatch):
    def missing():
        raise NotInstalled("reading SASS needs nvdisasm")

    monkeypatch.setattr(sass, "nvdisasm", missing)
    assert machine()["nvdisasm"].mend == "pip install 'cupyq[offline]'"
    assert machine("12.4", ("cupy-cuda12x 14.2.0",))["nvdisasm"].mend == "pip install 'cupyq[offline12]'"


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_each_gpu_has_a_line(machine):
    found = machine(cards=("a100-sxm", "rtx-4090"))
    assert "a100-sxm in the catalogue" in found["GPU 0"].said
    assert "rtx-4090" in found["GPU 1"].said


def test_a_gpu_that_the_catalogue_does_not_know(machine):
    fake = FakeCuPy(("a100-sxm",))
    fake.cards[0] = replace(fake.cards[0], sms=42)
    check = machine(cupy=fake)["GPU 0"]
    assert (check.state, check.mend) == ("note", "python -m cupyq.tune")
    assert "42 SMs" in check.said
    assert "not in the catalogue" in check.said


@pytest.mark.parametrize(
    ("driver", "cupy", "nvrtc", "archs", "cc", "said", "mend"),
    [
        ("13.2", "cupy-cuda13x 14.2.0", (13, 0), (75, 80), (9, 0),
         "NVRTC 13.0 does not know sm_90 and makes PTX of sm_80", "pip install -U 'nvidia-cuda-nvrtc==13.*'"),
        ("12.9", "cupy-cuda12x 14.2.0", (12, 8), (75, 100, 120), (10, 3),
         "NVRTC 12.8 does not know sm_103 and makes PTX of sm_100", "pip install -U nvidia-cuda-nvrtc-cu12"),
        ("13.0", "cupy-cuda13x 14.2.0", (13, 0), (90, 100), (8, 9), "NVRTC 13.0 does not know sm_89 and makes nothing",
         "pip install -U 'nvidia-cuda-nvrtc==13.*'"),
    ],
)  # fmt: skip
def test_a_gpu_that_nvrtc_does_not_list(machine, driver, cupy, nvrtc, archs, cc, said, mend):  # d5
    fake = FakeCuPy(("b200",), run=False)
    fake.cards[0] = replace(fake.cards[0], cc=cc)
    check = machine(driver, (cupy,), nvrtc=nvrtc, archs=archs, cupy=fake)["GPU 0"]
    assert (check.state, check.mend) == ("warning", mend)
    assert said in check.said


def test_no_gpu_for_this_process(machine):
    assert machine(cards=())["GPU"].state == "problem"


def test_cuda_that_fails(machine):
    fake = FakeCuPy(("a100-sxm",))

    def failing():
        raise RuntimeError("cudaErrorSystemNotReady:\nsystem not yet initialized")

    fake.cuda.runtime.getDeviceCount = failing
    check = machine(cupy=fake)["GPU"]
    assert fields(check) == (
        "problem", "CUDA finds no device: cudaErrorSystemNotReady: system not yet initialized", "nvidia-smi"
    )  # fmt: skip


class Recorded:
    """A part of CuPy that writes down what is asked of it."""

    def __init__(self, part, name, asked):
        self.part, self.name, self.asked = part, name, asked

    def __getattr__(self, name):
        self.asked.add(f"{self.name}.{name}")
        return getattr(self.part, name)


def test_nothing_is_asked_that_makes_a_context(machine):
    """What CuPy answers without selecting a device: `Device.compute_capability` and `mem_info` are not among it."""
    fake, asked = FakeCuPy(("h100-sxm", "t4"), run=False), set()
    cuda = fake.cuda
    fake.cuda = Recorded(cuda, "cuda", asked)
    fake.cuda.runtime = Recorded(cuda.runtime, "runtime", asked)
    fake.cuda.Device = lambda ordinal: Recorded(cuda.Device(ordinal), "Device", asked)
    found = machine(cupy=fake)
    assert (found["GPU 0"].state, found["GPU 1"].state) == ("ok", "ok")
    assert asked == {"runtime.getDeviceCount", "runtime.getDeviceProperties", "Device.attributes"}


# --- files ------------------------------------------------------------------------------------------------------------


def test_folders_are_looked_at_and_not_made(machine, tmp_path):
    found = machine()
    assert found["cache"].said == f"{tmp_path / 'cache'} (made when first needed)"
    assert sorted(each.name for each in tmp_path.iterdir()) == []


def test_the_cache_is_counted(machine, tmp_path):
    cache.write("0" * 40, {}, b"x" * 2_000_000)
    assert machine()["cache"].said == f"{tmp_path / 'cache'} (1 entries, 2.0 MB)"


@pytest.mark.parametrize("name", ["cache", "CuPy's cache"])
def test_a_cache_that_is_a_file(machine, tmp_path, name):  # f4
    variable, place = {"cache": ("CUPYQ_CACHE_DIR", "cache"), "CuPy's cache": ("CUPY_CACHE_DIR", "cupy-cache")}[name]
    (tmp_path / place).write_text("")
    check = machine()[name]
    assert check.state == "problem"
    assert variable in check.mend
    assert f"{tmp_path / place} is a file" in check.said


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_without_write_access(machine, tmp_path):  # f4
    (tmp_path / "cache").mkdir(mode=0o500)
    assert "cannot be written (Permission denied)" in machine()["cache"].said


def test_a_refused_write_is_said(machine, monkeypatch, tmp_path):  # f4
    def refused(**where):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    found = machine()
    assert found["cache"].said.startswith(f"{tmp_path / 'cache'} cannot be written (Permission denied): kernels are")
    assert found["database"].mend.startswith("export CUPYQ_DB=")


def test_a_database_is_counted(machine, tmp_path):
    problem = {"op": "w4a16", "m": 1, "n": 64, "k": 64, "group_size": 64, "symmetric": True, "dtype": "float16"}
    problem["scale_dtype"] = "float16"
    with db.open() as store:
        for source in ("measured", "predicted", "predicted"):
            store.add_trial(
                device=devices.get("t4"), problem=problem, config={"family": "x"}, source=source, time_us=1.0
            )
    said = machine()["database"].said
    assert said == f"{tmp_path / 'data' / 'tuning.db'} (1 measured and 2 predicted trials of 1 devices)"


def test_no_database_yet(machine, tmp_path):
    assert fields(machine()["database"]) == (
        "note", f"{tmp_path / 'data' / 'tuning.db'}: none yet", "python -m cupyq.tune"
    )  # fmt: skip


def test_a_damaged_database(machine, tmp_path):
    path = tmp_path / "data" / "tuning.db"
    path.parent.mkdir()
    path.write_bytes(b"no database at all, but long enough to be one " * 40)
    check = machine()["database"]
    assert (check.state, check.mend) == ("problem", f"mv '{path}' '{path}.damaged'")


def test_a_database_of_a_newer_version(machine):
    with db.open() as store, store.writing() as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    check = machine()["database"]
    assert (check.state, check.mend) == ("problem", "pip install -U cupyq")


# --- this machine -----------------------------------------------------------------------------------------------------


def test_this_machine_is_examined_without_a_fake():
    checks = doctor.examine()
    assert {"cupyq", "driver", "CuPy", "NVRTC", "headers", "nvdisasm", "cache", "presets", "database"} <= {
        check.name for check in checks
    }
    for check in checks:
        assert check.state in doctor.STATES
        assert "\n" not in check.said
        assert check.state in (doctor.OK, doctor.NOTE) or check.mend
