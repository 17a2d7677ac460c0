"""The report: one HTML file about some test examples, for a colleague without a server.

`build` gathers answers and puts the page together; `section` is one test example; `svg` draws charts, `cards` training
samples; `notebook` shows a spotlight in a notebook by the same means. How they look stands in the templates of
`show/templates/`, which escape every value. Readable without JavaScript and in print.
"""
