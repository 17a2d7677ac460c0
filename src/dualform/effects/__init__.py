"""Predictions, from the memory alone, of what training without some patterns would change.

Imports the engine's protocols and knows nothing of `attend`, whose spotlights call it.
"""
