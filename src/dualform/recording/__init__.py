"""Watch a training run: hooks, probes, optimizer facts, annotations. Knows no disk; hands its records to a sink."""
