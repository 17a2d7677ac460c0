"""Where patterns come from: the interface between the engine and whatever keeps or makes patterns.

A `PatternSource` describes a training run, knows the facts of every optimizer step, and gives its patterns in parts.
The run folder is one source (`dualform.store.reader`); the engine and everything behind it see only what is defined
here. To add a source, derive from `PatternSource` and `PatternPart` and implement their abstract methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from dualform.corpus import Corpus
from dualform.engine.addresses import Calls, addresses
from dualform.engine.beside_patterns import KnownState, Media, Tests
from dualform.engine.description import LayerEntry, RunDescription
from dualform.engine.share_source import ShareSource
from dualform.engine.walk_back import VisitStep
from dualform.errors import KeysOnlyError, QueryError, SharesOnlyError, UnknownLayerError
from dualform.identity.families import Coefficients, Facts, derive, find_optimizer_kind
from dualform.identity.families.optimizer_facts import CoefficientsOf
from dualform.recording.estimate import size_text
from dualform.recording.media import Files

if TYPE_CHECKING:
    from dualform.engine.explanation import Explanation  # which needs verifications, and these a source

Factors = npt.NDArray[np.float64]
"""What a parameter's gradient was multiplied with between backward and step, (steps, micros)."""
Which = Literal["initial", "final"]
ADDRESS = ("pattern", "step", "micro", "call", "row", "position")
"""The columns that every pattern has, beside the user's own."""
RANKED_ADDRESS = (*ADDRESS[:1], "rank", *ADDRESS[1:])
"""The same of a run that several processes recorded together."""

PATH_CONTRIBUTION = "a path contribution"
"""How messages name the question that `dualform.PathQuestion` asks before a training."""


class Rows(Protocol):
    """Keys or values of one layer in one part, as they are stored, (n, d); read when some of them are taken."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which rows are stored."""

    def __len__(self) -> int: ...

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some rows as they are stored, and their scales where they are row-scaled.

        Args:
            index: consecutive rows, or numbers of rows.
            into: a buffer (uint8) that may be used; the returned rows are then valid until it is used again.
        """


class RunFiles(Protocol):
    """Files that belong to a run but are no patterns: texts and pictures for people, tests, the rest of the model."""

    def check(self) -> int:
        """Compare every file with its checksum, raise where one differs, and return how many there are."""

    def size(self) -> int:
        """Return how many bytes all files have."""

    def manifest_checksum(self) -> str:
        """Return the xxh3 checksum of the list of files, as hexadecimal."""

    def attach(self, files: Files) -> None:
        """Take more files in, or replace some."""

    def tests(self) -> Tests:
        """Return the test inputs that the run keeps."""

    def paths(self) -> dict[str, Tensor]:
        """Return the answers to questions about the path that were asked before the training, as they were kept."""

    def media(self) -> Media:
        """Return what the run keeps for people to look at."""

    def corpus(self, *, fitting: bool) -> Corpus:
        """Return the text that the run keeps; with `fitting` raise where recorded places are not those of the text."""

    def add_corpus(self, corpus: Corpus) -> None:
        """Keep a text that fits the recorded places."""

    def known_state(self) -> KnownState | None:
        """Return what is known of the model's uncovered state at the end; None where the run says nothing of it."""

    def known_states(self) -> Sequence[tuple[int, Mapping[str, Tensor]]]:
        """Return the changing uncovered state wherever it is kept, with the number of steps after which it was so."""

    def restore(self, model: nn.Module) -> dict[str, str]:
        """Put the uncovered state into a model; return the parts that are not known, with reasons."""


class DerivedSums(Protocol):
    """Keeps tensors that were computed from a source's patterns for the next process."""

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors that were saved under a name; None where there are none that can be trusted."""

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save tensors under a name; fails silently where that is not possible."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a question takes at most.

    Attributes:
        replays: how many times the recorded training is run again.
        seconds: how long these replays take, by the time that the recorded training took.
        bytes: keys and values that are read or go by.
    """

    replays: int
    seconds: float
    bytes: int

    def __str__(self) -> str:
        times = "1 replay" if self.replays == 1 else f"{self.replays} replays"
        taken = f"{times}, about {self.seconds:.3g} s; " if self.replays else ""
        return f"{taken}{size_text(self.bytes)} of patterns"


