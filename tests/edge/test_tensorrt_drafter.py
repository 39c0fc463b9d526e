"""The TensorRT drafter: passes over buffers of a GPU, and the engine that a board builds, keeps and builds again."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="a tiny model is made with torch")

from edge.building import Building
from edge.checks import run_checks
from edge.drafters import cuda, engine_cache, golden, manifest, providers, runtimes, tensorrt
from edge.drafters.accelerator import Accelerator
from edge.drafters.cached import CachedDrafter
from edge.drafters.engine_build import Phases, build, import_tensorrt
from edge.drafters.engine_cache import Key
from edge.drafters.tensorrt import TensorRtDrafter
from edge.systemd import Notifier
from protocol.errors import ModelError
from tests.edge import played_gpu
from tests.edge.boardfiles import BoardFiles
from tests.edge.checking import config, found
from tests.tools import tiny_models
from tools.export import qdq, sources, write

TEXT = [(7 * i) % 250 for i in range(150)]  # more than two passes, and more slots than one step of the past
TEGRA = (
    "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025"
)
DPKG = (
    "Package: a\nVersion: 1\n\nPackage: nvidia-l4t-core\nStatus: ok\nVersion: 38.2.1-2025\n\nPackage: b\nVersion: 2\n"
)
KEY = Key("36.4.3", "10.3.0", "8.7", "ab" * 32, 256)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads of 16: a slot of 64 bytes is then no whole number of what a GPU aligns its tensors to."""
    where = tmp_path_factory.mktemp("drafter")
    source = sources.read(str(tiny_models.directory(where / "hf", "qwen2")))
    write.write_drafter(source, where / "out", qdq.options())
    return where / "out"


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> played_gpu.PlayedTensorRt:
    return played_gpu.install(monkeypatch)


def kept_in(directory: Path) -> Accelerator:
    return Accelerator(engines=directory / "engines")


def rounds(drafter: CachedDrafter) -> list[np.ndarray]:
    """Logits of a text, of branches, of rows after slots moved, of a wide tree, and of a text that begins like it."""
    logits = [drafter.logits(drafter.prefill(TEXT)).copy()]
    root = drafter._last
    drop, kept = drafter.extend([(50, root), (60, root)])
    _, middle, sibling, below = drafter.extend([(51, drop), (61, kept), (63, kept), (62, 1)])
    logits += [drafter.logits(row).copy() for row in (middle, sibling, below)]
    drafter.keep([kept, middle])
    wide = drafter.extend([(70, below), *((i, middle) for i in range(20))])
    logits += [drafter.logits(row).copy() for row in (wide[0], wide[-1])]
    drafter.keep([below, wide[0]])
    logits.append(drafter.logits(drafter.prefill([*TEXT[:70], 9, 8])).copy())
    return logits


def test_an_engines_passes_give_what_the_same_graph_gives_on_the_cpu(directory, tmp_path, trt) -> None:
    drafter = TensorRtDrafter.load(directory, kept_in(tmp_path), verify=True)
    for found_here, expected in zip(rounds(drafter), rounds(runtimes.load(directory, "onnx")), strict=True):
        np.testing.assert_allclose(found_here, expected, rtol=1e-3, atol=1e-3)
    assert drafter.info.provider == "TensorRT 10.3.0, SM 8.7"
    assert drafter.info.compute == "w4a16"
    facts = manifest.read(directory, "drafter")
    golden.check(drafter, facts.golden, "here")


def test_an_engine_is_built_once_and_its_building_told(directory, tmp_path, trt) -> None:
    said: list[tuple[str, float]] = []
    accelerator = Accelerator(engines=tmp_path / "engines", told=lambda *what: said.append(what))
    assert not tensorrt.outlook(directory, accelerator, None)[1]
    runtimes.load(directory, accelerator=accelerator)
    assert said == [("Building engine", 0.0), ("Building engine", 0.5), ("Building engine", 1.0), ("done", 1.0)]
    assert tensorrt.outlook(directory, accelerator, None)[1]
    runtimes.load(directory, accelerator=accelerator)
    assert trt.builds == 1


def test_another_tensorrt_gpu_or_length_is_another_engine_and_the_former_one_is_dropped(
    directory, tmp_path, trt, monkeypatch
) -> None:
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    trt.__version__ = "10.13.3"
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    assert trt.builds == 2
    monkeypatch.setattr(engine_cache, "platform", lambda: "38.2.1")
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    TensorRtDrafter.load(directory, kept_in(tmp_path), context=100)
    TensorRtDrafter.load(directory, kept_in(tmp_path), context=120)  # as many slots as 100 take
    assert trt.builds == 4
    assert len(list((tmp_path / "engines").iterdir())) == 1


