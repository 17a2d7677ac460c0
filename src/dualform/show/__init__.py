"""What people see of a memory: tables, figures, reports, notebooks and the viewer.

Importing this package registers what draws answers in notebooks; everything that draws is imported when it is used.
"""

from typing import TYPE_CHECKING

from dualform.drawing import register_html

if TYPE_CHECKING:
    from dualform.attend.spotlight import Spotlight


def _draw_spotlight(spotlight: "Spotlight") -> str:
    from dualform.show.report.notebook import spotlight_html

    return spotlight_html(spotlight)


register_html("Spotlight", _draw_spotlight)
