"""HTML and SVG from the templates of this package, every value escaped.

A template is a file in `templates/`. What a template renders is marked as safe, so that it can stand in another
template; everything else is escaped, whoever wrote it.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, /, **values: Any) -> "Markup":
    """Return a template with values in it; a value that the template names and nobody gives is an error."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(**values))


def template_source(name: str) -> "Markup":
    """Return the text of a style or a script of this package, marked as safe."""
    from markupsafe import Markup

    environment = _environment()
    assert environment.loader is not None, "set below"
    return Markup(environment.loader.get_source(environment, name)[0])


@functools.cache
def _environment() -> "Environment":
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("dualform.show"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
