"""A board speaks to its own fleet alone: ONNX Runtime's library is kept from reporting to its makers."""

from __future__ import annotations

import os
import subprocess
import sys

from tools.models import ROOT


def test_loading_the_library_leaves_no_identifier_and_no_queue_of_reports(tmp_path):
    """Where it may report, it makes both in the user's cache when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_")) and name != "CI"}
    environment = {**kept, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", "import edge.drafters.onnx"], env=environment, check=True, timeout=60)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
