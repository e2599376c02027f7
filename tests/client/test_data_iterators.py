"""States of data iterators and random generators in checkpoints, given back exactly."""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import numpy as np
import pytest
from grain import experimental

import storesvc_client as store
from storesvc_client._items.iterators import UnfitStateError, read_shards
from tests.support.examples import sampled

TREE = {"x": 1.0}
SIZE = 60


def documents() -> Any:
    """Returns token sequences of different lengths."""
    rows = [{"tokens": np.arange(2 + i % 5) + 100 * i} for i in range(SIZE)]
    return grain.MapDataset.source(rows).to_iter_dataset()


def examples() -> Any:
    return grain.MapDataset.range(SIZE)


def loader(workers: int = 0) -> Any:
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, SIZE, 1),
        sampler=grain.samplers.IndexSampler(
            SIZE, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
        ),
        operations=[grain.transforms.Batch(4, drop_remainder=True)],
        worker_count=workers,
    )


def shards(count: int) -> list[Any]:
    return [examples()[i::count].to_iter_dataset() for i in range(count)]


ITERATORS: dict[str, Callable[[], Any]] = {
    "shuffled batches": lambda: examples().shuffle(7).to_iter_dataset().batch(4),
    "a filter": lambda: examples().filter(lambda x: x % 3).to_iter_dataset(),
    "random augmentations": lambda: (
        examples()
        .seed(1)
        .random_map(lambda x, rng: x + rng.integers(1000))
        .to_iter_dataset()
    ),
    "a mixture": lambda: grain.IterDataset.mix(shards(2), weights=[0.7, 0.3]),
    "a window shuffle": lambda: experimental.WindowShuffleIterDataset(
        examples().to_iter_dataset(), window_size=5, seed=1
    ),
    "an interleave": lambda: experimental.InterleaveIterDataset(
        shards(5), cycle_length=2
    ),
    "packed documents": lambda: experimental.FirstFitPackIterDataset(
        documents(), length_struct={"tokens": 8}, num_packing_bins=3
    ),
    # its state has a tuple, which it does not recognize as a list
    "split documents": lambda: experimental.ConcatThenSplitIterDataset(
        documents(), length_struct={"tokens": 8}
    ),
    "threads that prefetch": lambda: experimental.ThreadPrefetchIterDataset(
        examples().to_iter_dataset(), prefetch_buffer_size=3
    ),
    "an elastic iterator": lambda: experimental.ElasticIterator(
        examples().shuffle(1), 6, grain.sharding.NoSharding()
    ),
    "a data loader": loader,
}


def leaves(batches: Any) -> list[Any]:
    """Returns what an iterator still yields, as values that can be compared."""
    return [[np.asarray(x).tolist() for x in jax.tree.leaves(b)] for b in batches]


@pytest.mark.parametrize("make", sampled(ITERATORS.values(), every=3), ids=ITERATORS)
@pytest.mark.parametrize(
    "steps", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 7))]
)
def test_an_iterator_of_grain_goes_on_where_it_was_when_save_was_called(
    run: store.Run, make: Callable[[], Any], steps: int
) -> None:
    batches = iter(make())
    for _ in range(steps):
        next(batches)

    save = run.save(1, TREE, items={"data": batches})
    rest = leaves(batches)  # at once: the state is that of the call
    save.result()
    new = iter(make())
    run.items(1).restore_into("data", new)

    assert rest
    assert rest == leaves(new)
    new = iter(make())
    for _ in range(5):  # one that is somewhere else
        next(new)
    run.items(1).restore_into("data", new)
    assert rest == leaves(new)


