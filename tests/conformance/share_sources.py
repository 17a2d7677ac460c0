"""What every `ShareSource` must be: complete sums by group, equal to those of the patterns themselves."""

import torch

from dualform.attend.memory import Memory
from dualform.engine.share_source import ShareSource
from helpers.shares_only import groups_by_hand


class ShareSourceConformance:
    """Derive, and give two fixtures.

    `shares`: a source that keeps sums by ("label",) and by ("label", "task"), at one step beside the last.
    `patterns`: the memory of patterns of the same training.
    `within`: how far sums may be apart, relative to the parameter.
    """

    within = 1e-11

    def close(self, one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> None:
        assert float((one.double() - other.double()).norm()) <= self.within * max(1.0, float(scale.double().norm()))

    def test_the_last_horizon_is_the_end_of_the_run(self, shares: ShareSource, patterns: Memory) -> None:
        assert list(shares.horizons) == sorted(set(shares.horizons))
        assert shares.horizons[-1] == patterns.step
        assert len(shares.horizons) > 1

    def test_labels_are_the_values_of_the_columns_and_none_is_a_group(
        self, shares: ShareSource, patterns: Memory
    ) -> None:
        for by in shares.groupings:
            labels = shares.labels(by)
            assert len(set(labels)) == len(labels)
            rows = [patterns.patterns(name, columns=by).to_pylist() for name in patterns.layers]
            values = [tuple(row[name] for name in by) for table in rows for row in table]
            assert set(labels) == {value if len(by) > 1 else value[0] for value in values}
        assert None in shares.labels(("label",))

    def test_all_parts_sum_to_the_weight_at_every_horizon(self, shares: ShareSource, patterns: Memory) -> None:
        for horizon in shares.horizons[-2:]:
            for name, weight in patterns.at(step=horizon).weights().items():
                for by in shares.groupings:
                    found = shares.shares(name, by, horizon=horizon)
                    assert set(found.labels) <= set(shares.labels(by))
                    assert len(found.shares) == len(found.labels)
                    whole = found.start + found.shares.sum(dim=0) + found.unexplained + found.rounding
                    self.close(whole, weight, weight)

    def test_a_groups_share_is_that_of_its_patterns(self, shares: ShareSource, patterns: Memory) -> None:
        for horizon in shares.horizons[-2:]:
            view = patterns.at(step=horizon)
            weights = view.weights()
            for label in shares.labels(("label",)):
                alone = view.where("label is null") if label is None else view.where(label=label)
                for name, share in alone.unwarned().shares().items():
                    found = shares.shares(name, ("label",), horizon=horizon)
                    mine = found.shares[found.labels.index(label)] if label in found.labels else torch.zeros(())
                    self.close(mine, share, weights[name])

    def test_layers_shares_sum_to_the_parameters(self, shares: ShareSource, patterns: Memory) -> None:
        for by in shares.groupings:
            for name, weight in patterns.weights().items():
                users = [n for n, entry in patterns.layers.items() if name in entry.parameters.values()]
                each = [shares.shares(name, by, layer=layer).shares for layer in users]
                self.close(torch.stack(each).sum(dim=0), shares.shares(name, by).shares, weight)

    def test_finer_groups_sum_to_coarser_ones(self, shares: ShareSource, patterns: Memory) -> None:
        fine, coarse = ("label", "task"), ("label",)
        for name, weight in patterns.weights().items():
            finer, coarser = shares.shares(name, fine), shares.shares(name, coarse)
            for label, share in zip(coarser.labels, coarser.shares, strict=True):
                mine = [s for each, s in zip(finer.labels, finer.shares, strict=True) if each[0] == label]
                self.close(torch.stack(mine).sum(dim=0), share, weight)

    def test_key_sums_are_those_of_the_patterns(self, shares: ShareSource, patterns: Memory) -> None:
        for layer, entry in patterns.layers.items():
            found = shares.key_sums(layer, ("label",))
            assert found.sums.dtype == torch.float64
            assert found.counts.dtype == torch.int64
            eye = torch.eye(entry.d_in, dtype=torch.float64)
            attention = patterns.attend(queries={layer: eye})[layer].attention()  # (d_in, T): the keys themselves
            assert abs(found.lowest - float(attention.min())) <= self.within * max(1.0, float(attention.abs().max()))
            groups = groups_by_hand(patterns, layer, "label")
            assert set(found.labels) == set(groups)
            for label, keys, count in zip(found.labels, found.sums, found.counts.tolist(), strict=True):
                assert count == len(groups[label])
                mine = attention[:, groups[label]]
                self.close(keys, mine.sum(dim=1), mine)
