"""Metrics, decision log and the admin port."""