@pytest.mark.parametrize("bits", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_generator_of_numpy_draws_the_same_numbers(run: store.Run, bits: str) -> None:
    def generator(seed: int) -> np.random.Generator:
        return np.random.Generator(getattr(np.random, bits)(seed))

    random = generator(1)
    random.integers(10, size=7, dtype=np.uint32)

    run.save(1, TREE, items={"rng": random}).result()
    expected = random.standard_normal(1000), random.integers(2**40, size=9)
    other = generator(2)
    run.items(1).restore_into("rng", other)

    assert np.array_equal(expected[0], other.standard_normal(1000))
    assert np.array_equal(expected[1], other.integers(2**40, size=9))


def test_a_random_state_of_numpy_draws_the_same_numbers(run: store.Run) -> None:
    random = np.random.RandomState(1)
    random.normal()  # keeps a second number for the next call

    run.save(1, TREE, items={"rng": random}).result()
    expected = random.normal(size=1000)
    other = np.random.RandomState(2)
    run.items(1).restore_into("rng", other)

    assert np.array_equal(expected, other.normal(size=1000))


class Loader:
    """A data loader in the way of torchdata."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = {"loaded": state["at"]} | state


def test_a_state_dict_is_loaded_with_its_types(run: store.Run) -> None:
    state = {
        "at": 7,
        "workers": {0: (1, 2), 1: b"\x00"},
        "rng": np.arange(3),
        "%": None,
    }

    run.save(1, TREE, items={"data": Loader(state)}).result()
    target = Loader({})
    run.items("latest").restore_into("data", target)

    assert repr({"loaded": 7} | state) == repr(target.state)


class Taker:
    """An object with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [None, b"\x00\xff", "text", [1], (1, 2), {}, {"": 1}])
def test_a_state_of_any_kind_is_given_back(run: store.Run, state: Any) -> None:
    run.save(1, TREE, items={"data": Taker(state)}).result()
    target = Taker()
    run.items(1).restore_into("data", target)

    assert repr(state) == repr(target.state)


@pytest.mark.parametrize(
    ("value", "message"),
    {
        "a tensor": (
            Loader({"a": [{"rng": jax.numpy.zeros(2)}]}),
            r"item 'data': state of \S*Loader: at \['a'\]\[0\]\['rng'\]: .*ArrayImpl",
        ),
        "a generator": (
            (x for x in "ab"),
            "got generator; it has neither get_state nor",
        ),
        "an iterator": (iter([1]), "got list_iterator; it has neither get_state nor"),
        "a data loader": (loader(), "DataLoader; pass the iterator that iter"),
        "a dataset": (documents(), "Dataset; pass the iterator that iter"),
        "a class": (Loader, "got type; convert it"),
        "a state that is marked twice": (
            store.PerProcess(store.Replicated(1)),
            "got storesvc_client.*Replicated; convert it",
        ),
    }.values(),
)
def test_what_has_no_state_that_can_be_kept_is_rejected_at_the_save(
    run: store.Run, value: Any, message: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=message):
        run.save(1, TREE, items={"data": value})
    with pytest.raises(store.NotFoundError):
        run.info()


@pytest.mark.parametrize(
    ("saved", "target", "message"),
    {
        "bytes into a dict": (
            iter(loader()),
            iter(examples().to_iter_dataset()),
            r"item 'data': expected a state of type dict, as grain\S+ has, got bytes; ",
        ),
        "a dict into bytes": (
            iter(examples().to_iter_dataset()),
            iter(loader()),
            r"expected a state of type bytes, as \S*DataLoaderIterator has, got dict",
        ),
        "a text into a state dict": (
            Taker("a"),
            Loader({}),
            r"expected a state of type dict, as \S*Loader has, got str",
        ),
        "another loader": (
            iter(loader(workers=0)),
            iter(
                grain.DataLoader(
                    data_source=grain.sources.RangeDataSource(0, 9, 1),
                    sampler=grain.samplers.SequentialSampler(9),
                )
            ),
            r"DataLoaderIterator rejects the state: ValueError: .*sampler",
        ),
        "another pipeline": (
            iter(examples().to_iter_dataset()),
            iter(experimental.RepeatIterDataset(examples().to_iter_dataset())),
            r"_RepeatDatasetIterator rejects the state: KeyError",
        ),
        "another generator": (
            np.random.default_rng(1),
            np.random.Generator(np.random.MT19937(1)),
            r"numpy.random\S*Generator rejects the state: ValueError: state must be",
        ),
    }.values(),
)
def test_a_state_that_does_not_fit_is_rejected(
    run: store.Run, saved: Any, target: Any, message: str
) -> None:
    run.save(1, TREE, items={"data": saved}).result()

    with pytest.raises(store.MismatchError, match=f"(?s){message}"):
        run.items(1).restore_into("data", target)


