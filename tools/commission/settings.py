"""A board's configuration from the file of its kind, with what is the board's own filled in."""

from __future__ import annotations

import json
import re

from tools.boards import FOLDER, SHORT
from tools.flash.plan import IDENTITY

PORT = 8883  # MQTT over TLS


def settings(hardware: str, device: str, host: str, port: int = PORT) -> str:
    """TOML text. hardware: a name of `tools.boards.NAMES`."""
    text = (FOLDER / f"{SHORT.get(hardware, hardware)}.toml").read_text()
    identity = {"ca": "ca.pem", "cert": "board.pem", "key": "board.key"}
    tls = "\n".join(f'{key} = "{IDENTITY}/{file}"' for key, file in identity.items())
    text = _fill(text, "name", json.dumps(device))
    return _fill(text, "host", f"{json.dumps(host)}\nport = {port}\n\n[broker.tls]\n{tls}")


def _fill(text: str, key: str, value: str) -> str:
    """Instead of the line that is marked as to be filled in."""
    return re.sub(rf"^{key} = .*# yours$", lambda _: f"{key} = {value}", text, count=1, flags=re.MULTILINE)
