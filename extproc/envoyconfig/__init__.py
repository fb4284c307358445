"""From the configuration to what Envoy reads: its bootstrap, clusters and routes."""
