"""Everything that looks at one verifier, put together: the meter, the metrics, the logs and the HTTP endpoint."""

from __future__ import annotations

from types import TracebackType

from cloud.config import CloudConfig
from cloud.gateway import Gateway
from cloud.logs import LogObserver
from cloud.meter import Meter
from cloud.usage import Observer
from protocol.errors import ConfigError


class Watch:
    """Made before the engine is, so that the endpoint can say that it is being loaded; use as a context manager.

    observers: for the verifier, to which others may be added before it is made; meter: None where the configuration has
    no directory for it. Raises ConfigError where the endpoint cannot listen.
    """

    def __init__(self, config: CloudConfig) -> None:
        self._metering = config.metering
        self.meter: Meter | None = None
        self.observers: list[Observer] = [LogObserver()]
        self._metrics = self._health = self._endpoint = None
        if config.http.port:
            try:
                from cloud.health import Endpoint, Health
                from cloud.metrics import Metrics
            except ImportError as error:
                remedy = '`pip install "outrider[cloud]"`, or set the port to 0.'
                raise ConfigError(f"`[http] port` needs a library: {error}", remedy=remedy) from None
            self._metrics = Metrics(config.named_tenants)
            self._health = Health(config.http.stuck_s)
            self._endpoint = Endpoint(config.http.host, config.http.port, self._metrics.registry, self._health)
            self.observers.append(self._metrics)

    def measure(self, verifier: str, target: str) -> Meter | None:
        """Begin to meter the verifier of that name, where a directory is configured. Raises RecordsError."""
        if self._metering.directory is not None:
            self.meter = Meter(self._metering.directory, verifier, target, flush_s=self._metering.flush_s)
            self.observers.append(self.meter)
        return self.meter

    def look_at(self, gateway: Gateway) -> None:
        """The verifier is made."""
        if self._metrics is not None and self._health is not None:
            self._metrics.watch(gateway, self.meter)
            self._health.watch(gateway)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._endpoint is not None:
            self._endpoint.stop()
