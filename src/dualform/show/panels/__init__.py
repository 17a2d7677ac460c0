"""The questions that the viewer and the report ask of a session, one module each, with their typed answers.

A question is a plain function; its answer is a frozen dataclass of what JSON can hold. Nothing here knows of requests,
pages or HTML.
"""
