"""The files that Envoy and the service share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    """Names of the files in `scheduler.run_dir`; nothing here touches the disk."""

    path: Path

    @property
    def bootstrap(self) -> Path:
        """Envoy's start configuration."""
        return self.path / "envoy.yaml"

    @property
    def xds(self) -> Path:
        """The directory that Envoy watches for clusters and routes."""
        return self.path / "xds"

    @property
    def clusters(self) -> Path:
        """CDS: one cluster a node."""
        return self.xds / "clusters.json"

    @property
    def routes(self) -> Path:
        """RDS: what goes where."""
        return self.xds / "routes.json"

    def secret(self, node_id: str) -> Path:
        """SDS: a node's API key (mode 0600)."""
        return self.xds / f"secret-{node_id}.json"

    @property
    def admin_socket(self) -> Path:
        """Where Envoy reaches the admin app."""
        return self.path / "admin.sock"

    @property
    def drains(self) -> Path:
        """Drained nodes (SQLite)."""
        return self.path / "drains.sqlite"
