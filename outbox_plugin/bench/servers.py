"""The servers of a chaos run: Postgres with a standby, three brokers, and a network of proxies between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from outbox_plugin.bench.proxy import Proxy
from outbox_plugin.bench.replication import ReplicatedPostgres
from outbox_plugin.bench.temporary_outbox import Tell
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.embedded.cluster import EmbeddedCluster
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings


class Route:
    """How one harvester reaches the servers: a proxy of its own to Postgres, and one to each broker."""

    def __init__(self, brokers: int) -> None:
        """Nothing listens yet."""
        self.postgres = Proxy()
        self.brokers = [Proxy() for _ in range(brokers)]

    @property
    def proxies(self) -> list[Proxy]:
        """All of them."""
        return [self.postgres, *self.brokers]


class Servers:
    """A Postgres with a synchronous standby, and three brokers, in `folder`.

    `routes` has a way of its own to all servers for each of `harvesters`; everybody else's way is never disturbed.
    """

    def __init__(self, folder: Path, tell: Tell, harvesters: int = 0) -> None:
        """Nothing is started yet.

        Args:
            folder: holds the servers' data and logs.
            tell: is called with each line of progress.
            harvesters: how many harvesters reach the servers on a network route of their own.
        """
        self.postgres = ReplicatedPostgres(folder / "postgres")
        self.cluster = EmbeddedCluster(folder / "kafka", tell)
        self.routes = [Route(len(self.cluster.nodes)) for _ in range(harvesters)]
        self._front = Proxy()  # A fixed address, as a fail-over changes the primary's.

    @contextmanager
    def running(self, delivery: Delivery | None = None) -> Iterator[Settings]:
        """Run them for as long as the body runs; gives settings for an outbox that is migrated, past all routes."""
        with ExitStack() as stack:
            for proxy in [self._front, *(proxy for route in self.routes for proxy in route.proxies)]:
                stack.enter_context(proxy)
            for route in self.routes:
                for proxy, node in zip(route.brokers, self.cluster.nodes, strict=True):
                    proxy.target = node.listen_behind(proxy.port)
            stack.callback(self.cluster.stop)
            stack.enter_context(self.postgres.running())
            self.cluster.start()
            self.postgres.add_standby()
            asked = {"delivery": delivery} if delivery else {}
            settings = Settings(
                dsn=self.postgres.dsn_through(self._front), bootstrap_servers=self.cluster.bootstrap_servers, **asked
            )
            migrate(settings)
            self.cluster.wait_in_sync()
            yield settings

    def through(self, route: Route, settings: Settings) -> Settings:
        """The settings of a harvester whose way is `route`."""
        brokers = ",".join(f"127.0.0.1:{proxy.port}" for proxy in route.brokers)
        values = {name: getattr(settings, name) for name in settings.model_fields_set}
        values |= {"dsn": self.postgres.dsn_through(route.postgres), "bootstrap_servers": brokers}
        return Settings(**values)
