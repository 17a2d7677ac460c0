"""Language models: train one on a text while it is recorded, and ask which passages its next word attends to.

A new text is a file in `experiments/datasets`; a new model is a file in `experiments/models` and a line in `plans.py`.
`study.py` runs a study from text to findings, by `corpora` (tokens), `training`, `storage` (what fits on the disk),
`measure` (do the spotlights mean something?) and `examples`; `summary.py` makes tables of the findings.
"""
