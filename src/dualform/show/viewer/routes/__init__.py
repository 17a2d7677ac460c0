"""The questions that the page asks, one file each: a function with `@question("/api/name")`, imported here."""

from dualform.show.viewer.routes import (  # noqa: F401 (an import registers the question)
    badge,
    curves,
    layers,
    mask,
    passage,
    prediction,
    run,
    sample,
    tests,
    time,
    top,
)
