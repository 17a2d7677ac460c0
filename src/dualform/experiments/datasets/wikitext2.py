"""WikiText-2: good and featured articles of Wikipedia."""

import re
from collections.abc import Mapping

from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.download import ZipDownload
from dualform.experiments.datasets.textset import TextSet, Title, decode_text

_TITLE = re.compile(r" = ([^=]+) = ")


@provides(
    "wikitext-2",
    licence="CC BY-SA 3.0, Wikipedia's authors; S. Merity and others",
    files={
        "wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    },
    remotes=(
        ZipDownload("https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip"),
        ZipDownload("https://wikitext.smerity.com/wikitext-2-v1.zip"),
    ),
)
def build_wikitext2(contents: Mapping[str, bytes]) -> TextSet:
    """Wikipedia articles, 600 pages of 2,088,628 words to train on and 60 of 245,569 held out."""
    train, valid, test = (
        decode_text(contents[f"wiki.{part}.tokens"], name=f"wikitext-2/wiki.{part}.tokens")
        for part in ("train", "valid", "test")
    )
    return TextSet("wikitext-2", train, test, unit="words", spaced=True, titles=page_titles(train), valid=valid)


def page_titles(text: str) -> tuple[Title, ...]:
    r"""Return the pages' titles: ` = Title = ` between blank lines; more signs are sections, none blank a table's.

    >>> [title.text for title in page_titles(" \n = Boulter = \n \n = = Career = = \n \n W = \n = Goals ; A = \n")]
    ['Boulter']
    """
    lines = text.split("\n")
    blank = [not line.strip() for line in lines]
    return tuple(
        Title(number, found[1])
        for number, line in enumerate(lines)
        if (found := _TITLE.fullmatch(line))
        and (number == 0 or blank[number - 1])
        and blank[number + 1 :][:1] == [True]
    )
