"""Campaigns that attack dualform on purpose: `scripts/torture`, or `python -m torture --help`."""
