"""Inferact: the service that picks the node for each request, and the `inferact` command."""

__version__ = "0.1.0"
