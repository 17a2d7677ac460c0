"""How a spotlight on a text looks in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dualform.attend.text_answers import TextSpotlight, Total, rankings
from dualform.printable import printable
from dualform.show.terminal_tables import console, percent, print_grid


def show_text(spotlight: TextSpotlight) -> None:
    """Print the model's next words and, for each layer, passages, documents and tokens."""
    screen = console()
    prompt = f"{_one_line(spotlight.prompt)}{spotlight.space}"
    screen.print(Text.assemble(prompt, (_one_line(spotlight.goes_on), "bold")))
    guesses = [f"{printable(guess.token)} {percent(guess.probability)}" for guess in spotlight.next]
    screen.print(f"next: {', '.join(guesses)}")
    for note in spotlight.notes:
        screen.print(f"note: {printable(note)}")
    for name, layer in spotlight.layers.items():
        for what, passages in rankings(layer):
            screen.print(
                Text.assemble("\n", (printable(name), "bold"), f": passages {what}, over {layer.patterns:,} patterns")
            )
            table = Table(header_style="dim", box=None, pad_edge=False)
            for column in ("attention", "occurrences"):
                table.add_column(column, justify="right")
            table.add_column("document", max_width=24)
            table.add_column("passage")
            for passage in passages:
                pieces = [(printable(piece), "bold reverse" if bold else "") for piece, bold in passage.pieces()]
                # A file shows no bold letters.
                text = Text.assemble(*pieces) if screen.is_terminal else Text(printable(passage.text()))
                document = Text(printable(passage.document))
                table.add_row(f"{passage.attention:.4g}", f"{passage.occurrences:,}", document, text)
            screen.print(table)
        _print_totals(screen, f"{name}: total attention by document", "document", layer.documents)
        _print_totals(screen, f"{name}: total attention by token", "token", layer.tokens)


def _print_totals(screen: Console, title: str, column: str, totals: tuple[Total, ...]) -> None:
    screen.print()
    rows = [(total.name, total.attention, total.patterns) for total in totals]
    print_grid(screen, title, [column, "attention", "patterns"], rows)


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "⏎"))
