"""A link that is cut as a cable is: packets are lost, nobody is told, and TCP waits longer and longer to try again. A
proxy cannot do that; a bridge between two network namespaces can.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.fleet import Child, Fleet
from tests.faults.trial import Costs, settle
from tools.broker import find_mosquitto

PORT = 1883
BOARD, CLOUD = "10.77.0.1", "10.77.0.2"
FORWARDS, DROPS = 3, 0  # states of a bridge's port
LAY = """
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
for end in board cloud; do
  eval pid=\\$$end
  ip link add at-$end type veth peer name eth0 netns $pid
  ip link set at-$end master br0 up
done
"""
BROKER = """\
listener {port} {address}
allow_anonymous true
set_tcp_nodelay true
max_topic_alias 1000
log_dest none
{user}
"""
SEEN = "the text stands still, then goes on; the log says why after a while"


def absent() -> str:
    """Why there can be no cable here, or ""."""
    tried = [
        "unshare",
        "--net",
        "sh",
        "-ec",
        "ip link add br0 type bridge; ip link add a0 type veth peer name b0; bridge link",
    ]
    try:
        done = subprocess.run(tried, capture_output=True)
    except OSError:
        return "no unshare"
    return "this user may make no networks" if done.returncode else ""


class Cable:
    """A network for the board, one for the cloud, and the bridge in between."""

    def __init__(self) -> None:
        hold = ["unshare", "--net", "sleep", "infinity"]
        self._holders = {name: subprocess.Popen(hold, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                         for name in ("bridge", "board", "cloud")}  # fmt: skip
        own = os.readlink("/proc/self/ns/net")
        for holder in self._holders.values():
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                time.sleep(0.01)
        environment = {**os.environ, **{name: f"{holder.pid}" for name, holder in self._holders.items()}}
        subprocess.run([*self.inside("bridge"), "sh", "-ec", LAY], env=environment, check=True)
        for name, address in (("board", BOARD), ("cloud", CLOUD)):
            up = f"ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up"
            subprocess.run([*self.inside(name), "sh", "-ec", up], check=True)

    def inside(self, name: str) -> list[str]:
        return ["nsenter", "--net", "--target", f"{self._holders[name].pid}"]

    def pass_packets(self, passes: bool) -> None:
        state = f"{FORWARDS if passes else DROPS}"
        subprocess.run([*self.inside("bridge"), "bridge", "link", "set", "dev", "at-board", "state", state], check=True)

    def remove(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()


class CableFleet(Fleet):
    """One board at one end, broker and verifiers at the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.cable = Cable()
        super().__init__(folder, num_boards=1, num_verifiers=2, seed=seed)

    def _start_broker(self) -> None:
        conf = self.folder / "cable.conf"
        user = "user root" if os.geteuid() == 0 else ""
        conf.write_text(BROKER.format(port=PORT, address=CLOUD, user=user))
        program = find_mosquitto()
        assert program is not None
        self._mosquitto = subprocess.Popen([*self.cable.inside("cloud"), program, "-c", str(conf)])

    def _child(self, name: str, user: str, kind: str, words: Sequence[str], *, log: str = "", **options: Any) -> Child:
        inside = self.cable.inside("board" if kind == "board" else "cloud")
        command = [kind, "--host", CLOUD, "--port", f"{PORT}", "--name", name, *words]
        return Child(log or name, self.folder, None, command, inside=inside, **options)

    def stop(self) -> None:
        super().stop()
        self._mosquitto.kill()
        self._mosquitto.wait()
        self.cable.remove()


def pull(folder: Path, seed: int, outages_s: Sequence[float]) -> tuple[Costs, list[str], int]:
    """(what it costs, what was wrong, how many texts)."""
    costs = Costs("cable pulled", SEEN, absent())
    if costs.absent:
        return costs, [], 0
    with CableFleet(folder, seed) as fleet:
        (board,) = fleet.boards
        for outage_s in outages_s:
            settle(fleet, 3.0)
            began = time.monotonic()
            fleet.cable.pass_packets(False)
            time.sleep(outage_s)
            fleet.cable.pass_packets(True)
            ended = time.monotonic()
            at = fleet.await_token(board, ended, 120.0)
            costs.note(ended - began, at - ended, fleet.application(board).silent_s(began, at))
        return costs, fleet.wrong, fleet.num_texts
