"""A fleet of verifiers on a Ray cluster: one actor, one process, one verifier. Ray places the processes and tells when
one has died; what is done about it `cloud.fleet` decides. There is no router: the broker spreads new sessions.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import msgspec

from cloud.autoscale import Load
from cloud.config import CloudConfig
from cloud.fleet import Fleet, Kill, Member, Order, Retire, Start, Stop, Tell
from cloud.gateway import Gateway
from cloud.logs import configure
from cloud.replica import Make, Replica
from cloud.usage import Observer
from protocol.errors import ConfigError, LinkError, OutriderError

log = logging.getLogger(__name__)

LOOK_S = 0.25
BEAT_S = 1.0  # how often each replica is asked for its load
RETIRE_S = 2.0
STORE_BYTES = 80 << 20  # Ray's least: nothing is put there
THREADS = 6  # of an actor: `serve`, `load`, `retire`, `stop`, and room for a question that a busy process answers late
TEXT_LOGS = partial(configure, "text")

# Read by Ray when it is imported or starts processes; what the operator has set counts.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # or a replica's line that another has said as well would be lost
    "RAY_COLOR_PREFIX": "0",
}
ALONE = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only way to have all of Ray's ports on loopback
    "RAY_worker_niceness": "0",  # or every replica would give way to whatever else runs
}


@dataclass(slots=True)
class Handle:
    """Ray's side of a member. done: of its `serve`; beat: of its `load`, while it is asked."""

    actor: Any
    done: Any
    beat: Any = None
    asked_at: float = 0.0


@contextmanager
def make_replica_gateway(config: CloudConfig, pulse: Observer) -> Iterator[Gateway]:
    """A replica's gateway as `outrider-cloud serve` makes it."""
    from cloud.serving import make_engine, make_gateway
    from cloud.watch import Watch

    with Watch(config) as watch:
        watch.observers.append(pulse)
        yield make_gateway(config, make_engine(config), watch)


def serve(
    config: CloudConfig,
    *,
    address: str | None = None,
    reload: Callable[[], CloudConfig] | None = None,
    configure_logs: Callable[[], None] = TEXT_LOGS,
    make: Make = make_replica_gateway,
) -> None:
    """Keep the fleet that `config.replicas` asks for until SIGTERM or SIGINT, then let it leave. SIGHUP replaces all
    replicas, by what `reload` gives.

    address: of a Ray cluster, as `ray.init` takes it; None starts one on this machine, for itself alone.
    configure_logs: called first in each replica's process; make: how a replica gets its gateway.
    Raises ConfigError where `config` names the verifier or there is no Ray, LinkError where the cluster cannot be
    reached, and what a replica raised that cannot be made with this configuration.
    """
    check(config)
    with redirect_stdout(sys.stderr), connected(address) as ray:  # where Ray says what it has to say
        cluster = Cluster(ray, config, reload or (lambda: config), make, configure_logs)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: cluster.stop())
        signal.signal(signal.SIGHUP, lambda *_: cluster.renew())
        cluster.run()


def check(config: CloudConfig) -> None:
    """Raise ConfigError where replicas cannot be made of `config`."""
    if config.verifier is not None:
        raise ConfigError(
            f"verifier = {config.verifier!r} names one replica, and each needs a name of its own",
            where="configuration",
            remedy="Leave `verifier` out; names are made anew",
        )


