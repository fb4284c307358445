"""Inferact: the service that picks the node for each request (see docs/)."""

__version__ = "0.1.0"
