"""Recording inside of training frameworks: transformers, Lightning, accelerate.

Each module here imports its framework, and nothing else of dualform imports these modules. They use the public names of
dualform, as a user's own program would.
"""
