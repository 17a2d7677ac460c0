"""Training samples as small cards of HTML: image or passage, label, number, how often it was seen."""

from collections.abc import Sequence
from html import escape
from typing import Any

from torch import Tensor

from dualform.show.panels.top_patterns import Card
from dualform.show.png import shrunk
from dualform.show.report.svg import data_uri, figures

SIDE = 64  # pixels of an image at most


def picture(pixels: Tensor | None, alt: str) -> str:
    """Return an image inline, at most 64 pixels a side; nothing where there is none."""
    if pixels is None:
        return ""
    uri = data_uri(shrunk(pixels.numpy(), side=SIDE))
    return f'<img class="px" src="{uri}" alt="{escape(alt, quote=True)}" width="64" height="64">'


def cards(found: Sequence[Card], image: Any) -> str:
    """Return a list of cards, best first; `image` gives a sample's pixels, or None."""
    return '<ol class="cards">' + "".join(_card(card, image) for card in found) + "</ol>"


def _card(card: Card, image: Any) -> str:
    sample, label = card.sample, card.label_name
    shown = picture(image(sample), f"training sample {sample}, label {label}") if card.image else ""
    if card.passage is not None and image is not no_image:
        passage = card.passage
        title = f'<span class="muted">{escape(passage.title)}</span><br>' if passage.title else ""
        shown = (
            f'<p class="passage">{title}{escape(passage.before)}<mark>{escape(passage.token)}</mark>'
            f"{escape(passage.after)}</p>"
        )
    seen = f"seen {card.occurrences} times" if card.occurrences else f"step {card.step:,}"
    share = "" if card.share is None else f", {100 * card.share:.2g} % of all"
    name = "" if label is None else f"<strong>{escape(str(label))}</strong> "
    number = f"#{sample}" if sample is not None else f"pattern {card.pattern}"
    sign = "neg" if card.value < 0 else "pos"
    return (
        f'<li>{shown}<div>{name}<span class="{sign}">{figures(card.value)}</span><br>'
        f'<span class="muted">{escape(number)}, {seen}{share}</span></div></li>'
    )


def no_image(sample: int) -> None:
    """Show no training sample: for reports that leave them out."""
