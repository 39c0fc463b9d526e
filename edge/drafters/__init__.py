"""Drafters: small models behind one interface (`edge.drafters.base`)."""

import os

# ONNX Runtime's library reports to its makers as soon as it is loaded; a board speaks to its own fleet alone.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
