"""What every `PatternSource` must be: whole, ordered, and enough to rebuild the weights."""

import numpy as np
import torch

from dualform.engine.jobs import WholeView
from dualform.engine.local import LocalExecutor
from dualform.engine.plain import PlainExecutor
from dualform.engine.rebuild import parts
from dualform.engine.source import ADDRESS, PatternSource


class SourceConformance:
    """Derive, and give a fixture `source`: a source whose final parameters are known."""

    def test_parts_follow_each_other_from_the_first_step_to_the_last(self, source: PatternSource) -> None:
        step, index = 0, -1
        for part in source.parts():
            assert part.index > index
            assert part.start == step
            assert part.stop > part.start
            step, index = part.stop, part.index
        assert step == source.steps == source.description.steps

    def test_calls_count_the_rows_that_are_there(self, source: PatternSource) -> None:
        for part in source.parts():
            for name, entry in source.layers.items():
                calls = part.calls(name)
                sizes = calls["rows"] * calls["positions"]
                assert np.array_equal(calls["offset"], np.cumsum(sizes) - sizes)
                assert (np.diff(calls["step"]) >= 0).all()
                assert ((calls["step"] >= part.start) & (calls["step"] < part.stop)).all()
                keys = part.rows(name, "keys")
                assert len(keys) == part.count(name) == sizes.sum()
                assert keys.take(slice(None))[0].shape == (part.count(name), entry.d_in)
                if entry.store != "keys":
                    assert part.rows(name, "values").take(slice(None))[0].shape == (part.count(name), entry.d_out)

    def test_rows_are_taken_in_any_order(self, source: PatternSource) -> None:
        for part in source.parts():
            for name in source.layers:
                rows = part.rows(name, "keys")
                whole, _ = rows.take(slice(None))
                wanted = torch.randperm(len(rows))[:5]
                assert torch.equal(rows.take(wanted)[0], whole[wanted])
                assert torch.equal(rows.take(slice(1, 3))[0], whole[1:3])

    def test_key_ids_point_to_the_keys(self, source: PatternSource) -> None:
        for name in source.layers:
            found = [own for part in source.parts() if (own := part.own_keys(name)) is not None]
            if not found:
                continue
            distinct = torch.cat([rows.take(slice(None))[0] for _, rows in found])
            for part in source.parts():
                ids = part.key_ids(name)
                if ids is not None:
                    assert torch.equal(distinct[ids.long()], part.rows(name, "keys").take(slice(None))[0])

    def test_the_table_has_a_row_per_pattern(self, source: PatternSource) -> None:
        for name in source.layers:
            seen = 0
            for part in source.parts():
                table = source.table(part, name, [*ADDRESS, *source.description.columns])
                assert table.num_rows == part.count(name)
                assert table["pattern"].to_pylist() == list(range(seen, seen + table.num_rows))
                seen += table.num_rows
            assert seen == source.count(name)

    def test_facts_are_of_the_steps(self, source: PatternSource) -> None:
        for name in source.description.parameters:
            facts, factors = source.facts(name)
            assert (np.diff(facts.step) > 0).all()
            assert len(factors) == source.steps
            assert all(len(column) == len(facts.step) for column in facts.settings.values())

    def test_patterns_rebuild_the_final_parameters(self, source: PatternSource) -> None:
        final = source.tensors("final")
        assert final is not None
        for executor in (PlainExecutor(), LocalExecutor()):
            rebuilt = parts(source, WholeView(source, source.steps), executor)
            for name, found in rebuilt.items():
                torch.testing.assert_close(found.whole.to(final[name].dtype), final[name], rtol=1e-4, atol=1e-6)

    def test_the_digest_is_of_the_content(self, source: PatternSource) -> None:
        assert source.digest
        assert source.digest == source.digest
