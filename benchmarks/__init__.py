"""Speed and size, as ratios of two things measured in turn in the same process. `scripts/bench` runs them all.

A time on a shared machine means little alone, so every row names what it is measured against. To add a row, write a
function under `@row(...)` in the file of its family in `benchmarks/families/`, or in a new file there; nothing else.
"""
