"""The viewer: a local web page on one run.

`serve` binds and prints the address; `app` puts the pieces together; `guard` decides who may ask; `opened` opens the
run, and opens it again when it has grown; `parameters` reads requests; `jobs` runs questions in threads. `routes` has a
function for each question; the answers come from `show/panels/`, and the page draws them in `static/panels/`.
"""