def test_a_value_of_json_that_is_no_state_does_not_fit(run: store.Run) -> None:
    for step, value in enumerate(({"%tuple": 1}, {"%shards": 1}, {"%new": {}})):
        run.save(step, TREE, items={"data": value}).result()
        with pytest.raises(store.MismatchError, match=r"expected what '%[a-z]+' holds"):
            run.items(step).restore_into("data", Taker())


def test_a_target_without_a_state_is_rejected(run: store.Run) -> None:
    run.save(1, TREE, items={"data": Taker(1)}).result()

    for target in (iter([1]), loader(), Taker, None):
        with pytest.raises(
            store.InvalidRequestError,
            match="@1 item 'data': expected an object with get_state and set_state, or",
        ):
            run.items(1).restore_into("data", target)


def test_a_name_that_is_not_there_names_the_nearest(run: store.Run) -> None:
    run.save(1, TREE, items={"data": Taker(1)}).result()

    with pytest.raises(store.NotFoundError, match="has no item 'dat'; nearest: data"):
        run.items(1).restore_into("dat", Taker())


def test_a_state_is_of_one_process_unless_it_is_shared(run: store.Run) -> None:
    elastic = experimental.ElasticIterator(examples(), 6, grain.sharding.NoSharding())
    around = experimental.ElasticIterator(examples(), 6, grain.sharding.NoSharding())
    items = {
        "own": iter(examples().to_iter_dataset()),
        "marked": store.PerProcess(iter(elastic)),
        "elastic": elastic,
        "inner": iter(elastic),
        "around": iter(around.map(lambda x: x)),
        "shared": store.Replicated(iter(examples().to_iter_dataset())),
        "all": store.Replicated({"a": 1}),
        # as much an iterator's as Grain's, but not of Grain
        "other": Taker({"global_next_index": 0}),
    }

    run.save(1, TREE, items=items).result()

    found = run.items(1)
    assert {
        "own": 1,
        "marked": 1,
        "elastic": None,
        "inner": None,
        "around": None,
        "shared": None,
        "all": None,
        "other": 1,
    } == {name: found.info(name).process_count for name in items}
    assert {"a": 1} == found["all"]


# --- shard states --------------------------------------------------------------------


ONE = grain.sharding.ShardOptions(0, 1)


class Sharded:
    """An iterator over shards, with the methods of Grain's elastic iterator."""

    def __init__(self, states: Any = None, options: Any = ONE) -> None:
        self.states = states
        self.shard_options = options

    def get_shard_states(self) -> Any:
        if self.states is None:
            raise NotImplementedError
        return self.states

    def set_shard_states(self, states: Any) -> None:
        self.states = states


class ShardedOrNot(Sharded, Taker):
    """One that has shard states or one state, as Grain's elastic iterator."""

    def __init__(self, states: Any = None) -> None:
        Sharded.__init__(self, states)
        self.state = 7


def test_shard_states_are_given_back_by_the_number_of_the_shard(run: store.Run) -> None:
    states = {1: {"at": (2,)}, 0: None, 2: b"x"}
    run.save(1, TREE, items={"data": Sharded(states)}).result()
    run.save(2, TREE, items={"data": store.Replicated(Sharded(states))}).result()

    for step in (1, 2):
        target = Sharded()
        run.items(step).restore_into("data", target)
        assert states == target.states
        target = Sharded(None, grain.sharding.ShardOptions(1, 2))
        run.items(step).restore_into("data", target)
        assert {1: {"at": (2,)}} == target.states


def test_an_iterator_without_shards_has_one_state(run: store.Run) -> None:
    run.save(1, TREE, items={"data": ShardedOrNot()}).result()
    target = ShardedOrNot({0: 1})
    target.state = 0
    run.items(1).restore_into("data", target)

    assert 7 == target.state
    assert {0: 1} == target.states


