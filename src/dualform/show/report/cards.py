"""Training samples as small cards of HTML: image or passage, label, number, how often it was seen."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dualform.show.panels.top_patterns import Card
from dualform.show.png import shrunk
from dualform.show.report.svg import data_uri, figures
from dualform.show.templating import render

if TYPE_CHECKING:
    from markupsafe import Markup

SIDE = 64  # pixels of an image at most
Images = Callable[[int], Tensor | None]
"""A function from the number of a sample to its pixels, or to None if the run keeps no image of it."""


def picture(pixels: Tensor | None, alt: str) -> "Markup | str":
    """Return an image inline, at most 64 pixels a side; an empty text without pixels."""
    if pixels is None:
        return ""
    return render("picture.html", uri=data_uri(shrunk(pixels.numpy(), side=SIDE)), alt=alt)


def card_list(cards: Sequence[Card], images: Images | None) -> "Markup":
    """Return cards as a list, best first; without `images`, neither images nor passages are shown."""
    return render("cards.html", cards=[_shown(card, images) for card in cards])


def _shown(card: Card, images: Images | None) -> dict[str, Any]:
    """Return a card as its template takes it: numbers as people read them."""
    seen = f"seen {card.occurrences} times" if card.occurrences else f"step {card.step:,}"
    share = "" if card.share is None else f", {100 * card.share:.2g} % of all"
    alt = f"training sample {card.sample}, label {card.label_name}"
    return {
        "passage": card.passage if images is not None else None,
        "picture": picture(images(card.sample), alt) if images is not None and card.image else "",
        "label": card.label_name,
        "sign": "neg" if card.value < 0 else "pos",
        "value": figures(card.value),
        "number": f"#{card.sample}" if card.sample is not None else f"pattern {card.pattern}",
        "seen": seen + share,
    }
