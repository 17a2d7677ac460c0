"""Trainings as functions: recorded, run again, proved equal step by step, and asked while they run."""
