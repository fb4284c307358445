"""The KV block cache: sharing by prefix, reference counts, room, eviction."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from extproc.simulator.blocks import BLOCK_TOKENS, BlockCache, Lease, block_hashes, blocks_for

BLOCK = b"tokn" * BLOCK_TOKENS


def fill(cache: BlockCache, hashes: list[int]) -> Lease:
    lease = cache.lease([], len(hashes))
    assert lease is not None
    cache.publish(lease, hashes)
    return lease


@given(st.binary(max_size=1000), st.binary(max_size=200), st.binary(max_size=200))
def test_texts_share_the_hashes_of_the_blocks_they_share(prefix: bytes, one: bytes, other: bytes) -> None:
    shared = len(prefix) // len(BLOCK)
    assert block_hashes(prefix + one)[:shared] == block_hashes(prefix + other)[:shared]


def test_a_block_hash_covers_all_that_came_before() -> None:
    assert block_hashes(b"a" * 64 + BLOCK)[1] != block_hashes(b"b" * 64 + BLOCK)[1]


def test_an_unfinished_block_has_no_hash() -> None:
    assert block_hashes(BLOCK[:-4]) == []
    assert len(block_hashes(BLOCK + BLOCK[:4])) == 1


def test_another_seed_gives_other_hashes() -> None:
    assert block_hashes(BLOCK, seed=1) != block_hashes(BLOCK)


def test_tokens_fill_blocks_of_sixteen() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_released_blocks_are_found_again() -> None:
    cache = BlockCache(10)
    cache.release(fill(cache, [1, 2, 3]))
    assert cache.held == 0
    assert cache.match([1, 2, 3, 4]) == 3


def test_a_match_ends_at_the_first_gap() -> None:
    cache = BlockCache(10)
    fill(cache, [1, 2, 3])
    assert cache.match([1, 9, 3]) == 1


def test_shared_blocks_are_held_once_and_until_the_last_holder_leaves() -> None:
    cache = BlockCache(10)
    first = fill(cache, [1, 2])
    second = cache.lease([1, 2], 3)
    assert second is not None
    assert cache.held == 3
    cache.release(first)
    assert cache.held == 3
    cache.release(second)
    assert cache.held == 0


def test_the_same_block_computed_twice_at_once_is_kept_once() -> None:
    cache = BlockCache(10)
    fill(cache, [1])
    fill(cache, [1])
    assert cache.held == 1


def test_the_least_recently_used_chain_goes_first_and_its_leaf_before_its_root() -> None:
    cache = BlockCache(4)
    cache.release(fill(cache, [1, 2]))
    cache.release(fill(cache, [11, 12]))
    cache.lease([], 1)
    assert (cache.match([1, 2]), cache.match([11, 12])) == (1, 2)
    cache.lease([], 2)
    assert (cache.match([1, 2]), cache.match([11, 12])) == (0, 1)


def test_using_a_chain_again_makes_it_the_last_to_go() -> None:
    cache = BlockCache(4)
    cache.release(fill(cache, [1, 2]))
    cache.release(fill(cache, [11, 12]))
    again = cache.lease([1, 2], 2)
    assert again is not None
    cache.release(again)
    cache.lease([], 2)
    assert (cache.match([1, 2]), cache.match([11, 12])) == (2, 0)


def test_held_blocks_are_never_evicted() -> None:
    cache = BlockCache(3)
    fill(cache, [1, 2])
    assert cache.lease([], 2) is None
    assert cache.match([1, 2]) == 2


def test_a_lease_that_does_not_fit_changes_nothing() -> None:
    cache = BlockCache(3)
    cache.release(fill(cache, [1, 2]))
    assert cache.lease([1, 2], 4) is None
    assert (cache.held, cache.cached) == (0, 2)


def test_releasing_twice_is_harmless() -> None:
    cache = BlockCache(3)
    keeper = fill(cache, [1])
    lease = cache.lease([1], 2)
    assert lease is not None
    cache.release(lease)
    cache.release(lease)
    assert cache.held == 1
    cache.release(keeper)
    assert cache.held == 0


class AnyUse(RuleBasedStateMachine):
    """Leases of a few prompts with common prefixes, in any order."""

    leases: Bundle[tuple[Lease, list[int]]] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(12)
        self.live: list[Lease] = []
        self.parents: dict[int, int | None] = {}

    @rule(
        target=leases, branches=st.lists(st.integers(0, 2), min_size=1, max_size=8), ahead=st.integers(0, 2)
    )
    def lease(self, branches: list[int], ahead: int) -> tuple[Lease, list[int]]:
        hashes = block_hashes(b"".join(bytes([branch]) * 64 for branch in branches))
        self.parents.update(zip(hashes, [None, *hashes[:-1]], strict=True))
        matched = self.cache.match(hashes)
        lease = self.cache.lease(hashes[:matched], matched + ahead)
        if lease is None:
            return Lease(), []
        self.live.append(lease)
        return lease, hashes

    @rule(held=leases, more=st.integers(0, 4))
    def grow(self, held: tuple[Lease, list[int]], more: int) -> None:
        lease, _ = held
        if lease in self.live:
            before = lease.blocks
            grown = self.cache.grow(lease, before + more)
            assert lease.blocks == before + (more if grown else 0)

    @rule(held=leases)
    def publish(self, held: tuple[Lease, list[int]]) -> None:
        lease, hashes = held
        start = len(lease.published)
        self.cache.publish(lease, hashes[start : start + lease.private])

    @rule(held=consumes(leases))
    def release(self, held: tuple[Lease, list[int]]) -> None:
        lease, _ = held
        self.cache.release(lease)
        if lease in self.live:
            self.live.remove(lease)

    @invariant()
    def blocks_never_exceed_the_capacity(self) -> None:
        assert self.cache.held + self.cache.cached <= self.cache.capacity
        assert 0 <= self.cache.used_ratio <= 1

    @invariant()
    def held_blocks_are_exactly_those_of_the_live_leases(self) -> None:
        published = {block for lease in self.live for block in lease.published}
        assert self.cache.held == len(published) + sum(lease.private for lease in self.live)

    @invariant()
    def no_block_is_cached_without_its_parent(self) -> None:
        for block, parent in self.parents.items():
            if parent is not None and self.cache.match([block]):
                assert self.cache.match([parent])

    def teardown(self) -> None:
        for lease in self.live:
            self.cache.release(lease)
        assert self.cache.held == 0


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(deadline=None, max_examples=40)
