"""The viewer: a local web page on one run.

`serve` binds and prints the address; `app` puts the pieces together; `guard` decides who may ask; `session` holds the
opened run; `ask` reads parameters; `jobs` runs questions in threads. A question is a file in `routes/`, and the panel
that shows its answer is a file in `static/panels/`.
"""