@pytest.mark.parametrize(
    ("saved", "target", "message"),
    {
        "no shards": (Sharded({0: 1}), Taker(), "with set_shard_states, because shard"),
        "no shard states": (Taker(1), Sharded(), "expected shard states, as .*Sharded"),
        "missing shards": (
            Sharded({0: 1, 2: 1}),
            Sharded(),
            "expected the states of the shards 0 to 2, got 2",
        ),
        "too few shards": (
            Sharded({0: 1, 1: 1}),
            Sharded(None, grain.sharding.ShardOptions(2, 3)),
            "of at most 2 shards, as many as were saved, got 2 of 3",
        ),
        "none": (Sharded({}), Sharded(), "of at most 0 shards, .* got 0 of 1"),
    }.values(),
)
def test_shard_states_that_do_not_fit_are_rejected(
    run: store.Run, saved: Any, target: Any, message: str
) -> None:
    run.save(1, TREE, items={"data": saved}).result()

    with pytest.raises(store.MismatchError, match=message):
        run.items(1).restore_into("data", target)


def restored(
    saved: list[Any], index: int, count: int
) -> tuple[dict[int, Any], list[int]]:
    """Returns the states that a process takes, and the processes whose values it has
    read."""
    read = list[int]()

    def values(processes: Sequence[int]) -> list[Any]:
        read.extend(processes)
        return [{"%shards": saved[process]} for process in processes]

    return read_shards(index, count, len(saved), values, {}), read


def divided(saved: list[Any], count: int) -> list[dict[int, Any]]:
    """Returns the states that each of some processes takes."""
    return [restored(saved, index, count)[0] for index in range(count)]


def striped(saved: int, shards: int) -> list[dict[str, int]]:
    """Returns the values of processes that have every so many-th shard."""
    return [
        {str(each): 10 * each for each in range(process, shards, saved)}
        for process in range(saved)
    ]


@pytest.mark.parametrize(
    "saved",
    [
        [{"0": 0, "2": 20}, {"1": 10, "3": 30, "2": 20}],
        [{"0": 0, "1": 10}, {"2": 20, "3": 30}],
        *(striped(count, 4) for count in (1, 2, 3, 4, 5)),
    ],
)
def test_the_shards_of_all_processes_are_divided_anew(saved: list[Any]) -> None:
    for count in (1, 2, 3, 4):
        for index, part in enumerate(divided(saved, count)):
            assert {n: 10 * n for n in range(index, 4, count)} == part


def test_a_process_reads_only_the_values_that_have_its_shards() -> None:
    assert [0, 8] == restored(striped(12, 48), 8, 12)[1]
    assert [0, 8, 20] == restored(striped(24, 96), 8, 12)[1]
    assert [0, 8] == restored(striped(12, 48), 20, 24)[1]
    # the next one proves that the last shard of a process is not missing
    assert [0, 8, 9] == restored(striped(12, 42), 8, 12)[1]
    every = [len(restored(striped(64, 256), index, 50)[1]) for index in range(50)]
    assert max(every) <= 256 // 50 + 3


@pytest.mark.parametrize(("saved", "shards", "count"), [(4, 14, 3), (5, 10, 5)])
def test_a_missing_shard_is_found_by_some_process(
    saved: int, shards: int, count: int
) -> None:
    for missing in range(shards - 1):
        values = striped(saved, shards)
        del values[missing % saved][str(missing)]

        with pytest.raises(UnfitStateError, match=f"of the shards 0 to {shards - 1}"):
            divided(values, count)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([{"0": 1}, {"0": 2}], "expected one state of shard 0, got different ones"),
        ([{"0": 1}, {"a": 2}], "expected shard states of all processes, got others"),
        ([{"0": 1}, 7], "expected shard states of all processes, got others"),
    ],
)
def test_shard_states_of_processes_that_do_not_go_together_are_rejected(
    saved: list[Any], message: str
) -> None:
    with pytest.raises(UnfitStateError, match=message):
        restored(saved, 0, 1)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([1], "expected shard states as a dict by the number of the shard, got list"),
        ({"0": 1}, "expected shard states as a dict by the number of the shard"),
        ({4: [{1}]}, r"at \[4\]\[0\]: expected a value of JSON"),
    ],
)
def test_shard_states_that_cannot_be_kept_are_rejected(
    run: store.Run, states: Any, message: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=f"Sharded: {message}"):
        run.save(1, TREE, items={"data": Sharded(states)})