class PatternPart(ABC):
    """The patterns of a range of steps, `start <= step < stop`, that can be read without the others.

    Attributes:
        index: names the part within its source; ascending in the order of steps.
    """

    index: int
    start: int
    stop: int

    @abstractmethod
    def calls(self, layer: str) -> Calls:
        """Return a layer's calls; those of steps from `stop` on are left out."""

    @abstractmethod
    def rows(self, layer: str, what: Literal["keys", "values"]) -> Rows:
        """Return a layer's keys or values, in the order of its calls."""

    @abstractmethod
    def annotation(self, name: str, *, keep: bool = True) -> pa.ChunkedArray | None:
        """Return one of the user's columns, over the rows that calls refer to; None where this part has none of it.

        Without `keep` the column is not asked for again soon, and need not stay in memory.
        """

    def key_range(self, layer: str) -> tuple[float, float] | None:
        """Return the least and the greatest element of a layer's keys; None without patterns."""
        keys = self.rows(layer, "keys").take(slice(None)) if self.count(layer) else None
        if keys is None or not keys[0].numel():
            return None
        whole = keys[0].double() if keys[1] is None else keys[0].double() * keys[1].double()[:, None]
        return float(whole.min()), float(whole.max())

    def key_ids(self, layer: str) -> Tensor | None:
        """Return the number of each pattern's key among the layer's distinct keys, (n,); None where it is not known."""
        return None

    def own_keys(self, layer: str) -> tuple[int, Rows] | None:
        """Return the distinct keys that came first in this part, and the number of the first of them."""
        return None

    def stored_bytes(self, layer: str) -> int:
        """Return how many bytes a layer's patterns take where they are stored; 0 where they are not."""
        return 0

    def key_bytes(self, layer: str) -> int:
        """Return about how many bytes a layer's keys take in memory once they are read; more is said than less."""
        return self.stored_bytes(layer)

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer are here."""
        calls = self.calls(layer)
        return int((calls["rows"] * calls["positions"]).sum())

    def addresses(self, layer: str, patterns: npt.NDArray[np.int64] | None = None) -> dict[str, npt.NDArray[np.int64]]:
        """Return step, micro, call, row, position and row in the annotation table of all patterns, or of some."""
        return addresses(self.calls(layer), patterns)


class PatternSource(ABC):
    """A recorded training run: its description, the facts of its steps, and its patterns in parts."""

    @property
    @abstractmethod
    def description(self) -> RunDescription:
        """What was trained: layers, parameters, columns, number of steps."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Names the content: two sources of one digest give the same answers."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The source as messages call it, for example the path of its folder."""

    @abstractmethod
    def parts(self) -> Sequence[PatternPart]:
        """Return the parts in the order of steps."""

    @abstractmethod
    def facts(self, parameter: str) -> tuple[Facts, Factors]:
        """Return what the optimizer did to a parameter, and its gradient's factors."""

    @abstractmethod
    def tensors(self, which: Which) -> Mapping[str, Tensor] | None:
        """Return the covered parameters at the start or at the end; None where they are not known."""

    @property
    @abstractmethod
    def initial_states(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The optimizer state that was warm at the start: parameter -> entry -> tensor."""

    @property
    def address(self) -> tuple[str, ...]:
        """The columns that every pattern has, beside the user's own."""
        return RANKED_ADDRESS if self.description.processes > 1 else ADDRESS

    @property
    def run_files(self) -> RunFiles | None:
        """Files that belong to the run but are no patterns; None where the source has none."""
        return None

    def require_files(self) -> RunFiles:
        """Return the files that belong to the run but are no patterns, or raise where it has none."""
        found = self.run_files
        if found is None:
            raise QueryError(f"{self.name} keeps patterns alone: no texts, pictures or tests. Open a run folder.")
        return found

    @property
    def kept_shares(self) -> ShareSource | None:
        """Exact sums by group that the run keeps itself; None where it keeps none."""
        return None

    def unexplained(self, parameter: str, horizon: int) -> Tensor | None:
        """Return what no pattern explains of a parameter after so many steps, float64, in its shape.

        None where the training itself was recorded: patterns explain all of it then, up to rounding. Of a run that was
        made from checkpoints it is known at these alone; elsewhere `SelectionError` says so.
        """
        return None

    def explanation(self) -> "Explanation | None":
        """Return how much of the change between checkpoints patterns explain; None where the training was recorded."""
        return None

    def require_recorded(self, what: str) -> None:
        """Raise where the run was made from checkpoints, for questions that follow the weights from step to step.

        Args:
            what: the question, for the message.
        """
        if self.explanation() is not None:
            raise QueryError(
                f"{self.name} was made from checkpoints: the weights between two of them are not known, and {what} "
                "needs them. Record the training, or replay it (docs/replay.md)."
            )

    def walk_back(self, visit: VisitStep, *, steps: int) -> None:
        """Show each of so many steps, the last one first, with the training put back to just before it.

        Of a source that cannot run its training again, this is refused.
        """
        raise QueryError(
            f"Unrolled effects run the training again from its end to its beginning, and {self.name} keeps patterns "
            "alone. Record a dualform.Restartable with loss=... by dualform.record_training (docs/replay.md)."
        )

    @property
    def steps_table(self) -> pa.Table:
        """The optimizer facts as they were logged, a row per (step, parameter); empty where they were not."""
        return pa.table({})

    @property
    def derived_sums(self) -> DerivedSums | None:
        """Where tensors that were computed from the patterns are kept for the next process; None for nowhere."""
        return None

    def cost(self, layers: Collection[str], rounds: int) -> Cost:
        """Say what a question about some layers takes whose jobs come in so many rounds, each after the one before."""
        size = sum(part.stored_bytes(name) for part in self.parts() for name in layers)
        return Cost(replays=0, seconds=0.0, bytes=rounds * size)

    # What follows from these --------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.description.steps

    @cached_property
    def layers(self) -> dict[str, LayerEntry]:
        """The layers of the run, without optional ones that were never used."""
        every = self.description.layers
        return {name: entry for name, entry in every.items() if not entry.optional or self.seen(name)}

    def layer(self, name: str) -> LayerEntry:
        """Return a layer's entry, or raise with the names of all layers."""
        try:
            return self.layers[name]
        except KeyError:
            known = ", ".join(map(repr, self.layers))
            raise UnknownLayerError(f"Layer {name!r} was not recorded in {self.name}. There are: {known}.") from None

    def require_values(self, layer: str) -> LayerEntry:
        """Return a layer's entry if its values are kept, or raise."""
        entry = self.layer(layer)
        if entry.store == "keys":
            raise KeysOnlyError(
                f"Layer {layer!r} was recorded with its keys only: attention works, but weights, contributions and "
                'outputs need values. Record it with layers={...: "keys+values"}.'
            )
        return entry

    def require_patterns(self, layer: str, what: str = "this question") -> LayerEntry:
        """Return a layer's entry if its patterns are kept, or raise.

        Args:
            layer: the layer's name.
            what: the question that needs patterns, for the message.
        """
        entry = self.layer(layer)
        if entry.store == "shares":
            kept = self.require_shares()
            beforehand = (
                " Or ask before the training: keep=dualform.Shares(paths={name: dualform.PathQuestion(...)})."
                if what == PATH_CONTRIBUTION
                else ""
            )
            raise SharesOnlyError(
                f"Layer {layer!r} keeps shares by {groupings_text(kept.groupings)} and no patterns: {what} needs "
                f"patterns. Record them too: keep=[dualform.Shares(...), dualform.Patterns(layers={layer!r})]."
                f"{beforehand}"
            )
        return entry

    def require_shares(self) -> ShareSource:
        """Return the sums by group that the run keeps, or raise where it keeps none."""
        kept = self.kept_shares
        if kept is None:
            raise QueryError(f"{self.name} keeps no shares. Record them: keep=dualform.Shares(by=...).")
        return kept

    def shared_parameters(self) -> tuple[str, ...]:
        """Return the parameters whose shares by group are all there is: those of layers without patterns."""
        layers = [entry for entry in self.layers.values() if entry.store == "shares"]
        return tuple(dict.fromkeys(parameter for entry in layers for parameter in entry.parameters.values()))

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer are kept."""
        return sum(part.count(layer) for part in self.parts())

    def seen(self, layer: str) -> int:
        """Return how many patterns of a layer are kept, or how many its shares sum."""
        if self.description.layers[layer].store != "shares":
            return self.count(layer)
        kept = self.require_shares()
        if not kept.horizons:
            return 0
        return int(kept.key_sums(layer, kept.groupings[0], horizon=kept.horizons[-1]).counts.sum())

    @property
    def last_step(self) -> int:
        """The last step that questions can be asked about: where shares are kept, the last that they are kept after.

        A program that was killed may have published more steps than shares.
        """
        kept = self.kept_shares
        if kept is None or not kept.horizons or not self.shared_parameters():
            return self.steps
        return kept.horizons[-1]

    def key_range(self, layer: str) -> tuple[float, float]:
        """Return the least and the greatest element of all of a layer's keys; (0, 0) without patterns."""
        ranges = [found for part in self.parts() if (found := part.key_range(layer)) is not None]
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0.0, 0.0)

    def coefficients(
        self, parameter: str, horizon: int, of: CoefficientsOf = "parameter"
    ) -> tuple[Coefficients, Factors]:
        """Return a parameter's coefficients after `horizon` steps, and its gradient's factors."""
        facts, factors = self.facts(parameter)
        if not len(facts.step):  # never updated: the start, whatever the optimizer
            start, buffer = (1.0, 0.0) if of == "parameter" else (0.0, 1.0)
            return Coefficients(np.zeros(horizon), start, buffer), factors
        return derive(facts, horizon=horizon, of=of), factors

    def is_replayed(self, parameter: str) -> bool:
        """Say whether a parameter's optimizer has no coefficients, so that its steps have to be taken again."""
        facts, _ = self.facts(parameter)
        kind = find_optimizer_kind(facts.optimizer)
        return kind is not None and not kind.has_coefficients and len(facts.step) > 0

    def exact_parameters(self) -> tuple[str, ...]:
        """Return the parameters that can be rebuilt: those of layers whose values are kept."""
        layers = [entry for entry in self.layers.values() if entry.store != "keys"]
        return tuple(dict.fromkeys(parameter for entry in layers for parameter in entry.parameters.values()))

    @cached_property
    def initial(self) -> Mapping[str, Tensor]:
        """The covered parameters at the start."""
        found = self.tensors("initial")
        assert found is not None, "every source knows its start"
        return found

    @cached_property
    def final(self) -> Mapping[str, Tensor] | None:
        """The covered parameters after the last step, where they are known."""
        return self.tensors("final")

    def table(
        self,
        part: PatternPart,
        layer: str,
        columns: Sequence[str],
        patterns: npt.NDArray[np.int64] | None = None,
    ) -> pa.Table:
        """Return columns of the pattern table, a row per pattern of a layer in a part; reads no keys.

        Args:
            part: the part.
            layer: the layer's name.
            columns: columns of the address, or the user's.
            patterns: the places in the part of the patterns that are wanted; by default all of them.
        """
        places = np.arange(part.count(layer)) if patterns is None else patterns
        address = part.addresses(layer, patterns) if set(columns) - {"pattern"} else {}
        found: dict[str, pa.Array] = {}
        for name in columns:
            if name == "pattern":
                before = sum(other.count(layer) for other in self.parts() if other.index < part.index)
                found[name] = pa.array(places + before)
            elif name in self.address:
                found[name] = pa.array(address[name])
            else:
                found[name] = self._annotation(part, name, address["annotation"])
        return pa.table(found)

    def _annotation(self, part: PatternPart, name: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Return one of the user's columns for patterns with these rows in the annotation table, -1 for none."""
        kind = pa.type_for_alias(self.description.columns[name])
        column = part.annotation(name)
        if column is None or not len(column):
            return pa.nulls(len(rows), kind)
        # Only whole numbers become floating-point ones here; beyond 2⁵³ they are rounded.
        return column.combine_chunks().cast(kind, safe=False).take(pa.array(rows, mask=rows < 0))


def groupings_text(groupings: Sequence[tuple[str, ...]]) -> str:
    """Return groupings as a message names them.

    >>> groupings_text([("source",), ("label", "step:100")])
    'source, or (label, step:100)'
    """
    return ", or ".join(by[0] if len(by) == 1 else f"({', '.join(by)})" for by in groupings)


def find_part(source: PatternSource, step: int) -> PatternPart:
    """Return the part that holds a step."""
    return next(part for part in source.parts() if part.start <= step < part.stop)
