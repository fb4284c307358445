"""Clients and load tools that people use, each as a script, against the whole chain."""
