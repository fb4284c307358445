"""Replays traces of real traffic over simulated fleets, to judge who picks nodes well."""
