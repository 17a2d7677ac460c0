"""What people see of a memory: tables, figures, reports, notebooks and the viewer.

Importing this package registers what draws answers in notebooks; everything that draws is imported when it is used.
"""

from typing import TYPE_CHECKING, Any

from dualform.drawing import register_html, register_picture

if TYPE_CHECKING:
    from dualform.attend.spotlight import Spotlight
    from dualform.attend.text_answers import TextSpotlight


def _draw_spotlight(spotlight: "Spotlight") -> str:
    from dualform.show.report.notebook import spotlight_html

    return spotlight_html(spotlight)


def _draw_text_spotlight(spotlight: "TextSpotlight") -> str:
    from dualform.show.report.notebook import text_spotlight_html

    return text_spotlight_html(spotlight)


def _draw_waterfall(answer: object, query: int) -> Any:
    from dualform.show.figures import waterfall

    return waterfall(answer, query)


register_html("Spotlight", _draw_spotlight)
register_html("TextSpotlight", _draw_text_spotlight)
register_picture("PathContributions", _draw_waterfall)