def cut(engine: Path) -> None:
    engine.write_bytes(engine.read_bytes()[:-1])


def flip(engine: Path) -> None:
    whole = bytearray(engine.read_bytes())
    whole[-3] ^= 1
    engine.write_bytes(whole)


def empty(engine: Path) -> None:
    engine.write_bytes(b"")


def other(engine: Path) -> None:
    engine.write_bytes(b"ftrt" * 2000)


def of_another_board(engine: Path) -> None:
    engine.write_bytes(engine.read_bytes().replace(b'"8.7"', b'"7.2"'))


@pytest.mark.parametrize("damage", [cut, flip, empty, other, of_another_board])
def test_an_engine_that_is_damaged_or_another_boards_is_built_again(directory, tmp_path, trt, damage) -> None:
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    (engine,) = (tmp_path / "engines").iterdir()
    damage(engine)
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    assert trt.builds == 2


def test_an_engine_that_tensorrt_refuses_is_built_again(directory, tmp_path, trt) -> None:
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    trt.refuses = True
    TensorRtDrafter.load(directory, kept_in(tmp_path))
    assert trt.builds == 2


def test_an_engine_that_cannot_be_kept_is_used_all_the_same(directory, tmp_path, trt, caplog) -> None:
    (tmp_path / "engines").write_text("a file where the directory should be")
    drafter = TensorRtDrafter.load(directory, kept_in(tmp_path))
    assert drafter.prefill(TEXT[:5]).position == 4
    assert "built again at the next start" in caplog.text


def test_a_full_disk_is_named_before_minutes_are_spent(directory, tmp_path, trt, monkeypatch) -> None:
    monkeypatch.setattr("edge.drafters.engine_build.ROOM", 1 << 40)
    with pytest.raises(ModelError, match=r"MiB are free, an engine may take"):
        TensorRtDrafter.load(directory, kept_in(tmp_path))
    assert trt.builds == 0


# -- where it is kept -------------------------------------------------------------------------------------------------


def test_what_a_power_cut_left_is_cleared_away_and_a_part_that_is_being_written_is_not(tmp_path) -> None:
    old, young = tmp_path / ".abc.engine", tmp_path / ".def.engine"
    for part in (old, young):
        part.write_bytes(b"part")
    os.utime(old, (0, 0))
    engine_cache.write(tmp_path, KEY, b"plan")
    assert not old.exists() and young.exists()
    assert bytes(engine_cache.read(tmp_path, KEY) or b"") == b"plan"


@pytest.mark.parametrize("path, text, said", [
    ("etc/nv_tegra_release", TEGRA, "36.4.3"),
    ("var/lib/dpkg/status", DPKG, "38.2.1-2025"),
    ("var/lib/dpkg/status", "Package: a\nVersion: 1\n", ""),
])  # fmt: skip
def test_jetson_linux_is_found_by_its_files(tmp_path, path, text, said) -> None:
    assert engine_cache.platform(tmp_path) == ""
    files = BoardFiles(tmp_path).write(path, text)
    assert engine_cache.platform(files.root) == said


# -- what is missing --------------------------------------------------------------------------------------------------


def test_an_absent_tensorrt_says_where_it_comes_from(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ModelError, match=r"apt install python3-libnvinfer"):
        import_tensorrt(tmp_path)
    (tmp_path / "usr/lib/python3.10/dist-packages/tensorrt").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", "/venv")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    with pytest.raises(ModelError, match=r"this environment does not see.*--system-site-packages"):
        import_tensorrt(tmp_path)
    monkeypatch.setattr(sys, "base_prefix", "/venv")
    with pytest.raises(ModelError, match=r"is for the system's own Python.*/usr/bin/python3"):
        import_tensorrt(tmp_path)


def test_an_empty_package_of_that_name_is_not_taken_for_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", type(sys)("tensorrt"))
    with pytest.raises(ModelError, match=r"has no Builder"):
        import_tensorrt(tmp_path)


