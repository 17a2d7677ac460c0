"""The engine: every question over patterns is a job, and an executor runs jobs over a source.

source.py     where patterns come from (a protocol), and the parts that a source can be read by
block.py      some patterns of one layer, as a job sees them
measures.py   what a pattern is measured by, for each query
reducers.py   what adds measures up
jobs.py       one question: a pass in any order of patterns
plain.py      the executor that every other one is compared with
local.py      the executor for one machine, and all of its tuning
"""
