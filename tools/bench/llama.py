"""llama.cpp through llama-cpp-python's low-level calls, in the setting that is fastest here."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import OutriderError
from tools.bench import reads
from tools.bench.record import ms
from tools.bench.rivals import BURST, CHAIN, CONTEXT, REST_S, TEXT

INSTALL = (
    "Build it from source, without AMX: CFLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16' CXXFLAGS=\"$CFLAGS\" "
    "CMAKE_ARGS='-DLLAVA_BUILD=OFF' pip install --no-binary llama-cpp-python llama-cpp-python"
)
SLOTS = 4 * CONTEXT
TRIALS = 5
HUGE_PAGES = "glibc.malloc.hugetlb=1"

_kept: list[object] = []


@cache
def library() -> Any:
    """The module of low-level calls, quiet. Raises OutriderError where it is not installed."""
    try:
        import llama_cpp
    except (ImportError, RuntimeError, OSError) as error:
        raise OutriderError(f"llama-cpp-python is not usable: {error}", where="llama.cpp", remedy=INSTALL) from error
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    _kept.append(quiet)  # the library knows its address alone
    return llama_cpp


def has_huge_pages() -> bool:
    """Whether its memory, which is the C library's, may lie in huge pages: a process is told so before it starts."""
    return HUGE_PAGES in os.environ.get("GLIBC_TUNABLES", "")


def quantise(source: Path, out: Path, threads: int = 2) -> Path:
    """All matrices of a GGUF file as Q4_0, in a file beside it; made once."""
    lib = library()
    if not out.exists():
        params = lib.llama_model_quantize_default_params()
        params.nthread, params.ftype = threads, lib.LLAMA_FTYPE_MOSTLY_Q4_0
        params.pure = params.allow_requantize = params.quantize_output_tensor = True
        part = out.with_suffix(".part")
        if lib.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params)):
            raise OutriderError("llama.cpp could not quantise it", where=str(source))
        part.rename(out)
    return out


@dataclass(frozen=True, slots=True)
class Setting:
    """flash: flash attention; repack: weights laid out for the processor when they are loaded."""

    flash: bool
    repack: bool


def load(path: Path, *, repack: bool) -> Any:
    """A model. Raises OutriderError where it cannot be loaded."""
    lib = library()
    params = lib.llama_model_default_params()
    params.use_extra_bufts = repack
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise OutriderError("llama.cpp cannot load it", where=str(path))
    return model


def fastest(path: Path, threads: int) -> tuple[Setting, list[dict[str, object]]]:
    """The setting whose passes of one and of four rows take least here, and what each takes together, in ms."""
    tried: dict[Setting, float] = {}
    for repack in (False, True):
        model = load(path, repack=repack)
        for flash in (False, True):
            rival = Llama(path, model, threads, Setting(flash, repack))
            tried[Setting(flash, repack)] = rival.trial()
            rival.close()
        library().llama_model_free(model)
    told: list[dict[str, object]] = [{**asdict(setting), "ms": ms(seconds)} for setting, seconds in tried.items()]
    return min(tried, key=tried.__getitem__), told


class Llama:
    """A context of a model in one setting; its cache is in half precision."""

    def __init__(self, path: Path, model: Any, threads: int, setting: Setting) -> None:
        """model: what `load` made of `path`."""
        self._lib = lib = library()
        wanted = lib.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = SLOTS, CONTEXT, CONTEXT
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.flash_attn_type = setting.flash
        wanted.no_perf = True
        self._context = lib.llama_init_from_model(model, wanted)
        self._memory = lib.llama_get_memory(self._context)
        self._width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(CONTEXT, 0, 1)
        self._decode(TEXT, 0, 1)
        about = ctypes.create_string_buffer(256)
        lib.llama_model_desc(model, about, 256)
        self.about: dict[str, object] = {
            "model": about.value.decode(),
            "runtime": f"llama-cpp-python {lib.__version__}",
            "setting": {**asdict(setting), "huge_pages": has_huge_pages()},
            "system": lib.llama_print_system_info().decode(),
        }
        self.read_bytes = reads.of_gguf(path)

    def ready(self) -> None:
        self._cut()

    def burst(self, rows: int) -> None:
        for _ in range(BURST):
            self._decode(range(7, 7 + rows), CONTEXT, rows)
            self._cut()

    def chain(self) -> None:
        id = 7
        for position in range(CONTEXT, CONTEXT + CHAIN):
            id = int(self._decode([id], position, 1)[0].argmax())
        self._cut()

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)

    def trial(self) -> float:
        """Seconds of a pass of one row and one of four."""
        taken = []
        for _ in range(TRIALS):
            time.sleep(REST_S)
            began = time.perf_counter()
            self.burst(1)
            self.burst(4)
            taken.append((time.perf_counter() - began) / BURST)
        return statistics.median(taken)

    def _cut(self) -> None:
        self._lib.llama_memory_seq_rm(self._memory, 0, CONTEXT, -1)

    def _decode(self, ids: Sequence[int], start: int, wanted: int) -> np.ndarray:
        """Evaluate ids from a position on: the logits of the last `wanted` rows, until the next call."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i] = id, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i >= len(ids) - wanted
        if self._lib.llama_decode(self._context, batch):
            raise OutriderError("a pass failed", where="llama.cpp")
        logits = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (wanted, self._width))
