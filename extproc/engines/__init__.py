"""The inference engines: what each exposes, and how it is asked and read."""
