"""CopyPlan: every region once, none too early, all in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.transfer.ranges import CopyPlan, Region, runs


@st.composite
def plans(draw):
    num_layers, block_size = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    num_tokens = draw(st.integers(1, 60))
    have_tokens = draw(st.integers(0, num_tokens))
    cached_tokens = draw(st.integers(0, num_tokens))
    return CopyPlan(num_layers, block_size, num_tokens, have_tokens, cached_tokens, draw(st.booleans())), have_tokens


@given(plans(), st.integers(1, 30), st.lists(st.tuples(st.integers(0, 70), st.integers(0, 6)), max_size=20))
def test_each_layer_block_is_handed_out_once_when_it_is_ready_and_all_are_in_the_end(made, limit, reports):
    plan, have_tokens = made
    ready = [plan._ready_tokens[layer] for layer in range(plan.num_layers)]
    seen = set()

    def take_all():
        while (region := plan.next_region(limit)) is not None:
            assert 0 < region.num_layer_blocks <= limit
            for layer in range(region.layer_start, region.layer_stop):
                for block in range(region.block_start, region.block_stop):
                    assert (layer, block) not in seen
                    seen.add((layer, block))
                    assert ready[layer] >= min(plan.num_tokens, (block + 1) * plan.block_size)
                    assert plan.streaming or min(ready) == plan.num_tokens

    take_all()
    for tokens, layers in reports:
        plan.progress(tokens, layers)
        for layer in range(min(layers, plan.num_layers)):
            ready[layer] = max(ready[layer], min(tokens, plan.num_tokens))
        take_all()
    plan.all_ready()
    ready = [plan.num_tokens] * plan.num_layers
    take_all()
    size = plan.block_size
    wanted = range(have_tokens // size, -(-plan.num_tokens // size)) if have_tokens < plan.num_tokens else ()
    assert seen == {(layer, block) for layer in range(plan.num_layers) for block in wanted}
    assert len(seen) == plan.num_layer_blocks and plan.exhausted


def test_a_partly_filled_block_waits_until_it_is_the_last_one():
    plan = CopyPlan(num_layers=1, block_size=16, num_tokens=40, have_tokens=0, cached_tokens=0, streaming=True)
    plan.progress(20, 1)
    assert plan.next_region(99) == Region(0, 1, 0, 1)
    assert plan.next_region(99) is None
    plan.progress(40, 1)
    assert plan.next_region(99) == Region(0, 1, 1, 3)


def test_neighbouring_layers_with_the_same_blocks_are_one_region():
    plan = CopyPlan(num_layers=4, block_size=16, num_tokens=32, have_tokens=0, cached_tokens=0, streaming=True)
    plan.progress(32, 3)
    assert plan.next_region(4) == Region(0, 2, 0, 2)
    assert plan.next_region(4) == Region(2, 3, 0, 2)


@given(st.lists(st.integers(0, 6), min_size=0, max_size=12), st.data())
def test_runs_cover_everything_once_and_count_up(ids, data):
    other = data.draw(st.lists(st.integers(0, 6), min_size=len(ids), max_size=len(ids)))
    covered = []
    for start, stop in runs(ids, other):
        covered += range(start, stop)
        for each in (ids, other):
            assert list(each[start:stop]) == list(range(each[start], each[start] + stop - start))
        if stop < len(ids):
            assert ids[stop] != ids[stop - 1] + 1 or other[stop] != other[stop - 1] + 1
    assert covered == list(range(len(ids)))
