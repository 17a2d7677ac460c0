"""The report: one HTML file about some test examples, for a colleague without a server.

`build` gathers answers and puts the page together; `section` is one test example; `svg` draws; `notebook` shows a
spotlight in a notebook by the same means. Readable without JavaScript and in print.
"""