@contextmanager
def connected(address: str | None) -> Iterator[ModuleType]:
    """The `ray` module, connected, until the end. Raises ConfigError without Ray, LinkError without the cluster."""
    os.environ.update({**QUIET, **(ALONE if address is None else {}), **os.environ})
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed", where="--ray", remedy='Install it with `pip install "outrider[cluster]"`'
        ) from None
    alone: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(address or "local", namespace="outrider", logging_level=logging.WARNING, **({} if address else alone))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise LinkError(
            f"no Ray cluster: {error}",
            where=address or "ray",
            remedy="Name a head node that runs, as HOST:PORT; where it asks for a token, set RAY_AUTH_MODE=token",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


class Cluster:
    """Carries out a fleet's orders, and tells it what becomes of them.

    Warnings have the replica's name in their format: one that happens to each in turn is no repetition to be left out.
    """

    def __init__(
        self,
        ray: ModuleType,
        config: CloudConfig,
        reload: Callable[[], CloudConfig],
        make: Make,
        configure_logs: Callable[[], None],
    ) -> None:
        self.fleet = Fleet(config.replicas)
        self._ray, self._config, self._reload = ray, config, reload
        self._make, self._configure_logs = make, configure_logs
        self._handles: dict[str, Handle] = {}
        self._stopping = self._renewing = False

    def stop(self) -> None:
        """Let all replicas leave, and end `run`; may be called from a signal handler."""
        self._stopping = True

    def renew(self) -> None:
        """Replace all replicas one after the other; may be called from a signal handler."""
        self._renewing = True

    def run(self) -> None:
        """Raises the fleet's failure, if it has one."""
        fleet = self.fleet
        try:
            while not fleet.over:
                if self._stopping:
                    fleet.close(time.monotonic())
                elif self._renewing:
                    self._renewing = False
                    self._load_again()
                for order in fleet.orders(time.monotonic()):
                    self._carry_out(order)
                self._listen()
        finally:
            for handle in self._handles.values():
                self._ray.kill(handle.actor)
        if fleet.failure is not None:
            raise fleet.failure

    def _load_again(self) -> None:
        try:
            config = self._reload()
            check(config)
        except OutriderError as error:
            log.error("%s; the replicas stay as they are", error)
            return
        self._config = config
        self.fleet.renew(config.replicas)
        log.info("all replicas are replaced")

    # -- orders ---------------------------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> None:
        match order:
            case Start(member):
                self._start(member)
            case Retire(id):
                log.info("replica %s leaves the share", id)
                self._ray.wait([self._handles[id].actor.retire.remote()], timeout=RETIRE_S)
            case Stop(id):
                log.info("replica %s drains", id)
                self._handles[id].actor.stop.remote()
            case Kill(id, why):
                log.warning(f"replica {id} is ended: %s", why)
                self._end(id)
                self.fleet.ended(id, time.monotonic())
            case Tell(what):
                log.warning("%s; the cluster has %s", what, self._free())

    def _start(self, member: Member) -> None:
        replicas = self._config.replicas
        options = {
            "name": f"outrider-{member.id}",
            "num_cpus": replicas.cpus,
            "num_gpus": replicas.gpus,
            "max_restarts": 0,  # a replica of Ray's making would have its predecessor's name
            "max_concurrency": THREADS,
        }
        config = of_replica(self._config, member.id, member.slot)
        actor = self._ray.remote(Replica).options(**options).remote(config, self._make, self._configure_logs)
        self._handles[member.id] = Handle(actor, actor.serve.remote())
        log.info("replica %s starts", member.id)

    def _end(self, id: str) -> None:
        self._ray.kill(self._handles.pop(id).actor)

    def _free(self) -> str:
        free = self._ray.available_resources()
        return f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU free"

    # -- events ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Hear who has ended and how those that serve are, for at most LOOK_S."""
        handles = self._handles
        done = {handle.done: id for id, handle in handles.items()}
        if not done:
            time.sleep(LOOK_S)
            return
        ended, _ = self._ray.wait(list(done), timeout=LOOK_S)
        for ref in ended:
            self._bury(done[ref], ref)
        now = time.monotonic()
        beats = {handle.beat: id for id, handle in handles.items() if handle.beat is not None}
        answered, _ = self._ray.wait(list(beats), num_returns=len(beats), timeout=0) if beats else ([], [])
        for ref in answered:
            self._take_pulse(beats[ref], ref, now)
        for handle in handles.values():
            if handle.beat is None and now - handle.asked_at >= BEAT_S:
                handle.beat, handle.asked_at = handle.actor.load.remote(), now

    def _take_pulse(self, id: str, ref: Any, now: float) -> None:
        self._handles[id].beat = None
        try:
            load: Load = self._ray.get(ref)
        except self._ray.exceptions.RayError:
            return  # its end, if it is one, is told by `serve`
        first = load.serving and self.fleet.members[id].served is None
        self.fleet.heard(id, load, now)
        if first:
            log.info("replica %s serves, %d of %d", id, *self._count())

    def _count(self) -> tuple[int, int]:
        members = self.fleet.members.values()
        return sum(member.serves for member in members), len(members)

    def _bury(self, id: str, ref: Any) -> None:
        error: Exception | None = None
        try:
            self._ray.get(ref)
            log.info("replica %s has left", id)
        except self._ray.exceptions.RayTaskError as raised:
            error = raised.cause
            log.error(f"replica {id} failed: %s", error)
        except self._ray.exceptions.RayError as died:
            error = OutriderError("its process died", where=f"replica {id}")
            log.warning(f"replica {id} died: %s", str(died).splitlines()[0])
        self._end(id)
        self.fleet.ended(id, time.monotonic(), error)


def of_replica(config: CloudConfig, id: str, slot: int) -> CloudConfig:
    """A replica's part of the fleet's configuration: its name, its share of the cores, a port of its own."""
    replace = msgspec.structs.replace
    engine, http = config.engine, config.http
    if not engine.threads:
        engine = replace(engine, threads=max(1, round(config.replicas.cpus)))
    if http.port:
        http = replace(http, port=http.port + slot)
    return replace(config, verifier=id, engine=engine, http=http)