def test_an_absent_cuda_is_named(monkeypatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    cuda.library.cache_clear()
    monkeypatch.setattr(cuda.ctypes, "CDLL", refuse)
    with pytest.raises(ModelError, match=r"libcudart.*not installed.*nvidia-jetpack"):
        cuda.compute_capability(0)


def test_check_says_whether_there_is_an_engine_and_what_to_do_without_tensorrt(
    directory, tmp_path, monkeypatch
) -> None:
    files = BoardFiles(tmp_path / "root").write("proc/meminfo", "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n")
    path = config(tmp_path, drafter=str(directory))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    report = run_checks(path, 0.1, root=files.root)
    missing = found(report, "engine")
    assert missing.status == "fail" and missing.exit_code == 66 and "python3-libnvinfer" in missing.remedy
    assert "drafter" not in [finding.name for finding in report.findings]

    played_gpu.install(monkeypatch)
    first = run_checks(path, 0.1, root=files.root)
    assert found(first, "engine").status == "warn" and "none is kept in" in found(first, "engine").what
    assert "on TensorRT 10.3.0, SM 8.7" in found(first, "drafter").what and found(first, "drafter").status == "ok"
    second = run_checks(path, 0.1, root=files.root)
    assert found(second, "engine").status == "ok" and str(tmp_path / "state/engines") in found(second, "engine").what


# -- ONNX Runtime's providers -----------------------------------------------------------------------------------------


def test_a_gpus_provider_that_is_not_installed_says_what_to_install(directory) -> None:
    if "CUDAExecutionProvider" in providers.ort.get_available_providers():
        pytest.skip("this ONNX Runtime has the provider")
    with pytest.raises(ModelError, match=r"'CUDAExecutionProvider' is not usable.*install onnxruntime-gpu"):
        runtimes.load(directory, "onnx", providers=["CUDAExecutionProvider"])


def test_providers_are_told_of_the_gpu_and_tensorrts_of_all_shapes_at_once(directory, tmp_path) -> None:
    accelerator = Accelerator(device=1, engines=tmp_path, fp16=False)
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    chosen = dict(providers.with_options(names, accelerator, directory / "model.onnx", 100))
    assert list(chosen) == names
    assert chosen["CUDAExecutionProvider"] == {"device_id": "1"}
    told = chosen["TensorrtExecutionProvider"]
    assert (told["device_id"], told["trt_fp16_enable"]) == ("1", "False")
    assert told["trt_engine_cache_path"] == str(tmp_path)
    assert "ids:1,positions:1,bias:1x65,wanted:1,past.0.key:64x2x16" in told["trt_profile_min_shapes"]
    assert "ids:64,positions:64,bias:64x192,wanted:64,past.0.key:128x2x16" in told["trt_profile_max_shapes"]


# -- what is told -----------------------------------------------------------------------------------------------------


def test_phases_within_phases_count_as_part_of_a_step_and_never_go_back() -> None:
    said: list[float] = []
    phases = Phases(lambda _, share: said.append(share))
    phases.start("all", None, 2)
    phases.start("part", "all", 4)
    phases.step("part", 0)
    phases.start("piece", "part", 2)
    phases.step("piece", 0)
    phases.finish("piece")
    phases.finish("part")
    phases.start("other", "all", 1)
    phases.step("all", 0)
    phases.step("nobody announced", 0)
    assert said == [0.0, 0.0, 0.125, 0.125, 0.1875, 0.1875, 0.5]


def test_a_build_is_logged_and_gives_systemd_a_reason_to_wait(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, Building(Notifier(address)) as building:
        manager.bind(address)
        building.told("Timing tactics", 0.25)
        building.told("Timing tactics", 0.26)
        manager.settimeout(1.0)
        heard = [manager.recv(1000).decode() for _ in range(2)]
    assert heard[0] == "EXTEND_TIMEOUT_USEC=300000000"
    assert heard[1] == "STATUS=building the drafter's engine: 25 %, Timing tactics"
    assert caplog.text.count("building the drafter's engine") == 1, "not at each of thousands of steps"


# -- NVIDIA's own -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="needs `pip install --no-deps tensorrt-rtx-cu12-libs tensorrt-rtx-cu12-bindings`, which needs no GPU",
)
def test_nvidias_parser_and_builder_take_the_graph(directory) -> None:
    import tensorrt_rtx_bindings

    said: list[float] = []
    plan = build(tensorrt_rtx_bindings, directory / "model.onnx", 256, lambda _, share: said.append(share))
    assert len(memoryview(plan)) > 100_000
    assert said == sorted(said) and said[-1] == 1.0 and len(said) > 100


def test_a_real_gpu_computes_what_the_cpu_computes(directory, tmp_path) -> None:
    if why := played_gpu.without_gpu():
        pytest.skip(f"no engine can run here: {why}")
    drafter = TensorRtDrafter.load(directory, kept_in(tmp_path))
    for found_here, expected in zip(rounds(drafter), rounds(runtimes.load(directory, "onnx")), strict=True):
        np.testing.assert_allclose(found_here, expected, atol=1e-2 * np.abs(expected).max())
