from __future__ import annotations

import subprocess
import sys

import pytest

# Tensors as a pass makes them: some tens of megabytes together, again and again. The first time each is new memory.
PROGRAM = """
import resource, sys
import numpy as np
from tools import memory
if sys.argv[1] == "kept":
    memory.keep_freed()
def make():
    return [np.ones(2_500_000) for _ in range(5)]
make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="it asks glibc")
def test_tensors_that_follow_each_other_use_the_same_memory() -> None:
    assert faults("kept") < 0.05 * faults("left")
